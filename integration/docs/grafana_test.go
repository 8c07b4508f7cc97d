package docs

import (
	"net"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/targettest"
)

// variable is one of a dashboard. Grafana's own begin with __.
var variable = regexp.MustCompile(`\$\{?([a-z]+)`)

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

	for name := range labels {
		// labels that Prometheus adds, and that of a histogram
		labels[name] = append(labels[name], "namespace", "pod", "instance", "le")
	}

	dashboard := testtool.ReadDashboard(t, "../../examples/kubernetes/grafana-dashboard.json")
	var variables []string
	for _, v := range dashboard.Templating.List {
		variables = append(variables, v.Name)
	}
	for _, p := range dashboard.Panels {
		require.Equal(t, "${datasource}", p.Datasource.UID, p.Title)
		for _, target := range p.Targets {
			require.Equal(t, "${datasource}", target.Datasource.UID, p.Title)
			for _, v := range variable.FindAllStringSubmatch(target.Expr, -1) {
				require.Contains(t, variables, v[1], target.Expr)
			}
			testtool.CheckExpression(t, labels, target.Expr, target.LegendFormat)
		}
	}
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
