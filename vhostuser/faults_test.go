package vhostuser

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/bitset"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/vhostuser/vhosttest"
)

// byHand gives the device a read of 4096 bytes whose memory lies in one region.
func byHand(t *testing.T, d *vhosttest.Driver, r *vhosttest.Region) {
	t.Helper()
	const next, write = vhosttest.DescNext, vhosttest.DescWrite
	b := testtool.Must(d.Memory.AllocIn(r, 16+4096+1))(t)
	q := d.Queue(0)
	q.SetDescriptor(1, vhosttest.Descriptor{Addr: b.Addr, Len: 16, Flags: next, Next: 2})
	q.SetDescriptor(2, vhosttest.Descriptor{Addr: b.Addr + 16, Len: 4096, Flags: next | write,
		Next: 3})
	q.SetDescriptor(3, vhosttest.Descriptor{Addr: b.Addr + 16 + 4096, Len: 1, Flags: write})
	q.Push(1)
	require.NoError(t, q.Publish())
	require.NoError(t, q.Kick())
}

// flushed is a disk that counts its flushes, and refuses them.
type flushed struct {
	disk.Disk
	count  atomic.Int32
	broken atomic.Bool
}

func (f *flushed) Flush() error {
	f.count.Add(1)
	if f.broken.Load() {
		return errors.New("no storage")
	}
	return nil
}

// TestStopFlushes: a machine that stops may go on elsewhere, so what it has written is durable when
// its ring stands still. QEMU is told if it is not.
func TestStopFlushes(t *testing.T) {
	f := &flushed{Disk: disktest.NewMemory(diskSize)}
	v := serve(t, f)
	d := v.dial(t, vhosttest.Options{})
	stop := func() uint16 {
		base := testtool.Must(d.Queue(0).Stop())(t)
		return base
	}
	base := stop()
	require.Zero(t, f.count.Load(), "nothing was done")
	require.NoError(t, d.Queue(0).Resume(base))
	require.NoError(t, d.Write(0, 0, random(4096, 1)))
	base = stop()
	require.EqualValues(t, 1, f.count.Load())
	require.NoError(t, d.Queue(0).Resume(base))
	base = stop()
	require.EqualValues(t, 1, f.count.Load(), "nothing was done since")
	require.NoError(t, d.Queue(0).Resume(base))
	require.NoError(t, d.Write(0, 0, random(4096, 1)))
	f.broken.Store(true)
	require.Error(t, testtool.Err(d.Queue(0).Stop()))
	testtool.Eventually(t, func() bool { return v.said("vhost-user connection ended") == 1 })
}

// relayed is a disk of another server, which may not answer.
type relayed struct{ *disktest.Fault }

func (relayed) Far() bool { return true }

// TestKickEndsStop: a machine that stops waits for a flush that takes long, such as that of a disk
// of another server which is away, and for a write that a server has and does not answer. An
// operator's kick lets QEMU go on at once. The next connection is refused until that has ended.
func TestKickEndsStop(t *testing.T) {
	for _, op := range []disktest.Op{disktest.OpFlush, disktest.OpWrite} {
		fault := disktest.NewFault(disktest.NewMemory(diskSize))
		v := serveFor(t, time.Millisecond, relayed{fault})
		d := v.dial(t, vhosttest.Options{})
		require.NoError(t, d.Write(0, 0, random(4096, 1)))
		answers := make(chan struct{})
		calls := fault.Calls(op)
		fault.Inject(disktest.Rule{Op: op, Times: 1, Block: answers})
		var ticket *vhosttest.Ticket
		if op == disktest.OpWrite {
			ticket = testtool.Must(d.Begin(0, vhosttest.Command{Type: vhosttest.TypeWrite,
				Out: random(4096, 2)}))(t)
			testtool.Eventually(t, func() bool { return fault.Calls(op) > calls })
		}
		stopped := make(chan error, 1)
		go func() {
			_, err := d.Queue(0).Stop()
			stopped <- err
		}()
		testtool.Eventually(t, func() bool { return fault.Calls(op) > calls })
		require.Len(t, v.EndSessions(func(status.Session) bool { return true }), 1)
		require.Error(t, <-stopped)
		require.Error(t, d.Reconnect(v.socket))
		close(answers)
		testtool.Eventually(t, func() bool { return d.Reconnect(v.socket) == nil })
		if ticket != nil {
			require.NoError(t, testtool.Err(ticket.Wait()), "it is executed again")
		}
		exercise(t, d)
	}
}

// TestRingIsCutUnderRequest: the memory of the ring is cut short while a request is under way, so
// that what faults is its way back.
func TestRingIsCutUnderRequest(t *testing.T) {
	far := disktest.NewDistant(disktest.NewMemory(diskSize))
	v := serve(t, far)
	d := v.dial(t, vhosttest.Options{Regions: []vhosttest.RegionOptions{
		{Addr: 1 << 30, Size: 8 << 20, Unsealed: true}, {Addr: 1 << 32, Size: 8 << 20}}})
	far.Cut()
	byHand(t, d, d.Memory.Regions()[1])
	testtool.Eventually(t, func() bool { return far.Waiting() == 1 })
	require.NoError(t, d.Memory.Regions()[0].Truncate(0))
	far.Restore()
	v.ends(t, d.Conn(), errFault.Error())
}

// mappings is how many mappings of the guest's memory this process has, without those of drivers.
func mappings(t *testing.T) int {
	t.Helper()
	b := testtool.Must(os.ReadFile("/proc/self/maps"))(t)
	return bytes.Count(b, []byte("memfd:"))
}

// TestMemoryIsGivenBack: when a connection ends with requests that wait for storage, they are left
// to the next one, and nothing of the guest stays mapped.
func TestMemoryIsGivenBack(t *testing.T) {
	for name, end := range map[string]func(v *served){
		"kicked":  func(v *served) { v.EndSessions(func(status.Session) bool { return true }) },
		"removed": func(v *served) { _, _ = v.disks.Remove(1) },
	} {
		t.Run(name, func(t *testing.T) {
			m := disktest.NewStorage(disktest.NewMemory(diskSize))
			v := serve(t, m)
			t.Cleanup(m.Arrive)
			before, fds := mappings(t), descriptors(t)
			d := v.dial(t, vhosttest.Options{})
			const requests = 10
			for i := range requests {
				_, err := d.Begin(0, vhosttest.Command{Type: vhosttest.TypeRead,
					Sector: uint64(i) * 8, In: 4096})
				require.NoError(t, err)
			}
			require.NoError(t, d.Read(0, diskSize/2, make([]byte, 4096)))
			testtool.Eventually(t, func() bool { return m.Waiting() > 0 })
			end(v)
			require.NoError(t, d.Conn().WaitClosed())
			m.Arrive()
			testtool.Eventually(t, func() bool {
				return v.said("vhost-user connection ended") == 1
			})
			require.GreaterOrEqual(t, len(d.Inflight().Taken(0)), requests-m.Waited())
			require.NoError(t, d.Close())
			testtool.Eventually(t, func() bool { return mappings(t) == before })
			testtool.Eventually(t, func() bool { return descriptors(t) <= fds })
		})
	}
}

// TestDirtyBehindWhatItIsAbout: the front end clears a bit of the dirty log and copies the page
// then, so what was written to the page stands there before the bit is set.
func TestDirtyBehindWhatItIsAbout(t *testing.T) {
	cut := testtool.Must(unix.Mmap(-1, 0, 4096, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON))(t)
	defer func() { _ = unix.Munmap(cut) }()
	log := &dirtyLog{bits: cut}
	log.wanted.Store(true)
	r := &ring{num: 4, used: make([]byte, 4+8*4+2), taken: bitset.New(4), logged: true}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	require.Panics(t, func() { r.put(3, 1, log) })
	require.EqualValues(t, 1, r.used[2], "the used index")
	require.EqualValues(t, 3, r.used[4], "the request")
}

// TestDisabledUntilEnabled: with the feature PROTOCOL_FEATURES, a ring is disabled until the front
// end enables it, also if the front end has spoken of it before it has accepted features.
func TestDisabledUntilEnabled(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	nc := testtool.Must(net.Dial("unix", v.socket))(t)
	defer nc.Close()
	for _, accepted := range []uint64{featureProtocol | featureVersion1, featureVersion1} {
		c := v.newConn(nc, &export{disk: v.disks.At(1)})
		q := testtool.Must(c.queue(0))(t)
		require.False(t, q.enabled)
		require.NoError(t, c.setFeatures(&message{payload: number(accepted)}))
		require.Equal(t, accepted&featureProtocol == 0, q.enabled)
		require.NoError(t, q.enable(true))
		require.False(t, q.running, "it has no eventfd")
	}
}

// TestScarceMemory: when memory is scarce, a ring has a few requests that wait, and the others stay
// with the guest meanwhile.
func TestScarceMemory(t *testing.T) {
	m := disktest.NewStorage(disktest.NewMemory(diskSize))
	v := serve(t, m)
	d := v.dial(t, vhosttest.Options{})
	v.disks.Memory.Charge(serving.DefaultMemory)
	tickets := begin(t, d, 40, vhosttest.Command{Type: vhosttest.TypeRead, In: 4096})
	testtool.Eventually(t, func() bool { return len(d.Inflight().Taken(0)) == fewRequests })
	m.Arrive()
	for _, ticket := range tickets {
		require.NoError(t, testtool.Err(ticket.Wait()))
	}
	require.NoError(t, d.Close())
	testtool.Eventually(t, func() bool { return v.said("vhost-user connection ended") == 1 })
	require.EqualValues(t, serving.DefaultMemory, v.disks.Memory.Used())
}

// TestReaderIsReplacedWhileItAsks: to ask the page cache can take long, as it begins to read. The
// reader that has come instead may wait for the peer when the request is left for later.
func TestReaderIsReplacedWhileItAsks(t *testing.T) {
	m := disktest.NewStorage(disktest.NewMemory(diskSize))
	told := make(chan struct{})
	m.Asked = func() { <-told }
	m.Arrive()
	d := serve(t, m).dial(t, vhosttest.Options{})
	tickets := begin(t, d, 1, vhosttest.Command{Type: vhosttest.TypeRead, In: 4096})
	require.NoError(t, d.Read(0, diskSize/2, make([]byte, 4096)))
	close(told)
	require.NoError(t, testtool.Err(tickets[0].Wait()))
}

func begin(t *testing.T, d *vhosttest.Driver, n int, c vhosttest.Command) []*vhosttest.Ticket {
	t.Helper()
	tickets := make([]*vhosttest.Ticket, n)
	for i := range tickets {
		tickets[i] = testtool.Must(d.Begin(0, c))(t)
	}
	return tickets
}

// TestDiskHangs: a disk that hangs keeps so many threads, and no more. All of its requests end when
// it answers again.
func TestDiskHangs(t *testing.T) {
	m := &hanging{Memory: disktest.NewMemory(diskSize), answers: make(chan struct{})}
	v := serve(t, m)
	d := v.dial(t, vhosttest.Options{QueueSize: 1024})
	var tickets []*vhosttest.Ticket
	for i := range maxBlocked + 50 {
		tickets = append(tickets, begin(t, d, 1, vhosttest.Command{Type: vhosttest.TypeWrite,
			Sector: uint64(i), Out: make([]byte, 512)})...)
	}
	testtool.Eventually(t, func() bool { return m.inside.Load() >= maxBlocked })
	testtool.Eventually(t, func() bool {
		all := v.disks.At(1).Troubles(time.Now().Add(serving.LongWait))
		return len(all) == 1 && all[0].Kind == status.TroubleStorage &&
			all[0].Count >= maxBlocked && len(all[0].Peers) == 1
	}, "people are told")
	close(m.answers)
	for _, ticket := range tickets {
		require.NoError(t, testtool.Err(ticket.Wait()))
	}
	require.EqualValues(t, maxBlocked, m.most.Load())
}

// hanging does not write until it answers.
type hanging struct {
	*disktest.Memory
	answers      chan struct{}
	inside, most atomic.Int32
}

func (h *hanging) WriteAt(ctx context.Context, p []byte, off int64) (int, error) {
	n := h.inside.Add(1)
	defer h.inside.Add(-1)
	for most := h.most.Load(); n > most && !h.most.CompareAndSwap(most, n); most = h.most.Load() {
	}
	<-h.answers
	return h.Memory.WriteAt(ctx, p, off)
}

// TestWriteCacheOverRestart: a guest that has turned the write cache off does not have it with the
// next connection either, also if its driver has begun anew meanwhile.
func TestWriteCacheOverRestart(t *testing.T) {
	fault := disktest.NewFault(disktest.NewMemory(diskSize))
	v := serve(t, fault)
	d := v.dial(t, vhosttest.Options{ProtocolFeatures: ^uint64(protocolMemSlots)})
	flushes := func() int {
		before := fault.Calls(disktest.OpFlush)
		require.NoError(t, d.Write(0, 0, make([]byte, 512)))
		return fault.Calls(disktest.OpFlush) - before
	}
	require.NoError(t, d.SetWriteCache(false))
	require.NoError(t, d.Reset())
	require.NoError(t, d.Start())
	for range 2 {
		v.EndSessions(func(status.Session) bool { return true })
		require.NoError(t, d.Conn().WaitClosed())
		require.NoError(t, d.Reconnect(v.socket))
		require.Equal(t, 1, flushes())
	}
	require.NoError(t, d.SetWriteCache(true))
	require.Zero(t, flushes())
}

// TestWriteCacheOfMigratedGuest: nobody says whether a guest that comes from elsewhere has turned
// its write cache off there. Its writes are durable until its driver flushes, or begins anew.
func TestWriteCacheOfMigratedGuest(t *testing.T) {
	from := serve(t, disktest.NewMemory(diskSize))
	fault := disktest.NewFault(disktest.NewMemory(diskSize))
	to := serve(t, fault)
	arrive := func() (*vhosttest.Driver, func() int) {
		d := from.dial(t, vhosttest.Options{ProtocolFeatures: ^uint64(protocolMemSlots)})
		require.NoError(t, d.SetWriteCache(false))
		require.NoError(t, d.Write(0, 0, make([]byte, 512)))
		require.NoError(t, d.Migrate(to.socket, func() error { return nil }))
		return d, func() int {
			before := fault.Calls(disktest.OpFlush)
			require.NoError(t, d.Write(0, 0, make([]byte, 512)))
			return fault.Calls(disktest.OpFlush) - before
		}
	}
	d, flushes := arrive()
	require.Equal(t, 1, flushes())
	base, err := d.Queue(0).Stop() // the machine is paused
	require.NoError(t, err)
	require.NoError(t, d.Queue(0).Resume(base))
	require.Equal(t, 1, flushes())
	to.EndSessions(func(status.Session) bool { return true })
	require.NoError(t, d.Conn().WaitClosed())
	require.NoError(t, d.Reconnect(to.socket))
	require.Equal(t, 1, flushes())
	require.NoError(t, d.Flush(0))
	require.Zero(t, flushes())
	require.NoError(t, d.Close())

	d, flushes = arrive()
	require.Equal(t, 1, flushes())
	require.NoError(t, d.Reset())
	require.NoError(t, d.Start())
	require.Zero(t, flushes())
	require.NoError(t, d.SetWriteCache(false))
	require.Equal(t, 1, flushes())
	require.NoError(t, d.Close())

	d, flushes = arrive()
	require.NoError(t, d.SetWriteCache(true))
	require.Zero(t, flushes())
}

// TestWriteCacheOfGuestThatStays: a guest that is paused, or whose daemon is another one, has not
// come from elsewhere. Its writes stay as fast as they were.
func TestWriteCacheOfGuestThatStays(t *testing.T) {
	fault := disktest.NewFault(disktest.NewMemory(diskSize))
	v := serve(t, fault)
	for _, features := range []uint64{^uint64(0), ^uint64(protocolInflight)} {
		d := v.dial(t, vhosttest.Options{ProtocolFeatures: features})
		require.NoError(t, d.Write(0, 0, make([]byte, 512)))
		base := testtool.Must(d.Queue(0).Stop())(t)
		require.NoError(t, d.Queue(0).Resume(base))
		if d.Inflight() != nil {
			v.EndSessions(func(status.Session) bool { return true })
			require.NoError(t, d.Conn().WaitClosed())
			require.NoError(t, d.Reconnect(v.socket))
		}
		flushed := fault.Calls(disktest.OpFlush)
		require.NoError(t, d.Write(0, 0, make([]byte, 512)))
		require.Equal(t, flushed, fault.Calls(disktest.OpFlush))
		require.NoError(t, d.Close())
	}
}

// TestTooManyRings: a ring for which there is no thread is refused.
func TestTooManyRings(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	rings.add(maxRings)
	require.Error(t, testtool.Err(vhosttest.Dial(v.socket, vhosttest.Options{})))
	rings.add(-maxRings)
	testtool.Eventually(t, func() bool { return v.said("vhost-user connection ended") == 1 })
	require.NoError(t, v.dial(t, vhosttest.Options{}).Read(0, 0, make([]byte, 512)))
}

// TestConnectionEndsInHungDisk: a connection ends while the disk hangs in a request of it. Nobody
// else gets the guest's memory or the disk until that has ended, and a shutdown waits no longer
// than it may.
func TestConnectionEndsInHungDisk(t *testing.T) {
	fault := disktest.NewFault(disktest.NewMemory(diskSize))
	answers := make(chan struct{})
	v := serve(t, fault)
	d := v.dial(t, vhosttest.Options{})
	fault.Inject(disktest.Rule{Op: disktest.OpRead, Times: 1, Block: answers})
	begin(t, d, 1, vhosttest.Command{Type: vhosttest.TypeRead, In: 4096})
	testtool.Eventually(t, func() bool { return fault.Calls(disktest.OpRead) == 1 })
	before := mappings(t)
	require.NoError(t, d.Conn().Close())
	require.Error(t, testtool.Err(vhosttest.Dial(v.socket, vhosttest.Options{})))
	require.GreaterOrEqual(t, mappings(t), before)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	require.ErrorIs(t, v.Shutdown(ctx), context.DeadlineExceeded)
	close(answers)
	require.NoError(t, v.Shutdown(t.Context()))
	require.NoError(t, d.Close())
}

// TestTroubles: the guest gets an I/O error, and people see why, unless the fault is the guest's.
func TestTroubles(t *testing.T) {
	for kind, fault := range map[string]disktest.Rule{
		status.TroubleNoSpace:   {Op: disktest.OpWrite, Err: disk.ErrNoSpace},
		status.TroubleReadError: {Op: disktest.OpRead, Err: &disk.MediumError{}},
		"":                      {},
	} {
		f := disktest.NewFault(disktest.NewMemory(diskSize))
		if fault.Err != nil {
			f.Inject(fault)
		}
		v := serve(t, f, func(o *serving.Options) { o.ReadOnly = fault.Err == nil })
		d := v.dial(t, vhosttest.Options{})
		err := d.Write(0, 0, make([]byte, 4096))
		if fault.Op == disktest.OpRead && fault.Err != nil {
			err = d.Read(0, 0, make([]byte, 4096))
		}
		var wrong *vhosttest.StatusError
		require.ErrorAs(t, err, &wrong, kind)
		require.Equal(t, vhosttest.StatusIOErr, wrong.Status)
		var kinds []string
		for _, trouble := range v.disks.At(1).Troubles(time.Now()) {
			kinds = append(kinds, trouble.Kind)
		}
		if kind == "" {
			require.Empty(t, kinds, "a write to a disk that cannot be written")
		} else {
			require.Equal(t, []string{kind}, kinds)
		}
	}
}

// TestIndexesWrap: nobody is left asleep while the indexes of a ring wrap, with and without
// EVENT_IDX, at one request at a time and at several.
func TestIndexesWrap(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	for _, features := range []uint64{0, ^uint64(featureEventIdx)} {
		d := v.dial(t, vhosttest.Options{Features: features})
		for sum, depth := uint64(0), 1; sum < 1<<16+1000; depth = depth%8 + 1 {
			s, err := d.Queue(0).Stream(vhosttest.StreamOptions{Bytes: 512, Depth: depth})
			require.NoError(t, err)
			totals := testtool.Must(s.Run(50 * time.Millisecond))(t)
			sum += uint64(totals.Operations)
			s.Close()
		}
		require.NoError(t, d.Close())
	}
}

// TestNothingStays of a connection: no descriptor, mapping or goroutine.
func TestNothingStays(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	round := func() {
		d := v.dial(t, vhosttest.Options{Queues: maxQueues})
		require.NoError(t, d.StartLog())
		require.NoError(t, d.SetMemTable())
		require.NoError(t, d.Read(maxQueues-1, 0, make([]byte, 4096)))
		base := testtool.Must(d.Queue(3).Stop())(t)
		require.NoError(t, d.Queue(3).Resume(base))
		require.NoError(t, d.Close())
	}
	round()
	ended := func(n int) {
		testtool.Eventually(t, func() bool { return v.said("vhost-user connection ended") == n })
	}
	ended(1)
	fds, maps, goroutines := descriptors(t), mappings(t), runtime.NumGoroutine()
	for i := range 10 {
		round()
		ended(i + 2)
	}
	testtool.Eventually(t, func() bool {
		return descriptors(t) <= fds && mappings(t) <= maps &&
			runtime.NumGoroutine() <= goroutines+1 // the watchdog
	})
}
