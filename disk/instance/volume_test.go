package instance

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
)

// snapshot copies the files of a disk like a snapshot of its volume. It lacks what only memory
// holds: it happens to have the unflushed map, but not what was written in the given range.
func snapshot(t *testing.T, from, to string, off int64, length int) {
	t.Helper()
	for _, name := range filetest.Names(t, from) {
		content := filetest.Content(t, filepath.Join(from, name))
		if name == PersistentName {
			clear(content[off : off+int64(length)])
		}
		require.NoError(t, os.WriteFile(filepath.Join(to, name), content, 0o600))
	}
}

// TestSnapshotOfAVolumeOnTheSameMachine restores a volume from a snapshot on the machine of the
// first one, within one boot. Flushed data is there. Elsewhere is the image or the last write,
// never zeros that nobody wrote.
func TestSnapshotOfAVolumeOnTheSameMachine(t *testing.T) {
	content := make([]byte, 4<<20)
	for i := range content {
		content[i] = byte(1 + i%251)
	}
	path := filetest.Put(t, t.TempDir(), "disk.raw", content, 0)
	for _, mode := range []CopyMode{CopyOnWrite, CopyOnRead} {
		t.Run(string(mode), func(t *testing.T) {
			volume, restored := t.TempDir(), filetest.TinyFS(t, "64m")
			opt := Options{Mode: mode, PersistentDir: volume}
			inst, _ := start(t, path, opt)
			inst.copies.done.Wait()
			filetest.Write(t, inst, filetest.Block('f', 4096), 4096)
			require.NoError(t, inst.Flush())
			filetest.Write(t, inst, filetest.Block('l', 512), 1<<20)
			filetest.ReadAll(t, inst, inst.Size())
			snapshot(t, volume, restored, 1<<20, 2<<20)

			want := bytes.Clone(content)
			copy(want[4096:], filetest.Block('f', 4096))
			opt.PersistentDir = restored
			clone, _ := start(t, path, opt)
			require.True(t, clone.kept)
			require.Equal(t, inst.Identity, clone.Identity)
			require.Equal(t, -1,
				filetest.FirstDifference(want, filetest.ReadAll(t, clone, clone.Size())))
			filetest.Write(t, clone, filetest.Block('c', 512), 2<<20)
			copy(want[2<<20:], filetest.Block('c', 512))
			require.NoError(t, clone.Close())

			// The kill of a process loses nothing, there and on the first volume.
			again, _ := start(t, path, opt)
			require.Equal(t, -1,
				filetest.FirstDifference(want, filetest.ReadAll(t, again, again.Size())))
			require.NoError(t, inst.Close())
			opt.PersistentDir = volume
			first, _ := start(t, path, opt)
			copy(want[2<<20:], content[2<<20:2<<20+512])
			copy(want[1<<20:], filetest.Block('l', 512))
			require.Equal(t, -1,
				filetest.FirstDifference(want, filetest.ReadAll(t, first, first.Size())))
		})
	}
}

// TestDirectoryErrorsSayWhatToDo: an unusable directory is not always a matter of permissions.
func TestDirectoryErrorsSayWhatToDo(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Block(1, 8192), 0)
	full := filetest.TinyFS(t, "16k,nr_inodes=1")
	_, err := Open(t.Context(), openGood(t, path), Options{WorkDir: full})
	require.ErrorContains(t, err, "no space left on device; make room")
	require.NoError(t, unix.Mount("", full, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	_, err = Open(t.Context(), openGood(t, path), Options{WorkDir: full})
	require.ErrorContains(t, err, "read-only file system; mount a volume there that user 0 can "+
		"write to")
}
