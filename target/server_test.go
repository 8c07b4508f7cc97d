package target_test

import (
	"context"
	"errors"
	"net"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
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
		{"name of two lines", "target name", options{Options: target.Options{TargetName: "a\nb"}}},
		{"sessions without a handle", "handles for 65535 sessions",
			limits(target.Limits{MaxConnections: 65536})},
		{"negative limit", "CommandWindow", limits(target.Limits{CommandWindow: -1})},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.ErrorContains(t, testtool.Err(c.opt.serve()), c.want)
		})
	}
	require.ErrorContains(t, testtool.Err(target.New(target.Options{})), "needs the disks")
}

// TestCloseAsServingBegins closes a server just as it begins to serve. The race detector finds
// faults.
func TestCloseAsServingBegins(t *testing.T) {
	for range 300 {
		srv := testtool.Must(target.New(target.Options{Disks: serving.New(serving.Config{})}))(t)
		l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
		served := testtool.Go(func() error { return srv.Serve(l) })
		runtime.Gosched()
		require.NoError(t, srv.Close())
		require.ErrorIs(t, <-served, target.ErrServerClosed)
	}
}

func TestServeAfterClose(t *testing.T) {
	s := start(t)
	require.NoError(t, s.Shutdown(context.Background()))
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	require.ErrorIs(t, s.Serve(l), target.ErrServerClosed)
	_, err := l.Accept()
	require.True(t, errors.Is(err, net.ErrClosed), "Serve closes its listener")
	late, _ := newLUN(3, 3)
	require.ErrorIs(t, s.inUse.Add(late), target.ErrServerClosed)
}
