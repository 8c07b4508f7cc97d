package target_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
	tt "kubevirt.io/disk/target/targettest"
)

// wide lets a session of a farServer send as many commands as others.
func wide(o *options) { o.Limits.CommandWindow = 0 }

// TestOthersGoOn has many commands wait for content. Everything else on the same connection goes
// on. No reader waits, not even until the watchdog notices.
func TestOthersGoOn(t *testing.T) {
	s := startFar(t, time.Hour, wide)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1, 2)
	s.far.Cut()
	var held []*tt.Task
	for i := range uint32(32) {
		cmd := tt.Read10(1, i*8, 8)
		if i%2 == 1 {
			cmd = tt.Write10(1, i*8+1, bytes.Repeat([]byte{byte(i)}, 512))
		}
		held = append(held, c.MustStart(t, cmd))
	}
	s.waits(t, len(held))
	require.Zero(t, s.Stalls(1))
	for i := range uint32(500) {
		data := bytes.Repeat([]byte{byte(i)}, 4096)
		c.MustGood(t, tt.Write10(2, i*8, data))
		require.Equal(t, data, c.MustGood(t, tt.Read10(2, i*8, 8)).Data)
	}
	require.NoError(t, testtool.Err(c.Ping([]byte("still there?"))))
	c.MustGood(t, tt.Write10(1, 1024, make([]byte, 4096))) // whole blocks of the same LUN
	require.Zero(t, s.Stalls(1))
	s.waits(t, len(held))
	require.Equal(t, len(held), s.Sessions()[0].Waiting)
	waitsFor(t, s.server, 1, status.TroubleRegistry, int64(len(held)))
	s.far.Restore()
	for _, task := range held {
		require.True(t, task.MustFinish(t).Good())
	}
	for i := uint32(1); i < 32; i += 2 {
		got := c.MustGood(t, tt.Read10(1, i*8+1, 1)).Data
		require.Equal(t, bytes.Repeat([]byte{byte(i)}, 512), got)
	}
	testtool.Eventually(t, func() bool { return s.DataInUse() <= 64<<10 }, "nothing is held")
}

// TestHeldCommandsLeaveMemory has as many large reads wait as three sessions may send. Other
// sessions still get memory for their commands: many answers of BUSY would soon be errors for their
// guests.
func TestHeldCommandsLeaveMemory(t *testing.T) {
	s := startFar(t, time.Hour, wide)
	s.far.Cut()
	for i := range 3 {
		name := fmt.Sprintf("iqn.2026-01.test:%d", i)
		c := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: name}, 1)
		for range 128 {
			c.MustStart(t, tt.Read10(1, 0, 512))
		}
		s.waits(t, (i+1)*128)
	}
	other := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: "iqn.2026-01.test:other"}, 2)
	for range 64 {
		other.MustGood(t, tt.Write10(2, 0, make([]byte, 256<<10)))
		other.MustGood(t, tt.Read10(2, 0, 512))
	}
	require.Less(t, s.MemoryInUse(), int64(56<<20), "of 64 MiB")
}

// TestDistantStorm has initiators write and read at random while content comes, comes slowly, stays
// away, and moves away again. Each read returns the last write, however the commands ended.
func TestDistantStorm(t *testing.T) {
	const initiators, blocks = 4, 64 // of 512 bytes, of each
	rounds := 400
	if testing.Short() {
		rounds = 50
	}
	s := startFar(t, 5*time.Millisecond, wide)
	ctx, stop := context.WithCancel(t.Context())
	var weather, users sync.WaitGroup
	weather.Go(func() {
		r := rand.New(rand.NewPCG(1, 1))
		for ctx.Err() == nil {
			[]func(){s.far.Cut, s.far.Refuse, s.far.Restore, s.far.Restore, s.far.Forget,
				func() { s.far.Slow(time.Duration(r.IntN(2000)) * time.Microsecond) }}[r.IntN(6)]()
			time.Sleep(time.Duration(r.IntN(5000)) * time.Microsecond)
		}
		s.far.Restore()
	})
	for i := range uint32(initiators) {
		name := fmt.Sprintf("iqn.2026-01.test:%d", i)
		c := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: name}, 1)
		users.Go(func() {
			r := rand.New(rand.NewPCG(2, uint64(i)))
			var content [blocks][]byte
			for b := range content {
				content[b] = farContent[(int(i)*blocks+b)*512:][:512]
			}
			for range rounds {
				first := r.IntN(blocks)
				n := 1 + r.IntN(blocks-first)
				at := i*blocks + uint32(first)
				if r.IntN(2) == 0 {
					want := bytes.Join(content[first:first+n], nil)
					got, err := insist(c, tt.Read10(1, at, n))
					if err != nil || !got.Good() || !bytes.Equal(want, got.Data) {
						t.Errorf("initiator %d: a wrong read of %d blocks at %d: %v", i, n, at, err)
						return
					}
					continue
				}
				data := make([]byte, n*512)
				for b := range n {
					block := bytes.Repeat([]byte{byte(r.Uint32())}, 512)
					content[first+b] = block
					copy(data[b*512:], block)
				}
				if r, err := insist(c, tt.Write10(1, at, data)); err != nil || !r.Good() {
					t.Errorf("initiator %d: %v, %+v", i, err, r)
					return
				}
			}
		})
	}
	users.Wait()
	stop()
	weather.Wait()
	testtool.Eventually(t, func() bool { return s.DataInUse() <= 512<<10 }, "nothing is held")
	require.Zero(t, s.far.Waiting())
}
