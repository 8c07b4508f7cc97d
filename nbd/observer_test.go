package nbd

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// recorded is an observer that remembers what it was told.
type recorded struct {
	serving.Observer
	mu   sync.Mutex
	told []any
}

func (r *recorded) note(what any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.told = append(r.told, what)
}

func (r *recorded) LoginAccepted(e serving.LoginEvent)  { r.note(e) }
func (r *recorded) LoginRefused(e serving.LoginEvent)   { r.note(e) }
func (r *recorded) SessionEnded(e serving.SessionEvent) { r.note(e) }
func (r *recorded) RequestDone(e serving.RequestEvent) {
	e.Duration = min(e.Duration, 1)
	r.note(e)
}

// TestTheObserverIsTold of sessions and of each request, as by every front end.
func TestTheObserverIsTold(t *testing.T) {
	v := serve(t, 1, nil)
	r := &recorded{}
	v.Server.disks.Observer = r
	c := v.open(t, "disk1.raw", structured)
	c.writeAt(0, make([]byte, 4096))
	c.readAt(512, 1024)
	require.NoError(t, c.Close())
	name := "unix:" + v.socket
	eventually(t, "the session has ended", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.told) == 4
	})
	require.Equal(t, "disk1.raw", r.told[0].(serving.LoginEvent).Target)
	require.Equal(t, name, r.told[0].(serving.LoginEvent).Client)
	require.Equal(t, []any{
		serving.RequestEvent{Client: name, Number: 1, Op: serving.OpWrite, Bytes: 4096,
			Duration: 1},
		serving.RequestEvent{Client: name, Number: 1, Op: serving.OpRead, Bytes: 1024,
			Duration: 1},
	}, r.told[1:3])
	require.Equal(t, "connection_closed", r.told[3].(serving.SessionEvent).Reason)

	r.told = nil
	c = v.dial(t)
	require.NoError(t, testtool.Err(c.Write([]byte("GET / HTTP/1.1\r\n\r\n"))))
	eventually(t, "it is refused", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.told) == 1
	})
	require.Equal(t, "nbd_protocol_error", r.told[0].(serving.LoginEvent).Reason)
	_ = c.Close()
}
