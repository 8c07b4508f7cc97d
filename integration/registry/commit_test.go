package registry

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/nbd"
	"kubevirt.io/disk/serving"
)

// TestCommit stores what a guest has written to a streamed disk as an image: what differs from the
// image that it came from, and the whole disk. While the guest uses the disk, that is refused.
func TestCommit(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry")
	raw, _ := rig.NewFullDisk(t)
	w := rig.NewWatchedRegistry(t)
	insecure := "--insecure-registry=" + w.Proxy
	rig.MustRun(t, nil, "push", "--base=none", insecure, raw, w.Proxy+"/vm/fedora:42")
	whole := w.Received.Swap(0)
	socket := filepath.Join(t.TempDir(), "nbd.sock")
	d := rig.Start(t, streaming(t.TempDir(), w.Proxy, "copy-on-write", "--nbd=unix:"+socket))
	defer d.Stop()

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
		_, err := guest.WriteAt(t.Context(), p, off/512*512)
		require.NoError(t, err)
	}
	require.NoError(t, guest.Flush())
	uri := "nbd+unix:///?socket=" + socket
	commit := []string{"commit", insecure, uri, w.Proxy + "/vm2/fedora:43",
		"--onto=" + w.Proxy + "/vm/fedora:42"}
	r := rig.Run(t, nil, commit...)
	require.Equal(t, 1, r.Status, "%s", r)
	require.Contains(t, r.Output, "is in use by", "%s", r)
	require.NoError(t, guest.Close())

	w.Received.Store(0)
	first := rig.MustRun(t, nil, commit...)
	require.Less(t, w.Received.Load(), whole/10)
	require.Equal(t, pushedDigest.FindString(first.Output),
		pushedDigest.FindString(rig.MustRun(t, nil, commit...).Output))
	rig.MustRun(t, nil, "commit", insecure, uri, w.Proxy+"/flat/fedora:43", "--flat", "--base=none")
	want := filepath.Join(t.TempDir(), "want.raw")
	require.NoError(t, os.WriteFile(want, content, 0o644))
	for _, repository := range []string{"/vm2/fedora:43", "/flat/fedora:43"} {
		got := filepath.Join(t.TempDir(), "got.raw")
		rig.MustRun(t, nil, "pull", insecure, w.Proxy+repository, got)
		rig.SameFile(t, want, got)
	}

	// The next version has all that the guest has written, on the layers that the disk came from.
	guest, err = nbd.OpenRemote(t.Context(), nbd.RemoteOptions{
		Address: serving.SocketPrefix + socket})
	require.NoError(t, err)
	next := bytes.Repeat([]byte("the next version"), 256)
	copy(content[15<<20:], next)
	_, err = guest.WriteAt(t.Context(), next, 15<<20)
	require.NoError(t, err)
	require.NoError(t, guest.Close())
	layers := func(tag string) int { return len(layerSizes(t, w, "vm2/fedora", tag)) }
	for flag, tag := range map[string]string{"": "44", "--squash": "45"} {
		w.Received.Store(0)
		rig.MustRun(t, nil,
			strings.Fields("commit "+insecure+" "+uri+" "+w.Proxy+"/vm2/fedora:"+tag+
				" --onto="+w.Proxy+"/vm2/fedora:43 "+flag)...)
		require.Less(t, w.Received.Load(), whole/10)
		require.NoError(t, os.WriteFile(want, content, 0o644))
		got := filepath.Join(t.TempDir(), "got.raw")
		rig.MustRun(t, nil, "pull", insecure, w.Proxy+"/vm2/fedora:"+tag, got)
		rig.SameFile(t, want, got)
	}
	require.Equal(t, layers("43")+2, layers("44"))
	require.Equal(t, layers("43"), layers("45"))
}
