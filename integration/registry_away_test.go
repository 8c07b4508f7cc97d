package integration

import (
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestRegistryAway: a command that a person waits for soon says that nobody answers. A daemon that
// starts before its registry waits for it.
func TestRegistryAway(t *testing.T) {
	t.Parallel()
	requireTools(t, "docker-registry", "qemu-img")
	raw, qcow2 := newDisk(t)
	s := startRegistry(t, false, "")
	ref, insecure := s.address+"/vm/fedora:42", "--insecure-registry="+s.address
	mustDisk(t, nil, "push", "--base=none", insecure, qcow2, ref)
	s.kill()
	c := streaming(t.TempDir(), s.address, "copy-on-write")
	path, err := binary()
	require.NoError(t, err)
	c.binary = path

	type started struct {
		d   *daemon
		err error
	}
	serving := make(chan started, 1)
	go func() {
		d, err := tryStart(t, c)
		serving <- started{d, err}
	}()
	var commands sync.WaitGroup
	for _, args := range [][]string{
		{"pull", ref, filepath.Join(t.TempDir(), "a.raw")},
		{"push", "--base=none", raw, ref},
		{"adapt", ref, "--to", t.TempDir(), "--kernel", raw, "--initrd", raw},
	} {
		commands.Go(func() {
			r := kubevirtDisk(t, nil, append(args, insecure)...)
			assert.Equal(t, 1, r.status)
			assert.Contains(t, r.output, "connection refused; next try in ")
			assert.Contains(t, r.output, "without any answer: asking "+s.address)
		})
	}
	commands.Wait()
	s.run(t)
	got := <-serving
	require.NoError(t, got.err)
	require.Contains(t, got.d.Output(), "reads wait for a registry")
	sameDisk(t, got.d, 1, raw)
}
