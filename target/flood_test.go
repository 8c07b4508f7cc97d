package target_test

import (
	"bytes"
	"io"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target"
	"kubevirt.io/disk/target/internal/pdu"
	tt "kubevirt.io/disk/target/targettest"
)

// TestHalfOpenFlood opens 10,000 connections that never log in. Some are silent, some stop during
// the login. Other logins and I/O go on, and the server keeps no more of these connections than its
// limit.
func TestHalfOpenFlood(t *testing.T) {
	const flood = 10000
	var limit syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	if limit.Max < flood+1000 {
		t.Skipf("needs %d descriptors, but the limit is %d (ulimit -Hn)", flood+1000, limit.Max)
	}
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	data := bytes.Repeat([]byte{0x5a}, 4096)
	c.MustGood(t, tt.Write10(1, 0, data))
	longest := time.Duration(0)
	for i := range flood {
		nc := testtool.Must(net.Dial("tcp", s.addr.String()))(t)
		defer nc.Close()
		if i%3 == 0 {
			_, _ = nc.Write([]byte{0x43, 0x81, 0, 0, 0, 0, 0, 50})
		}
		if i%500 != 499 {
			continue
		}
		require.Equal(t, data, c.MustGood(t, tt.Read10(1, 0, 8)).Data)
		began := time.Now()
		other, err := tt.Login(s.addr, tt.LoginOptions{Initiator: "iqn.2026-01.test:late"})
		require.NoError(t, err)
		longest = max(longest, time.Since(began))
		require.NoError(t, testtool.Err(other.Logout(pdu.LogoutCloseSession)))
		require.NoError(t, other.Close())
		_, pending := s.Connections()
		require.LessOrEqual(t, pending, 256)
	}
	t.Logf("the longest login among %d half-open connections took %v", flood, longest)
	require.Positive(t, s.seen.count("refused"))
}

// TestFewDescriptors has more sessions than there are descriptors for the fast way of each of them.
func TestFewDescriptors(t *testing.T) {
	const most, sessions = 256, 80 // the initiators in this process take a descriptor each, too
	var before syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &before))
	require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE,
		&syscall.Rlimit{Cur: most, Max: before.Max}))
	t.Cleanup(func() { require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &before)) })
	// nobody answers pings while the others have their turn
	s := start(t, limits(target.Limits{NOPInterval: time.Hour}))
	data := bytes.Repeat([]byte{0x5a}, 1<<20)
	var all []*tt.Session
	for i := range sessions {
		c := tt.MustLogin(t, s.addr, tt.LoginOptions{ISID: [6]byte{0x80, byte(i)}}, 1)
		c.MustGood(t, tt.Write10(1, uint32(i), data))
		all = append(all, c)
	}
	for _, c := range all {
		require.Equal(t, data, c.MustGood(t, tt.Read10(1, 79, len(data)/512)).Data)
		require.NoError(t, testtool.Err(c.Logout(pdu.LogoutCloseSession)))
		require.NoError(t, c.Close())
	}
}

// TestMemoryBeforeLogin has connections that make a login as expensive as possible without
// authentication.
func TestMemoryBeforeLogin(t *testing.T) {
	const conns = 200
	// so many connections take a while on a busy machine
	s := start(t, withCHAP(), limits(target.Limits{LoginTimeout: 10 * time.Minute}))
	all := make([]*tt.Conn, conns)
	for i := range all {
		all[i] = tt.MustDial(t, s.addr)
	}
	inUse := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc + m.StackInuse
	}
	testtool.Eventually(t,
		func() bool { n, _ := s.Connections(); return n == conns }, "they are accepted")
	before := inUse()
	id := tt.LoginID{ISID: [6]byte{0x80, 1}, Tag: 1}
	// First many short keys, which the target remembers. Then an endless text, as much of it as the
	// target takes.
	var keys strings.Builder
	keys.WriteString("InitiatorName=iqn.2026-01.test:a\x00SessionType=Normal\x00TargetName=" +
		target.DefaultTargetName + "\x00AuthMethod=CHAP\x00")
	for i := range 600 {
		keys.WriteString("X-" + string(rune('a'+i%26)) + string(rune('a'+i/26)) + "=\x00")
	}
	for _, c := range all {
		_, err := c.LoginStep(id, tt.LoginPDU{CSG: tt.StageSecurity, Raw: []byte(keys.String())})
		require.NoError(t, err)
		require.NoError(t, testtool.Err(c.LoginStep(id,
			tt.LoginPDU{CSG: tt.StageSecurity, Continue: true,
				Raw: bytes.Repeat([]byte{'x'}, 8000)})))
	}
	after := inUse()
	each := (int64(after) - int64(before)) / conns
	t.Logf("%d bytes for each connection that has not logged in", each)
	require.Less(t, each, int64(64<<10))
	_, pending := s.Connections()
	require.Equal(t, conns, pending, "the connections are still open")
}

// TestSessionsPerAddress checks the limit of sessions from one address. A session counts until it
// ends.
func TestSessionsPerAddress(t *testing.T) {
	s := start(t, func(o *options) { o.Limits.MaxPerAddress = 2 })
	login := func(n byte) (*tt.Session, error) {
		return tt.Login(s.addr, tt.LoginOptions{ISID: [6]byte{0x80, n}, Discovery: n == 2})
	}
	first := testtool.Must(login(1))(t)
	require.NoError(t, testtool.Err(login(2)))
	s.refused(t, tt.LoginOptions{ISID: [6]byte{0x80, 3}}, 0x0302)
	again := testtool.Must(login(1))(t, "a reinstated session makes room for the new one")
	require.NoError(t, testtool.Err(first.ExpectClosedAfter()))
	require.NoError(t, testtool.Err(again.Logout(pdu.LogoutCloseSession)))
	require.NoError(t, again.ExpectClosed())
	require.NoError(t, testtool.Must(login(3))(t).Close())
}

// TestFailingAddressIsSlowedDown checks that logins wait, but work, after several failures of
// authentication from their address.
func TestFailingAddressIsSlowedDown(t *testing.T) {
	core, logs := observer.New(zapcore.DebugLevel)
	s := start(t, withCHAP(), func(o *options) {
		o.Log, o.Limits.LoginDelay = zap.New(core), 300*time.Millisecond
	})
	heldUp := func() int { return logs.FilterMessageSnippet("held up").Len() }
	for i := range 6 {
		require.Equal(t, max(0, i-3), heldUp())
		s.refused(t, tt.LoginOptions{CHAP: &tt.CHAP{Username: user, Password: "wrong password"}},
			0x0201)
	}
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{CHAP: good()}, 1)
	require.Equal(t, 4, heldUp())
	c.MustGood(t, tt.TestUnitReady(1))
}

// TestHotInitiator: a peer that comes back at once fills no log: one that speaks something else
// than iSCSI, and one that logs in, does nothing, and is gone.
func TestHotInitiator(t *testing.T) {
	for name, once := range map[string]func(t *testing.T, s *server){
		"something else": func(t *testing.T, s *server) {
			nc := testtool.Must(net.Dial("tcp", s.addr.String()))(t)
			defer nc.Close()
			hello := make([]byte, 64) // of TLS
			copy(hello, "\x16\x03\x01")
			require.NoError(t, testtool.Err(nc.Write(hello)))
			_, _ = nc.Read(make([]byte, 1)) // it ends
		},
		"no use for a session": func(t *testing.T, s *server) {
			require.NoError(t, testtool.Must(tt.Login(s.addr, tt.LoginOptions{}))(t).Close())
			testtool.Eventually(t, func() bool { return len(s.Sessions()) == 0 }, "it has ended")
		},
	} {
		t.Run(name, func(t *testing.T) {
			core, logs := observer.New(zapcore.InfoLevel)
			s := start(t, func(o *options) { o.Log = zap.New(core) })
			for range 50 {
				once(t, s)
			}
			warned := func() int { return logs.FilterLevelExact(zapcore.WarnLevel).Len() }
			testtool.Eventually(t, func() bool { return warned() > 0 }, "the log says it")
			require.LessOrEqual(t, warned(), 3)
			require.Less(t, logs.Len(), 20)
			c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
			c.MustGood(t, tt.TestUnitReady(1))
		})
	}
}

// TestWaitingLoginEndsWithTheServer has an address with so many failures that a login from it waits
// for minutes.
func TestWaitingLoginEndsWithTheServer(t *testing.T) {
	core, logs := observer.New(zapcore.DebugLevel)
	s := start(t, func(o *options) {
		o.Log, o.Limits.LoginDelay = zap.New(core), time.Hour
	})
	s.FailLogins(netip.MustParseAddr("127.0.0.1"), 20)
	waiting := tt.MustDial(t, s.addr)
	require.NoError(t, waiting.SendLogin(tt.LoginID{Tag: 1},
		tt.LoginPDU{Raw: []byte("InitiatorName=a\x00")}))
	testtool.Eventually(t, func() bool {
		return logs.FilterMessageSnippet("held up").Len() == 1
	}, "it waits")
	require.NoError(t, s.Close())
	require.NoError(t, waiting.ExpectClosed())
}

// TestInitiatorsThatTakeNothing: the sessions of one address ask for data, and take none of it,
// until the memory is in use. An initiator of another address still gets its data, and the rest of
// their long reads takes little beyond the limit.
func TestInitiatorsThatTakeNothing(t *testing.T) {
	const limit, sessions = 16 << 20, 80
	s := start(t, func(o *options) { o.Shared.Memory = limit })
	other := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: "iqn.2026-01.test:other"}, 1)
	for i := range sessions {
		c, nc := s.loginFrom(t, "127.0.0.2", tt.LoginOptions{ISID: [6]byte{0x80, 0, byte(i)}})
		require.NoError(t, nc.(*net.TCPConn).SetReadBuffer(4096))
		for c.MaxCmdSN-c.CmdSN < 1<<31 {
			c.MustStart(t, tt.Read10(1, 0, 8192))
		}
	}
	testtool.Eventually(t, func() bool { return s.MemoryInUse() > limit-512<<10 },
		"the memory is in use: %d", func() any { return s.MemoryInUse() })
	for range 100 {
		other.MustGood(t, tt.Read10(1, 0, 512))
		require.Less(t, s.MemoryInUse(), int64(limit+limit/4+sessions*(128<<10)))
	}
}

// TestPingFlood sends requests that are answered at once, faster than the target handles them. The
// answers go out meanwhile, and do not pile up until the initiator pauses.
func TestPingFlood(t *testing.T) {
	s := start(t)
	nc := testtool.Must(net.Dial("tcp", s.addr.String()))(t)
	defer nc.Close()
	c := testtool.Must(tt.NewConn(nc).Login(tt.LoginOptions{}))(t)
	require.NoError(t, nc.SetDeadline(time.Time{}))
	received := make(chan struct{})
	go func() {
		defer close(received)
		_, _ = io.Copy(io.Discard, nc)
	}()
	flood := bytes.Repeat(c.Bytes(&pdu.NOPOut{Immediate: true, TaskTag: 1,
		TransferTag: pdu.ReservedTag, CmdSN: c.CmdSN}, nil), 40000)
	sent := testtool.Go(func() error {
		for range 10 {
			if _, err := nc.Write(flood); err != nil {
				return err
			}
		}
		return nil
	})
	most := 0
	for done := false; !done; {
		select {
		case err := <-sent:
			require.NoError(t, err)
			done = true
		default:
			most = max(most, s.Queued())
			runtime.Gosched()
		}
	}
	t.Logf("%d bytes were queued at most", most)
	require.Less(t, most, 1<<20)
	require.NoError(t, nc.Close())
	<-received
}

// TestOneNameFromTwoHosts logs in with one name, first from one address and then from two. Only the
// second case gets a warning.
func TestOneNameFromTwoHosts(t *testing.T) {
	core, logs := observer.New(zapcore.WarnLevel)
	s := start(t, func(o *options) {
		o.Log, o.LUNs[0].Access = zap.New(core), serving.AccessWriteExclusive
	})
	use := func(host string, isid byte) {
		c, _ := s.loginFrom(t, host, tt.LoginOptions{ISID: [6]byte{0x80, isid}})
		c.MustGood(t, tt.Read10(1, 0, 1))
	}
	use("127.0.0.1", 1)
	use("127.0.0.1", 2)
	require.Empty(t, logs.All(), "two ports of one address are one host")
	use("127.0.0.2", 3)
	use("127.0.0.2", 4)
	require.Len(t, logs.All(), 1)
	m := logs.All()[0].ContextMap()
	require.Equal(t, tt.DefaultInitiator, m["initiator"])
	require.ElementsMatch(t, []any{"127.0.0.1", "127.0.0.2"}, m["addresses"])
}
