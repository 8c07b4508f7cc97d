package vhosttest

import (
	"encoding/binary"
	"net"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

// fake is a back end that has what qemu-storage-daemon has not, and that lies. It looks at the
// guest's memory through the driver's own.
type fake struct {
	t        *testing.T
	socket   string
	d        *Driver // whose rings it has; the back end itself does not look at it
	features atomic.Uint64
	protocol uint64

	messages chan Request // what it was told, all of it
	back     chan int     // the back channel
	refuse   atomic.Uint32
	status   uint64
	taken    atomic.Uint32 // how many heads it says it took
}

func startFake(t *testing.T) *fake {
	t.Helper()
	f := &fake{t: t, socket: filepath.Join(t.TempDir(), "fake.sock"),
		protocol: knownProtocol, messages: make(chan Request, 1000), back: make(chan int, 9)}
	f.features.Store(FeatureProtocolFeatures | FeatureVersion1 | FeatureLogAll)
	l := testtool.Must(net.ListenUnix("unix", &net.UnixAddr{Name: f.socket, Net: "unix"}))(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			nc, err := l.AcceptUnix()
			if err != nil {
				return
			}
			f.serve(&Conn{nc: nc, timeout: time.Minute})
			_ = nc.Close()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	return f
}

// serve answers one connection. Messages have the same form in both directions.
func (f *fake) serve(c *Conn) {
	for {
		m, err := c.Receive()
		if err != nil {
			return
		}
		f.messages <- m.Request
		reply := Message{Request: m.Request, Flags: FlagVersion | FlagReply, Payload: U64(0)}
		answers := true
		switch m.Request {
		case GetFeatures:
			reply.Payload = U64(f.features.Load())
		case GetProtocolFeatures:
			reply.Payload = U64(f.protocol)
		case GetQueueNum, GetMaxMemSlots:
			reply.Payload = U64(4)
		case SetStatus:
			f.status, answers = binary.NativeEndian.Uint64(m.Payload), false
		case GetStatus:
			reply.Payload = U64(f.status)
		case GetVringBase:
			reply.Payload = append(m.Payload[:4:4], U32(f.taken.Load())...)
		case GetInflightFD:
			fd, err := unix.MemfdCreate("inflight", 0)
			if err != nil || unix.Ftruncate(fd, 1<<20) != nil {
				return
			}
			defer unix.Close(fd)
			reply.Payload = append(U64(16<<10, 4096), m.Payload[16:20]...)
			reply.FDs = []int{fd}
		case SetBackendReqFD:
			f.back <- m.FDs[0]
			m.FDs, answers = nil, false
		default:
			answers = false
		}
		closeAll(m.FDs)
		if !answers && m.Flags&FlagNeedReply == 0 {
			continue
		}
		if f.refuse.Load() == uint32(m.Request) {
			reply.Payload = U64(5)
		}
		if err := c.Send(reply); err != nil {
			return
		}
	}
}

// gives has the fake give a head back that the driver gave it, or any other.
func (f *fake) gives(head, written uint32) {
	q := f.d.Queue(0)
	index := q.UsedIndex()
	binary.LittleEndian.PutUint32(q.Used.Bytes[4+8*int(index%q.Size):], head)
	binary.LittleEndian.PutUint32(q.Used.Bytes[8+8*int(index%q.Size):], written)
	atomic.StoreUint32(q.usedHead, uint32(index+1)<<16)
	require.NoError(f.t, signal(q.callFD))
}

func (f *fake) dial(o Options) *Driver {
	f.t.Helper()
	d, err := Dial(f.socket, o)
	require.NoError(f.t, err)
	f.d = d
	f.t.Cleanup(func() { require.NoError(f.t, d.Close()) })
	return d
}

// TestViolations: the driver sees what a back end does wrong with a ring.
func TestViolations(t *testing.T) {
	for name, lie := range map[string]struct {
		do    func(f *fake, head uint32)
		wants string
	}{
		"no status": {func(f *fake, head uint32) { f.gives(head, 0) }, "without a status"},
		"too much":  {func(f *fake, head uint32) { f.gives(head, 1000) }, "wrote 1000 bytes"},
		"not given": {func(f *fake, head uint32) { f.gives(head+1, 1) }, "does not have"},
		"no head":   {func(f *fake, _ uint32) { f.gives(1<<20, 1) }, "does not have"},
		"jump": {func(f *fake, _ uint32) {
			atomic.StoreUint32(f.d.Queue(0).usedHead, 7<<16)
			require.NoError(f.t, signal(f.d.Queue(0).callFD))
		}, "used index of queue 0 went from 0 to 7"},
		"refusal": {func(f *fake, head uint32) {
			*f.statusOf(head) = StatusIOErr
			f.gives(head, 1)
		}, "flush at sector 0: IOERR"},
		"other length": {func(f *fake, head uint32) {
			*f.statusOf(head) = StatusOK
			f.gives(head, 0)
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := startFake(t)
			d := f.dial(Options{})
			ticket := testtool.Must(d.Begin(0, Command{Type: TypeFlush}))(t)
			lie.do(f, uint32(ticket.Head()))
			_, err := ticket.Wait()
			if lie.wants == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, lie.wants)
		})
	}
	t.Run("stopped", func(t *testing.T) {
		f := startFake(t)
		d := f.dial(Options{})
		require.NoError(t, testtool.Err(d.Begin(0, Command{Type: TypeFlush})))
		require.Zero(t, testtool.Must(d.Queue(0).Stop())(t, "it has not been taken"))
		f.taken.Store(1)
		_, err := d.Queue(0).Stop()
		require.ErrorContains(t, err, "stopped at 1 of 1, but 1 requests have no answer")
		require.NoError(t, testtool.Err(d.Prepare(0, Command{Type: TypeFlush})))
		f.taken.Store(0)
		require.NoError(t, testtool.Err(d.Queue(0).Stop()), "the second one is not published")
	})
}

// TestCutShort: memory that is cut short ends what needs it, and not the process.
func TestCutShort(t *testing.T) {
	f := startFake(t)
	d := f.dial(Options{Regions: []RegionOptions{{Addr: 1 << 20, Size: 1 << 20, Unsealed: true}}})
	q := d.Queue(0)
	ticket := testtool.Must(d.Begin(0, Command{Type: TypeFlush}))(t)
	require.NoError(t, d.Memory.Regions()[0].Truncate(0))
	require.NoError(t, signal(q.callFD))
	const wants = "the guest's memory cannot be read"
	require.ErrorContains(t, testtool.Err(ticket.Wait()), wants)
	require.ErrorContains(t, q.Publish(), wants)
	require.ErrorContains(t, testtool.Err(q.Submit([]Part{{1 << 20, 16, false}}, false)), wants)
	require.ErrorContains(t, testtool.Err(d.Prepare(0, Command{Type: TypeFlush})), wants)
}

// statusOf is the status of a flush: what its second descriptor points at.
func (f *fake) statusOf(head uint32) *byte {
	table := f.d.Queue(0).Table.Bytes
	next := binary.LittleEndian.Uint16(table[descriptorLen*head+14:])
	b, err := f.d.Memory.At(binary.LittleEndian.Uint64(table[descriptorLen*int(next):]), 1)
	require.NoError(f.t, err)
	return &b[0]
}

// TestMessages: messages that qemu-storage-daemon does not know, and refusals.
func TestMessages(t *testing.T) {
	f := startFake(t)
	d := f.dial(Options{Queues: 2})
	require.Equal(t, 4, d.MaxQueues)
	require.Equal(t, 4, d.MaxSlots)
	require.EqualValues(t, 15, testtool.Must(d.Status())(t))

	require.Equal(t, 16<<10, len(d.Inflight().Bytes))
	d.Inflight().Bytes[inflightHeader+3*inflightState] = 1
	require.Equal(t, []uint16{3}, d.Inflight().Taken(0))
	require.Empty(t, d.Inflight().Taken(1))
	require.NoError(t, d.Reconnect(f.socket))
	require.Equal(t, []uint16{3}, d.Inflight().Taken(0), "the front end keeps it")
	require.NoError(t, d.Reset())
	require.Nil(t, d.Inflight())
	require.NoError(t, d.Start())
	require.Empty(t, d.Inflight().Taken(0))

	<-f.back
	back := f.channel(<-f.back)
	require.NoError(t, back.Tell(backConfigChange, nil))
	<-d.ConfigChanges()
	require.NoError(t, d.BackChannelError())
	var refused *RefusedError
	require.ErrorAs(t, back.Tell(77, nil), &refused)
	require.ErrorIs(t, d.BackChannelError(), ErrViolation)

	f.refuse.Store(uint32(SetConfig))
	require.ErrorAs(t, d.SetWriteCache(true), &refused)
	require.Equal(t, RefusedError{SetConfig, 5}, *refused)
	f.refuse.Store(uint32(GetFeatures))
	features := testtool.Must(d.Conn().Ask(GetFeatures, nil))(t)
	require.Equal(t, U64(5), features.Payload)
	require.NoError(t, d.Conn().Send(Message{Request: 4000, Flags: FlagVersion}))
	for r := range f.messages {
		if r == 4000 {
			break
		}
	}
}

// channel is the back end's end of the back channel.
func (f *fake) channel(fd int) *Conn {
	nc, err := connOf(fd)
	require.NoError(f.t, err)
	f.t.Cleanup(func() { _ = nc.Close() })
	return &Conn{nc: nc, timeout: time.Minute, ack: true}
}

// TestOtherOffer: a guest does not go on with a back end that offers less.
func TestOtherOffer(t *testing.T) {
	f := startFake(t)
	d := f.dial(Options{})
	f.features.Store(FeatureProtocolFeatures)
	require.ErrorIs(t, d.Reconnect(f.socket), ErrUnsupported)
	require.NoError(t, d.Close())
	require.NoError(t, d.Close(), "once is enough")
}
