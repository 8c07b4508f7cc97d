package testtool

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Dashboard has the parts of a Grafana dashboard that tests look at.
type Dashboard struct {
	UID, Title    string
	SchemaVersion int
	Templating    struct {
		List []struct{ Name, Type string }
	}
	Panels []struct {
		ID         int
		Title      string
		Datasource struct{ Type, UID string }
		GridPos    struct{ X, Y, W, H int }
		Targets    []struct {
			Expr, LegendFormat string
			Datasource         struct{ Type, UID string }
		}
	}
}

// ReadDashboard reads one, whose panels must each have their own room.
func ReadDashboard(t testing.TB, file string) (d Dashboard) {
	t.Helper()
	require.NoError(t, json.Unmarshal(Must(os.ReadFile(file))(t), &d))
	require.NotEmpty(t, d.UID)
	require.NotEmpty(t, d.Title)
	require.NotZero(t, d.SchemaVersion)
	ids := map[int]bool{}
	taken := map[[2]int]string{}
	for _, p := range d.Panels {
		require.False(t, ids[p.ID], "two panels have id %d", p.ID)
		ids[p.ID] = true
		require.NotEmpty(t, p.Targets, p.Title)
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				at := [2]int{p.GridPos.X + x, p.GridPos.Y + y}
				require.Empty(t, taken[at], "%q overlaps %q", p.Title, taken[at])
				require.Less(t, at[0], 24, p.Title)
				taken[at] = p.Title
			}
		}
	}
	return d
}

var (
	seriesName = regexp.MustCompile(
		`\b(kubevirt_disk|controller_runtime|workqueue|process|go)_[a-z0-9_]+\b`)
	labelMatcher = regexp.MustCompile(`[{,]\s*([a-z_]+)\s*(?:=~|!~|!=|=)`)
	labelList    = regexp.MustCompile(`\b(?:by|on)\s*\(([^)]*)\)`)
	labelText    = regexp.MustCompile(`\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}`)
)

// CheckExpression finds names of series and labels that do not exist. The known series have their
// labels. The texts show labels of the result.
func CheckExpression(t testing.TB, known map[string][]string, expr string, texts ...string) {
	t.Helper()
	require.Equal(t, strings.Count(expr, "("), strings.Count(expr, ")"), expr)
	require.Equal(t, strings.Count(expr, "{"), strings.Count(expr, "}"), expr)
	var labels, used []string
	for _, name := range seriesName.FindAllString(expr, -1) {
		require.Contains(t, known, name, expr)
		labels = append(labels, known[name]...)
	}
	require.NotEmpty(t, labels, expr)
	for _, m := range labelMatcher.FindAllStringSubmatch(expr, -1) {
		used = append(used, m[1])
	}
	kept := labels
	for i, m := range labelList.FindAllStringSubmatch(expr, -1) {
		if i == 0 {
			kept = nil
		}
		for label := range strings.SplitSeq(m[1], ",") {
			label = strings.TrimSpace(label)
			used, kept = append(used, label), append(kept, label)
		}
	}
	for _, label := range used {
		require.Contains(t, labels, label, expr)
	}
	for _, text := range texts {
		for _, m := range labelText.FindAllStringSubmatch(text, -1) {
			require.Contains(t, kept, m[1], "%s: %s", expr, text)
		}
	}
}
