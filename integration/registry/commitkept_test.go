package registry

import (
	"bytes"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/nbd"
	"kubevirt.io/disk/serving"
)

// TestCommitKept stores a persistent disk as an image while its guest uses it, a snapshot of it,
// and the same disks when no daemon runs. Each way has the same result, and none changes the disk.
func TestCommitKept(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry")
	raw, _ := rig.NewFullDisk(t)
	w := rig.NewWatchedRegistry(t)
	insecure, old := "--insecure-registry="+w.Proxy, w.Proxy+"/vm/fedora:42"
	rig.MustRun(t, nil, "push", "--base=none", insecure, raw, old)
	whole := w.Received.Swap(0)
	dir := t.TempDir()
	socket, kept := filepath.Join(dir, "nbd.sock"), filepath.Join(dir, "kept")
	require.NoError(t, os.Mkdir(kept, 0o700))
	state := t.TempDir()
	c := streaming(t.TempDir(), w.Proxy, "copy-on-write", "--nbd=unix:"+socket,
		"--persistent-dir="+kept)
	c.StateDir = state
	d := rig.Start(t, c)
	content := []byte(rig.ReadFile(t, raw))
	guest := testtool.Must(nbd.OpenRemote(t.Context(), nbd.RemoteOptions{
		Address: serving.SocketPrefix + socket}))(t)
	write := func(p []byte, off int64) {
		copy(content[off:], p)
		require.NoError(t, testtool.Err(guest.WriteAt(t.Context(), p, off)))
	}
	ask := func(args ...string) rig.Result {
		t.Helper()
		return rig.Run(t, []string{"WORK_DIR=" + filepath.Join(state, "work")}, args...)
	}
	stored := func(args ...string) string {
		t.Helper()
		r := ask(append([]string{"commit", insecure}, args...)...)
		require.Zero(t, r.Status, "%s", r)
		return pushedDigest.FindString(r.Output)
	}
	is := func(ref string, want []byte) {
		t.Helper()
		got := filepath.Join(t.TempDir(), "got.raw")
		rig.MustRun(t, nil, "pull", insecure, ref, got)
		require.True(t, bytes.Equal(want, []byte(rig.ReadFile(t, got))), ref)
	}
	write(bytes.Repeat([]byte("first!"), 512), 512)
	write(make([]byte, 64<<10), 7<<20)
	require.Zero(t, ask("snapshot", "create", "1", "before").Status)
	first := bytes.Clone(content)
	write(bytes.Repeat([]byte("second"), 2560), 20<<20+4096)

	// The guest goes on, and nothing is left of the snapshot that was taken.
	repository := w.Proxy + "/vm2/fedora:"
	w.Sent.Store(0)
	now := stored("1", repository+"now", "--onto="+old)
	before := stored(old+"@before", repository+"before", "--onto="+old)
	require.Less(t, w.Received.Load(), whole/5)
	require.Less(t, w.Sent.Load(), whole/2, "the daemon has fetched the disk to read all of it")
	require.NotEqual(t, now, before)
	require.Equal(t, before, stored(old+"@before", repository+"itself"),
		"the daemon knows what the disk was made of")
	is(repository+"now", content)
	is(repository+"before", first)
	flat := stored("1@before", repository+"flat", "--flat", "--base=none")
	is(repository+"flat", first)
	require.NotContains(t, ask("snapshot", "list").Output, "commit-")
	r := ask("commit", insecure, "1@never", repository+"x", "--onto="+old)
	require.Equal(t, 1, r.Status, "%s", r)
	require.Contains(t, r.Output, `"never"`)

	r = ask("commit", insecure, repository+"x", "--onto="+old, "--persistent-dir="+kept)
	require.Equal(t, 1, r.Status, "%s", r)
	require.Contains(t, r.Output, "is in use by")
	require.Contains(t, r.Output, "without --persistent-dir")
	require.NoError(t, guest.Close())
	d.Stop()

	files := func() map[string]string {
		all := map[string]string{}
		for _, e := range testtool.Must(os.ReadDir(kept))(t) {
			if strings.HasPrefix(e.Name(), "disk.img") && !e.IsDir() {
				all[e.Name()] = rig.ReadFile(t, filepath.Join(kept, e.Name()))
			}
		}
		maps.DeleteFunc(all, func(name, _ string) bool { // what each start writes
			return strings.HasSuffix(name, ".lock") || strings.HasSuffix(name, ".state") ||
				strings.HasSuffix(name, ".live")
		})
		return all
	}
	had, said := files(), filepath.Join(dir, "digest")
	require.NoError(t, os.WriteFile(said, nil, 0o600))
	offline := "--persistent-dir=" + kept
	require.Equal(t, now, stored(repository+"now2", "--onto="+old, offline, "--digest-file="+said))
	require.Equal(t, now+"\n", rig.ReadFile(t, said))
	require.Equal(t, before, stored("@before", repository+"before2", "--onto="+old, offline))
	require.Equal(t, flat, stored(old+"@before", repository+"flat2", "--flat", "--base=none",
		offline, "--image="+old))
	require.Equal(t, had, files())
	for want, args := range map[string][]string{
		"is not complete, and needs": {repository + "x", "--flat", "--base=none", offline},
		"has no disk \"x\"":          {"x", repository + "x", "--onto=" + old, offline},
		"is another image": {repository + "x", "--onto=" + old, offline,
			"--image=" + repository + "now"},
		"there is no disk.img": {repository + "x", "--onto=" + old,
			"--persistent-dir=" + t.TempDir()},
	} {
		r := ask(append([]string{"commit", insecure}, args...)...)
		require.Equal(t, 1, r.Status, "%s", r)
		require.Contains(t, r.Output, want)
	}

	// A disk that is complete needs no image, and is the same.
	c = streaming(t.TempDir(), w.Proxy, "clone", "--persistent-dir="+kept)
	d = rig.Start(t, c)
	d.Until("complete", func() bool { return d.Complete(1) })
	d.Stop()
	require.Equal(t, now, stored(repository+"now3", "--onto="+old, offline))
	require.Equal(t, flat, stored("@before", repository+"flat3", "--flat", "--base=none", offline))
}

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

	content := testtool.Must(os.ReadFile(raw))(t)
	guest := testtool.Must(nbd.OpenRemote(t.Context(), nbd.RemoteOptions{
		Address: serving.SocketPrefix + socket}))(t)
	for off, p := range map[int64][]byte{
		512: []byte("written by a guest"), 7 << 20: make([]byte, 64<<10),
		20<<20 + 4096: bytes.Repeat([]byte("and more "), 70),
	} {
		copy(content[off:], p)
		p = content[off/512*512 : (off+int64(len(p))+511)/512*512]
		require.NoError(t, testtool.Err(guest.WriteAt(t.Context(), p, off/512*512)))
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
	guest = testtool.Must(nbd.OpenRemote(t.Context(), nbd.RemoteOptions{
		Address: serving.SocketPrefix + socket}))(t)
	next := bytes.Repeat([]byte("the next version"), 256)
	copy(content[15<<20:], next)
	require.NoError(t, testtool.Err(guest.WriteAt(t.Context(), next, 15<<20)))
	require.NoError(t, guest.Close())
	layers := func(tag string) int { return len(w.Layers(t, "vm2/fedora", tag)) }
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

// TestRegistryOnto pushes a disk, changes two percent of it, and pushes that onto the first one, in
// another repository. Little is sent and fetched, for the push, which has a copy of the old file,
// and for a node that has the old version. The new image is pulled, streamed, and read by QEMU, as
// the disk that was pushed.
func TestRegistryOnto(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img")
	w := rig.NewWatchedRegistry(t)
	dir := t.TempDir()
	raw, old := filepath.Join(dir, "fedora.raw"), filepath.Join(dir, "old.raw")
	content := make([]byte, 48<<20)
	random := rand.NewChaCha8([32]byte{36})
	_, _ = random.Read(content)
	for i := range content { // only half of it, so that clusters can be compressed
		content[i] &= 0x0f
	}
	require.NoError(t, os.WriteFile(raw, content, 0o644))
	require.NoError(t, os.WriteFile(old, content, 0o644))
	insecure := "--insecure-registry=" + w.Proxy
	rig.MustRun(t, nil, "push", "--base=none", insecure, raw, w.Proxy+"/vm/fedora:42")
	whole := w.Received.Load()

	// A node has the old version.
	cache := t.TempDir()
	d := rig.Start(t, streaming(t.TempDir(), w.Proxy, "copy-on-write", "--cache-dir="+cache))
	rig.Same(t, old, d.URL(1))
	d.Stop()

	_, _ = random.Read(content[10<<20 : 10<<20+512<<10])
	_, _ = random.Read(content[30<<20+4096 : 30<<20+512<<10])
	clear(content[40<<20 : 40<<20+128<<10])
	require.NoError(t, os.WriteFile(raw, content, 0o644))
	was := filepath.Join(t.TempDir(), "fedora.qcow2")
	rig.MustRun(t, nil, "pull", insecure, "--format=original", w.Proxy+"/vm/fedora:42", was)
	w.Received.Store(0)
	w.Sent.Store(0)
	args := []string{"push", insecure, "--onto=" + w.Proxy + "/vm/fedora:42",
		"--onto-file=" + was, raw}
	pushed := rig.MustRun(t, nil, append(args, w.Proxy+"/vm2/fedora:43")...)
	sent, fetched := w.Received.Load(), w.Sent.Load()
	t.Logf("%d bytes sent and %d fetched; the whole disk took %d", sent, fetched, whole)
	require.Less(t, sent, whole/10)
	require.Less(t, fetched, whole/4)
	digest := pushedDigest.FindString(pushed.Output)
	again := rig.MustRun(t, nil, append(args, w.Proxy+"/vm3/fedora:43")...)
	require.Equal(t, digest, pushedDigest.FindString(again.Output))

	ref := w.Proxy + "/vm2/fedora:43"
	out := t.TempDir()
	rig.MustRun(t, nil, "pull", insecure, ref, filepath.Join(out, "new.raw"))
	rig.SameFile(t, raw, filepath.Join(out, "new.raw"))
	for _, name := range []string{"fedora.qcow2", "fedora.1.qcow2"} {
		rig.MustRun(t, nil, "pull", insecure, "--path="+name, "--format=original", ref,
			filepath.Join(out, name))
	}
	for _, args := range [][]string{
		{"check", "-f", "qcow2", filepath.Join(out, "fedora.1.qcow2")},
		{"compare", "-f", "qcow2", "-F", "raw", filepath.Join(out, "fedora.1.qcow2"), raw},
		{"compare", "-f", "qcow2", "-F", "raw", filepath.Join(out, "fedora.qcow2"), old},
	} {
		r := rig.Client(t, nil, "qemu-img", args...)
		require.Zero(t, r.Status, "%s", r)
	}
	// One file, where only that will do.
	rig.MustRun(t, nil, "push", "--base=none", insecure, filepath.Join(out, "new.raw"),
		w.Proxy+"/vm/flat:43")

	layers := w.Layers(t, "vm2/fedora", digest)
	differ := layers[len(layers)-1].Size
	w.Sent.Store(0)
	next := rig.Config{DiskDir: t.TempDir(), Args: []string{"--image=" + ref, insecure,
		"--copy-mode=copy-on-write", "--cache-dir=" + cache}}
	d = rig.Start(t, next)
	rig.Same(t, raw, d.URL(1))
	d.Stop()
	t.Logf("%d bytes fetched to start the new version, of which %d differ", w.Sent.Load(), differ)
	const headers = 2 * 2 * 16 << 10 // of two layers, which are compared with the index
	require.Less(t, (w.Sent.Load()-headers)*10, differ*12)
}
