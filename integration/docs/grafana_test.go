package docs

import (
	"encoding/json"
	"net"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/targettest"
)

// grafanaDashboard has the parts of a dashboard that the test checks.
type grafanaDashboard struct {
	UID, Title    string
	SchemaVersion int
	Templating    struct {
		List []struct{ Name, Type string }
	}
	Panels []struct {
		ID         int
		Title      string
		Type       string
		Datasource struct{ Type, UID string }
		GridPos    struct{ X, Y, W, H int }
		Targets    []struct {
			RefID, Expr, LegendFormat string
			Datasource                struct{ Type, UID string }
		}
	}
}

var (
	metricName = regexp.MustCompile(`\b(kubevirt_disk|process|go)_[a-z0-9_]+\b`)
	// Labels in the selectors and sums of an expression, and in a legend.
	labelMatcher = regexp.MustCompile(`[{,]\s*([a-z_]+)\s*(?:=~|!~|!=|=)`)
	labelList    = regexp.MustCompile(`\b(?:by|on)\s*\(([^)]*)\)`)
	labelLegend  = regexp.MustCompile(`\{\{(\w+)\}\}`)
	variable     = regexp.MustCompile(`\$\{?([a-z]+)`) // without Grafana's own, which begin with __
)

// TestGrafanaDashboard: a daemon in use shows every metric that the dashboard names, with the
// labels that the dashboard uses.
func TestGrafanaDashboard(t *testing.T) {
	t.Parallel()
	rig.Need(t)
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 8<<20), Env: rig.CHAPEnv})
	session := targettest.LoginOptions{Initiator: "iqn.2026-01.test:grafana",
		CHAP: &targettest.CHAP{Username: rig.User, Password: rig.Password}}
	portal := testtool.Must(net.ResolveTCPAddr("tcp", d.Portals[0]))(t)
	_, err := targettest.Login(portal, targettest.LoginOptions{Initiator: session.Initiator})
	require.Error(t, err, "for the metrics of refused logins")
	first := targettest.MustLogin(t, portal, session, 1)
	require.True(t, rig.Do(t, first, targettest.Write10(1, 0, rig.Block(0, 1))).Good())
	rig.Logout(t, first)
	second := targettest.MustLogin(t, portal, session, 1)
	require.True(t, rig.Do(t, second, rig.ReadBlock(1, 0)).Good())
	labels := labelsOf(d.Get("/metrics"))
	// Only a peer that breaks the protocol causes these.
	labels["kubevirt_disk_pdus_rejected_total"] = []string{"reason"}

	text := testtool.Must(os.ReadFile("../../examples/kubernetes/grafana-dashboard.json"))(t)
	var dashboard grafanaDashboard
	require.NoError(t, json.Unmarshal(text, &dashboard))
	require.NotEmpty(t, dashboard.UID)
	require.NotEmpty(t, dashboard.Title)
	require.NotZero(t, dashboard.SchemaVersion)
	var variables []string
	for _, v := range dashboard.Templating.List {
		variables = append(variables, v.Name)
	}
	// labels that Prometheus adds, and that of a histogram
	scraped := []string{"namespace", "pod", "instance", "le"}
	ids := map[int]bool{}
	taken := map[[2]int]string{}
	for _, p := range dashboard.Panels {
		require.False(t, ids[p.ID], "two panels have id %d", p.ID)
		ids[p.ID] = true
		require.Equal(t, "${datasource}", p.Datasource.UID, p.Title)
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				at := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				require.Empty(t, taken[at], "%q overlaps %q", p.Title, taken[at])
				require.Less(t, at[0], 24, p.Title)
				taken[at] = p.Title
			}
		}
		require.NotEmpty(t, p.Targets, p.Title)
		for _, target := range p.Targets {
			require.Equal(t, "${datasource}", target.Datasource.UID, p.Title)
			require.Equal(t, strings.Count(target.Expr, "("), strings.Count(target.Expr, ")"),
				target.Expr)
			for _, v := range variable.FindAllStringSubmatch(target.Expr, -1) {
				require.Contains(t, variables, v[1], target.Expr)
			}
			var known []string
			for _, name := range metricName.FindAllString(target.Expr, -1) {
				require.True(t, len(labels[name]) > 0, "%s: there is no metric %s", p.Title, name)
				known = append(known, labels[name]...)
			}
			require.NotEmpty(t, known, target.Expr)
			for _, label := range labelsIn(target.Expr, target.LegendFormat) {
				require.True(t, slices.Contains(known, label) || slices.Contains(scraped, label),
					"%s: no metric of %q has label %q", p.Title, target.Expr, label)
			}
		}
	}
}

// labelsIn are the labels that an expression and its legend use.
func labelsIn(expr, legend string) (all []string) {
	for _, m := range labelMatcher.FindAllStringSubmatch(expr, -1) {
		all = append(all, m[1])
	}
	for _, m := range labelList.FindAllStringSubmatch(expr, -1) {
		for label := range strings.SplitSeq(m[1], ",") {
			all = append(all, strings.TrimSpace(label))
		}
	}
	for _, m := range labelLegend.FindAllStringSubmatch(legend, -1) {
		all = append(all, m[1])
	}
	return all
}

// labelsOf returns the metrics of a page in the text format, with the names of their labels.
func labelsOf(page string) map[string][]string {
	found := map[string][]string{}
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		name, rest, has := strings.Cut(line, "{")
		if !has {
			name, _, _ = strings.Cut(line, " ")
			found[name] = append(found[name], "")
			continue
		}
		for pair := range strings.SplitSeq(rest, `",`) {
			label, _, _ := strings.Cut(pair, "=")
			found[name] = append(found[name], strings.TrimSpace(label))
		}
	}
	return found
}
