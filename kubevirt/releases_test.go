package kubevirt

import (
	"cmp"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// release is what a version of KubeVirt calls, and what it gets.
type release struct {
	version string
	calls   []string // procedures that we answer
	others  string   // what else it calls; "": nothing
	after   string   // what becomes of the answer
	known   string
}

// releases are all that we know of. docs/kubevirt.md has the same table.
func releases() []release {
	hooks := []string{"info.Info/Info", "v1alpha1.Callbacks/OnDefineDomain",
		"v1alpha2.Callbacks/OnDefineDomain", "v1alpha3.Callbacks/OnDefineDomain",
		"v1alpha3.Callbacks/Shutdown"}
	plugins := append(hooks[:len(hooks):len(hooks)],
		"plugins.v1alpha1.DomainHookService/MutateDomain")
	const asItIs, address = "defined as it is", "no sockets beside a `Plugin`"
	return []release{
		{"1.7", hooks, "", asItIs, "1.7.0 was run"},
		{"1.8", hooks, "", asItIs, "1.8.2 was read"},
		{"1.9, sidecar", hooks, "", address, "its launcher was run"},
		{"1.9, plugin", plugins, "", asItIs, "its launcher was run"},
		{"1.10", hooks, "`launcherHooks`", "unknown", "its proposal was read"},
	}
}

// row is that of the documentation.
func (r *release) row() string {
	calls := "hook sidecars, v1alpha1 to v1alpha3"
	if strings.HasSuffix(r.version, "plugin") {
		calls = "`MutateDomain`, v1alpha1"
	}
	others := cmp.Or(r.others, "nothing")
	return fmt.Sprintf("| %s | %s | %s | %s | %s |", r.version, calls, others, r.after, r.known)
}

// TestReleases: what the table says is answered is answered, and the documentation has the table.
func TestReleases(t *testing.T) {
	s := NewServer(Options{})
	var rows []string
	for _, r := range releases() {
		rows = append(rows, r.row())
		for _, procedure := range r.calls {
			w := httptest.NewRecorder()
			s.http.Handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet,
				"/kubevirt.hooks."+procedure, nil))
			require.NotEqual(t, http.StatusNotFound, w.Code, "%s: %s", r.version, procedure)
		}
	}
	page := testtool.Must(os.ReadFile("../docs/kubevirt.md"))(t)
	require.Contains(t, string(page), strings.Join(rows, "\n"))
}
