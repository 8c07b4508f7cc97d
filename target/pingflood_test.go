package target_test

import (
	"bytes"
	"io"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/target/internal/pdu"
	tt "kubevirt.io/disk/target/targettest"
)

// TestPingFlood sends requests that are answered at once, faster than the target handles them. The
// answers go out meanwhile, and do not pile up until the initiator pauses.
func TestPingFlood(t *testing.T) {
	s := start(t)
	nc, err := net.Dial("tcp", s.addr.String())
	require.NoError(t, err)
	defer nc.Close()
	c, err := tt.NewConn(nc).Login(tt.LoginOptions{})
	require.NoError(t, err)
	require.NoError(t, nc.SetDeadline(time.Time{}))
	received := make(chan struct{})
	go func() {
		defer close(received)
		_, _ = io.Copy(io.Discard, nc)
	}()
	flood := bytes.Repeat(c.Bytes(&pdu.NOPOut{Immediate: true, TaskTag: 1,
		TransferTag: pdu.ReservedTag, CmdSN: c.CmdSN}, nil), 40000)
	sent := make(chan error, 1)
	go func() {
		for range 10 {
			if _, err := nc.Write(flood); err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
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
