package target_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target"
	. "kubevirt.io/disk/target/targettest"
)

const (
	diskSize = 64 << 20 // bytes of each LUN

	user, password             = "fedora", "correct horse 1"
	targetUser, targetPassword = "kubevirt", "battery staple 2"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// server is a target under test, with LUN 1 and 2.
type server struct {
	*target.Server
	inUse  *serving.Disks
	addr   net.Addr
	disks  [2]*disktest.Fault // of LUN 1 and 2
	seen   *events
	served chan error // the result of Serve, then closed
	bugs   int        // panics that the test causes; any other one fails it
}

// options are those of a server and of its disks.
type options struct {
	target.Options
	Shared serving.Config
	LUNs   []serving.Options
}

// serve makes a server of the options, and adds its disks.
func (o *options) serve() (*target.Server, error) {
	o.Shared.Log = o.Log
	o.Disks = serving.New(o.Shared)
	srv, err := target.New(o.Options)
	for i := 0; err == nil && i < len(o.LUNs); i++ {
		err = o.Disks.Add(o.LUNs[i])
	}
	return srv, err
}

// start serves a target until the test ends. change may change the options.
func start(t testing.TB, change ...func(*options)) *server {
	t.Helper()
	return startOn(t, testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t), change...)
}

func startOn(t testing.TB, l net.Listener, change ...func(*options)) *server {
	t.Helper()
	s := &server{seen: &events{}, served: make(chan error, 1)}
	opt := options{Shared: serving.Config{Observer: s.seen}}
	for i, name := range []string{"one.raw", "two.raw"} {
		s.disks[i] = disktest.NewFault(disktest.NewMemory(diskSize))
		opt.LUNs = append(opt.LUNs, serving.Options{Number: uint16(i + 1), Name: name,
			Disk: s.disks[i], Identity: identity(byte(i + 1)), Access: serving.AccessWriteShared})
	}
	for _, c := range change {
		c(&opt)
	}
	if opt.Limits.LoginDelay == 0 {
		// many tests fail to authenticate, more than once
		opt.Limits.LoginDelay = time.Millisecond
	}
	s.Server = testtool.Must(opt.serve())(t)
	s.inUse = opt.Disks
	s.addr = l.Addr()
	go func() {
		s.served <- s.Serve(l)
		close(s.served)
	}()
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		if err, ok := <-s.served; ok { // the test has not taken it
			require.ErrorIs(t, err, target.ErrServerClosed)
		}
		require.Equal(t, s.bugs, s.seen.count("panic"), "panics caught")
		require.Zero(t, s.Working(), "no reader is left")
	})
	return s
}

func identity(n byte) disk.Identity {
	return disk.Identity{Serial: "serial-" + string('0'+n), NAA: [8]byte{0x30, 7: n}}
}

// withCHAP requires authentication. change may change the configuration.
func withCHAP(change ...func(*chap.Config)) func(*options) {
	return func(o *options) {
		cfg := chap.Config{Initiator: chap.Credential{Username: user,
			Secret: chap.NewSecret(password)}}
		for _, c := range change {
			c(&cfg)
		}
		auth, err := chap.NewAuthenticator(cfg)
		if err != nil {
			panic(err)
		}
		o.Auth = auth
	}
}

func mutual(c *chap.Config) {
	c.Target = chap.Credential{Username: targetUser, Secret: chap.NewSecret(targetPassword)}
}

// limits sets limits of the server.
func limits(l target.Limits) func(*options) {
	return func(o *options) { o.Limits = l }
}

// good returns the right credential.
func good() *CHAP { return &CHAP{Username: user, Password: password} }

// login logs in and clears the unit attentions of LUN 1 and 2.
func (s *server) login(t testing.TB, o LoginOptions) *Session {
	t.Helper()
	return MustLogin(t, s.addr, o, 1, 2)
}

// loginFrom logs in from an address of this machine, clears the unit attentions of LUN 1, and also
// returns the connection.
func (s *server) loginFrom(t testing.TB, host string, o LoginOptions) (*Session, net.Conn) {
	t.Helper()
	from := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(host)}}
	nc := testtool.Must(from.Dial("tcp", s.addr.String()))(t)
	t.Cleanup(func() { _ = nc.Close() })
	c := testtool.Must(NewConn(nc).Login(o))(t)
	require.NoError(t, testtool.Err(c.ClearAttention(1)))
	return c, nc
}

// refused checks that a login is refused with this status and that the connection closes.
func (s *server) refused(t testing.TB, o LoginOptions, status uint16) {
	t.Helper()
	c := MustDial(t, s.addr)
	_, err := c.Login(o)
	var le *LoginError
	require.ErrorAs(t, err, &le)
	require.Equal(t, status, le.Status, "status %04x, want %04x", le.Status, status)
	require.NoError(t, c.ExpectClosed())
}

// works checks that a new session can still write and read.
func (s *server) works(t testing.TB) {
	t.Helper()
	o := LoginOptions{Initiator: DefaultInitiator + ".check", ISID: [6]byte{0x80, 9}}
	sess := MustLogin(t, s.addr, o, 2)
	data := bytes.Repeat([]byte{0xc4}, 4*BlockSize)
	sess.MustGood(t, Write10(2, 100, data))
	require.Equal(t, data, sess.MustGood(t, Read10(2, 100, 4)).Data)
	require.NoError(t, sess.Close())
}

// shutdown starts a shutdown in the background. The channel gets its result.
func (s *server) shutdown(timeout time.Duration) <-chan error {
	done := testtool.Go(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		return s.Shutdown(ctx)
	})
	return done
}

// pattern returns data in which every block differs.
func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i) ^ byte(i/BlockSize)*7 ^ seed
	}
	return b
}

// events is an observer that counts what the target reports.
type events struct {
	mu     sync.Mutex
	counts map[string]int // guarded by mu
}

func (e *events) add(all ...string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.counts == nil {
		e.counts = make(map[string]int)
	}
	for _, one := range all {
		e.counts[one]++
	}
}

func (e *events) count(what string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.counts[what]
}

func (e *events) LoginAccepted(serving.LoginEvent)  { e.add("accepted") }
func (e *events) LoginRefused(l serving.LoginEvent) { e.add("refused", "refused "+l.Reason) }
func (e *events) RequestDone(serving.RequestEvent)  { e.add("command") }
func (e *events) MessageRejected(reason string)     { e.add("rejected", "rejected "+reason) }
func (e *events) PanicCaught()                      { e.add("panic") }

func (e *events) SessionEnded(s serving.SessionEvent) {
	e.add("ended", "ended "+s.Reason)
}

// errDisk is the error of a broken disk.
var errDisk = errors.New("the disk is broken")
