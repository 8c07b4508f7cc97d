package instance

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
)

// limitDescriptors limits the descriptors of the process, until restore is called.
func limitDescriptors(t *testing.T, limit uint64) (restore func()) {
	t.Helper()
	var before unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE,
		&unix.Rlimit{Cur: limit, Max: before.Max}))
	return func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before)) }
}

// TestAStartShortOfDescriptorsKeepsTheDisk starts with one more descriptor than are open, then two,
// until that is enough. Whichever file cannot be opened, the guest's writes are there afterwards.
func TestAStartShortOfDescriptorsKeepsTheDisk(t *testing.T) {
	for _, mode := range []CopyMode{CopyOnWrite, CopyClone, CopyNone} {
		for _, persistent := range []bool{false, true} {
			if mode == CopyNone && persistent {
				continue // there is no such disk
			}
			name := string(mode)
			if persistent {
				name += ", persistent"
			}
			t.Run(name, func(t *testing.T) {
				path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(3<<20, 1), 0)
				opt := Options{WorkDir: t.TempDir(), Mode: mode}
				if persistent {
					opt = Options{PersistentDir: t.TempDir(), Mode: mode}
				}
				first, _ := start(t, path, opt)
				if first.copies != nil && mode == CopyClone {
					first.copies.done.Wait()
				}
				want := filetest.Block('w', 1<<20)
				filetest.Write(t, first, want, 0)
				id := first.Identity
				require.NoError(t, first.Close())

				refused := 0
				for extra := uint64(0); ; extra++ {
					img := openGood(t, path)
					probe := testtool.Must(os.Open(path))(t)
					next := uint64(probe.Fd())
					require.NoError(t, probe.Close())
					restore := limitDescriptors(t, next+extra)
					again, err := Open(t.Context(), img, opt)
					if err == nil {
						err := again.Close()
						restore()
						require.NoError(t, err)
						break
					}
					restore()
					img.Close()
					require.ErrorIs(t, err, unix.EMFILE)
					require.NotContains(t, err.Error(), "remove")
					refused++
				}
				require.Greater(t, refused, 1, "the state and more are opened one after the other")
				again, logs := start(t, path, opt)
				require.True(t, again.kept, "%v", dropReason(logs))
				require.Equal(t, id, again.Identity)
				require.Equal(t, want, filetest.Read(t, again, 0, len(want)))
			})
		}
	}
}

// TestBootAndVolumeAreTheSameWithoutDescriptors: without a descriptor, neither the boot nor the
// volume may seem to have changed. The guest's writes would not count then.
func TestBootAndVolumeAreTheSameWithoutDescriptors(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, knowBoot())
	this := bootID()
	volume := testtool.Must(volumeID(dir))(t)
	settle := func() error { return Homes{Base: filepath.Join(dir, "no")}.Settle("a", dir, dir) }
	restore := limitDescriptors(t, 0)
	known, bootNow := settle(), bootID()
	volumeNow, err := volumeID(dir)
	boot.Store(nil) // as if this was the first disk
	unknown := settle()
	restore()
	require.NoError(t, known)
	require.Equal(t, this, bootNow)
	require.ErrorIs(t, unknown, unix.EMFILE)
	require.NoError(t, knowBoot())
	require.Equal(t, this, bootID())
	if err == nil { // an overlay file system has no identifier to ask for
		require.Equal(t, volume, volumeNow)
	} else {
		require.ErrorIs(t, err, unix.EMFILE)
	}
}

// withoutRights calls f on a thread that has no capabilities, such as that of reading any file.
func withoutRights(t *testing.T, f func()) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // until the goroutine ends, and the thread with it
		err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3},
			&make([]unix.CapUserData, 2)[0])
		if err == nil {
			f()
		}
		done <- err
	}()
	require.NoError(t, <-done)
}

// TestAsideThatCannotBeRead: a start does not make a disk anew because it cannot look into the
// directory with the former one, nor leaves half a disk there.
func TestAsideThatCannotBeRead(t *testing.T) {
	d := workDirOf(t.TempDir(), "a.raw")
	a := workDirOf(d.path, asidePrefix+"1")
	require.NoError(t, os.Mkdir(d.path, 0o700))
	require.NoError(t, os.Mkdir(a.path, 0))
	t.Cleanup(func() { require.NoError(t, os.Chmod(a.path, 0o700)) })
	o := &opening{dir: d, log: zap.NewNop()}
	var unsettled error
	var v verdict
	withoutRights(t, func() {
		unsettled = d.settleAsides()
		v = o.lookAside(t.Context(), verdict{})
	})
	require.ErrorIs(t, unsettled, unix.EACCES)
	require.Equal(t, refuse, v.what)
	require.ErrorIs(t, v.err, unix.EACCES)
}

func TestWhatAUnitKeptIsNotToBeRemovedBecauseItCannotBeOpened(t *testing.T) {
	s := durable.NewStore(t.TempDir(), false)
	require.NoError(t, s.Save("handover", []byte("somebody is fenced")))
	restore := limitDescriptors(t, 0)
	_, err := s.Load("handover")
	restore()
	require.ErrorIs(t, err, unix.EMFILE)
	require.NotContains(t, err.Error(), "remove")
	require.NoError(t, os.WriteFile(s.Where("handover"), []byte("cut off"), 0o600))
	require.ErrorContains(t, testtool.Err(s.Load("handover")), "remove")
}

// TestRestartKeepsTheDiskOfAnImageWhoseNameIsNoText: a file name is bytes, but the state file is
// text.
func TestRestartKeepsTheDiskOfAnImageWhoseNameIsNoText(t *testing.T) {
	for _, mode := range []CopyMode{CopyClone, CopyNone} {
		dir := t.TempDir()
		path := filepath.Join(dir, "b\xfcro.raw")
		err := os.WriteFile(path, filetest.Sample(1<<20, 1), 0o600)
		if errors.Is(err, unix.EILSEQ) {
			t.Skip("the file system takes names in UTF-8 only")
		}
		require.NoError(t, err)
		opt := Options{WorkDir: t.TempDir(), Mode: mode}
		first, _ := start(t, path, opt)
		require.NoError(t, first.Close())
		again, logs := start(t, path, opt)
		require.True(t, again.kept, "%s: %v", mode, dropReason(logs))
		require.Equal(t, first.Identity, again.Identity)
	}
}
