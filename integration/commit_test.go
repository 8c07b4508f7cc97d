package integration

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/nbd"
	"kubevirt.io/disk/serving"
)

// TestCommit stores what a guest has written to a streamed disk as an image: what differs from the
// image that it came from, and the whole disk. While the guest uses the disk, that is refused.
func TestCommit(t *testing.T) {
	t.Parallel()
	requireTools(t, "docker-registry")
	raw, _ := newFullDisk(t)
	w := newWatchedRegistry(t)
	insecure := "--insecure-registry=" + w.proxy
	mustDisk(t, nil, "push", "--base=none", insecure, raw, w.proxy+"/vm/fedora:42")
	whole := w.received.Swap(0)
	socket := filepath.Join(t.TempDir(), "nbd.sock")
	d := start(t, streaming(t.TempDir(), w.proxy, "copy-on-write", "--nbd=unix:"+socket))
	defer d.stop()

	content, err := os.ReadFile(raw)
	require.NoError(t, err)
	guest, err := nbd.OpenRemote(t.Context(), nbd.RemoteOptions{
		Address: serving.SocketPrefix + socket})
	require.NoError(t, err)
	for off, p := range map[int64][]byte{
		512: []byte("written by a guest"), 7 << 20: make([]byte, 64<<10),
		20<<20 + 4096: bytes.Repeat([]byte("and more "), 70),
	} {
		copy(content[off:], p)
		p = content[off/512*512 : (off+int64(len(p))+511)/512*512]
		_, err := guest.WriteAt(p, off/512*512)
		require.NoError(t, err)
	}
	require.NoError(t, guest.Flush())
	uri := "nbd+unix:///?socket=" + socket
	commit := []string{"commit", insecure, uri, w.proxy + "/vm2/fedora:43",
		"--onto=" + w.proxy + "/vm/fedora:42"}
	r := kubevirtDisk(t, nil, commit...)
	require.Equal(t, 1, r.status, "%s", r)
	require.Contains(t, r.output, "is in use by", "%s", r)
	require.NoError(t, guest.Close())

	w.received.Store(0)
	first := mustDisk(t, nil, commit...)
	require.Less(t, w.received.Load(), whole/10)
	require.Equal(t, pushedDigest.FindString(first.output),
		pushedDigest.FindString(mustDisk(t, nil, commit...).output))
	mustDisk(t, nil, "commit", insecure, uri, w.proxy+"/flat/fedora:43", "--flat", "--base=none")
	want := filepath.Join(t.TempDir(), "want.raw")
	require.NoError(t, os.WriteFile(want, content, 0o644))
	for _, repository := range []string{"/vm2/fedora:43", "/flat/fedora:43"} {
		got := filepath.Join(t.TempDir(), "got.raw")
		mustDisk(t, nil, "pull", insecure, w.proxy+repository, got)
		sameFile(t, want, got)
	}

	// The next version has all that the guest has written, on the layers that the disk came from.
	guest, err = nbd.OpenRemote(t.Context(), nbd.RemoteOptions{
		Address: serving.SocketPrefix + socket})
	require.NoError(t, err)
	next := bytes.Repeat([]byte("the next version"), 256)
	copy(content[15<<20:], next)
	_, err = guest.WriteAt(next, 15<<20)
	require.NoError(t, err)
	require.NoError(t, guest.Close())
	layers := func(tag string) int { return len(layerSizes(t, w, "vm2/fedora", tag)) }
	for flag, tag := range map[string]string{"": "44", "--squash": "45"} {
		w.received.Store(0)
		mustDisk(t, nil, strings.Fields("commit "+insecure+" "+uri+" "+w.proxy+"/vm2/fedora:"+tag+
			" --onto="+w.proxy+"/vm2/fedora:43 "+flag)...)
		require.Less(t, w.received.Load(), whole/10)
		require.NoError(t, os.WriteFile(want, content, 0o644))
		got := filepath.Join(t.TempDir(), "got.raw")
		mustDisk(t, nil, "pull", insecure, w.proxy+"/vm2/fedora:"+tag, got)
		sameFile(t, want, got)
	}
	require.Equal(t, layers("43")+2, layers("44"))
	require.Equal(t, layers("43"), layers("45"))
}
