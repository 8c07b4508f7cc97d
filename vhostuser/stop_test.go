// Tests of rings that stop, and go on or begin anew.

package vhostuser

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/rangelock"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/vhostuser/vhosttest"
)

// TestStop: a ring that stops, or that is disabled, has given everything back before, and goes on
// where it was.
func TestStop(t *testing.T) {
	for _, disable := range []bool{false, true} {
		far := disktest.NewDistant(disktest.NewMemory(diskSize))
		v := serve(t, far)
		d := v.dial(t, vhosttest.Options{})
		far.Cut()
		ticket, err := d.Begin(0, vhosttest.Command{Type: vhosttest.TypeRead, In: 4096})
		require.NoError(t, err)
		testtool.Eventually(t, func() bool { return far.Waiting() == 1 })
		var base uint16
		stopped := make(chan error, 1)
		go func() {
			var err error
			if disable {
				err = d.Queue(0).Enable(false)
			} else {
				base, err = d.Queue(0).Stop()
			}
			stopped <- err
		}()
		select {
		case <-stopped:
			t.Fatal("the ring has stopped before its request ended")
		case <-time.After(50 * time.Millisecond): // it cannot have stopped by then
		}
		far.Restore()
		require.NoError(t, <-stopped)
		require.Empty(t, d.Inflight().Taken(0))
		require.NoError(t, testtool.Err(ticket.Wait()))
		if disable {
			require.NoError(t, d.Queue(0).Enable(true))
		} else {
			require.EqualValues(t, 1, base)
			require.NoError(t, d.Queue(0).Resume(base))
		}
		exercise(t, d)
	}
}

// TestStopLeavesRequests: what waits for far content when a ring stops is given up after a while,
// and the ring goes on with it, wherever that is. Others that came after it have ended.
func TestStopLeavesRequests(t *testing.T) {
	for _, test := range []struct {
		name          string
		options       vhosttest.Options
		disable, end  bool
		moves, resets bool
	}{
		{name: "the same connection"},
		{name: "disabled", disable: true},
		{name: "another connection", end: true},
		{name: "another driver, the same region", resets: true,
			options: vhosttest.Options{KeepInflight: true,
				ProtocolFeatures: ^uint64(protocolMemSlots)}},
		{name: "no region",
			options: vhosttest.Options{ProtocolFeatures: ^uint64(protocolInflight)}},
		{name: "another machine", moves: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			far := disktest.NewDistant(disktest.NewMemory(diskSize))
			v := serveFor(t, time.Millisecond, far)
			d := v.dial(t, test.options)
			near := vhosttest.Command{Type: vhosttest.TypeRead, Sector: 1 << 11, In: 512}
			require.NoError(t, testtool.Err(d.Do(0, near)))
			far.Cut()
			ticket, err := d.Begin(0, vhosttest.Command{Type: vhosttest.TypeRead, In: 4096})
			require.NoError(t, err)
			testtool.Eventually(t, func() bool { return far.Waiting() == 1 })
			for range 3 {
				require.NoError(t, testtool.Err(d.Do(0, near)))
			}
			if test.moves {
				to := serve(t, disktest.NewMemory(diskSize))
				require.NoError(t, d.Migrate(to.socket, func() error { return nil }))
				exercise(t, d)
				_, err = ticket.Wait()
				require.NoError(t, err)
				return
			}
			var base uint16
			if test.disable {
				err = d.Queue(0).Enable(false)
			} else {
				base, err = d.Queue(0).Stop()
				require.EqualValues(t, 4, base)
			}
			require.NoError(t, err)
			far.Restore()
			switch {
			case test.disable:
				err = d.Queue(0).Enable(true)
			case test.end:
				err = d.Reconnect(v.socket)
			case test.resets:
				require.NoError(t, d.Reset())
				err = d.Start()
			default:
				err = d.Queue(0).Resume(base)
			}
			require.NoError(t, err)
			if _, err = ticket.Wait(); test.resets {
				require.ErrorContains(t, err, "reset")
			} else {
				require.NoError(t, err)
			}
			exercise(t, d)
		})
	}
}

// TestRingIsCutWhileItStops: the ring is gone when what is left is to be written into it.
func TestRingIsCutWhileItStops(t *testing.T) {
	far := disktest.NewDistant(disktest.NewMemory(diskSize))
	v := serveFor(t, time.Millisecond, far)
	d := v.dial(t, vhosttest.Options{Unsealed: true})
	far.Cut()
	begin(t, d, 2, vhosttest.Command{Type: vhosttest.TypeRead, In: 4096})
	testtool.Eventually(t, func() bool { return far.Waiting() == 2 })
	require.NoError(t, d.Memory.Regions()[0].Truncate(0))
	require.Error(t, d.Queue(0).Enable(false))
	v.ends(t, d.Conn(), errFault.Error())
}

// TestAnotherDriver: the firmware has a driver, and then the kernel. The front end resets nothing
// between them, and keeps the region of requests in flight.
func TestAnotherDriver(t *testing.T) {
	for _, stop := range []bool{false, true} {
		far := disktest.NewDistant(disktest.NewMemory(diskSize))
		v := serveFor(t, time.Millisecond, far)
		d := v.dial(t, vhosttest.Options{Queues: 2, KeepInflight: true,
			ProtocolFeatures: ^uint64(protocolMemSlots)})
		require.NoError(t, d.Read(0, 1<<20, make([]byte, 512)))
		far.Cut() // what is left in flight is not the next driver's
		_, err := d.Begin(0, vhosttest.Command{Type: vhosttest.TypeRead, In: 4096})
		require.NoError(t, err)
		testtool.Eventually(t, func() bool { return far.Waiting() == 1 })
		require.NoError(t, d.Renew(stop))
		far.Restore()
		for range 3 {
			exercise(t, d)
			require.NoError(t, d.Renew(stop))
		}
		exercise(t, d)
	}
}

// TestStatusBeforeBase: QEMU 7.2 resets the status before it asks where the rings were, and the
// guest goes on there on another machine.
func TestStatusBeforeBase(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	d := v.dial(t, vhosttest.Options{})
	for range 3 {
		require.NoError(t, d.Write(0, 0, make([]byte, 512)))
	}
	require.NoError(t, d.Conn().Tell(vhosttest.SetStatus, vhosttest.U64(0)))
	require.EqualValues(t, 3, testtool.Must(d.Queue(0).Stop())(t))
}

// TestGivenUpTogether: rings that stop one after the other wait for far content once.
func TestGivenUpTogether(t *testing.T) {
	far := disktest.NewDistant(disktest.NewMemory(diskSize))
	v := serveFor(t, time.Millisecond, far)
	d := v.dial(t, vhosttest.Options{Queues: 3})
	far.Cut()
	var tickets []*vhosttest.Ticket
	for i := range 3 {
		ticket := testtool.Must(d.Begin(i, vhosttest.Command{Type: vhosttest.TypeRead,
			Sector: uint64(i) * disktest.DistantBlock / 512, In: 512}))(t)
		tickets = append(tickets, ticket)
	}
	testtool.Eventually(t, func() bool { return far.Waiting() == 3 })
	testtool.Eventually(t, func() bool {
		all := v.disks.At(1).Troubles(time.Now().Add(serving.LongWait))
		return len(all) == 1 && all[0].Kind == status.TroubleRegistry && all[0].Count == 3 &&
			v.conns.Sessions()[0].Waiting == 3
	}, "people are told")
	stop := func(on bool) {
		for i := range 3 {
			require.NoError(t, d.Queue(i).Enable(on))
		}
	}
	stop(false)
	require.Zero(t, far.Waiting())
	stop(true)
	testtool.Eventually(t, func() bool { return far.Waiting() == 3 })
	far.Restore()
	for _, ticket := range tickets {
		require.NoError(t, testtool.Err(ticket.Wait()))
	}
	far.Cut()
	require.NoError(t, testtool.Err(d.Begin(0, vhosttest.Command{Type: vhosttest.TypeRead,
		Sector: 4 * disktest.DistantBlock / 512, In: 512})))
	testtool.Eventually(t, func() bool { return far.Waiting() == 1 })
	c := v.conns.All(func(*conn) bool { return true })[0]
	stop(false)
	require.NoError(t, d.Close())
	<-c.gone
	require.Zero(t, c.stopTime, "nothing is left for others")
}

// TestRegionIsKept: a front end resets the device, and gives it the same region of requests in
// flight again. A region that says of a request that it is in flight is another matter.
func TestRegionIsKept(t *testing.T) {
	region := &inflightRegion{make([]byte, inflightSize(8)), 1, 8}
	f := region.ringPart(0, 8)
	require.NoError(t, testtool.Err(f.resume(0)))
	for used := range uint16(100) {
		f.noteTaken(used % 8)
		f.notePutting(used % 8)
		f.notePut(used%8, used+1)
	}
	heads := testtool.Must(f.resume(0))(t)
	require.Empty(t, heads)
	f.noteTaken(3)
	heads = testtool.Must(f.resume(0))(t)
	require.Equal(t, []uint16{3}, heads)
	require.ErrorContains(t, testtool.Err(f.resume(1000)), "lags")
}

// TestManyAwake: where many rings are awake, Go's poller wakes those that are kicked.
func TestManyAwake(t *testing.T) {
	rings.awake.Add(maxRings)
	defer rings.awake.Add(-maxRings)
	for name, test := range map[string]func(*testing.T){"indexes wrap": TestIndexesWrap,
		"stop": TestStop, "requests are left": TestStopLeavesRequests, "far": TestFarContent,
		"another call": TestCallThatWaits, "scarce memory": TestScarceMemory,
		"memory is cut": TestMemoryIsCutShort, "nothing stays": TestNothingStays} {
		t.Run(name, test)
	}
}

// TestReadsSeeNothingHalfDone: a change of several steps by another protocol, such as a COMPARE AND
// WRITE, is not seen in its middle.
func TestReadsSeeNothingHalfDone(t *testing.T) {
	m := disktest.NewMemory(diskSize)
	for i, of := range []disk.Disk{m, relayed{disktest.NewFault(m)}} {
		v := serve(t, of, func(o *serving.Options) { o.Access = serving.AccessWriteShared })
		d, ranges := v.dial(t, vhosttest.Options{}), &v.disks.At(1).Ranges
		var h rangelock.Hold
		h.Set(rangelock.Exclusive, "", 0, 512)
		ranges.Lock(&h)
		read := begin(t, d, 1, vhosttest.Command{Type: vhosttest.TypeRead, In: 512})[0]
		testtool.Eventually(t, func() bool { return ranges.State().Waiting == 1 })
		after := bytes.Repeat([]byte{byte(1 + i)}, 512)
		require.NoError(t, testtool.Err(m.WriteAt(t.Context(), after, 0)))
		ranges.Unlock(&h)
		require.Equal(t, after, testtool.Must(read.Wait())(t))
	}
}

// TestReadOfSegmentsIsOne: such a change does not come between two segments of a read, either.
func TestReadOfSegmentsIsOne(t *testing.T) {
	fault, answers := disktest.NewFault(disktest.NewMemory(diskSize)), make(chan struct{})
	v := serve(t, fault, func(o *serving.Options) { o.Access = serving.AccessWriteShared })
	d := v.dial(t, vhosttest.Options{Layout: vhosttest.Layout{Data: []int{512}, Regions: true},
		Regions: []vhosttest.RegionOptions{{Size: 1 << 20}, {Addr: 1 << 30, Size: 1 << 20}}})
	ranges := &v.disks.At(1).Ranges
	fault.Inject(disktest.Rule{Op: disktest.OpRead, Times: 1, Block: answers})
	read := begin(t, d, 1, vhosttest.Command{Type: vhosttest.TypeRead, In: 1024})[0]
	testtool.Eventually(t, func() bool { return fault.Calls(disktest.OpRead) == 1 })
	changed := testtool.Go(func() error {
		var h rangelock.Hold
		h.Set(rangelock.Exclusive, "", 0, 1024)
		ranges.Lock(&h)
		defer ranges.Unlock(&h)
		return testtool.Err(fault.WriteAt(t.Context(), bytes.Repeat([]byte{1}, 1024), 0))
	})
	testtool.Eventually(t, func() bool { return ranges.State().Waiting == 1 })
	close(answers)
	require.NoError(t, <-changed)
	require.Equal(t, make([]byte, 1024), testtool.Must(read.Wait())(t))
}

// TestKickedBeforeItsTurn: a write that waits for another one when its guest is kicked is not done
// then. The next connection has it.
func TestKickedBeforeItsTurn(t *testing.T) {
	fault := disktest.NewFault(disktest.NewMemory(diskSize))
	answers := make(chan struct{})
	v := serve(t, fault)
	d := v.dial(t, vhosttest.Options{})
	fault.Inject(disktest.Rule{Op: disktest.OpWrite, Times: 1, Block: answers})
	write := func(b byte) *vhosttest.Ticket {
		return begin(t, d, 1, vhosttest.Command{Type: vhosttest.TypeWrite,
			Out: bytes.Repeat([]byte{b}, 512)})[0]
	}
	ranges := &v.disks.At(1).Ranges
	write(1)
	testtool.Eventually(t, func() bool { return fault.Calls(disktest.OpWrite) == 1 })
	second := write(2)
	testtool.Eventually(t, func() bool { return ranges.State().Waiting == 1 })
	require.Len(t, v.EndSessions(func(status.Session) bool { return true }), 1)
	close(answers)
	testtool.Eventually(t, func() bool { return ranges.State().Held == 0 })
	p := make([]byte, 512)
	require.NoError(t, testtool.Err(fault.ReadAt(t.Context(), p, 0)))
	require.Equal(t, bytes.Repeat([]byte{1}, 512), p)
	require.NoError(t, d.Reconnect(v.socket))
	require.NoError(t, testtool.Err(second.Wait()))
	require.NoError(t, d.Read(0, 0, p))
	require.Equal(t, bytes.Repeat([]byte{2}, 512), p)
}
