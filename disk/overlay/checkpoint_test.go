package overlay

import (
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// flushing is a file that calls a function during its flush.
type flushing struct {
	*filetest.SimFile
	during func()
}

func (f *flushing) Flush() error {
	err := f.SimFile.Flush()
	f.during()
	return err
}

// TestCheckpointSpeaksOfFlushedDataOnly: what the guest writes during the flush of the data is not
// on storage yet, so the map that is saved next must not include it.
func TestCheckpointSpeaksOfFlushedDataOnly(t *testing.T) {
	for seed := range uint64(10) { // a crash keeps some sectors
		d := newSimDisk(t, seed, Options{})
		write := func(b byte, blockNumber int64) {
			p := filetest.Block(b, minGranule)
			d.attempt(p, blockNumber*minGranule)
			filetest.Write(t, d.over, p, blockNumber*minGranule)
			copy(d.expected[blockNumber*minGranule:], p)
		}
		write('a', 1)
		d.over.file = &flushing{d.file, func() { write('b', 2) }}
		require.NoError(t, d.over.Flush())
		for sector := range int64(minGranule / disk.SectorSize) {
			delete(d.allowed, minGranule/disk.SectorSize+sector)
		}
		require.NoError(t, d.recover())
	}
}

// TestFlushWaitsForTheOneBefore: a flush that finds another one under way has to wait for it,
// because that one is saving the changes of both.
func TestFlushWaitsForTheOneBefore(t *testing.T) {
	d := newSimDisk(t, 1, Options{})
	filetest.Write(t, d.over, filetest.Block('a', minGranule), minGranule)
	begun, release := make(chan struct{}), make(chan struct{})
	var flushes atomic.Int64
	d.over.file = &flushing{d.file, func() {
		if flushes.Add(1) == 1 {
			close(begun)
			<-release
		}
	}}
	first, second := make(chan error, 1), make(chan error, 1)
	go func() { first <- d.over.Flush() }()
	<-begun
	go func() { second <- d.over.Flush() }()
	testtool.Waits(t, second, "the map is not on storage yet")
	close(release)
	require.NoError(t, <-first)
	require.NoError(t, <-second)
}

// TestDirtyPagesAreSavedInBatches: every changed page is saved once. A page that could not be saved
// stays dirty.
func TestDirtyPagesAreSavedInBatches(t *testing.T) {
	const pages = 20*64 + 5
	s := newMapStore(pages)
	var want []int64
	for page := int64(0); page < pages; page += 1 + page%3 {
		s.taint(page)
		want = append(want, page)
	}
	var saved []int64
	calls := 0
	save := func(pages []int64) error {
		if calls++; calls == 2 {
			return unix.ENOSPC
		}
		require.LessOrEqual(t, len(pages), checkpointPages)
		saved = append(saved, pages...)
		return nil
	}
	require.ErrorIs(t, s.takeDirty(checkpointPages, save), unix.ENOSPC)
	require.NotEmpty(t, saved)
	require.NoError(t, s.takeDirty(checkpointPages, save))
	slices.Sort(saved)
	require.Equal(t, want, saved)
	require.NoError(t, s.takeDirty(checkpointPages,
		func([]int64) error { panic("nothing is left") }))
}

// TestMapFileSaysWhatTheMapSays: a map file made of a map says the same, including full pages,
// which it does not store.
func TestMapFileSaysWhatTheMapSays(t *testing.T) {
	const blocks = 3*mapPageBlocks + 70
	m := newBlockMap(blocks)
	require.NoError(t, m.set(mapPageBlocks, 2*mapPageBlocks-1, nil))
	require.NoError(t, m.set(2*mapPageBlocks+3, 2*mapPageBlocks+4, nil))
	require.NoError(t, m.set(3*mapPageBlocks, blocks-1, nil))
	header := mapHeader{granule: minGranule, blocks: blocks}
	path := filepath.Join(t.TempDir(), "map")
	f := testtool.Must(createMap(path, header, m, false))(t)
	require.NoError(t, f.Close())
	again := newBlockMap(blocks)
	f = testtool.Must(mergeMap(path, header, again, func(int64, bool) {}))(t)
	require.NoError(t, f.Close())
	want, got := make([]byte, mapPageSize), make([]byte, mapPageSize)
	for page := range int64(4) {
		m.copyPage(page, want)
		again.copyPage(page, got)
		require.Equal(t, want, got, "page %d", page)
	}
	require.Equal(t, m.clear.Load(), again.clear.Load())
}

// pageWrites is a new file that records its writes.
type pageWrites struct {
	content []byte
	sizes   []int
}

func (w *pageWrites) WriteAt(p []byte, off int64) (int, error) {
	w.sizes = append(w.sizes, len(p))
	return copy(w.content[off:], p), nil
}

// TestMapPagesAreWrittenTogether: clear, full and other pages may follow each other in any order.
// Each is written once or not at all, and neighbours together.
func TestMapPagesAreWrittenTogether(t *testing.T) {
	const pages, blocks = 5*mapChunk/mapPageSize + 1, 5*mapChunk/mapPageSize*mapPageBlocks + 70
	random := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		m := newBlockMap(blocks)
		var want []int
		together := false // whether the next page joins the one before
		for kind, page := 0, int64(0); page < pages; page++ {
			if random.IntN(6) == 0 { // long runs
				kind = random.IntN(3)
			}
			first, last := page*mapPageBlocks, min((page+1)*mapPageBlocks, blocks)-1
			switch kind {
			case 0:
				together = false
			case 1:
				require.NoError(t, m.set(first, last, nil))
				together = false
			case 2:
				require.NoError(t, m.set(first+page, first+page, nil))
				if !together {
					want = append(want, 0)
				}
				want[len(want)-1] += mapPageSize
				together = want[len(want)-1] < mapChunk
			}
		}
		w := &pageWrites{content: make([]byte, mapHeaderSize+pages*mapPageSize)}
		full := testtool.Must(writeMapPages(w, m))(t)
		require.Equal(t, want, w.sizes)
		stored := make([]byte, mapPageSize)
		for page := range int64(pages) {
			m.copyPage(page, stored)
			isFull := m.pages[page].Load() == m.full
			require.Equal(t, isFull, full[page/8]>>(page%8)&1 == 1, "page %d", page)
			if isFull || m.pages[page].Load() == nil {
				clear(stored)
			}
			require.Equal(t, stored, w.content[mapHeaderSize+page*mapPageSize:][:mapPageSize],
				"page %d", page)
		}
	}
}
