package ext4

import (
	"hash/maphash"
	"iter"
	"maps"
	"slices"
)

// list is an array that grows without being copied. Its records have no pointers, so the garbage
// collector does not look into them.
type list[T any] struct {
	chunks []*[chunkLength]T
	n      uint32
}

const chunkLength = 1 << 12

func (l *list[T]) at(i uint32) *T { return &l.chunks[i/chunkLength][i%chunkLength] }

// add appends a record of zeros and returns its index.
func (l *list[T]) add() uint32 {
	if l.n%chunkLength == 0 {
		l.chunks = append(l.chunks, new([chunkLength]T))
	}
	l.n++
	return l.n - 1
}

// text keeps names and the targets of links.
type text struct {
	chunks [][]byte
}

const textChunk = 1 << 18

// add stores s, which is at most a block long, and returns its index.
func (t *text) add(s string) uint32 {
	last := len(t.chunks) - 1
	if last < 0 || len(t.chunks[last])+len(s) > textChunk {
		t.chunks = append(t.chunks, make([]byte, 0, textChunk))
		last++
	}
	at := len(t.chunks[last])
	t.chunks[last] = append(t.chunks[last], s...)
	return uint32(last*textChunk + at)
}

func (t *text) get(at uint32, n int) []byte {
	return t.chunks[at/textChunk][at%textChunk:][:n]
}

// nameTable finds entries by directory and name. It has only their indexes, 0 in a free slot.
type nameTable struct {
	seed  maphash.Seed
	slots []uint32 // a power of two
	n     int
}

func newNameTable() nameTable {
	return nameTable{seed: maphash.MakeSeed(), slots: make([]uint32, 1<<10)}
}

func (t *nameTable) hash(dir uint32, name string) uint32 {
	h := maphash.String(t.seed, name)
	return uint32(h>>32) ^ uint32(h)*0x9e3779b1 ^ dir*0x85ebca6b
}

// find returns the entry with the hash for which same is true, or 0.
func (t *nameTable) find(hash uint32, same func(entry uint32) bool) uint32 {
	mask := uint32(len(t.slots) - 1)
	for i := hash & mask; t.slots[i] != 0; i = (i + 1) & mask {
		if same(t.slots[i]) {
			return t.slots[i]
		}
	}
	return 0
}

// insert adds an entry. hashOf returns the hash of any entry.
func (t *nameTable) insert(entry uint32, hashOf func(entry uint32) uint32) {
	if 4*(t.n+1) > 3*len(t.slots) {
		old := t.slots
		t.slots = make([]uint32, 2*len(old))
		for _, e := range old {
			if e != 0 {
				t.put(e, hashOf(e))
			}
		}
	}
	t.put(entry, hashOf(entry))
	t.n++
}

func (t *nameTable) put(entry, hash uint32) {
	mask := uint32(len(t.slots) - 1)
	i := hash & mask
	for t.slots[i] != 0 {
		i = (i + 1) & mask
	}
	t.slots[i] = entry
}

// remove removes an entry and moves later entries up, so that no tombstones are left.
func (t *nameTable) remove(entry uint32, hashOf func(entry uint32) uint32) {
	mask := uint32(len(t.slots) - 1)
	i := hashOf(entry) & mask
	for t.slots[i] != entry {
		i = (i + 1) & mask
	}
	t.n--
	for j := (i + 1) & mask; t.slots[j] != 0; j = (j + 1) & mask {
		home := hashOf(t.slots[j]) & mask
		if (j-home)&mask >= (j-i)&mask {
			t.slots[i] = t.slots[j]
			i = j
		}
	}
	t.slots[i] = 0
}

// sums has a checksum for some blocks. Neighbours are stored together, because blocks of metadata
// are mostly in a row, and a map of a million blocks is twice as large.
type sums struct {
	pages map[uint32]*[sumsPage]blockSum
	n     int
}

// blockSum is zeros for a block that has none.
type blockSum [16]byte

const sumsPage = 32

func newSums() sums { return sums{pages: make(map[uint32]*[sumsPage]blockSum)} }

func (s *sums) get(block uint32) (sum blockSum, known bool) {
	if page := s.pages[block/sumsPage]; page != nil {
		sum = page[block%sumsPage]
	}
	return sum, sum != blockSum{}
}

func (s *sums) set(block uint32, sum blockSum) {
	page := s.pages[block/sumsPage]
	if page == nil {
		page = new([sumsPage]blockSum)
		s.pages[block/sumsPage] = page
	}
	if page[block%sumsPage] == (blockSum{}) {
		s.n++
	}
	page[block%sumsPage] = sum
}

// all are the blocks with a checksum, the lowest first.
func (s *sums) all() iter.Seq2[uint32, blockSum] {
	return func(yield func(uint32, blockSum) bool) {
		for _, number := range slices.Sorted(maps.Keys(s.pages)) {
			for i, sum := range s.pages[number] {
				if sum != (blockSum{}) && !yield(number*sumsPage+uint32(i), sum) {
					return
				}
			}
		}
	}
}
