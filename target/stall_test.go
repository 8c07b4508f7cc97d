package target_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"runtime"
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

// stall makes every call of an operation wait until resume is called.
func stall(t *testing.T, d *disktest.Fault, op disktest.Op) (resume func()) {
	block := make(chan struct{})
	remove := d.Inject(disktest.Rule{Op: op, Block: block})
	done := false
	resume = func() {
		if !done {
			done = true
			remove()
			close(block)
		}
	}
	t.Cleanup(resume)
	return resume
}

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
	resume := stall(t, s.disks[0], disktest.OpAny)
	hung := c.MustStart(t, tt.Read10(1, 0, 1))
	require.Empty(t, s.inUse.At(1).Troubles(time.Now()))
	waitsFor(t, s, 1, status.TroubleStorage, 1)
	require.Equal(t, 1, s.Sessions()[0].Waiting)
	resume()
	hung.MustFinish(t)
	require.Empty(t, s.inUse.At(1).Troubles(time.Now().Add(time.Hour)))
}

// TestStalledDisk has a disk that does not answer. Everything else goes on: pings, the other LUN,
// more commands for the stalled one, task management and logout.
func TestStalledDisk(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1, 2)
	resume := stall(t, s.disks[0], disktest.OpAny)
	var stuck []*tt.Task
	for i := range 8 {
		stuck = append(stuck, c.MustStart(t, tt.Read10(1, uint32(i), 1)))
	}
	write := c.MustStart(t, tt.Write10(1, 100, make([]byte, 512)))
	_, err := c.Ping([]byte("still there?"))
	require.NoError(t, err)
	c.MustGood(t, tt.Write10(2, 0, bytes.Repeat([]byte{7}, 4096)))
	require.Equal(t, bytes.Repeat([]byte{7}, 4096), c.MustGood(t, tt.Read10(2, 0, 8)).Data)

	got, err := c.AbortTask(stuck[0])
	require.NoError(t, err)
	require.Equal(t, pdu.TMComplete, got)
	got, err = c.AbortTask(write)
	require.NoError(t, err)
	require.Equal(t, pdu.TMComplete, got)

	other := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: "iqn.2026-01.test:other"}, 2)
	_, err = other.Ping(nil)
	require.NoError(t, err)

	resume()
	for _, task := range stuck[1:] {
		require.True(t, task.MustFinish(t).Good())
	}
	require.NoError(t, c.ExpectOnlyPing(), "nothing is sent for an aborted task")
	_, err = c.Logout(pdu.LogoutCloseSession)
	require.NoError(t, err)
	require.NoError(t, c.ExpectClosed())
	require.Zero(t, s.seen.count("panic"))
}

// TestManyStalledCommands makes as many commands hang in a disk as may be in flight. The watchdog
// finds the first ones. The others are passed on at once, in this session and another one.
func TestManyStalledCommands(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1, 2)
	other := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: "iqn.2026-01.test:other"}, 1, 2)
	resume := stall(t, s.disks[0], disktest.OpAny)
	var stuck []*tt.Task
	for i := range 100 {
		cmd := tt.Read10(1, uint32(i), 1)
		if i%2 == 1 {
			cmd = tt.Write10(1, uint32(i), make([]byte, 512))
		}
		stuck = append(stuck, c.MustStart(t, cmd), other.MustStart(t, tt.Read10(1, 0, 1)))
	}
	for _, sess := range []*tt.Session{c, other} {
		_, err := sess.Ping(nil)
		require.NoError(t, err)
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
	resume := stall(t, s.disks[0], disktest.OpAny)
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
	_, err := c.Ping(nil)
	require.NoError(t, err)
	resume()
	require.True(t, first.MustFinish(t).Good())
	answered := len(c.Inbox())
	for ; answered < late; answered++ {
		in, _, err := tt.Expect[pdu.DataIn](c.Conn)
		require.NoError(t, err)
		require.True(t, in.HasStatus)
	}
}

// TestStaleWrite aborts a write that hangs in the disk. A newer write to the same block must win,
// although the old one ends only now.
func TestStaleWrite(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	block := make(chan struct{})
	s.disks[0].Inject(disktest.Rule{Op: disktest.OpWrite, Times: 1, Block: block})
	stale := c.MustStart(t, tt.Write10(1, 5, bytes.Repeat([]byte{1}, 512)))
	testtool.Eventually(t, func() bool { return s.disks[0].Calls(disktest.OpWrite) == 1 },
		"the write reaches the disk")
	got, err := c.AbortTask(stale)
	require.NoError(t, err)
	require.Equal(t, pdu.TMComplete, got)
	newer := c.MustStart(t, tt.Write10(1, 5, bytes.Repeat([]byte{2}, 512)))
	_, err = c.Ping(nil)
	require.NoError(t, err)
	close(block)
	require.True(t, newer.MustFinish(t).Good())
	require.Equal(t, bytes.Repeat([]byte{2}, 512), c.MustGood(t, tt.Read10(1, 5, 1)).Data)
}

// TestLogoutWhileStalled ends a session whose command never ends, by logout and by a new login.
func TestLogoutWhileStalled(t *testing.T) {
	s := start(t)
	resume := stall(t, s.disks[0], disktest.OpRead)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{})
	c.MustFail(t, tt.TestUnitReady(1), "06/29/00")
	c.MustStart(t, tt.Read10(1, 0, 1))
	_, err := c.Logout(pdu.LogoutCloseSession)
	require.NoError(t, err)
	require.NoError(t, c.ExpectClosed())

	c = tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	c.MustStart(t, tt.Read10(1, 0, 1))
	again := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	_, err = c.ExpectClosedAfter()
	require.NoError(t, err)
	_, err = again.Ping(nil)
	require.NoError(t, err)
	testtool.Eventually(t, func() bool { return s.seen.count("ended") == 2 }, "the sessions end")
	require.Equal(t, []string{"logout", "reinstated"}, s.seen.reasons())
	resume()
}

// TestShutdownDrains drains a server: commands in flight finish and are answered, the initiator is
// asked to log out, and then the connections close.
func TestShutdownDrains(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	resume := stall(t, s.disks[0], disktest.OpWrite)
	task := c.MustStart(t, tt.Write10(1, 0, bytes.Repeat([]byte{3}, 4096)))
	testtool.Eventually(t, func() bool { return s.disks[0].Calls(disktest.OpWrite) == 1 },
		"the write reaches the disk")
	done := make(chan error, 1)
	go func() { done <- s.Shutdown(context.Background()) }()
	async, err := c.AwaitAsync()
	require.NoError(t, err)
	require.Equal(t, pdu.AsyncLogoutRequest, async.Event)
	_, err = tt.Login(s.addr, tt.LoginOptions{Initiator: "iqn.2026-01.test:late"})
	require.Error(t, err, "nobody logs in any more")
	resume()
	require.True(t, task.MustFinish(t).Good())
	_, err = c.Logout(pdu.LogoutCloseSession)
	require.NoError(t, err)
	require.NoError(t, <-done)
	require.Equal(t, []string{"logout"}, s.seen.reasons())
}

// TestShutdownDeadline gives up on a disk that never answers, and says so.
func TestShutdownDeadline(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	resume := stall(t, s.disks[0], disktest.OpWrite)
	c.MustStart(t, tt.Write10(1, 0, make([]byte, 512)))
	testtool.Eventually(t, func() bool { return s.disks[0].Calls(disktest.OpWrite) == 1 },
		"the write reaches the disk")
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, s.Shutdown(ctx), context.DeadlineExceeded)
	resume()
}

// panicky is a disk with a bug.
type panicky struct{ *disktest.Memory }

func (panicky) ReadAt(context.Context, []byte, int64) (int, error) { panic("a bug in the disk") }

func (p panicky) WriteAt(ctx context.Context, b []byte, off int64) (int, error) {
	if b[0] == 'X' {
		panic("another bug in the disk")
	}
	return p.Memory.WriteAt(ctx, b, off)
}

// TestPanic checks that a bug ends the session of its command and no other one.
func TestPanic(t *testing.T) {
	s := start(t,
		func(o *options) { o.LUNs[0].Disk = panicky{disktest.NewMemory(1 << 20)} })
	bystander := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: "iqn.2026-01.test:bystander"},
		2)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	c.MustStart(t, tt.Read10(1, 0, 1))
	_, err := c.ExpectClosedAfter()
	require.NoError(t, err)
	testtool.Eventually(t, func() bool { return s.seen.count("panic") == 1 }, "the bug is counted")
	bystander.MustGood(t, tt.Write10(2, 0, make([]byte, 512)))
	c = tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	c.MustStart(t, tt.Write10(1, 0, bytes.Repeat([]byte("X"), 512)))
	_, err = c.ExpectClosedAfter()
	require.NoError(t, err)
	testtool.Eventually(t, func() bool { return s.seen.count("panic") == 2 }, "the other one, too")
	s.bugs = 2
	again := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	again.MustGood(t, tt.Write10(1, 0, make([]byte, 512)))
}

// TestClaimedMemory announces far more data than it sends. The target allocates only for data that
// arrives.
func TestClaimedMemory(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	c.MustGood(t, tt.Write10(1, 0, make([]byte, 4096)))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 4 {
		cmd := tt.Command{LUN: 1, CDB: tt.Write10(1, 0, make([]byte, 512)).CDB}
		p, _, _ := c.Prepare(cmd)
		p.Write, p.Read, p.Final, p.ExpectedLength = true, false, true, 1750<<20
		require.NoError(t, c.Send(&p, nil))
	}
	_, err := c.Ping(nil)
	require.NoError(t, err)
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(1<<20))
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

// TestDiskError checks that an error of the disk is reported and that the session goes on.
func TestDiskError(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	remove := s.disks[0].Inject(disktest.Rule{Op: disktest.OpRead, Err: errors.New("cable pulled")})
	c.MustFail(t, tt.Read10(1, 0, 1), "04/44/00")
	remove()
	c.MustGood(t, tt.Read10(1, 0, 1))
}

// TestDeadPeer checks that a silent peer is pinged and dropped, and that one that answers stays.
func TestDeadPeer(t *testing.T) {
	s := start(t, func(o *options) {
		o.Limits.NOPInterval, o.Limits.NOPTimeout = 300*time.Millisecond, 5*time.Second
	})
	silent := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: "iqn.2026-01.test:silent"}, 1)
	silent.AnswerPings = false
	ping, _, err := tt.Expect[pdu.NOPIn](silent.Conn)
	require.NoError(t, err)
	require.Equal(t, pdu.ReservedTag, ping.TaskTag)
	require.NotEqual(t, pdu.ReservedTag, ping.TransferTag)
	require.NoError(t, silent.ExpectClosed())
	testtool.Eventually(t, func() bool { return s.seen.count("ended") == 1 }, "the session ends")
	require.Equal(t, []string{"timeout"}, s.seen.reasons())
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
	nc, err := net.Dial("tcp", s.addr.String())
	require.NoError(t, err)
	require.NoError(t, nc.(*net.TCPConn).SetReadBuffer(256<<10))
	c, err := tt.NewConn(nc).Login(
		tt.LoginOptions{Keys: tt.KV("MaxRecvDataSegmentLength", "262144")})
	require.NoError(t, err)
	defer c.Close()
	_, err = c.ClearAttention(1)
	require.NoError(t, err)
	resume := stall(t, s.disks[0], disktest.OpAny)
	c.MustStart(t, tt.Read10(1, 0, 65535))
	testtool.Eventually(t, func() bool { return s.Stalls(1) == 1 }, "its reader has lost the role")
	resume()
	testtool.Eventually(t, func() bool {
		waiting := s.Queued()
		time.Sleep(50 * time.Millisecond)
		return waiting > 0 && s.Queued() == waiting
	}, "it waits for the peer")
	_, err = c.Logout(pdu.LogoutCloseSession)
	require.NoError(t, err)
	require.NoError(t, c.ExpectClosed())
}

// TestSlowPeerStays has a peer that takes longer to read one answer than the limits for silence and
// for a PDU. It must stay: it has sent its whole command and is reading.
func TestSlowPeerStays(t *testing.T) {
	s := start(t, func(o *options) {
		o.Limits.PDUTimeout, o.Limits.NOPInterval, o.Limits.NOPTimeout = 4*time.Second,
			300*time.Millisecond, 4*time.Second
	})
	nc, err := net.Dial("tcp", s.addr.String())
	require.NoError(t, err)
	// so that only a little of the answer is under way
	require.NoError(t, nc.(*net.TCPConn).SetReadBuffer(256<<10))
	slow := &slowConn{Conn: nc}
	c, err := tt.NewConn(slow).Login(tt.LoginOptions{HeaderDigest: true,
		Keys: tt.KV("MaxRecvDataSegmentLength", "262144")})
	require.NoError(t, err)
	defer c.Close()
	_, err = c.ClearAttention(1)
	require.NoError(t, err)
	// This takes more than 6 s. It reads the rest at once, because a ping waits behind it in the
	// buffers of the network.
	slow.slow = 16 << 20
	c.MustGood(t, tt.Read10(1, 0, 65535))
	c.MustGood(t, tt.TestUnitReady(1))
}

// TestSlowPeers checks that a login that takes too long ends, and a PDU that is never complete.
func TestSlowPeers(t *testing.T) {
	s := start(t, func(o *options) {
		o.Limits.LoginTimeout = 500 * time.Millisecond
	})
	require.NoError(t, tt.MustDial(t, s.addr).ExpectClosed())
	// Sending one byte at a time does not help.
	dribble(t, tt.MustDial(t, s.addr), []byte{0x43, 0x81, 0, 0, 0, 0, 0x1f, 0xf0})

	s = start(t, func(o *options) { o.Limits.PDUTimeout = 500 * time.Millisecond })
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	cmd, _, _ := c.Prepare(tt.TestUnitReady(1))
	require.NoError(t, c.SendRaw(c.Bytes(&cmd, nil)[:20]))
	require.NoError(t, c.ExpectClosed())

	c = tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	ping := pdu.NOPOut{Immediate: true, TaskTag: 1, TransferTag: pdu.ReservedTag, CmdSN: c.CmdSN}
	dribble(t, c.Conn, c.Bytes(&ping, make([]byte, 4096)))
}

// dribble sends one byte at a time, over and over, until the connection is closed.
func dribble(t *testing.T, c *tt.Conn, b []byte) {
	t.Helper()
	for i := 0; ; i = (i + 1) % len(b) {
		if err := c.SendRaw(b[i : i+1]); err != nil {
			require.ErrorIs(t, err, tt.ErrClosed)
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}
