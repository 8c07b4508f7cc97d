package testtool

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/flock"
)

// TestAwait: a test waits for its binaries as long as the build runs, and no longer.
func TestAwait(t *testing.T) {
	dir, names := t.TempDir(), []string{"etcd", "kubectl"}
	late := func() time.Time { return time.Now().Add(time.Hour) }
	write := func(name string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o755))
	}
	lock := func() *os.File {
		f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
		require.NoError(t, err)
		require.NoError(t, flock.Lock(f, unix.LOCK_EX))
		return f
	}
	type answer struct {
		missing string
		err     error
	}
	// waiting checks that a test waits, and returns where its answer arrives.
	waiting := func() <-chan answer {
		answers := make(chan answer, 1)
		go func() {
			missing, err := await(dir, names, late)
			answers <- answer{missing, err}
		}()
		select {
		case got := <-answers:
			require.Fail(t, "it did not wait", "%+v", got)
		case <-time.After(300 * time.Millisecond):
		}
		return answers
	}

	missing, err := await(dir, names, late)
	require.NoError(t, err)
	require.Equal(t, "etcd", missing, "nothing was ever built")

	build := lock()
	answers := waiting()
	write("etcd")
	require.NoError(t, build.Close()) // the build fails before the second binary
	require.Equal(t, answer{missing: "kubectl"}, <-answers)

	build = lock()
	_, err = await(dir, names, func() time.Time { return time.Time{} })
	require.ErrorContains(t, err, "waited in vain for kubectl")
	answers = waiting()
	write("kubectl")
	require.Equal(t, answer{}, <-answers, "other binaries are still being built")
	require.NoError(t, build.Close())
}
