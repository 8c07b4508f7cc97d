package plane

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kubevirt.io/disk/internal/testtool"
)

// oldest has the tests run with the oldest Kubernetes that is promised.
var oldest = os.Getenv("KUBEVIRT_DISK_PLANE") == "oldest"

// Gates are the feature gates that the server and the kubelets need. There may be none.
func Gates() string {
	if oldest {
		return "ImageVolume=true"
	}
	return ""
}

// Binaries returns the directory where scripts/build-kubernetes.sh has put the binaries that it
// built from the present modules. The test needs those that are named, as testtool.Built says.
func Binaries(t testing.TB, names ...string) string {
	t.Helper()
	dir := testtool.Must(binaries())(t)
	script := "scripts/build-kubernetes.sh"
	if oldest {
		dir, script = filepath.Join(dir, "oldest"), script+" --oldest"
	}
	testtool.Built(t, script, dir, names...)
	return dir
}

// binaries names the directory by the same hash as the script.
func binaries() (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	var files []string
	for _, name := range []string{"go.mod", "go.sum"} {
		found, err := filepath.Glob(filepath.Join(root, "kubernetes/integration/parts/*", name))
		if err != nil {
			return "", err
		}
		slices.Sort(found)
		files = append(files, found...)
	}
	sum := sha256.New()
	for _, file := range append(files, filepath.Join(root, "scripts/build-kubernetes.sh")) {
		data, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		sum.Write(data)
	}
	place := os.Getenv("KUBEVIRT_DISK_KUBERNETES")
	if place == "" {
		place = filepath.Join(root, "cache/kubernetes")
	}
	return filepath.Join(place, fmt.Sprintf("%x", sum.Sum(nil))[:16]), nil
}

// Root returns the directory of the main module, kubevirt.io/disk, which has that of this one.
func Root() (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "kubevirt.io/disk").Output()
	if err != nil {
		return "", fmt.Errorf("go list -m: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}
