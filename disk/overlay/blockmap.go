package overlay

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"sync"
	"sync/atomic"

	"kubevirt.io/disk/disk/internal/rawfile"
)

const (
	// minGranule is the smallest block of the map, in bytes: guests seldom write less.
	minGranule = 4 << 10
	// maxMapBlocks limits the map of one disk to 32 MiB of bits. Larger images have larger blocks.
	maxMapBlocks = 1 << 28
)

// granuleFor returns the block size of the map for an image of that many bytes: 4 KiB up to 1 TiB,
// 64 KiB at 16 TiB.
func granuleFor(size int64) int64 {
	granule := int64(minGranule)
	for (size+granule-1)/granule > maxMapBlocks {
		granule <<= 1
	}
	return granule
}

// fullWords is a saved page with all blocks set.
var fullWords = bytes.Repeat([]byte{0xff}, mapPageSize)

// blockMap says for every block of an image where its content is: in the disk's own file (set) or
// in the image (clear). A set block is never cleared, so readers need no lock. Any number of
// goroutines may use it, but two set calls for the same block must not overlap (blockLocks).
type blockMap struct {
	blocks int64
	clear  atomic.Int64 // blocks that are clear
	pages  []atomic.Pointer[mapPage]
	full   *mapPage // stands for every page with all blocks set
}

// mapPage is a part of a map. Bits past the end of the map are set.
type mapPage struct {
	mu    sync.Mutex // held while bits are set
	words [mapPageWords]atomic.Uint64
	unset atomic.Int32 // blocks; changed with mu held
}

func newBlockMap(blocks int64) *blockMap {
	m := &blockMap{blocks: blocks, full: new(mapPage),
		pages: make([]atomic.Pointer[mapPage], (blocks+mapPageBlocks-1)/mapPageBlocks)}
	for i := range m.full.words {
		m.full.words[i].Store(^uint64(0))
	}
	m.clear.Store(blocks)
	return m
}

// page returns a page to set bits in. It allocates the page if all of it was clear.
func (m *blockMap) page(index int64) *mapPage {
	for {
		if p := m.pages[index].Load(); p != nil {
			return p
		}
		p := new(mapPage)
		unset := int64(mapPageBlocks)
		// touch the memory now: a read before the first write would map it twice, and the second
		// mapping interrupts all processors
		p.words[0].Store(0)
		if rest := m.blocks - index*mapPageBlocks; rest < mapPageBlocks {
			unset = rest
			for b := rest; b < mapPageBlocks; b++ {
				p.words[b/64].Or(1 << (b % 64))
			}
		}
		p.unset.Store(int32(unset))
		if m.pages[index].CompareAndSwap(nil, p) {
			return p
		}
	}
}

// word returns 64 blocks of the map. Bits past its end are set.
func (m *blockMap) word(index int64) uint64 {
	p := m.pages[index/mapPageWords].Load()
	if p == nil {
		if rest := m.blocks - index*64; rest < 64 {
			return ^uint64(0) << max(rest, 0)
		}
		return 0
	}
	return p.words[index%mapPageWords].Load()
}

func (m *blockMap) allSet(first, last int64) bool {
	for w := first / 64; w <= last/64; w++ {
		if w%mapPageWords == 0 && m.pages[w/mapPageWords].Load() == m.full {
			w += mapPageWords - 1
			continue
		}
		if mask := rawfile.WordMask(w, first, last); m.word(w)&mask != mask {
			return false
		}
	}
	return true
}

// run returns the state of block first, and the end of the run of blocks in that state, up to last.
// It reads each word only once, so a run is never empty although other blocks may be set meanwhile.
func (m *blockMap) run(first, last int64) (set bool, end int64) {
	w := first / 64
	word := m.word(w)
	set = word>>(first%64)&1 == 1
	differ := func(word uint64) uint64 {
		if set {
			return ^word
		}
		return word
	}
	for other := differ(word) & (^uint64(0) << (first % 64)); ; other = differ(m.word(w)) {
		if other != 0 {
			return set, min(last+1, w*64+int64(bits.TrailingZeros64(other)))
		}
		if w++; w > last/64 {
			return set, last + 1
		}
	}
}

// nextClear returns the first clear block from first on, or m.blocks if there is none.
func (m *blockMap) nextClear(first int64) int64 {
	for first < m.blocks {
		switch m.pages[first/mapPageBlocks].Load() {
		case nil:
			return first
		case m.full:
			first = (first/mapPageBlocks + 1) * mapPageBlocks
			continue
		}
		last := min(m.blocks, (first/mapPageBlocks+1)*mapPageBlocks) - 1
		set, end := m.run(first, last)
		if !set {
			return first
		}
		first = end
	}
	return m.blocks
}

// countClear returns how many of the blocks first to last are clear. It takes no lock. For a whole
// page it reads only the page's count.
func (m *blockMap) countClear(first, last int64) (n int64) {
	for first <= last {
		index := first / mapPageBlocks
		end := min(m.blocks, (index+1)*mapPageBlocks) - 1
		p := m.pages[index].Load()
		switch {
		case p == m.full:
		case p == nil:
			n += min(last, end) - first + 1
		case first%mapPageBlocks == 0 && last >= end:
			n += int64(p.unset.Load())
		default:
			for w := first / 64; w <= min(last, end)/64; w++ {
				mask := rawfile.WordMask(w, first, min(last, end))
				n += int64(bits.OnesCount64(^m.word(w) & mask))
			}
		}
		first = end + 1
	}
	return n
}

// set sets the blocks first to last. Before it sets bits of a page, it calls save with the page's
// new words from the given one on. If save fails, the blocks of this page and of the following ones
// stay clear. If save is nil, nothing is saved.
func (m *blockMap) set(first, last int64, save func(page, word int64, words []byte) error) error {
	for first <= last {
		end := min(last, (first/mapPageBlocks+1)*mapPageBlocks-1)
		if err := m.setInPage(first, end, save); err != nil {
			return err
		}
		first = end + 1
	}
	return nil
}

func (m *blockMap) setInPage(first, last int64,
	save func(page, word int64, words []byte) error) error {
	index := first / mapPageBlocks
	if first%mapPageBlocks == 0 && last+1 == min(m.blocks, first+mapPageBlocks) &&
		m.pages[index].Load() == nil {
		return m.setPage(index, save)
	}
	p := m.page(index)
	if p == m.full {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	low, high := first/64, last/64
	if save != nil {
		buf := mapBuffers.Get().(*[mapPageSize]byte)
		defer mapBuffers.Put(buf)
		words := buf[:0]
		for w := low; w <= high; w++ {
			words = binary.LittleEndian.AppendUint64(words,
				p.words[w%mapPageWords].Load()|rawfile.WordMask(w, first, last))
		}
		if err := save(index, low%mapPageWords, words); err != nil {
			return err
		}
	}
	added := 0
	for w := low; w <= high; w++ {
		mask := rawfile.WordMask(w, first, last)
		old := p.words[w%mapPageWords].Or(mask)
		added += bits.OnesCount64(mask &^ old)
	}
	if p.unset.Add(-int32(added)) == 0 {
		m.pages[index].Store(m.full)
	}
	m.clear.Add(-int64(added))
	return nil
}

// setPage sets all blocks of a page that is all clear. Nobody else sets any of them meanwhile,
// because calls must not overlap. The page does not exist yet, so setPage and snapshotPage use the
// lock of the full page.
func (m *blockMap) setPage(index int64, save func(page, word int64, words []byte) error) error {
	m.full.mu.Lock()
	defer m.full.mu.Unlock()
	blocks := min(m.blocks-index*mapPageBlocks, mapPageBlocks)
	if save != nil {
		if err := save(index, 0, fullWords[:(blocks+63)/64*8]); err != nil {
			return err
		}
	}
	m.pages[index].Store(m.full)
	m.clear.Add(-blocks)
	return nil
}

func (m *blockMap) copyPage(index int64, buf []byte) {
	for i := range int64(mapPageWords) {
		binary.LittleEndian.PutUint64(buf[i*8:], m.word(index*mapPageWords+i))
	}
}

// snapshotPage is copyPage, but waits for set calls: the copy has all that save was called with.
func (m *blockMap) snapshotPage(index int64, buf []byte) {
	p := m.pages[index].Load()
	if p == nil {
		p = m.full
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	m.copyPage(index, buf)
}

// mergePage sets the blocks that are set in buf, of mapPageSize bytes. It reports whether any of
// them is new.
func (m *blockMap) mergePage(index int64, buf []byte) (news bool) {
	p := m.page(index)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p == m.full {
		return false
	}
	for i := range int64(mapPageWords) {
		word := binary.LittleEndian.Uint64(buf[i*8:])
		old := p.words[i].Or(word)
		p.unset.Add(-int32(bits.OnesCount64(word &^ old)))
		m.clear.Add(-int64(bits.OnesCount64(word &^ old)))
		news = news || word&^old != 0
	}
	if p.unset.Load() == 0 {
		m.pages[index].Store(m.full)
	}
	return news
}

// mapBuffers holds buffers to encode a page's words for save.
var mapBuffers = sync.Pool{New: func() any { return new([mapPageSize]byte) }}
