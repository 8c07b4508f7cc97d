// Package testtool finds the tools that tests run, and measures for them. Only tests import it.
package testtool

import (
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"testing"
	"time"
)

// HeapGrowth is by how many bytes the heap grows at most while work runs. Garbage is collected
// often, so it is mostly what lives. The race detector keeps its own memory elsewhere.
func HeapGrowth(t testing.TB, work func()) int64 {
	t.Helper()
	defer debug.SetGCPercent(debug.SetGCPercent(10))
	var stats runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&stats)
	before, peak := int64(stats.HeapAlloc), int64(0)
	var done atomic.Bool
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for last := false; !last; time.Sleep(time.Millisecond) {
			last = done.Load()
			var now runtime.MemStats
			runtime.ReadMemStats(&now)
			peak = max(peak, int64(now.HeapAlloc)-before)
		}
	}()
	work()
	done.Store(true)
	<-ended
	t.Logf("the heap grew by %d MiB", peak>>20)
	return peak
}

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
		_, err := exec.LookPath(name)
		Needs(t, name, err == nil)
	}
}

// Needs skips the test if something is not there, or fails it if everything is required.
func Needs(t testing.TB, what string, present bool) {
	t.Helper()
	switch {
	case present:
	case Required():
		t.Fatalf("needs %s, and everything is required", what)
	default:
		t.Skip("needs " + what)
	}
}
