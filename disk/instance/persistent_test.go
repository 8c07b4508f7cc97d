package instance

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
)

// moved gives a file another inode.
func moved(t *testing.T, path string, content []byte) {
	t.Helper()
	filetest.Put(t, filepath.Dir(path), "moved", content, 0)
	require.NoError(t, os.Rename(filepath.Join(filepath.Dir(path), "moved"), path))
}

// TestPartOfADisk: the file of a disk that needs its image is not taken for all of the disk.
func TestPartOfADisk(t *testing.T) {
	path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(1<<20, 1), 0)
	for _, opt := range []Options{{WorkDir: t.TempDir()}, {PersistentDir: t.TempDir()}} {
		for _, mode := range []CopyMode{CopyOnWrite, CopyClone} {
			opt.Mode = mode
			inst, _ := start(t, path, opt)
			filetest.Write(t, inst, filetest.Block('w', 512), 512)
			inst.copies.done.Wait()
			require.NoError(t, inst.Close())
			if mode == CopyClone && opt.PersistentDir != "" { // a kill before the map was removed
				filetest.Put(t, opt.PersistentDir, PersistentName+".map", []byte("KVDMAP1\n"), 0)
			}
			link := filepath.Join(t.TempDir(), "link") // as people name a directory
			require.NoError(t, os.Symlink(inst.dir.path, link))
			named := filepath.Join(link, filepath.Base(inst.dir.disk()))
			img, err := image.Open(named, image.Options{})
			if mode == CopyOnWrite {
				require.ErrorContains(t, err, "is only a part of a disk")
				other := openGood(t, path)
				require.ErrorContains(t, image.Convert(t.Context(), other, inst.dir.disk(), true,
					nil), "is only a part of a disk")
				require.NoError(t, other.Close())
				live := inst.dir.disk() + image.MapSuffixes[0]
				require.NoError(t, os.Rename(live, live+".kept"))
				require.NoError(t, os.Symlink(live, live)) // the system cannot open it
				require.ErrorContains(t, testtool.Err(image.Open(inst.dir.disk(), image.Options{})),
					"may be only a part of a disk: stat "+live)
				require.NoError(t, os.Rename(live+".kept", live))
				continue
			}
			require.NoError(t, err)
			require.NoError(t, img.Close())
			if opt.PersistentDir != "" { // a kill within an atomic write
				store := durable.NewStore(inst.dir.disk()+image.UnitInfix+inst.content, true)
				require.NoError(t, store.Save(disk.StoredAtomic, []byte("former")))
				require.ErrorContains(t, testtool.Err(image.Open(named, image.Options{})),
					"half of an atomic write of its guest, in which the daemon ended")
			}
		}
	}
}

// TestReadAnewAfterAKill: after a failed flush the page cache has what storage lacks, until the
// kernel drops it at any time. A stop drops it; after a kill the next start does.
func TestReadAnewAfterAKill(t *testing.T) {
	opt := Options{PersistentDir: t.TempDir(), Empty: true, Size: 1 << 20}
	var st unix.Statfs_t
	require.NoError(t, unix.Statfs(opt.PersistentDir, &st))
	testtool.Needs(t, "a file system that is not in memory", st.Type != unix.TMPFS_MAGIC)
	dropped := func(killed bool) bool {
		inst := testtool.Must(Open(t.Context(), nil, opt))(t)
		filetest.Write(t, inst, filetest.Block('w', 4096), 0)
		require.NoError(t, inst.Flush())
		lock := inst.dir.lock.Name()
		text := filetest.Content(t, lock)
		require.NotEmpty(t, text)
		require.NoError(t, inst.Close())
		require.Empty(t, filetest.Content(t, lock))
		if killed {
			require.NoError(t, os.WriteFile(lock, text, 0o600))
		}
		inst = testtool.Must(Open(t.Context(), nil, opt))(t)
		_, err := inst.ReadAt(disk.Cached, make([]byte, 4096), 0)
		require.NoError(t, inst.Close())
		return errors.Is(err, disk.ErrNotNow)
	}
	require.False(t, dropped(false))
	for tries := 0; !dropped(true); tries++ { // another processor may still have the page
		require.Less(t, tries, 100)
	}
}

// TestImageThatWasNeverRead: a disk was stopped before its image was read. If the image is now
// another file, a person must confirm that it is the same. If it has changed, no confirmation
// helps.
func TestImageThatWasNeverRead(t *testing.T) {
	content := filetest.Sample(3<<20, 1)
	path := filetest.Put(t, t.TempDir(), "a.raw", content, 0)
	opt := Options{PersistentDir: t.TempDir(), Mode: CopyOnWrite}
	inst, _ := start(t, path, opt)
	inst.copies.done.Wait()
	filetest.Write(t, inst, filetest.Block('w', 512), 512)
	require.NoError(t, inst.Close())
	s := stateOf(t, inst)
	s.Chain[0].Hash = ""
	require.NoError(t, s.save(inst.dir.state(), true))

	moved(t, path, content)
	var refused *PersistentError
	_, err := Open(t.Context(), openGood(t, path), opt)
	require.ErrorAs(t, err, &refused)
	require.ErrorContains(t, err, "before its image had been read once")
	require.ErrorContains(t, err, "--on-image-change=keep")

	opt.OnImageChange = ImageChangeKeep
	kept, _ := start(t, path, opt)
	require.True(t, kept.kept)
	copy(content[512:], filetest.Block('w', 512))
	require.Equal(t, -1, filetest.FirstDifference(content, filetest.ReadAll(t, kept, kept.Size())))
	kept.copies.done.Wait()
	require.NoError(t, kept.Close())
	s = stateOf(t, inst)
	require.NotEmpty(t, s.Chain[0].Hash, "from now on it is known")

	moved(t, path, filetest.Sample(3<<20, 2))
	_, err = Open(t.Context(), openGood(t, path), opt)
	require.ErrorAs(t, err, &refused)
	require.ErrorContains(t, err, "still needs the image")
}

// TestKeptDiskDoesNotReadItsImage: a complete disk that is kept with any image does not wait until
// the image is read.
func TestKeptDiskDoesNotReadItsImage(t *testing.T) {
	content := filetest.Sample(3<<20, 1)
	path := filetest.Put(t, t.TempDir(), "a.raw", content, 0)
	opt := Options{PersistentDir: t.TempDir()}
	inst, _ := start(t, path, opt)
	settle(t, inst)
	require.NoError(t, inst.Close())
	moved(t, path, filetest.Sample(3<<20, 2))
	var refused *PersistentError
	require.ErrorAs(t, testtool.Err(Open(t.Context(), openGood(t, path), opt)), &refused)
	opt.OnImageChange = ImageChangeKeep
	kept, logs := start(t, path, opt)
	require.Zero(t, logs.FilterMessageSnippet("checking whether the image").Len())
	require.Equal(t, -1, filetest.FirstDifference(content, filetest.ReadAll(t, kept, kept.Size())))

	// A disk in the work directory is always of the image that is there.
	opt = Options{WorkDir: t.TempDir(), OnImageChange: ImageChangeKeep}
	inst, _ = start(t, path, opt)
	settle(t, inst)
	require.NoError(t, inst.Close())
	content = filetest.Sample(3<<20, 3)
	moved(t, path, content)
	made, _ := start(t, path, opt)
	require.Equal(t, -1, filetest.FirstDifference(content, filetest.ReadAll(t, made, made.Size())))
}

// TestHalfReceivedDiskIsNone: what an interrupted transfer leaves has its size and not its content.
func TestHalfReceivedDiskIsNone(t *testing.T) {
	volume := t.TempDir()
	for _, name := range []string{".receiving", "a.raw"} {
		dir := filepath.Join(volume, name)
		require.NoError(t, os.Mkdir(dir, 0o700))
		filetest.Put(t, dir, PersistentName, nil, 1<<20)
	}
	kept := testtool.Must(KeptIn(volume))(t)
	require.Len(t, kept, 1)
	require.Equal(t, "a.raw", kept[0].Name)
}

// TestFullVolumeIsServed: a full volume is served after a restart of the machine, so that the guest
// can make room.
func TestFullVolumeIsServed(t *testing.T) {
	for _, mode := range []CopyMode{CopyOnWrite, CopyClone} {
		t.Run(string(mode), func(t *testing.T) {
			volume := filetest.TinyFS(t, "8m")
			path := filetest.Put(t, t.TempDir(), "a.raw", filetest.Sample(3<<20, 1), 0)
			opt := Options{PersistentDir: volume, Mode: mode}
			inst, _ := start(t, path, opt)
			inst.copies.done.Wait()
			filetest.Write(t, inst, filetest.Block('w', 1<<20), 0)
			require.NoError(t, inst.Flush())
			if mode == CopyClone {
				require.NoError(t, inst.Close())
				s := stateOf(t, inst)
				s.Boot = "another"
				require.NoError(t, s.save(inst.dir.state(), true))
			} else {
				reboot(t, inst)
			}
			require.NoError(t, os.Remove(inst.dir.state()+durable.SpareSuffix),
				"as an earlier version has left it")
			filetest.Fill(t, volume)
			moved(t, path, filetest.Sample(3<<20, 1))

			again, logs := start(t, path, opt)
			require.True(t, again.kept)
			if mode == CopyOnWrite {
				require.Equal(t, 1, logs.FilterMessageSnippet("no space is left for the map").Len())
				require.NoFileExists(t, again.dir.liveMap(),
					"it is of another machine, to which the disk may come back")
			}
			p := filetest.Read(t, again, 0, 1<<20)
			require.Equal(t, filetest.Block('w', 1<<20), p)
			require.NoError(t, again.Disk.(disk.Discarder).Discard(t.Context(), 0, 1<<20))
			_, err := again.WriteAt(t.Context(), filetest.Block('x', 4096), 2<<20)
			require.NoError(t, err, "there is room again")
			require.NoError(t, again.Flush())
			require.NoError(t, again.Close())
			third, _ := start(t, path, opt)
			p = p[:4096]
			require.NoError(t, testtool.Err(third.ReadAt(t.Context(), p, 2<<20)))
			require.Equal(t, filetest.Block('x', 4096), p)
		})
	}
}

// TestStorageOfManyDaemons: all daemons that choose a new storage at the same time know it by the
// same text. Otherwise one of them takes it for another storage later.
func TestStorageOfManyDaemons(t *testing.T) {
	const daemons = 8
	for range 20 {
		root := t.TempDir()
		var all sync.WaitGroup
		var ids [daemons]string
		var errs [daemons]error
		begin := make(chan struct{})
		for i := range daemons {
			all.Go(func() {
				<-begin
				ids[i], errs[i] = storageID(root)
			})
		}
		close(begin)
		all.Wait()
		now := testtool.Must(storageID(root))(t)
		for i := range daemons {
			require.NoError(t, errs[i])
			require.Equal(t, now, ids[i])
		}
	}
}

// TestAnotherPlaceThatCannotBeRead: while storage gives errors, a disk that may be there is not
// made anew, gets no other number, and does not seem to be on another volume.
func TestAnotherPlaceThatCannotBeRead(t *testing.T) {
	loop := filepath.Join(t.TempDir(), "loop")
	require.NoError(t, os.Symlink(loop, loop)) // the system cannot resolve it
	base := t.TempDir()
	for _, persistent := range []bool{false, true} {
		h := Homes{Base: base, Roots: []string{loop}, Persistent: persistent}
		err := h.Settle("a.raw", DirIn(loop, "a.raw"), DirIn(base, "a.raw"))
		require.ErrorContains(t, err, "too many", "persistent: %v", persistent)
		_, _, err = KnownAs(DirIn(loop, "a.raw"), persistent)
		require.ErrorContains(t, err, "too many", "persistent: %v", persistent)
	}
	require.ErrorIs(t, testtool.Err(volumeID(loop)), unix.ELOOP)

	// Where nobody may ask, the volume is unknown, and that is no error.
	require.NoError(t, os.Mkdir(filepath.Join(base, "below"), 0o700))
	require.NoError(t, os.Chmod(base, 0))
	require.NoError(t, <-testtool.Go(func() error {
		runtime.LockOSThread() // for good, so that the thread ends with the goroutine
		if os.Geteuid() == 0 {
			if err := unix.Setfsuid(65534); err != nil {
				return err
			}
		}
		id, err := volumeID(filepath.Join(base, "below"))
		if id != "" {
			return errors.New(id)
		}
		return err
	}))
	require.NoError(t, os.Chmod(base, 0o700))
}
