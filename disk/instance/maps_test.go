package instance

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cespare/xxhash/v2"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// reboot makes a work directory look as after a restart of the machine: the live map is of another
// boot.
func reboot(t *testing.T, inst *Instance) {
	t.Helper()
	require.NoError(t, inst.Close())
	s := stateOf(t, inst)
	s.Boot = "another"
	require.NoError(t, s.save(inst.dir.state(), false))
	rewriteMap(t, inst.dir.liveMap(), mapBoot, mapBootLength, "another")
}

// Offsets in the header of a map file that the tests change.
const (
	mapBoot, mapBootLength     = 40, 36
	mapVolume, mapVolumeLength = 80, 48
	mapChecksum                = 4088
	mapHeaderSize              = 4096
)

// rewriteMap changes the boot or the volume in a map file.
func rewriteMap(t *testing.T, path string, off, length int, value string) {
	t.Helper()
	content := filetest.Content(t, path)
	sum := xxhash.Sum64(content[:mapChecksum])
	require.Equal(t, sum, binary.LittleEndian.Uint64(content[mapChecksum:]), "it is a map file")
	clear(content[off : off+length])
	copy(content[off:off+length], value)
	binary.LittleEndian.PutUint64(content[mapChecksum:], xxhash.Sum64(content[:mapChecksum]))
	f := testtool.Must(os.OpenFile(path, os.O_RDWR, 0))(t)
	require.NoError(t, testtool.Err(f.WriteAt(content[:mapHeaderSize], 0)))
	require.NoError(t, f.Close())
}

// TestWritesWhereTheImageHadAHole: the same raw image may have a hole at one start and zeros at the
// next, for example after it was copied to another machine. The guest's writes there must stay.
func TestWritesWhereTheImageHadAHole(t *testing.T) {
	const size = 4 << 20
	content := make([]byte, size)
	copy(content[1<<20:], filetest.Sample(1<<20, 1))
	for name, again := range map[string]func(*testing.T, *Instance){
		"killed":    func(t *testing.T, inst *Instance) { require.NoError(t, inst.Close()) },
		"restarted": reboot,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			opt := Options{Mode: CopyOnWrite, PersistentDir: t.TempDir()}
			want := bytes.Clone(content)
			path := filepath.Join(dir, "disk.raw")
			for i, sparse := range []bool{false, true, false, true} {
				filetest.Put(t, dir, "new.raw", content, 0)
				if sparse {
					require.NoError(t, os.Truncate(filetest.Put(t, dir, "new.raw", nil, 0), size))
					f, err := os.OpenFile(filepath.Join(dir, "new.raw"), os.O_WRONLY, 0)
					require.NoError(t, err)
					require.NoError(t, testtool.Err(f.WriteAt(content[1<<20:2<<20], 1<<20)))
					require.NoError(t, f.Close())
				}
				require.NoError(t, os.Rename(filepath.Join(dir, "new.raw"), path))
				inst, _ := start(t, path, opt)
				inst.copies.done.Wait()
				require.Equal(t, i > 0, inst.kept)
				require.Equal(t, -1,
					filetest.FirstDifference(want, filetest.ReadAll(t, inst, size)), "start %d", i)
				for _, off := range []int{8192*i + 512, 3<<20 + 8192*i} {
					filetest.Write(t, inst, filetest.Block(byte('a'+i), 4096), int64(off))
					copy(want[off:], filetest.Block(byte('a'+i), 4096))
				}
				require.NoError(t, inst.Flush())
				again(t, inst)
			}
		})
	}
}

// TestMapsAreWrittenOnce: the holes of a large image cost nothing, and an intact map is not written
// again.
func TestMapsAreWrittenOnce(t *testing.T) {
	const size = 1 << 40
	dir, volume := t.TempDir(), t.TempDir()
	path := filetest.Put(t, dir, "disk.raw", filetest.Sample(8192, 1), size)
	watch := testtool.Must(unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC))(t)
	defer unix.Close(watch)
	require.NoError(t, testtool.Err(unix.InotifyAddWatch(watch, volume, unix.IN_MOVED_TO)))
	made := func() (count int) {
		events := make([]byte, 64<<10)
		n, err := unix.Read(watch, events)
		if err != unix.EAGAIN {
			require.NoError(t, err)
			count = strings.Count(string(events[:n]), PersistentName+".live\x00") +
				strings.Count(string(events[:n]), PersistentName+".map\x00")
		}
		return count
	}
	opt := Options{Mode: CopyOnWrite, PersistentDir: volume}
	inst, _ := start(t, path, opt)
	require.Equal(t, 2, made(), "one file of each kind")
	require.NoError(t, inst.Flush())
	for _, name := range []string{inst.dir.liveMap(), inst.dir.durableMap()} {
		require.LessOrEqual(t, filetest.Allocated(t, name), int64(64<<10))
	}
	filetest.Write(t, inst, filetest.Block('w', 4096), size/2)
	require.NoError(t, inst.Close())

	again, _ := start(t, path, opt)
	require.Zero(t, made())
	p := filetest.Read(t, again, size/2, 4096)
	require.Equal(t, filetest.Block('w', 4096), p)
	filetest.Write(t, again, filetest.Block('x', 4096), 0)
	require.NoError(t, again.Flush())

	reboot(t, again)
	third, _ := start(t, path, opt)
	require.Equal(t, 1, made(), "a live map of another boot is of no use")
	require.NoError(t, testtool.Err(third.ReadAt(t.Context(), p, 0)))
	require.Equal(t, filetest.Block('x', 4096), p)
}

// TestFlushOfWhatAnEarlierProcessWrote: a flush covers the writes of an earlier, killed process
// too, because nobody can tell which of them the guest still waits for.
func TestFlushOfWhatAnEarlierProcessWrote(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Block('a', 1<<20), 0)
	opt := Options{Mode: CopyOnWrite, PersistentDir: t.TempDir()}
	inst, _ := start(t, path, opt)
	inst.copies.done.Wait()
	filetest.Write(t, inst, filetest.Block('w', 4096), 8192)
	require.NoError(t, inst.Close())
	again, _ := start(t, path, opt)
	require.NoError(t, again.Flush())
	reboot(t, again)
	third, _ := start(t, path, opt)
	require.Equal(t, filetest.Block('w', 4096), filetest.Read(t, third, 8192, 4096))
}

// TestMapsOfACompleteDiskAreRemoved removes the maps of a process that was killed right after the
// clone became complete.
func TestMapsOfACompleteDiskAreRemoved(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Sample(3<<20, 1), 0)
	opt := Options{PersistentDir: t.TempDir()}
	inst, _ := start(t, path, opt)
	settle(t, inst)
	require.NoError(t, inst.Close())
	maps := []string{inst.dir.liveMap(), inst.dir.durableMap()}
	for _, name := range maps {
		require.NoFileExists(t, name)
		require.NoError(t, os.WriteFile(name, []byte("left behind"), 0o600))
	}
	again, _ := start(t, path, opt)
	require.True(t, again.kept)
	for _, name := range maps {
		require.NoFileExists(t, name)
	}
	require.True(t, bytes.Equal(filetest.Sample(3<<20, 1),
		filetest.ReadAll(t, again, again.Size())))
}

// TestDiskThatStopsBeingDurable: an incomplete disk that was flushed survives a restart of the
// machine, even if it need not be flushed any more. What is on storage is read before the state
// says so.
func TestDiskThatStopsBeingDurable(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Sample(3<<20, 1), 0)
	opt := Options{WorkDir: t.TempDir(), Mode: CopyOnWrite, Durable: true}
	inst, _ := start(t, path, opt)
	filetest.Write(t, inst, filetest.Block('w', 8192), 4096)
	require.NoError(t, inst.Flush())
	reboot(t, inst)

	opt.Durable = false
	for range 2 {
		again, logs := start(t, path, opt)
		require.True(t, again.kept, dropReason(logs))
		require.Equal(t, filetest.Block('w', 8192), filetest.Read(t, again, 4096, 8192))
		require.NoError(t, again.Close())
	}
	reboot(t, inst)
	lost, logs := start(t, path, opt)
	require.False(t, lost.kept, "the disk was not flushed this time")
	require.Contains(t, dropReason(logs), "restarted")
}

// TestEphemeralDiskOnAnotherMount: an ephemeral disk stays the same on another mount of its
// directory. If it becomes durable there, the writes of a killed process count on that mount.
func TestEphemeralDiskOnAnotherMount(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "disk.raw", filetest.Block('a', 1<<20), 0)
	opt := Options{Mode: CopyOnWrite, WorkDir: t.TempDir()}
	inst, _ := start(t, path, opt)
	filetest.Write(t, inst, filetest.Block('w', 4096), 8192)
	require.NoError(t, inst.Close())
	rewriteMap(t, inst.dir.liveMap(), mapVolume, mapVolumeLength, "another")

	opt.Durable = true
	want := filetest.Block('a', 1<<20)
	copy(want[8192:], filetest.Block('w', 4096))
	for _, off := range []int{65536, 131072} {
		again, logs := start(t, path, opt)
		require.True(t, again.kept, dropReason(logs))
		require.Equal(t, -1, filetest.FirstDifference(want,
			filetest.ReadAll(t, again, again.Size())))
		filetest.Write(t, again, filetest.Block('d', 4096), int64(off))
		copy(want[off:], filetest.Block('d', 4096))
		require.NoError(t, again.Close())
	}
}
