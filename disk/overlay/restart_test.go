package overlay

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/internal/testtool"
)

// disks is one durable disk over several processes.
type disks struct {
	dir  string
	img  Image
	opt  Options
	boot string // of the machine
}

func (d *disks) file() string { return filepath.Join(d.dir, "disk") }

func (d *disks) durableMap() string { return filepath.Join(d.dir, "map") }

// start makes the disk, or opens the existing one.
func (d *disks) start(t *testing.T) *Disk {
	t.Helper()
	opt := MapOptions{Live: filepath.Join(d.dir, "live"), Durable: d.durableMap(),
		ImageSize: d.img.Size(), Boot: d.boot, Volume: "a volume", WasDurable: true,
		IsDurable: true}
	m := NewMap(opt)
	_, err := os.Stat(d.file())
	if err == nil {
		m = testtool.Must(LoadMap(opt))(t)
	} else {
		filetest.Put(t, d.dir, "disk", nil, d.img.Size())
	}
	require.NoError(t, m.Begin(t.Context(), d.img))
	file := testtool.Must(rawfile.Open(d.file(), rawfile.Options{Durable: true, Private: true}))(t)
	return New(file, d.img, m, d.opt)
}

// TestRestartAfterAFailedFlush: when a flush fails, the kernel forgets pages that it could not
// write. After a restart, everything copied since the last flush is read from the image again, not
// from the lost pages.
func TestRestartAfterAFailedFlush(t *testing.T) {
	for name, fail := range map[string]func(o *Disk) error{"flush": (*Disk).Flush,
		"grow": func(o *Disk) error { return o.Grow(o.Size() + disk.SectorSize) }} {
		t.Run(name, func(t *testing.T) { restartAfterAFailedFlush(t, fail) })
	}
}

func restartAfterAFailedFlush(t *testing.T, fail func(o *Disk) error) {
	content := make([]byte, 3<<20)
	for i := range content {
		content[i] = byte(1 + i%251)
	}
	d := &disks{dir: t.TempDir(), img: filetest.SimImage{Content: bytes.Clone(content)},
		opt: Options{CopyReads: true}, boot: "a boot"}
	over := d.start(t)
	filetest.Write(t, over, filetest.Block('f', 4096), 4096)
	require.NoError(t, over.Flush())
	// the rest of it comes from the image
	filetest.Write(t, over, filetest.Block('l', 512), 1<<20)
	filetest.ReadAll(t, over, over.Size()) // and so does everything else
	over.file = &unflushed{over.file}
	require.ErrorIs(t, fail(over), disk.ErrFailed)
	_, err := over.WriteAt(t.Context(), filetest.Block('x', 512), 4096)
	require.ErrorIs(t, err, disk.ErrFailed)
	require.NoError(t, over.Close())

	f := testtool.Must(os.OpenFile(d.file(), os.O_RDWR, 0))(t)
	require.NoError(t, testtool.Err(f.WriteAt(make([]byte, 2<<20), 1<<20)))
	require.NoError(t, f.Close())
	again := d.start(t)
	copy(content[4096:], filetest.Block('f', 4096))
	require.Equal(t, -1, filetest.FirstDifference(content,
		filetest.ReadAll(t, again, again.Size())))
	require.NoError(t, again.Flush())
	require.NoError(t, again.Close())
}

// unflushed is a disk's file whose flush fails.
type unflushed struct{ File }

func (u unflushed) Grow(int64) error { return u.Flush() }

func (unflushed) Flush() error { return fmt.Errorf("%w: %w", disk.ErrFailed, unix.EIO) }

// unsyncable is a map file whose sync fails.
type unsyncable struct{ storage }

func (unsyncable) Sync() error { return unix.EIO }

// onStorage is a map file that also keeps what has reached storage of the writes since it was
// opened.
type onStorage struct {
	storage
	platter *os.File
}

func (f onStorage) WriteAt(p []byte, off int64) (int, error) {
	if _, err := f.platter.WriteAt(p, off); err != nil {
		return 0, err
	}
	return f.storage.WriteAt(p, off)
}

// TestFlushAfterTheMapCouldNotBeSynced: if the sync of the map fails, the kernel takes pages for
// clean that are not on storage. The next process reads them like that. What it then flushes must
// survive a crash of the machine.
func TestFlushAfterTheMapCouldNotBeSynced(t *testing.T) {
	img := filetest.SimImage{Content: filetest.Block('a', 1<<20)}
	d := &disks{dir: t.TempDir(), img: img, boot: "a boot"}
	over := d.start(t)
	content := filetest.Content(t, d.durableMap())
	platter, err := os.OpenFile(filetest.Put(t, t.TempDir(), "map", content, 0), os.O_RDWR, 0)
	require.NoError(t, err)
	defer platter.Close()
	filetest.Write(t, over, filetest.Block('w', 4096), 8192)
	over.maps.durable = unsyncable{over.maps.durable}
	require.ErrorIs(t, over.Flush(), disk.ErrFailed)
	require.NoError(t, over.Close())

	again := d.start(t)
	again.maps.durable = onStorage{again.maps.durable, platter}
	require.NoError(t, again.Flush())
	require.NoError(t, again.Close())
	content = filetest.Content(t, platter.Name())
	require.NoError(t, os.WriteFile(d.durableMap(), content, 0o600))
	d.boot = "another boot"
	third := d.start(t)
	require.Equal(t, filetest.Block('w', 4096), filetest.Read(t, third, 8192, 4096))
	require.NoError(t, third.Close())
}

// storedZeros is an image that stores its zeros.
type storedZeros struct{ filetest.SimImage }

func (storedZeros) Extent(_ context.Context, _, length int64) (disk.Extent, error) {
	return disk.Extent{Length: length, Data: true}, nil
}

// TestHolesOverALostWrite: a write that is lost leaves something in the file, below a block that is
// not marked. The guest sees the image there, and still does when the same image is stored with a
// hole, as a copy of a raw file may be.
func TestHolesOverALostWrite(t *testing.T) {
	img := filetest.SimImage{Content: make([]byte, 1<<20)}
	d := &disks{dir: t.TempDir(), img: storedZeros{img}, boot: "a boot"}
	over := d.start(t)
	filetest.Write(t, over, filetest.Block('w', 4096), 8192)
	require.NoError(t, over.Close())
	d.boot = "another boot" // the crash has left the data and not the map
	for _, d.img = range []Image{storedZeros{img}, img, storedZeros{img}} {
		again := d.start(t)
		require.Equal(t, make([]byte, 4096), filetest.Read(t, again, 8192, 4096))
		require.NoError(t, again.Close())
	}
}

// TestMapOfAnotherDisk: a map counts only for the disk, the boot and the volume that it names.
func TestMapOfAnotherDisk(t *testing.T) {
	own := mapHeader{granule: minGranule, blocks: 100, id: [16]byte{1, 15: 2}, boot: "a boot",
		volume: "a volume"}
	path := filepath.Join(t.TempDir(), "map")
	require.NoError(t, testtool.Must(createMap(path, own, newBlockMap(100), false))(t).Close())
	merge := func(header mapHeader) error {
		f, err := mergeMap(path, header, newBlockMap(100), func(int64, bool) {})
		if err == nil {
			require.NoError(t, f.Close())
		}
		return err
	}
	require.NoError(t, merge(own))
	for name, change := range map[string]func(*mapHeader){
		"granule": func(h *mapHeader) { h.granule *= 2 },
		"blocks":  func(h *mapHeader) { h.blocks++ },
		"id":      func(h *mapHeader) { h.id[15]++ },
		"boot":    func(h *mapHeader) { h.boot = "" },
		"volume":  func(h *mapHeader) { h.volume += "x" },
	} {
		other := own
		change(&other)
		require.True(t, isDamaged(merge(other)), name)
	}
}

// fullFile has no space.
type fullFile struct{}

func (fullFile) WriteAt([]byte, int64) (int, error) { return 0, unix.ENOSPC }

func TestMapThatCannotBeWritten(t *testing.T) {
	m := newBlockMap(mapPageBlocks)
	require.NoError(t, m.set(3, 3, nil))
	require.ErrorIs(t, testtool.Err(writeMapPages(fullFile{}, m)), unix.ENOSPC)
}

// failingReads is storage whose reads fail.
type failingReads struct{ storage }

func (failingReads) ReadAt([]byte, int64) (int, error) {
	return 0, &os.PathError{Op: "read", Path: "map", Err: unix.EIO}
}

func TestAMapThatStorageDoesNotLetBeReadIsNotDamaged(t *testing.T) {
	m := newBlockMap(16)
	err := readMap(failingReads{}, "", math.MaxInt64, mapHeader{}, m, func(int64, bool) {})
	require.ErrorIs(t, err, unix.EIO)
	require.False(t, isDamaged(err))
}

// instant is a file whose calls take no time.
type instant struct{ size int64 }

func (f instant) ReadAt(ctx context.Context, p []byte, _ int64) (int, error)  { return len(p), nil }
func (f instant) WriteAt(ctx context.Context, p []byte, _ int64) (int, error) { return len(p), nil }
func (f instant) Flush() error                                                { return nil }
func (f instant) Sync() error                                                 { return nil }
func (f instant) Size() int64                                                 { return f.size }
func (f instant) Close() error                                                { return nil }
func (f instant) Discard(_ context.Context, _, _ int64) error                 { return nil }
func (f instant) Zero(_ context.Context, _, _ int64) error                    { return nil }

func (f instant) Extent(ctx context.Context, _, length int64) (disk.Extent, error) {
	return disk.Extent{Length: length, Data: true}, nil
}

// ownBlocks makes a disk whose file has all blocks but some, so that no page of the map is full.
func ownBlocks(tb testing.TB) (over *Disk, blocks int64) {
	const size = 64 << 20
	m := newBlockMap(blocksOf(size))
	require.NoError(tb, m.set(0, m.blocks/2-1, nil))
	img := filetest.SimImage{Content: make([]byte, size)}
	return newDisk(instant{size}, img, m, newMapStore(len(m.pages)), size, Options{}), m.blocks / 2
}

// TestOwnBlocksAllocateNothing: reading and writing blocks of the file allocates nothing.
func TestOwnBlocksAllocateNothing(t *testing.T) {
	over, blocks := ownBlocks(t)
	p := make([]byte, 8*minGranule)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		_, _ = over.ReadAt(t.Context(), p, (blocks-8)*minGranule)
		_, _ = over.WriteAt(t.Context(), p, minGranule/2)
	}))
}
