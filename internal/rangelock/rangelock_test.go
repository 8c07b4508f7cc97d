package rangelock

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

func TestSpansOverlap(t *testing.T) {
	for _, c := range []struct {
		a, b Span
		want bool
	}{
		{Span{0, 10}, Span{10, 10}, false},
		{Span{0, 11}, Span{10, 10}, true},
		{Span{10, 10}, Span{0, 10}, false},
		{Span{5, 1}, Span{0, 10}, true},
		{Span{5, 0}, Span{0, 10}, false},
		{Span{5, 0}, Span{5, 0}, false},
	} {
		require.Equal(t, c.want, c.a.overlaps(c.b))
		require.Equal(t, c.want, c.b.overlaps(c.a))
	}
}

func TestModes(t *testing.T) {
	for _, c := range []struct {
		a, b Mode
		want bool
	}{
		{Read, Read, false},
		{Read, Write, false},
		{Read, Exclusive, true},
		{Write, Write, true},
		{Write, Exclusive, true},
		{Exclusive, Exclusive, true},
	} {
		require.Equal(t, c.want, c.a.conflicts(c.b))
		require.Equal(t, c.want, c.b.conflicts(c.a))
	}
}

// user locks holds and records the order in which they succeed.
type user struct {
	table Table
	order []string
}

func hold(mode Mode, owner string, spans ...Span) *Hold {
	h := &Hold{}
	if len(spans) == 1 {
		h.Set(mode, owner, spans[0].Off, spans[0].Length)
	} else {
		h.SetSpans(mode, owner, spans)
	}
	return h
}

// lock takes a hold in a new goroutine, and returns when that has the hold or waits for it.
func (u *user) lock(name string, h *Hold) {
	go func() {
		u.table.Lock(h)
		u.order = append(u.order, name) // only one is woken before the bubble is at rest
	}()
	synctest.Wait()
}

func (u *user) unlock(h *Hold) {
	u.table.Unlock(h)
	synctest.Wait()
}

// TestOverlappingHoldsWait checks that overlapping ranges are held one after the other, and others
// at once.
func TestOverlappingHoldsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := &user{}
		left, right, low := hold(Write, "", Span{10, 11}), hold(Write, "", Span{21, 10}),
			hold(Write, "", Span{0, 10})
		for _, h := range []*Hold{left, right, low} {
			u.table.Lock(h)
		}
		both := hold(Write, "", Span{20, 2})
		u.lock("both", both)
		u.unlock(left)
		require.Empty(t, u.order, "it overlaps a range that is held")
		u.unlock(right)
		require.Equal(t, []string{"both"}, u.order)
		u.unlock(both)
		u.unlock(low)
		require.Zero(t, u.table.State())
	})
}

// TestLargeRangesHaveTheirTurn checks that a hold of everything waits only for earlier holds, while
// later ones keep coming.
func TestLargeRangesHaveTheirTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := &user{}
		first, all, later := hold(Write, "", Span{3, 1}), hold(Write, "", Span{0, 101}),
			hold(Write, "", Span{50, 1})
		u.table.Lock(first)
		u.lock("all", all)
		u.lock("later", later)
		require.Equal(t, State{Held: 3, Waiting: 2}, u.table.State())
		outside := hold(Write, "", Span{200, 1})
		u.table.Lock(outside) // conflicts with nothing
		u.unlock(outside)
		require.Empty(t, u.order)
		u.unlock(first)
		require.Equal(t, []string{"all"}, u.order)
		u.unlock(all)
		require.Equal(t, []string{"all", "later"}, u.order)
		u.unlock(later)
		require.Zero(t, u.table.State())
	})
}

// TestSeveralSpans checks that a hold of several ranges waits for each and holds each.
func TestSeveralSpans(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := &user{}
		several := hold(Write, "", Span{0, 1}, Span{10, 1}, Span{20, 1})
		for _, at := range []int64{0, 10, 20} {
			one := hold(Write, "", Span{at, 1})
			u.table.Lock(one)
			u.lock("several", several)
			require.Empty(t, u.order)
			u.unlock(one)
			require.Equal(t, []string{"several"}, u.order)
			u.lock("one", one)
			other := hold(Write, "", Span{5, 1}, Span{at, 1})
			u.lock("other", other)
			require.Equal(t, []string{"several"}, u.order)
			u.unlock(several)
			u.unlock(one)
			require.Equal(t, []string{"several", "one", "other"}, u.order)
			u.unlock(other)
			u.order = nil
		}
		require.Zero(t, u.table.State())
	})
}

// TestLockGivesUp checks that a hold that gives up leaves no place behind and wakes its waiters.
func TestLockGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := &user{}
		first, later := hold(Write, "", Span{0, 10}), hold(Write, "", Span{20, 10})
		for _, mode := range []Mode{Write, Exclusive} {
			middle := hold(mode, "", Span{5, 20})
			u.table.Lock(first)
			ctx, cancel := context.WithCancel(t.Context())
			gaveUp := testtool.Go(func() error { return u.table.LockContext(ctx, middle) })
			synctest.Wait()
			u.lock("later", later)
			require.Empty(t, u.order, "it comes after the waiting hold")
			cancel()
			require.ErrorIs(t, <-gaveUp, context.Canceled)
			synctest.Wait()
			require.Equal(t, []string{"later"}, u.order)
			u.unlock(later)
			require.Equal(t, State{Held: 1}, u.table.State())
			u.unlock(first)
			require.Zero(t, u.table.State())
			require.NoError(t, u.table.LockContext(ctx, middle), "nobody is in the way")
			u.unlock(middle)
			u.order = nil
		}
	})
}

// TestReadsWaitForExclusiveOnly checks that reads do not wait for writes but for exclusive holds,
// and that these wait for earlier reads.
func TestReadsWaitForExclusiveOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := &user{}
		write, exclusive := hold(Write, "", Span{0, 10}), hold(Exclusive, "", Span{0, 10})
		u.table.Lock(write)
		var before, after, elsewhere Hold
		placed := u.table.EnterRead(&before, "", 0, 10)
		require.False(t, placed, "a read without exclusive holds takes no place")
		u.unlock(write)
		u.lock("exclusive", exclusive)
		require.Empty(t, u.order)
		require.Equal(t, State{Held: 1, Exclusive: 1, Waiting: 1, Readers: 1}, u.table.State())
		go func() {
			require.True(t, u.table.EnterRead(&after, "", 9, 1))
			u.order = append(u.order, "after")
		}()
		synctest.Wait()
		require.Empty(t, u.order, "the exclusive hold comes first")
		require.True(t, u.table.EnterRead(&elsewhere, "", 10, 1), "it does not overlap")
		u.table.LeaveRead(&elsewhere, true)
		u.table.LeaveRead(&before, false)
		synctest.Wait()
		require.Equal(t, []string{"exclusive"}, u.order)
		u.unlock(exclusive)
		require.Equal(t, []string{"exclusive", "after"}, u.order)
		u.table.LeaveRead(&after, true)
		require.Zero(t, u.table.State())
	})
}

// TestPairsComeBeforeWhatComesLater checks that a waiting pair gets both of its holds before a
// later exclusive hold.
func TestPairsComeBeforeWhatComesLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := &user{}
		for _, span := range []Span{{0, 10}, {20, 10}} {
			first := hold(Exclusive, "", span)
			u.table.Lock(first)
			read, write := hold(Read, "", Span{0, 10}), hold(Write, "", Span{20, 10})
			go func() {
				u.table.LockPair(read, write)
				u.order = append(u.order, "pair")
			}()
			synctest.Wait()
			later := hold(Exclusive, "", Span{0, 30})
			u.lock("later", later)
			u.unlock(first)
			require.Equal(t, []string{"pair"}, u.order)
			u.unlock(read)
			require.Equal(t, []string{"pair"}, u.order)
			u.unlock(write)
			require.Equal(t, []string{"pair", "later"}, u.order)
			u.unlock(later)
			u.order = nil
		}
		require.Zero(t, u.table.State())
	})
}

// TestDrain checks that Drain waits for earlier writes of some owners and for nothing else.
func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := &user{}
		mine, waits := hold(Write, "a", Span{0, 1}), hold(Exclusive, "a", Span{0, 1})
		read, others, nobodys := hold(Read, "a", Span{2, 1}), hold(Write, "b", Span{3, 1}),
			hold(Write, "", Span{4, 1})
		for _, h := range []*Hold{mine, read, others, nobodys} {
			u.table.Lock(h)
		}
		u.lock("waits", waits)
		require.True(t, u.table.Writing("a"))
		go func() {
			u.table.Drain(func(owner string) bool { return owner == "a" })
			u.order = append(u.order, "drained")
		}()
		synctest.Wait()
		after := hold(Write, "a", Span{0, 10})
		u.lock("after", after)
		u.unlock(mine)
		require.Equal(t, []string{"waits"}, u.order)
		u.unlock(waits)
		require.Equal(t, []string{"waits", "drained"}, u.order)
		for _, h := range []*Hold{read, others, nobodys, after} {
			u.unlock(h)
		}
		require.False(t, u.table.Writing("a"))
		require.Zero(t, u.table.State())
	})
}

// TestUnlockWithoutLock checks that Unlock without Lock does not change the holds of others.
func TestUnlockWithoutLock(t *testing.T) {
	var table Table
	held, never := hold(Write, "", Span{0, 1}), hold(Exclusive, "", Span{0, 1})
	table.Unlock(held)
	require.Zero(t, table.State())
	table.Lock(held)
	table.Unlock(never)
	require.Equal(t, State{Held: 1}, table.State())
	table.Unlock(held)
	table.Unlock(held)
	require.Zero(t, table.State())
}

// TestRandomHolds takes and gives up holds of every kind in many goroutines. Each checks that
// nobody in conflict with it shares its range.
func TestRandomHolds(t *testing.T) {
	const units, workers, rounds = 12, 8, 3000
	var table Table
	var in [units]struct{ readers, writers, exclusive atomic.Int32 }
	enter := func(mode Mode, spans []Span, n int32) {
		for _, s := range spans {
			for u := s.Off; u < s.Off+s.Length; u++ {
				at := &in[u]
				switch mode {
				case Read:
					at.readers.Add(n)
				case Write:
					at.writers.Add(n)
				case Exclusive:
					at.exclusive.Add(n)
				}
				r, w, e := at.readers.Load(), at.writers.Load(), at.exclusive.Load()
				if n > 0 && (w+e > 1 || e > 0 && r > 0) {
					t.Errorf("%d readers, %d writers and %d exclusive ones", r, w, e)
				}
			}
		}
	}
	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(uint64(worker), 3))
			span := func() Span {
				off := random.Int64N(units)
				return Span{off, random.Int64N(min(4, units-off+1))}
			}
			var h, second Hold
			for range rounds {
				s := span()
				switch random.IntN(5) {
				case 0:
					placed := table.EnterRead(&h, "", s.Off, s.Length)
					enter(Read, []Span{s}, 1)
					enter(Read, []Span{s}, -1)
					table.LeaveRead(&h, placed)
				case 1:
					w := span()
					h.Set(Read, "", s.Off, s.Length)
					second.Set(Write, "", w.Off, w.Length)
					table.LockPair(&h, &second)
					enter(Read, []Span{s}, 1)
					enter(Write, []Span{w}, 1)
					enter(Read, []Span{s}, -1)
					enter(Write, []Span{w}, -1)
					table.Unlock(&h)
					table.Unlock(&second)
				case 2:
					ctx, cancel := context.WithTimeout(t.Context(),
						time.Duration(random.IntN(20))*time.Microsecond)
					h.Set(Exclusive, "", s.Off, s.Length)
					if table.LockContext(ctx, &h) == nil {
						enter(Exclusive, []Span{s}, 1)
						enter(Exclusive, []Span{s}, -1)
						table.Unlock(&h)
					}
					cancel()
				case 3:
					table.Drain(func(string) bool { return true })
				default:
					spans := []Span{s, {units - 1, 1}}
					if s.Off+s.Length == units {
						spans = spans[1:]
					}
					h.SetSpans(Write, "w", spans)
					table.Lock(&h)
					enter(Write, spans, 1)
					enter(Write, spans, -1)
					table.Unlock(&h)
				}
			}
		})
	}
	wg.Wait()
	require.Zero(t, table.State())
}

func TestLockDoesNotAllocate(t *testing.T) {
	var table Table
	var h Hold
	require.Zero(t, testing.AllocsPerRun(100, func() {
		h.Set(Write, "iqn.a", 0, 4096)
		table.Lock(&h)
		table.Unlock(&h)
		table.LeaveRead(&h, table.EnterRead(&h, "iqn.a", 0, 4096))
	}))
}

func BenchmarkLock(b *testing.B) {
	for _, c := range []struct {
		name string
		held int
	}{{"alone", 0}, {"beside 31", 31}} {
		b.Run(c.name, func(b *testing.B) {
			var table Table
			for i := range c.held {
				table.Lock(hold(Write, "", Span{int64(1+i) << 20, 4096}))
			}
			var h Hold
			b.ReportAllocs()
			for b.Loop() {
				h.Set(Write, "iqn.a", 0, 4096)
				table.Lock(&h)
				table.Unlock(&h)
			}
		})
	}
	b.Run("contended", func(b *testing.B) {
		var table Table
		b.SetParallelism(8)
		b.RunParallel(func(pb *testing.PB) {
			var h Hold
			for pb.Next() {
				h.Set(Write, "iqn.a", 0, 4096)
				table.Lock(&h)
				table.Unlock(&h)
			}
		})
	})
}
