package target_test

import (
	"context"
	"errors"
	"net"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target"
)

func TestOptions(t *testing.T) {
	zero, _ := newLUN(0, 1)
	limits := func(l target.Limits) options { return options{Options: target.Options{Limits: l}} }
	for _, c := range []struct {
		name, want string
		opt        options
	}{
		{"LUN 0", "LUN 0: a LUN number is 1 to 16383", options{LUNs: []serving.Options{zero}}},
		{"long vendor", "vendor", options{Options: target.Options{Vendor: "123456789"}}},
		{"sessions without a handle", "handles for 65535 sessions",
			limits(target.Limits{MaxConnections: 65536})},
		{"negative limit", "CommandWindow", limits(target.Limits{CommandWindow: -1})},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := c.opt.serve()
			require.ErrorContains(t, err, c.want)
		})
	}
	_, err := target.New(target.Options{})
	require.ErrorContains(t, err, "needs the disks")
}

// TestCloseAsServingBegins closes a server just as it begins to serve. The race detector finds
// faults.
func TestCloseAsServingBegins(t *testing.T) {
	for range 300 {
		srv, err := target.New(target.Options{Disks: serving.New(serving.Config{})})
		require.NoError(t, err)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		served := make(chan error, 1)
		go func() { served <- srv.Serve(l) }()
		runtime.Gosched()
		require.NoError(t, srv.Close())
		require.ErrorIs(t, <-served, target.ErrServerClosed)
	}
}

func TestServeAfterClose(t *testing.T) {
	s := start(t)
	require.NoError(t, s.Shutdown(context.Background()))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.ErrorIs(t, s.Serve(l), target.ErrServerClosed)
	_, err = l.Accept()
	require.True(t, errors.Is(err, net.ErrClosed), "Serve closes its listener")
	late, _ := newLUN(3, 3)
	require.ErrorIs(t, s.inUse.Add(late), target.ErrServerClosed)
}
