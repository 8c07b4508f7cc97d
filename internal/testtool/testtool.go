// Package testtool finds the tools that tests run. Only tests import it.
package testtool

import (
	"os"
	"os/exec"
	"testing"
)

// Required reports whether every tool has to be there, as in continuous integration.
func Required() bool { return os.Getenv("KUBEVIRT_DISK_REQUIRE_TOOLS") == "1" }

// Nightly reports whether a test takes its time: `make test-nightly` sets KUBEVIRT_DISK_NIGHTLY=1.
func Nightly() bool { return os.Getenv("KUBEVIRT_DISK_NIGHTLY") == "1" }

// NeedNightly skips a test that takes long, and shows little that faster ones do not, in everyday
// runs.
func NeedNightly(t testing.TB) {
	t.Helper()
	if !Nightly() {
		t.Skip("takes long: `make test-nightly` runs it")
	}
}

// Rounds returns how often a test repeats what it makes up: few times in everyday runs, and full
// times in a nightly one.
func Rounds(few, full int) int {
	if Nightly() {
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
