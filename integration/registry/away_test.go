package registry

import (
	"errors"
	"io"
	"net/http"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

// TestRegistryAway: a command that a person waits for soon says that nobody answers. A daemon that
// starts before its registry waits for it.
func TestRegistryAway(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img")
	raw, qcow2 := newDisk(t)
	s := rig.StartRegistry(t, false, "")
	ref, insecure := s.Address+"/vm/fedora:42", "--insecure-registry="+s.Address
	rig.MustRun(t, nil, "push", "--base=none", insecure, qcow2, ref)
	s.Kill()
	c := streaming(t.TempDir(), s.Address, "copy-on-write")
	path := rig.Program(t)
	c.Binary = path
	pages := "127.0.0.1:" + rig.FreePort(t)
	c.Env = map[string]string{"METRICS_LISTEN": pages}

	type started struct {
		d   *rig.Daemon
		err error
	}
	serving := make(chan started, 1)
	go func() {
		d, err := rig.TryStart(t, c)
		serving <- started{d, err}
	}()
	var commands sync.WaitGroup
	for _, args := range [][]string{
		{"pull", ref, filepath.Join(t.TempDir(), "a.raw")},
		{"push", "--base=none", raw, ref},
		{"adapt", ref, "--to", t.TempDir(), "--kernel", raw, "--initrd", raw},
	} {
		commands.Go(func() {
			r := rig.Run(t, nil, append(args, insecure)...)
			assert.Equal(t, 1, r.Status)
			assert.Contains(t, r.Output, "connection refused; next try in ")
			assert.Contains(t, r.Output, "without any answer: asking "+s.Address)
		})
	}
	commands.Wait()
	for _, path := range []string{"/", "/readyz", "/status"} {
		res, err := http.Get("http://" + pages + path)
		require.NoError(t, err)
		text, err := io.ReadAll(res.Body)
		require.NoError(t, errors.Join(err, res.Body.Close()))
		require.Contains(t, string(text), "waits for the registry of "+ref, path)
		require.Contains(t, string(text), "connection refused", path)
	}
	s.Run(t)
	got := <-serving
	require.NoError(t, got.err)
	require.Contains(t, got.d.Output(), "next try in")
	rig.Same(t, raw, got.d.URL(1))
}
