package controllertest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Chart renders the chart as Helm does, for a controller in a namespace, with values in YAML.
func Chart(t testing.TB, namespace, values string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(values), 0o600); err != nil {
		t.Fatal(err)
	}
	return render(t, "-namespace", namespace, "-values", file)
}

// Manifest is the file that `make manifests` writes. With it, people install the product by
// kubectl. The arguments are more of those of scripts/tools/chart.
func Manifest(t testing.TB, args ...string) string {
	t.Helper()
	text := render(t, append(args, "-manifest", "-set", "namespace.create=true")...)
	file := filepath.Join(t.TempDir(), "kubevirt-disk-controller.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func render(t testing.TB, args ...string) string {
	t.Helper()
	var wrong strings.Builder
	cmd := exec.Command("go", append([]string{"run", "-trimpath", "./chart"}, args...)...)
	cmd.Dir, cmd.Stderr = filepath.Join(charts(), "../../scripts/tools"), &wrong
	text, err := cmd.Output()
	if err != nil {
		t.Fatal(err, wrong.String())
	}
	return string(text)
}
