package kubernetes

import (
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// importRules say what packages of this module must not need, directly or not, and why. Those of
// the main module are in its integration/docs/imports_test.go.
var importRules = []struct {
	pkg string // pattern of packages, as ./api/...
	// If not nil, of both our modules they need only these, as kubevirt.io/disk/...
	only  []string
	never string // regular expression of packages
	why   string
}{
	{pkg: "./vmdisk", only: []string{"libvirt"},
		why: "whoever makes pods and domains imports it without the server"},
	{pkg: "./claim", only: []string{"libvirt"},
		why: "whoever makes domains imports it without the server"},
	{pkg: "./api/...", only: []string{},
		why: "whoever reads the types gets nothing else with them"},
	{pkg: "./admission", only: []string{"kubernetes/api/v1alpha1", "kubernetes/vmdisk", "libvirt"},
		why: "admission changes pods, whoever asks for it"},
	{pkg: "./controller/...",
		never: `^kubevirt\.io/disk/(target|disk|internal/daemon)(/|$)|^kubevirt\.io/disk/registry$`,
		why:   "the controller makes objects, and serves no disk"},
	{pkg: "./controller/...", never: `^github\.com/spf13/cobra`,
		why: "only the command reads the command line"},
	{pkg: "./command",
		never: `^github\.com/stretchr/|^go\.uber\.org/goleak|^testing$|/integration/`,
		why:   "test code must not get into the binary"},
	{pkg: "./api/... ./claim ./admission ./vmdisk",
		never: `^k8s\.io/client-go/|^sigs\.k8s\.io/controller-runtime/`,
		why:   "types are read and made without a client"},
}

func TestImportRules(t *testing.T) {
	t.Parallel()
	for _, rule := range importRules {
		never := regexp.MustCompile(rule.never)
		packages := importsOf(t, strings.Fields(rule.pkg)...)
		require.NotEmpty(t, packages, rule.pkg)
		for name, imports := range packages {
			for _, path := range imports {
				own, ours := strings.CutPrefix(path, "kubevirt.io/disk/")
				unlisted := ours && rule.only != nil && packages[path] == nil &&
					!slices.Contains(rule.only, own)
				if unlisted || rule.never != "" && never.MatchString(path) {
					t.Errorf("%s depends on %s, which it must not: %s", name, path, rule.why)
				}
			}
		}
	}
}

// importsOf returns what packages import, directly or not, by their paths.
func importsOf(t *testing.T, patterns ...string) map[string][]string {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-f",
		`{{.ImportPath}} {{join .Deps " "}}`}, patterns...)...)
	out := testtool.Must(cmd.Output())(t)
	found := map[string][]string{}
	for line := range strings.Lines(string(out)) {
		words := strings.Fields(line)
		found[words[0]] = words[1:]
	}
	return found
}
