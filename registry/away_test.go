package registry

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// longWait is far longer than what is expected, and far shorter than the timeout of these clients.
const longWait = 40 * time.Second

// TestNobodyAnswers: a registry that refuses connections from the beginning is soon an error, and
// the first warning says so at once.
func TestNobodyAnswers(t *testing.T) {
	ref := parsed(t, fmt.Sprintf("127.0.0.1:%d/vm/a:1", testtool.Must(peers.FreePort())(t)))
	file := filepath.Join(t.TempDir(), "a.raw")
	require.NoError(t, os.WriteFile(file, make([]byte, 4096), 0o600))
	for what, work := range map[string]func(context.Context, *Client) error{
		"pull": func(ctx context.Context, c *Client) error {
			_, _, err := c.Pull(ctx, ref, filepath.Join(t.TempDir(), "a.raw"), PullOptions{})
			return err
		},
		"push": func(ctx context.Context, c *Client) error {
			_, err := c.Push(ctx, []string{file}, ref, PushOptions{Base: BaseNone})
			return err
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			var mu sync.Mutex
			var warned []string
			began := time.Now()
			err := work(t.Context(), newClient(t, transport.Options{Timeout: time.Hour,
				FirstTimeout: 2 * time.Second, Warn: func(text string) {
					mu.Lock()
					defer mu.Unlock()
					warned = append(warned, text)
				}}))
			require.Less(t, time.Since(began), longWait)
			require.ErrorContains(t, err, "without any answer")
			require.ErrorContains(t, err, ref.Host())
			require.ErrorContains(t, err, "connection refused; check the name and the port")
			require.Contains(t, warned[0], "connection refused; next try in ")
		})
	}
}

// TestRegistryRestarts: a registry that has answered once may be away for longer than one that
// never did.
func TestRegistryRestarts(t *testing.T) {
	l := newLying(t)
	content := noise(27, 1<<20)
	l.NewImage(t, content)
	opt := l.options()
	opt.FirstTimeout = 10 * time.Millisecond
	const away = 500 * time.Millisecond
	l.Faults = []fault{func(_ http.ResponseWriter, r *http.Request, _ []byte) bool {
		_ = l.Server.Listener.Close()
		time.AfterFunc(away, func() {
			again, err := net.Listen("tcp", l.Host())
			if err != nil {
				t.Error(err)
				return
			}
			go func() { _ = l.Server.Config.Serve(again) }()
		})
		panic(http.ErrAbortHandler)
	}}
	var mu sync.Mutex
	var warned []string
	opt.Warn = func(text string) {
		mu.Lock()
		defer mu.Unlock()
		warned = append(warned, text)
	}
	brings(t, newClient(t, opt), l.ref(t, "vm/a:1"), PullOptions{}, content)
	require.Contains(t, fmt.Sprint(warned), "connection refused")
}
