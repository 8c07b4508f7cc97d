// Package testtool finds the tools that tests run. Only tests import it.
package testtool

import (
	"os"
	"os/exec"
	"testing"
)

// Required reports whether every tool has to be there, as in continuous integration.
func Required() bool { return os.Getenv("KUBEVIRT_DISK_REQUIRE_TOOLS") == "1" }

// Rounds returns how often a test repeats what it makes up: few times in everyday runs, and full
// times with KUBEVIRT_DISK_NIGHTLY=1, which `make test-nightly` sets.
func Rounds(few, full int) int {
	if os.Getenv("KUBEVIRT_DISK_NIGHTLY") == "1" {
		return full
	}
	return few
}

// Need skips the test if a tool is missing, or fails it if every tool is required.
func Need(t testing.TB, names ...string) {
	t.Helper()
	for _, name := range names {
		if _, err := exec.LookPath(name); err != nil {
			if Required() {
				t.Fatalf("%s is required and not installed", name)
			}
			t.Skipf("needs %s", name)
		}
	}
}
