package controllertest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Chart renders the chart as Helm does, for a controller in a namespace, with values in YAML.
func Chart(t testing.TB, namespace, values string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "values.yaml")
	require.NoError(t, os.WriteFile(file, []byte(values), 0o600))
	return render(t, "-namespace", namespace, "-values", file)
}

// Manifest is the file that `make manifests` writes. With it, people install the product by
// kubectl. The arguments are more of those of scripts/tools/chart.
func Manifest(t testing.TB, args ...string) string {
	t.Helper()
	text := render(t, append(args, "-manifest", "-set", "namespace.create=true")...)
	file := filepath.Join(t.TempDir(), "kubevirt-disk-controller.yaml")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

func render(t testing.TB, args ...string) string {
	t.Helper()
	text, wrong, err := tryRender(args...)
	require.NoError(t, err, wrong)
	return text
}

func tryRender(args ...string) (text, wrong string, err error) {
	var b strings.Builder
	cmd := exec.Command("go", append([]string{"run", "-trimpath", "./chart"}, args...)...)
	cmd.Dir, cmd.Stderr = filepath.Join(charts(), "../../scripts/tools"), &b
	out, err := cmd.Output()
	return string(out), b.String(), err
}
