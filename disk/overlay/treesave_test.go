package overlay

import (
	"bytes"
	"context"
	"io/fs"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// unsureShelf fails to save the record, as a sync of a directory that fails: the new record has its
// name already.
type unsureShelf struct {
	Shelf
	stored int     // so many calls replace the record, and say that they have not
	failed int     // and after them so many do nothing
	full   bool    // no layer can be made
	named  bool    // the record that went last named a layer
	stays  *Record // is on storage
}

func (s *unsureShelf) Make(id string, size, floor int64) (File, *Map, error) {
	if s.full {
		return nil, nil, unix.ENOSPC
	}
	return s.Shelf.Make(id, size, floor)
}

func (s *unsureShelf) Save(r *Record) error {
	switch {
	case s.stored > 0:
		s.stored--
		s.stays = r
		if err := s.Shelf.Save(r); err != nil {
			return err
		}
		return unix.EIO
	case s.failed > 0:
		s.failed--
		return unix.EIO
	}
	s.named = r == nil && s.stays != nil && len(s.stays.Layers) > 0
	s.stays = r
	return s.Shelf.Save(r)
}

// fill writes a byte to the whole first block and flushes it.
func (d *simTree) fill(b byte) error {
	if _, err := d.disk.WriteAt(d.t.Context(), bytes.Repeat([]byte{b}, minGranule), 0); err != nil {
		return err
	}
	return d.disk.Flush()
}

// first is the first byte of the disk.
func (d *simTree) first() byte {
	p := make([]byte, disk.SectorSize)
	require.NoError(d.t, testtool.Err(d.disk.ReadAt(d.t.Context(), p, 0)))
	return p[0]
}

// TestRevertThatCannotBeRecorded: after a save that failed, storage may have either record. What a
// guest writes and flushes after it is there at the next start, or it is told that it is not.
func TestRevertThatCannotBeRecorded(t *testing.T) {
	for failed := range 3 {
		d := newSimTree(t, 1, Options{}, true)
		require.NoError(t, d.fill('a'))
		require.NoError(t, TakeSnapshot(t.Context(), "s", d.tree))
		require.NoError(t, d.fill('b'))
		d.tree.opt.Shelf = &unsureShelf{Shelf: d, stored: 1, failed: failed}
		require.ErrorIs(t, d.tree.Revert("s"), unix.EIO)
		require.Equal(t, byte('b'), d.first())
		want := byte('c')
		if err := d.fill('c'); err != nil {
			require.ErrorIs(t, err, disk.ErrFailed)
			require.Positive(t, failed, "the former record is there again")
			want = 'a'
		}
		d.load()
		require.Equal(t, want, d.first())
	}
}

// TestGrowAfterASnapshotThatCannotBeRecorded: a layer that only storage knows of ends where the
// disk ended then.
func TestGrowAfterASnapshotThatCannotBeRecorded(t *testing.T) {
	d := newSimTree(t, 1, Options{}, true)
	size := d.disk.Size()
	require.NoError(t, TakeSnapshot(t.Context(), "before", d.tree))
	d.tree.opt.Shelf = &unsureShelf{Shelf: d, stored: 1, failed: 2}
	require.ErrorIs(t, TakeSnapshot(t.Context(), "s", d.tree), unix.EIO)
	require.ErrorIs(t, d.tree.Grow(2*size), unix.EIO)
	require.Equal(t, size, d.disk.Size())
	require.NoError(t, d.tree.Grow(2*size))
	data := bytes.Repeat([]byte{'d'}, disk.SectorSize)
	filetest.Write(t, d.disk, data, 2*size-disk.SectorSize)
	require.NoError(t, d.disk.Flush())
	d.load()
	require.Equal(t, data, filetest.Read(t, d.disk, 2*size-disk.SectorSize, disk.SectorSize))
}

// TestNoLayersAfterASnapshotThatCannotBeRecorded: the files of layers go before the record does, so
// a record that names one must not be there any more.
func TestNoLayersAfterASnapshotThatCannotBeRecorded(t *testing.T) {
	d := newSimTree(t, 1, Options{}, true)
	require.NoError(t, d.tree.markLocked())
	shelf := &unsureShelf{Shelf: d, stored: 1, failed: 1}
	d.tree.opt.Shelf = shelf
	require.ErrorIs(t, TakeSnapshot(t.Context(), "s", d.tree), unix.EIO)
	shelf.full = true
	require.ErrorIs(t, TakeSnapshot(t.Context(), "s", d.tree), unix.ENOSPC)
	require.Nil(t, shelf.stays)
	require.False(t, shelf.named)
}

// TestMergingALayerThatStorageHasLost: storage may fail to write what a guest has written, and only
// a flush of that layer tells. Once it is merged and gone, nobody would.
func TestMergingALayerThatStorageHasLost(t *testing.T) {
	for _, frozen := range []bool{false, true} {
		d := newSimTree(t, 1, Options{}, true)
		require.NoError(t, d.fill('a'))
		require.NoError(t, TakeSnapshot(t.Context(), "s", d.tree))
		filetest.Write(t, d.disk, filetest.Block('b', minGranule), 0)
		top := d.tree.top.disk
		top.file = &unflushed{top.file}
		require.NoError(t, d.tree.Delete("s"))
		if frozen {
			d.tree.mu.Lock()
			require.NoError(t, d.tree.replaceTopLocked())
			d.tree.mu.Unlock()
		}
		_, _, err := d.tree.round()
		require.ErrorIs(t, err, disk.ErrFailed)
		require.ErrorIs(t, d.disk.Flush(), disk.ErrFailed)
	}
}

// noUsage fails a test that asks what a layer takes.
type noUsage struct{ t *testing.T }

func (n noUsage) Usage() (disk.Usage, error) {
	n.t.Error("somebody asks what the layer takes")
	return disk.Usage{}, nil
}

// TestImagesOfSnapshots: a commit asks for each of its pieces which snapshots have images. To find
// out what the snapshots take as well would go over all maps each time.
func TestImagesOfSnapshots(t *testing.T) {
	d := newSimTree(t, 1, Options{}, false)
	require.NoError(t, TakeSnapshot(t.Context(), "a", d.tree))
	d.tree.bottom.disk.accounts = noUsage{t}
	among := d.disk.Since()
	require.NoError(t, d.tree.Committed(among[0].ID, "an image"))
	require.Equal(t, map[string]string{"an image": among[0].ID}, d.tree.Images(among))
	require.Empty(t, d.tree.Images(nil))
}

// TestOverWhatIsClosed: a call ends with an error when what the layers lie over is closed. It does
// not wait for layers that never come.
func TestOverWhatIsClosed(t *testing.T) {
	d := newSimDisk(t, 1, Options{})
	p := make([]byte, disk.SectorSize)
	of := NewStack(newDisk(d.file, closedImage{d.image}, newBlockMap(blocksOf(simSize)),
		newMapStore(1), simSize, Options{}))
	require.ErrorIs(t, testtool.Err(of.ReadAt(t.Context(), p, 0)), fs.ErrClosed)
	require.ErrorIs(t, testtool.Err(of.WriteAt(t.Context(), p, 0)), fs.ErrClosed)
}

// closedImage is the snapshot of a disk that was closed, as the image of a clone.
type closedImage struct{ Image }

func (closedImage) ReadAt(context.Context, []byte, int64) (int, error) {
	return 0, fs.ErrClosed
}
