package overlay

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestRunWhileBlocksAreSet asks for the run around blocks that another goroutine is setting. A run
// has at least its first block: a reader takes its length from it.
func TestRunWhileBlocksAreSet(t *testing.T) {
	const blocks = 4 * mapPageBlocks
	m := newBlockMap(blocks)
	var next atomic.Int64
	done := testtool.Go(func() error {
		for block := range int64(blocks) {
			next.Store(block)
			if err := m.set(block, block, nil); err != nil {
				return err
			}
		}
		return nil
	})
	for {
		first := next.Load()
		_, end := m.run(first, blocks-1)
		require.Greater(t, end, first)
		require.LessOrEqual(t, end, int64(blocks))
		select {
		case err := <-done:
			require.NoError(t, err)
			set, end := m.run(0, blocks-1)
			require.True(t, set)
			require.EqualValues(t, blocks, end)
			return
		default:
		}
	}
}

// TestMapAgainstAModel sets ranges of every shape, including whole pages and more. It compares each
// bit, the counts, and the saved map.
func TestMapAgainstAModel(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 1))
	for range 40 {
		blocks := int64(1 + r.IntN(5*mapPageBlocks))
		m := newBlockMap(blocks)
		model, saved := make([]bool, blocks), make([]bool, blocks+64)
		save := func(page, word int64, words []byte) error {
			for i := 0; i < len(words)*8; i++ {
				if b := page*mapPageBlocks + word*64 + int64(i); b < int64(len(saved)) &&
					binary.LittleEndian.Uint64(words[i/64*8:])>>(i%64)&1 == 1 {
					saved[b] = true
				}
			}
			return nil
		}
		for range 12 {
			first := r.Int64N(blocks)
			last := first + r.Int64N(blocks-first)
			if r.IntN(2) == 0 { // whole pages
				first = first / mapPageBlocks * mapPageBlocks
				last = min(blocks, (last/mapPageBlocks+1)*mapPageBlocks) - 1
			}
			require.NoError(t, m.set(first, last, save))
			require.True(t, m.allSet(first, last))
			for b := first; b <= last; b++ {
				model[b] = true
			}
		}
		clear := int64(0)
		for b, want := range model {
			if got := m.word(int64(b)/64)>>(b%64)&1 == 1; got != want || saved[b] != want {
				t.Fatalf("block %d of %d: set is %v, saved is %v, and it should be %v", b, blocks,
					got, saved[b], want)
			}
			if !want {
				clear++
			}
		}
		require.Equal(t, clear, m.clear.Load())
	}
}

// TestSnapshotWaitsForWhatIsSaved: a checkpoint begins after a change was saved and before it is
// made. It must get the map with the change: the page counts as saved after it. Otherwise the
// durable map would never get the change, nor anything the guest flushes there later.
func TestSnapshotWaitsForWhatIsSaved(t *testing.T) {
	for name, last := range map[string]int64{"a part of a page": 99,
		"a whole page": mapPageBlocks - 1} {
		t.Run(name, func(t *testing.T) {
			m := newBlockMap(2 * mapPageBlocks)
			buf := make([]byte, mapPageSize)
			done := make(chan struct{})
			require.NoError(t, m.set(0, last, func(int64, int64, []byte) error {
				go func() {
					defer close(done)
					m.snapshotPage(0, buf)
				}()
				select {
				case <-done:
				case <-time.After(50 * time.Millisecond): // it waits, as it should
				}
				return nil
			}))
			<-done
			want := make([]byte, mapPageSize)
			m.copyPage(0, want)
			require.True(t, bytes.Equal(want, buf))
		})
	}
}
