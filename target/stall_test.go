package target_test

import (
	"bytes"
	"context"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target/internal/pdu"
	tt "kubevirt.io/disk/target/targettest"
)

// waitsFor requires that people are told of so many commands to a LUN that wait.
func waitsFor(t *testing.T, s *server, lun uint16, kind string, commands int64) {
	t.Helper()
	look := func() []status.Trouble {
		return s.inUse.At(lun).Troubles(time.Now().Add(serving.LongWait))
	}
	testtool.Eventually(t, func() bool {
		all := look()
		return len(all) == 1 && all[0].Kind == kind && all[0].Count == commands &&
			slices.Equal(all[0].Peers, []string{tt.DefaultInitiator})
	}, "it is trouble: %v", func() any { return look() })
}

// TestHangingDiskIsTrouble: people see how many commands wait for storage, and whose they are.
func TestHangingDiskIsTrouble(t *testing.T) {
	s := start(t, func(*options) {})
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	resume, _ := s.stall(t, disktest.OpAny)
	hung := c.MustStart(t, tt.Read10(1, 0, 1))
	require.Empty(t, s.inUse.At(1).Troubles(time.Now()))
	waitsFor(t, s, 1, status.TroubleStorage, 1)
	require.Equal(t, 1, s.Sessions()[0].Waiting)
	resume()
	hung.MustFinish(t)
	require.Empty(t, s.inUse.At(1).Troubles(time.Now().Add(time.Hour)))
}

// TestManyStalledCommands makes as many commands hang in a disk as may be in flight. The watchdog
// finds the first ones. The others are passed on at once, in this session and another one.
func TestManyStalledCommands(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1, 2)
	other := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: "iqn.2026-01.test:other"}, 1, 2)
	resume, _ := s.stall(t, disktest.OpAny)
	var stuck []*tt.Task
	for i := range 100 {
		cmd := tt.Read10(1, uint32(i), 1)
		if i%2 == 1 {
			cmd = tt.Write10(1, uint32(i), make([]byte, 512))
		}
		stuck = append(stuck, c.MustStart(t, cmd), other.MustStart(t, tt.Read10(1, 0, 1)))
	}
	for _, sess := range []*tt.Session{c, other} {
		require.NoError(t, testtool.Err(sess.Ping(nil)))
		sess.MustGood(t, tt.Write10(2, 0, make([]byte, 512)))
	}
	require.LessOrEqual(t, s.Stalls(1), 2*2*5,
		"a few commands of a session, two looks each, until the LUN counts as stuck")
	require.Positive(t, s.Stalls(1))
	require.Zero(t, s.Stalls(2))
	resume()
	for _, task := range stuck {
		require.True(t, task.MustFinish(t).Good())
	}
	testtool.Eventually(t, func() bool { return s.Stalls(1) == 0 }, "nothing is stalled")
}

// crowded is a disk that takes a moment for each read, and counts the reads at once.
type crowded struct {
	*disktest.Memory
	now, most atomic.Int64
}

func (d *crowded) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	n := d.now.Add(1)
	defer d.now.Add(-1)
	for most := d.most.Load(); n > most && !d.most.CompareAndSwap(most, n); most = d.most.Load() {
	}
	time.Sleep(2 * time.Millisecond) // slow, but not long enough to look stalled
	return d.Memory.ReadAt(ctx, p, off)
}

// TestSlowDisk reads from a disk that is slow for each command but works on many at once, like one
// whose data is not in memory.
func TestSlowDisk(t *testing.T) {
	slow := &crowded{Memory: disktest.NewMemory(1 << 20)}
	s := start(t, func(o *options) { o.LUNs[0].Disk = slow })
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1, 2)
	var all []*tt.Task
	for i := range 64 {
		all = append(all, c.MustStart(t, tt.Read10(1, uint32(i), 1)))
	}
	for _, task := range all {
		require.True(t, task.MustFinish(t).Good())
	}
	require.Greater(t, slow.most.Load(), int64(1), "commands reach the disk side by side")
	require.LessOrEqual(t, slow.most.Load(), int64(64))
	testtool.Eventually(t, func() bool { return s.DataInUse() <= 64<<10 }, "nothing is held")
	for range 40 {
		c.MustGood(t, tt.Read10(2, 0, 8))
	}
}

// TestStalledOutOfOrder has commands for a stalled disk wait for their turn, so that the reader
// passes its role on while it replays one.
func TestStalledOutOfOrder(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1, 2)
	resume, _ := s.stall(t, disktest.OpAny)
	first := c.MustStart(t, tt.Read10(1, 0, 1))
	testtool.Eventually(t, func() bool { return s.Stalls(1) == 1 }, "the first one is found out")
	const late = 20
	var commands []pdu.SCSICommand
	for i := range late {
		cmd, _, _ := c.Prepare(tt.Read10(uint16(1+i%2), uint32(i), 1))
		commands = append(commands, cmd)
	}
	for i := range commands {
		require.NoError(t, c.Send(&commands[late-1-i], nil))
	}
	require.NoError(t, testtool.Err(c.Ping(nil)))
	resume()
	require.True(t, first.MustFinish(t).Good())
	answered := len(c.Inbox())
	for ; answered < late; answered++ {
		in, _ := testtool.Must2(tt.Expect[pdu.DataIn](c.Conn))(t)
		require.True(t, in.HasStatus)
	}
}

// TestMemoryLimit has less memory than one chunk. Commands that need more end with BUSY, and the
// session and small commands go on.
func TestMemoryLimit(t *testing.T) {
	s := start(t, func(o *options) { o.Shared.Memory = 64 << 10 })
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	c.MustFail(t, tt.Write10(1, 0, make([]byte, 256<<10)), "status 0x8")
	c.MustFail(t, tt.Read10(1, 0, 512), "status 0x8")
	c.MustGood(t, tt.Write10(1, 0, bytes.Repeat([]byte{9}, 4096)))
	require.Equal(t, bytes.Repeat([]byte{9}, 4096), c.MustGood(t, tt.Read10(1, 0, 8)).Data)
}

// slowConn reads its first bytes slowly, as over a slow network.
type slowConn struct {
	net.Conn
	slow int // bytes
}

func (c *slowConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.slow > 0 {
		time.Sleep(time.Duration(n) * 400 * time.Nanosecond)
		c.slow -= n
	}
	return n, err
}

// TestLogoutBehindAnAnswer logs out while a goroutine other than the reader writes an answer and
// waits for the peer to read it. The answer to the logout comes after it, and the connection does
// not end before.
func TestLogoutBehindAnAnswer(t *testing.T) {
	s := start(t)
	c, nc := s.loginFrom(t, "127.0.0.1",
		tt.LoginOptions{Keys: tt.KV("MaxRecvDataSegmentLength", "262144")})
	require.NoError(t, nc.(*net.TCPConn).SetReadBuffer(256<<10))
	resume, _ := s.stall(t, disktest.OpAny)
	c.MustStart(t, tt.Read10(1, 0, 65535))
	testtool.Eventually(t, func() bool { return s.Stalls(1) == 1 }, "its reader has lost the role")
	resume()
	testtool.Eventually(t, func() bool {
		waiting := s.Queued()
		time.Sleep(50 * time.Millisecond)
		return waiting > 0 && s.Queued() == waiting
	}, "it waits for the peer")
	require.NoError(t, testtool.Err(c.Logout(pdu.LogoutCloseSession)))
	require.NoError(t, c.ExpectClosed())
}

// TestSlowPeerStays has a peer that takes longer to read one answer than the limits for silence and
// for a PDU. It must stay: it has sent its whole command and is reading.
func TestSlowPeerStays(t *testing.T) {
	s := start(t, func(o *options) {
		o.Limits.PDUTimeout, o.Limits.NOPInterval, o.Limits.NOPTimeout = 4*time.Second,
			300*time.Millisecond, 4*time.Second
	})
	nc := testtool.Must(net.Dial("tcp", s.addr.String()))(t)
	// so that only a little of the answer is under way
	require.NoError(t, nc.(*net.TCPConn).SetReadBuffer(256<<10))
	slow := &slowConn{Conn: nc}
	c := testtool.Must(tt.NewConn(slow).Login(tt.LoginOptions{HeaderDigest: true,
		Keys: tt.KV("MaxRecvDataSegmentLength", "262144")}))(t)
	defer c.Close()
	require.NoError(t, testtool.Err(c.ClearAttention(1)))
	// This takes more than 6 s. It reads the rest at once, because a ping waits behind it in the
	// buffers of the network.
	slow.slow = 16 << 20
	c.MustGood(t, tt.Read10(1, 0, 65535))
	c.MustGood(t, tt.TestUnitReady(1))
}

// TestTextWhileCommands declares another MaxRecvDataSegmentLength while other goroutines than the
// reader answer commands.
func TestTextWhileCommands(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	s.disks[0].Inject(disktest.Rule{Op: disktest.OpAny, Delay: 30 * time.Millisecond})
	for _, length := range []string{"65536", "32768", "16384", "8192"} {
		var tasks []*tt.Task
		for i := range 8 {
			tasks = append(tasks, c.MustStart(t, tt.Read10(1, uint32(i), 1)))
		}
		require.NoError(t, testtool.Err(c.Text(tt.KV("MaxRecvDataSegmentLength", length))))
		for _, task := range tasks {
			require.True(t, task.MustFinish(t).Good())
		}
	}
}

// TestStaleRead aborts a long read whose first part hangs in the disk. The rest is not read, and
// the session goes on.
func TestStaleRead(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	before, window := s.DataInUse(), c.MaxCmdSN-c.CmdSN
	calls := s.disks[0].Calls(disktest.OpRead)
	resume, hangs := s.stall(t, disktest.OpRead)
	stale := c.MustStart(t, tt.Read10(1, 0, 4<<20/512))
	hangs(1)
	aborts(t, c, stale)
	resume()
	testtool.Eventually(t, func() bool { return s.DataInUse() <= before }, "nothing is held")
	require.Equal(t, calls+1, s.disks[0].Calls(disktest.OpRead), "the rest is not read")
	require.NoError(t, c.ExpectOnlyPing())
	require.Equal(t, window, c.MaxCmdSN-c.CmdSN, "its place in the window is given back once")
	require.Len(t, c.MustGood(t, tt.Read10(1, 0, 8)).Data, 8*512)
}

// TestHeldDataIsNotKept sends requests with unused data ahead of their turn. Their memory must be
// free again.
func TestHeldDataIsNotKept(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	before := s.DataInUse()
	late, _, _ := c.Prepare(tt.TestUnitReady(1))
	for _, cdb := range [][]byte{tt.TestUnitReady(1).CDB, tt.Read10(1, 1<<31, 1).CDB,
		tt.Read10(1, 0, 1).CDB} {
		cmd, _, _ := c.Prepare(tt.Command{LUN: 1, CDB: cdb})
		require.NoError(t, c.Send(&cmd, make([]byte, 16<<10)))
	}
	require.NoError(t, testtool.Err(c.Ping(nil)))
	require.Greater(t, s.DataInUse(), before, "they wait for their turn")
	require.NoError(t, c.Send(&late, nil))
	for range 4 {
		require.NoError(t, testtool.Err2(tt.Expect[pdu.SCSIResponse](c.Conn)))
	}
	testtool.Eventually(t, func() bool { return s.DataInUse() <= before }, "nothing is held")
}
