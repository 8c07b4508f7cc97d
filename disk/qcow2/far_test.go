package qcow2

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

var errNotNow = errors.New("not now")

// farFile takes a second for each read, and gives up when the reader's context ends.
type farFile struct {
	*bytes.Reader
	now, most, reads, given atomic.Int64
}

func (f *farFile) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	f.reads.Add(1)
	now := f.now.Add(1)
	defer f.now.Add(-1)
	for {
		most := f.most.Load()
		if now <= most || f.most.CompareAndSwap(most, now) {
			break
		}
	}
	select {
	case <-time.After(time.Second):
		n, err := f.Reader.ReadAt(p, off)
		f.given.Add(int64(n))
		return n, err
	case <-ctx.Done():
		return 0, errNotNow
	}
}

// manyTables is an image with that many L2 tables, of which the guest's n-th is the order[n]-th in
// the file.
func manyTables(bits, gap int, order []int) *image {
	tables, cs := len(order), 1<<bits
	im := newImage(uint(bits), uint64(tables*(cs/8)<<bits), tables*(1+gap)+tables)
	first := atL2 + tables*(1+gap)
	for i, n := range order {
		table := (atL2 + n*(1+gap)) << bits
		im.put64(atL1<<bits+8*i, uint64(table)|entryCopied)
		im.put64(table, uint64(first+i)<<bits|entryCopied)
		copy(im.cluster(first+i), fmt.Sprintf("of table %d", i))
	}
	return im
}

// TestFarTables opens images whose tables lie behind each other, and apart from each other.
func TestFarTables(t *testing.T) {
	const bits, tables, parallel = 12, 500, 8
	for gap, wantReads := range []int64{2, tables} {
		synctest.Test(t, func(t *testing.T) {
			im := manyTables(bits, gap, rand.Perm(tables))
			file := &farFile{Reader: bytes.NewReader(im.b)}
			near := im.opened(t)
			begin := time.Now()
			got, err := Open(t.Context(), file, int64(len(im.b)), Options{Parallel: parallel})
			require.NoError(t, err)
			require.Equal(t, near.Info(), got.Info())

			const others = 4 // header, all of its cluster, L1 table, refcount table
			require.EqualValues(t, others+wantReads, file.reads.Load())
			require.EqualValues(t, min(wantReads, parallel), file.most.Load())
			rounds := others + (wantReads+parallel-1)/parallel
			require.Equal(t, time.Duration(rounds)*time.Second, time.Since(begin))
			most := int64((tables + others + 1) << bits)
			require.Less(t, file.given.Load(), most, "no more than the tables")

			p := make([]byte, 16)
			off := int64(7 * (1 << bits / 8) << bits)
			require.NoError(t, testtool.Err(got.ReadAt(t.Context(), p, off)))
			require.Equal(t, "of table 7", string(bytes.TrimRight(p, "\x00")))
		})
	}
}

// TestFarTablesThatAreBad checks that a bad table ends the reading of the others, and that the
// error says what is wrong.
func TestFarTablesThatAreBad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const tables = 60 // the L1 table has one cluster
		im := manyTables(9, 1, rand.Perm(tables))
		table := (atL2 + 2*tables/2) << 9
		im.put64(table+8, 3)
		file := &farFile{Reader: bytes.NewReader(im.b)}
		_, err := Open(t.Context(), file, int64(len(im.b)), Options{Parallel: 4})
		require.ErrorAs(t, err, new(*FormatError))
		_, nearErr := im.open()
		require.Equal(t, nearErr, err)
		synctest.Wait()
		require.Zero(t, file.now.Load())
		require.Less(t, file.reads.Load(), int64(tables))
	})
}

// TestOpeningThatIsGivenUp ends the context in every second of opening.
func TestOpeningThatIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		im := manyTables(9, 1, rand.Perm(10))
		for after := time.Second / 2; ; after += time.Second {
			ctx, cancel := context.WithTimeout(t.Context(), after)
			file := &farFile{Reader: bytes.NewReader(im.b)}
			_, err := Open(ctx, file, int64(len(im.b)), Options{Parallel: 4})
			cancel()
			if err == nil {
				require.Greater(t, after, 5*time.Second)
				return
			}
			require.ErrorIs(t, err, errNotNow)
			synctest.Wait()
			require.Zero(t, file.now.Load())
		}
	})
}

// TestReaderThatGivesUp has several readers of one cluster. The one that reads it from the file
// gives up, and so does one that waits for it; the others get it, by one more read.
func TestReaderThatGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		im, content := compressedFile(t, 4, compressionZlib)
		file := &farFile{Reader: bytes.NewReader(im.b)}
		got := testtool.Must(Open(t.Context(), file, int64(len(im.b)), Options{Parallel: 4}))(t)
		_, err := got.ReadAt(t.Context(), make([]byte, 1), 0) // the table is in memory then
		require.NoError(t, err)

		read := func(ctx context.Context) (time.Duration, error) {
			begin := time.Now()
			p := make([]byte, 512)
			_, err := got.ReadAt(ctx, p, 2<<16)
			if err == nil && !bytes.Equal(p, content[2<<16:][:512]) {
				err = errors.New("other content")
			}
			return time.Since(begin), err
		}
		before := file.reads.Load()
		first, giveUp := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer giveUp()
		second, giveUpToo := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer giveUpToo()
		var all sync.WaitGroup
		all.Go(func() {
			took, err := read(first)
			if !errors.Is(err, errNotNow) || took != 500*time.Millisecond {
				t.Errorf("who reads the file: %v after %v", err, took)
			}
		})
		synctest.Wait()
		all.Go(func() {
			took, err := read(second)
			if !errors.Is(err, context.DeadlineExceeded) || took != 200*time.Millisecond {
				t.Errorf("who waits: %v after %v", err, took)
			}
		})
		for range 3 {
			all.Go(func() {
				took, err := read(t.Context())
				if err != nil || took != 1500*time.Millisecond {
					t.Errorf("who stays: %v after %v", err, took)
				}
			})
		}
		all.Wait()
		require.EqualValues(t, before+2, file.reads.Load())
		got.holdsNothing(t)
		require.Zero(t, testtool.Must(read(t.Context()))(t), "it is kept")
	})
}

// TestWaitingForAPlaceEnds fills a cache and the places beside it with blocks that are being
// loaded.
func TestWaitingForAPlaceEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		goOn := make(chan struct{})
		var c cache
		c.init(8, 0, func(context.Context, []byte, uint64) error {
			<-goOn
			return nil
		})
		var all sync.WaitGroup
		for i := range int64(minSlots + cap(c.places)) {
			all.Go(func() {
				b, err := c.get(bg, i, uint64(i), 8)
				if err != nil {
					t.Error(err)
				}
				b.release()
			})
		}
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.ErrorIs(t, testtool.Err(c.get(ctx, 1000, 1000, 8)), context.DeadlineExceeded)
		close(goOn)
		all.Wait()
		require.Empty(t, c.places)
	})
}

// TestPiecesAreAnnounced reads a range that lies in many places of the file.
func TestPiecesAreAnnounced(t *testing.T) {
	const bits, cs, clusters = 16, 1 << 16, 12
	im := newImage(bits, clusters*cs, 3*clusters)
	at := (atData + 2*clusters) << bits
	for i := range clusters {
		switch i % 4 {
		case 0: // not stored
		case 1, 2: // in the reverse order
			im.data(i, atData+2*(clusters-i)+i%2, byte(i))
		case 3:
			data := deflated(t, words(cs, uint64(i)))
			im.compressed(i, at, data)
			at += len(data) + 2*announceGap
		}
	}
	l := &listener{ReaderAt: bytes.NewReader(im.b), announced: map[int64]int64{}}
	got, err := Open(bg, near{l}, int64(len(im.b)), Options{Parallel: 4, WillRead: l.willRead})
	require.NoError(t, err)
	want := im.opensAs(t, nil)
	_, err = got.ReadAt(bg, make([]byte, 1), 0) // the table is in memory then
	require.NoError(t, err)
	for _, off := range []int64{0, 100, 5 * cs} {
		l.announced, l.read, l.sudden = map[int64]int64{}, nil, nil
		p, q := make([]byte, got.Size()-off), make([]byte, got.Size()-off)
		require.NoError(t, testtool.Err(got.ReadAt(bg, p, off)))
		require.NoError(t, testtool.Err(want.ReadAt(bg, q, off)))
		require.True(t, bytes.Equal(q, p))
		require.Greater(t, len(l.read), 4)
		require.Equal(t, l.read[:1], l.sudden, "all but the first piece are announced")
		require.Len(t, l.announced, len(l.read)-1)
	}
}
