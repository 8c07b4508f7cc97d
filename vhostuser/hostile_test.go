package vhostuser

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/vhostuser/vhosttest"
)

// ends waits until the connection has ended, with one line in the log, and shows that the next
// guest is served.
func (v *served) ends(t *testing.T, c *vhosttest.Conn, why string) {
	t.Helper()
	const message = "vhost-user connection ended"
	require.NoError(t, c.WaitClosed())
	testtool.Eventually(t, func() bool { return v.said(message) > 0 })
	lines := v.logs.FilterMessage(message).All()
	require.Len(t, lines, 1)
	require.Contains(t, lines[0].ContextMap()["error"], why)
	v.logs.TakeAll()
	require.Zero(t, v.said("internal error: the vhost-user connection ends"))
	d := v.dial(t, vhosttest.Options{})
	require.NoError(t, d.Write(0, 0, make([]byte, 4096)))
	require.NoError(t, d.Close())
	testtool.Eventually(t, func() bool { return v.said(message) > 0 })
	v.logs.TakeAll()
}

// TestBrokenRings: a driver that breaks the rules of a ring loses its connection, and only that.
func TestBrokenRings(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	const next, write, indirect = vhosttest.DescNext, vhosttest.DescWrite, vhosttest.DescIndirect
	type ring = *vhosttest.Queue
	for name, c := range map[string]struct {
		why string
		do  func(q ring, at uint64)
	}{
		"loop": {"no end", func(q ring, at uint64) {
			q.SetDescriptor(1, vhosttest.Descriptor{Addr: at, Len: 16, Flags: next, Next: 2})
			q.SetDescriptor(2, vhosttest.Descriptor{Addr: at, Len: 16, Flags: next, Next: 1})
			q.Push(1)
		}},
		"outside": {"outside", func(q ring, at uint64) {
			q.SetDescriptor(1, vhosttest.Descriptor{Addr: 1 << 60, Len: 16, Flags: 0})
			q.Push(1)
		}},
		"over the end": {"outside", func(q ring, at uint64) {
			q.SetDescriptor(1, vhosttest.Descriptor{Addr: at, Len: 1<<32 - 1, Flags: 0})
			q.Push(1)
		}},
		"address overflows": {"outside", func(q ring, at uint64) {
			q.SetDescriptor(1, vhosttest.Descriptor{Addr: 1<<64 - 8, Len: 16, Flags: 0})
			q.Push(1)
		}},
		"no such head": {"does not have", func(q ring, at uint64) { q.Push(q.Size) }},
		"no such next": {"does not have", func(q ring, at uint64) {
			q.SetDescriptor(1, vhosttest.Descriptor{Addr: at, Len: 16, Flags: next, Next: q.Size})
			q.Push(1)
		}},
		"index jumps": {"jumped", func(q ring, at uint64) {
			q.SetAvailIndex(q.AvailIndex() + q.Size + 1)
		}},
		"no status": {"status", func(q ring, at uint64) {
			q.SetDescriptor(1, vhosttest.Descriptor{Addr: at, Len: 16, Flags: 0})
			q.Push(1)
		}},
		"no header": {"header", func(q ring, at uint64) {
			q.SetDescriptor(1, vhosttest.Descriptor{Addr: at, Len: 1, Flags: write})
			q.Push(1)
		}},
		"short header": {"header", func(q ring, at uint64) {
			q.SetDescriptor(1, vhosttest.Descriptor{Addr: at, Len: 15, Flags: next, Next: 2})
			q.SetDescriptor(2, vhosttest.Descriptor{Addr: at, Len: 1, Flags: write})
			q.Push(1)
		}},
		"wrong order": {"behind", func(q ring, at uint64) {
			q.SetDescriptor(1,
				vhosttest.Descriptor{Addr: at, Len: 16, Flags: next | write, Next: 2})
			q.SetDescriptor(2, vhosttest.Descriptor{Addr: at, Len: 16})
			q.Push(1)
		}},
		"table of no length": {"table", func(q ring, at uint64) {
			q.SetDescriptor(1, vhosttest.Descriptor{Addr: at, Flags: indirect})
			q.Push(1)
		}},
		"table and next": {"table", func(q ring, at uint64) {
			q.SetDescriptor(1, vhosttest.Descriptor{Addr: at, Len: 16, Flags: indirect | next})
			q.Push(1)
		}},
		"table outside": {"outside", func(q ring, at uint64) {
			q.SetDescriptor(1, vhosttest.Descriptor{Addr: 1 << 60, Len: 16, Flags: indirect})
			q.Push(1)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			d := v.dial(t, vhosttest.Options{})
			require.NoError(t, d.Read(0, 0, make([]byte, 512)))
			b := testtool.Must(d.Memory.Alloc(4096))(t)
			c.do(d.Queue(0), b.Addr)
			require.NoError(t, d.Queue(0).Publish())
			require.NoError(t, d.Queue(0).Kick())
			v.ends(t, d.Conn(), c.why)
		})
	}
}

// TestHeadTwice: a driver gives a request again that the device still has.
func TestHeadTwice(t *testing.T) {
	far := disktest.NewDistant(disktest.NewMemory(diskSize))
	v := serve(t, far)
	d := v.dial(t, vhosttest.Options{})
	far.Cut()
	_, err := d.Begin(0, vhosttest.Command{Type: vhosttest.TypeRead, In: 512})
	require.NoError(t, err)
	testtool.Eventually(t, func() bool { return far.Waiting() == 1 })
	d.Queue(0).Push(d.Inflight().Taken(0)[0])
	require.NoError(t, d.Queue(0).Publish())
	require.NoError(t, d.Queue(0).Kick())
	require.NoError(t, d.Conn().WaitClosed())
	far.Restore()
	v.ends(t, d.Conn(), "twice")
}

// TestMemoryIsCutShort: the front end takes back the memory that it shared: below the data, below
// the rings, and below the region of requests in flight.
func TestMemoryIsCutShort(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	d := v.dial(t, vhosttest.Options{Unsealed: true})
	require.NoError(t, d.Write(0, 0, random(4096, 1)))
	require.NoError(t, d.Memory.Regions()[0].Truncate(0))
	require.NoError(t, d.Queue(0).Kick())
	v.ends(t, d.Conn(), errFault.Error())

	d = v.dial(t, vhosttest.Options{Regions: []vhosttest.RegionOptions{
		{Addr: 1 << 30, Size: 8 << 20}, {Addr: 1 << 32, Size: 8 << 20, Unsealed: true}}})
	r := d.Memory.Regions()[1]
	for _, kind := range []vhosttest.Type{vhosttest.TypeRead, vhosttest.TypeWrite} {
		b := testtool.Must(d.Memory.AllocIn(r, 1<<16))(t)
		h := testtool.Must(d.Memory.Alloc(16))(t)
		s := testtool.Must(d.Memory.Alloc(1))(t)
		header := testtool.Must(d.Memory.At(h.Addr, 16))(t)
		copy(header, vhosttest.U32(uint32(kind), 0, 0, 0))
		flags := uint16(vhosttest.DescNext)
		if kind == vhosttest.TypeRead {
			flags |= vhosttest.DescWrite
		}
		require.NoError(t, r.Truncate(0))
		q := d.Queue(0)
		q.SetDescriptor(1, vhosttest.Descriptor{Addr: h.Addr, Len: 16, Flags: vhosttest.DescNext,
			Next: 2})
		q.SetDescriptor(2, vhosttest.Descriptor{Addr: b.Addr, Len: 1 << 16, Flags: flags, Next: 3})
		q.SetDescriptor(3, vhosttest.Descriptor{Addr: s.Addr, Len: 1, Flags: vhosttest.DescWrite})
		q.Push(1)
		require.NoError(t, q.Publish())
		require.NoError(t, q.Kick())
		v.ends(t, d.Conn(), errFault.Error())
		d = v.dial(t, vhosttest.Options{Regions: []vhosttest.RegionOptions{
			{Addr: 1 << 30, Size: 8 << 20}, {Addr: 1 << 32, Size: 8 << 20, Unsealed: true}}})
		r = d.Memory.Regions()[1]
	}
}

// TestWrongMessages: a front end that says what it cannot loses its connection, and only that.
func TestWrongMessages(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	pipe := func() int {
		var p [2]int
		require.NoError(t, unix.Pipe2(p[:], unix.O_CLOEXEC))
		t.Cleanup(func() { _ = unix.Close(p[0]); _ = unix.Close(p[1]) })
		return p[0]
	}
	file := func() int {
		f := testtool.Must(os.Create(t.TempDir() + "/memory"))(t)
		t.Cleanup(func() { _ = f.Close() })
		require.NoError(t, f.Truncate(1<<20))
		return int(f.Fd())
	}
	memfd := func(size int64) int {
		fd := testtool.Must(unix.MemfdCreate("x", unix.MFD_CLOEXEC))(t)
		t.Cleanup(func() { _ = unix.Close(fd) })
		require.NoError(t, unix.Ftruncate(fd, size))
		return fd
	}
	table := func(regions ...uint64) []byte {
		return append(vhosttest.U32(uint32(len(regions)/4), 0), vhosttest.U64(regions...)...)
	}
	for name, c := range map[string]struct {
		why     string
		request vhosttest.Request
		payload []byte
		fds     []int
	}{
		"unknown":   {"not known", 1000, nil, nil},
		"a feature": {"not offered", vhosttest.SetFeatures, vhosttest.U64(1 << 50), nil},
		"protocol feature": {"not offered", vhosttest.SetProtocolFeatures,
			vhosttest.U64(1 << 50), nil},
		"no such ring": {"there is no ring", vhosttest.SetVringNum,
			vhosttest.U32(16, 128), nil},
		"no payload":     {"payload", vhosttest.SetVringNum, nil, nil},
		"kick by a pipe": {"eventfd", vhosttest.SetVringKick, vhosttest.U64(0), []int{pipe()}},
		"call by a file": {"eventfd", vhosttest.SetVringCall, vhosttest.U64(0), []int{file()}},
		"ring without ring": {"power of two", vhosttest.SetVringKick,
			vhosttest.U64(0), []int{event(t)}},
		"memory in a file": {"not in memory", vhosttest.SetMemTable,
			table(0, 1<<20, 0, 0), []int{file()}},
		"memory overlaps": {"overlap", vhosttest.SetMemTable,
			table(0, 1<<20, 0, 0, 4096, 1<<20, 1<<30, 0), []int{memfd(1 << 20), memfd(1 << 20)}},
		"memory too short": {"ends at", vhosttest.SetMemTable,
			table(0, 1<<20, 0, 4096), []int{memfd(1 << 20)}},
		"memory of no size": {"cannot be", vhosttest.SetMemTable,
			table(0, 0, 0, 0), []int{memfd(1 << 20)}},
		"memory overflows": {"cannot be", vhosttest.SetMemTable,
			table(1<<63, 1<<63, 0, 1<<63), []int{memfd(1 << 20)}},
		"memory of all addresses": {"8 TiB", vhosttest.SetMemTable,
			table(0, 9<<40, 0, 0), []int{memfd(9 << 40)}},
		"more and more memory": {"8 TiB", vhosttest.SetMemTable,
			table(0, 5<<40, 0, 0, 5<<40, 5<<40, 0, 0), []int{memfd(5 << 40), memfd(5 << 40)}},
		"memory without fd": {"descriptors", vhosttest.SetMemTable, table(0, 1<<20, 0, 0), nil},
		"region not there":  {"no region", vhosttest.RemMemReg, vhosttest.U64(0, 0, 1, 2, 3), nil},
		"inflight of nothing": {"in flight", vhosttest.SetInflightFD,
			append(vhosttest.U64(0, 0), 1, 0, 128, 0), []int{memfd(1 << 20)}},
		"inflight too short": {"need", vhosttest.SetInflightFD,
			append(vhosttest.U64(64, 0), 1, 0, 128, 0), []int{memfd(1 << 20)}},
		"log of nothing": {"dirty log", vhosttest.SetLogBase,
			vhosttest.U64(0, 0), []int{memfd(4096)}},
		"log too short": {"ends at", vhosttest.SetLogBase,
			vhosttest.U64(1<<20, 0), []int{memfd(4096)}},
		"configuration": {"only the device can", vhosttest.SetConfig,
			append(vhosttest.U32(0, 1, 0), 1), nil},
	} {
		t.Run(name, func(t *testing.T) {
			conn := testtool.Must(vhosttest.DialConn(v.socket, 0))(t)
			defer conn.Close()
			require.NoError(t, conn.Send(vhosttest.Message{Request: vhosttest.SetVringEnable,
				Flags: vhosttest.FlagVersion, Payload: vhosttest.U32(0, 1)}))
			require.NoError(t, conn.Send(vhosttest.Message{Request: c.request,
				Flags: vhosttest.FlagVersion, Payload: c.payload, FDs: c.fds}))
			v.ends(t, conn, c.why)
		})
	}
	before := descriptors(t)
	for range 50 {
		conn := testtool.Must(vhosttest.DialConn(v.socket, 0))(t)
		require.NoError(t, conn.SendBytes(vhosttest.Header(vhosttest.SetMemTable,
			vhosttest.FlagVersion, 1<<20), memfd(1<<20)))
		require.NoError(t, conn.WaitClosed())
		require.NoError(t, conn.Close())
	}
	testtool.Eventually(t, func() bool { return descriptors(t) <= before+50 }) // its own 50
}

func event(t *testing.T) int {
	t.Helper()
	fd := testtool.Must(unix.Eventfd(0, unix.EFD_CLOEXEC))(t)
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

func descriptors(t *testing.T) int {
	t.Helper()
	all := testtool.Must(os.ReadDir("/proc/self/fd"))(t)
	return len(all)
}

// TestCallThatWaits: a front end does not take what it is told, and the connection ends all the
// same.
func TestCallThatWaits(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	d := v.dial(t, vhosttest.Options{})
	call := event(t) // it blocks
	full := bytes.Repeat([]byte{0xff}, 8)
	full[0] = 0xfd // one less than the most
	require.NoError(t, d.Conn().Tell(vhosttest.SetVringCall, vhosttest.U64(0), call))
	testtool.Eventually(t, func() bool { // what was told when the eventfd came
		var b [8]byte
		n, _ := unix.Read(call, b[:])
		return n == 8
	})
	require.NoError(t, testtool.Err(unix.Write(call, full)))
	for range 4 { // the second one waits
		require.NoError(t, testtool.Err(d.Begin(0, vhosttest.Command{Type: vhosttest.TypeFlush})))
	}
	require.NoError(t, d.Conn().Close())
	testtool.Eventually(t, func() bool { return v.said("vhost-user connection ended") == 1 })
	next := v.dial(t, vhosttest.Options{})
	require.NoError(t, next.Read(0, 0, make([]byte, 512)))
}

// TestHotFrontEnd: a front end that comes back at once after each failure fills no log, and so does
// one that does not like what it gets.
func TestHotFrontEnd(t *testing.T) {
	for name, said := range map[string]string{"garbage": "GET / HTTP/1.1\r\n\r\n", "nothing": ""} {
		t.Run(name, func(t *testing.T) {
			v := serve(t, disktest.NewMemory(diskSize))
			for i := range 50 {
				c := testtool.Must(vhosttest.DialConn(v.socket, 0))(t)
				require.NoError(t, c.SendBytes([]byte(said)))
				require.NoError(t, c.Close())
				testtool.Eventually(t, func() bool {
					return v.said("vhost-user connection ended") == i+1
				}, "it has ended")
			}
			all := v.logs.Filter(func(e observer.LoggedEntry) bool {
				return e.Level >= zap.InfoLevel && strings.HasPrefix(e.Message, "vhost-user c")
			})
			warned := all.Filter(func(e observer.LoggedEntry) bool {
				return e.Level == zap.WarnLevel
			})
			require.LessOrEqual(t, all.Len(), 6)
			require.NotZero(t, warned.Len())
			require.LessOrEqual(t, warned.Len(), 3)
			exercise(t, v.dial(t, vhosttest.Options{}))
		})
	}
}

// TestRepeatedMessages: what a front end says again and again is in the log once.
func TestRepeatedMessages(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	c := testtool.Must(vhosttest.DialConn(v.socket, 0))(t)
	defer c.Close()
	fd := testtool.Must(unix.MemfdCreate("x", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING))(t)
	defer unix.Close(fd)
	require.NoError(t, unix.Ftruncate(fd, 4096))
	region := slices.Concat(make([]byte, 8), vhosttest.U64(1<<50), vhosttest.U64(4096),
		vhosttest.U64(1<<50), vhosttest.U64(0))
	require.NoError(t, c.Tell(vhosttest.SetBackendReqFD, nil, fd)) // no message can be sent there
	for range 10 {
		require.NoError(t, c.Tell(vhosttest.AddMemReg, region, fd))
		require.NoError(t, c.Tell(vhosttest.RemMemReg, region, fd))
		require.NoError(t, c.Tell(vhosttest.SetStatus, vhosttest.U64(15)))
	}
	require.NoError(t, testtool.Err(c.Ask(vhosttest.GetStatus, nil)))
	for _, part := range []string{"memory can be cut short", "does not learn"} {
		require.Equal(t, 1, v.logs.FilterMessageSnippet(part).Len(), part)
	}
}

// TestCallIsFull: a front end gives a call that waits at once, and then perhaps another one. The
// connection ends all the same.
func TestCallIsFull(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	fds := descriptors(t)
	for range 2 {
		d := v.dial(t, vhosttest.Options{})
		for _, call := range []int{event(t), event(t)} { // they block
			_, err := unix.Write(call, append([]byte{0xfe}, bytes.Repeat([]byte{0xff}, 7)...))
			require.NoError(t, err)
			require.NoError(t, d.Conn().Tell(vhosttest.SetVringCall, vhosttest.U64(0), call))
			_, err = d.Begin(0, vhosttest.Command{Type: vhosttest.TypeFlush})
			require.NoError(t, err)
		}
		require.NoError(t, d.Conn().Close())
		testtool.Eventually(t, func() bool { return v.said("vhost-user connection ended") == 1 })
		v.logs.TakeAll()
		require.NoError(t, d.Close())
	}
	testtool.Eventually(t, func() bool { return descriptors(t) <= fds+4 }) // its own four
	next := v.dial(t, vhosttest.Options{})
	require.NoError(t, next.Read(0, 0, make([]byte, 512)))
}
