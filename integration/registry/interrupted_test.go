package registry

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// pieceProxy is a proxy before a registry. It counts the bytes in pieces of blobs.
type pieceProxy struct {
	address string
	buffers bool // passes a piece on only when it is complete, like nginx by default
	passed  atomic.Int64

	mu sync.Mutex // held while a piece passes
	// before is called before each piece with the bytes that have passed so far, and returns
	// whether the sender is gone; guarded by mu
	before func(int64) (gone bool)
}

func newPieceProxy(t *testing.T, registry string, buffers bool) *pieceProxy {
	p := &pieceProxy{buffers: buffers}
	forward := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(&url.URL{Scheme: "http", Host: registry})
		r.Out.Host = r.In.Host
	}, ErrorHandler: func(http.ResponseWriter, *http.Request, error) {
		panic(http.ErrAbortHandler)
	}}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPatch {
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.before != nil && p.before(p.passed.Load()) {
				panic(http.ErrAbortHandler)
			}
			if p.buffers {
				piece, err := io.ReadAll(r.Body)
				if err != nil {
					panic(http.ErrAbortHandler)
				}
				r.Body = io.NopCloser(bytes.NewReader(piece))
			}
			r.Body = &rig.CountedBody{ReadCloser: r.Body, N: &p.passed}
		}
		forward.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	p.address = strings.TrimPrefix(server.URL, "http://")
	return p
}

// sent returns how many bytes have passed since the last call, and sets before.
func (p *pieceProxy) sent(before func(passed int64) (gone bool)) (n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.before = before
	return p.passed.Swap(0)
}

// watchedOutput can be read while a process writes it. It tells when a push ends because it was
// asked to.
type watchedOutput struct {
	mu     sync.Mutex
	text   bytes.Buffer  // guarded by mu
	ending chan struct{} // guarded by mu; closed and nil after that
}

func (o *watchedOutput) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n, err := o.text.Write(p)
	if o.ending != nil && strings.Contains(o.text.String(), "finishing the current piece") {
		close(o.ending)
		o.ending = nil
	}
	return n, err
}

func (o *watchedOutput) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// TestRegistryPushInterrupted ends a push in the middle of a blob: the next push sends the data
// that the registry does not have. A killed push continues if the proxy passes on whole pieces. A
// push that was asked to end continues in all cases. Version 2 of distribution refuses to continue
// after a part of a piece.
func TestRegistryPushInterrupted(t *testing.T) {
	rig.Need(t, "docker-registry")
	path := rig.Program(t)
	const size = 64 << 20
	raw := filepath.Join(t.TempDir(), "a.img")
	content := make([]byte, size)
	require.NoError(t, testtool.Err(rand.NewChaCha8([32]byte{1}).Read(content)))
	require.NoError(t, os.WriteFile(raw, content, 0o600))
	for name, signal := range map[string]syscall.Signal{"SIGKILL": syscall.SIGKILL,
		"SIGTERM": syscall.SIGTERM} {
		t.Run(name, func(t *testing.T) {
			s := rig.StartRegistry(t, false, "")
			p := newPieceProxy(t, s.Address, signal == syscall.SIGKILL)
			ref := p.address + "/vm/a:1"
			env := []string{"XDG_CACHE_HOME=" + filepath.Join(t.TempDir(), "cache")}
			args := []string{"push", "--base=none", "--compress=none", raw, ref,
				"--insecure-registry=" + p.address}

			ending := make(chan struct{})
			said := &watchedOutput{ending: ending}
			cmd := exec.Command(path, args...)
			cmd.Env, cmd.Stdout, cmd.Stderr = rig.ClientEnv(env...), said, said
			cmd.WaitDelay = rig.Timeout / 4
			signalled, started := false, make(chan struct{})
			p.sent(func(passed int64) (gone bool) {
				// Do not stop at half: a piece may end in the middle of the disk, and other pieces
				// count, too.
				if signalled || passed <= size*5/8 {
					return signalled && signal == syscall.SIGKILL
				}
				signalled = true
				<-started
				_ = cmd.Process.Signal(signal)
				if signal == syscall.SIGTERM { // not before it knows that it should end
					select {
					case <-ending:
					case <-time.After(rig.Timeout): // the test fails by what is sent then
					}
				}
				return signal == syscall.SIGKILL
			})
			require.NoError(t, cmd.Start())
			close(started)
			require.Error(t, cmd.Wait(), "%s", said)
			require.Greater(t, p.sent(nil), int64(size/2))

			r := rig.MustRun(t, env, args...)
			require.NotEmpty(t, pushedDigest.FindString(r.Output))
			require.Less(t, p.sent(nil), int64(size/2))
			require.NotContains(t, said.String()+r.Output, "_state=", "who has it can send")

			out := filepath.Join(t.TempDir(), "out.raw")
			rig.MustRun(t, env, "pull", ref, out, "--insecure-registry="+p.address)
			rig.SameFile(t, raw, out)
		})
	}
}
