package targettest_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/target"
	. "kubevirt.io/disk/target/targettest"
)

const (
	diskSize = 64 << 20 // bytes of each LUN

	user, password             = "fedora", "correct horse 1"
	targetUser, targetPassword = "kubevirt", "battery staple 2"
)

// server is a target under test, with LUN 1 and 2.
type server struct {
	*target.Server
	addr   net.Addr
	disk   *disktest.Fault // LUN 1
	seen   *observer
	served chan error // the result of Serve
}

// start serves a target until the test ends. change may change the options.
func start(t testing.TB, change ...func(*target.Options)) *server {
	t.Helper()
	s := &server{disk: disktest.NewFault(disktest.NewMemory(diskSize)), seen: &observer{},
		served: make(chan error, 1)}
	opt := target.Options{
		LUNs: []target.LUN{
			{Number: 1, Name: "one.raw", Disk: s.disk, Identity: identity(1),
				Access: target.AccessWriteShared},
			{Number: 2, Name: "two.raw", Disk: disktest.NewMemory(diskSize), Identity: identity(2),
				Access: target.AccessWriteShared},
		},
		Observer: s.seen,
	}
	for _, c := range change {
		c(&opt)
	}
	if opt.Limits.LoginDelay == 0 {
		// many tests fail to authenticate, more than once
		opt.Limits.LoginDelay = time.Millisecond
	}
	var err error
	s.Server, err = target.New(opt)
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s.addr = l.Addr()
	go func() { s.served <- s.Serve(l) }()
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		require.Zero(t, s.seen.count("panic"), "the target caught a panic")
	})
	return s
}

func identity(n byte) disk.Identity {
	return disk.Identity{Serial: "serial-" + string('0'+n), NAA: [8]byte{0x30, 7: n}}
}

// withCHAP requires authentication. change may change the configuration.
func withCHAP(change ...func(*chap.Config)) func(*target.Options) {
	return func(o *target.Options) {
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
func limits(l target.Limits) func(*target.Options) {
	return func(o *target.Options) { o.Limits = l }
}

// good returns the right credential.
func good() *CHAP { return &CHAP{Username: user, Password: password} }

// login logs in and clears the unit attentions of LUN 1 and 2.
func (s *server) login(t testing.TB, o LoginOptions) *Session {
	t.Helper()
	return MustLogin(t, s.addr, o, 1, 2)
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
	done := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		done <- s.Shutdown(ctx)
	}()
	return done
}

// eventually waits for a condition that another goroutine brings about.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	require.Eventually(t, condition, time.Minute, 2*time.Millisecond, what)
}

// pattern returns data in which every block differs.
func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i) ^ byte(i/BlockSize)*7 ^ seed
	}
	return b
}

// observer counts the events that the target reports.
type observer struct {
	mu     sync.Mutex
	counts map[string]int
}

func (o *observer) add(what string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.counts == nil {
		o.counts = make(map[string]int)
	}
	o.counts[what]++
}

func (o *observer) count(what string) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.counts[what]
}

// forget removes the count of an event that the test has caused.
func (o *observer) forget(what string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.counts, what)
}

func (o *observer) LoginAccepted(target.LoginEvent) { o.add("accepted") }
func (o *observer) LoginRefused(e target.LoginEvent) {
	o.add("refused")
	o.add("refused " +
		e.Reason)
}
func (o *observer) SessionEnded(e target.SessionEvent) {
	o.add("ended")
	o.add("ended " +
		e.Reason)
}
func (o *observer) CommandDone(target.CommandEvent) { o.add("command") }
func (o *observer) PDURejected(reason string)       { o.add("rejected " + reason) }
func (o *observer) PanicCaught()                    { o.add("panic") }

// errDisk is the error of a broken disk.
var errDisk = errors.New("the disk is broken")
