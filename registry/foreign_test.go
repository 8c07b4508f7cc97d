package registry

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// TestForeign: images of other programs are pulled and pushed where that is allowed. Otherwise, as
// where they would be served, the error says how to convert them.
func TestForeign(t *testing.T) {
	testtool.Need(t, "qemu-img")
	raw := append(noise(99, 3<<20), make([]byte, 4<<20)...)
	dir, tmp := t.TempDir(), t.TempDir()
	t.Setenv("TMPDIR", tmp)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "raw"), raw, 0o644))
	allowed := image.Options{Foreign: true}
	for name, format := range map[string]string{"box.vhdx": "vhdx", "box.vmdk": "vmdk"} {
		qemuImg(t, dir, "convert", "-f", "raw", "-O", format, "raw", name)
		path := filepath.Join(dir, name)
		content := bytesOf(t, path)
		for title, content := range map[string][]byte{name: content,
			name + ".gz": gzipped(t, content),
			"box.tar":    packtest.Tar(t, packtest.File{Name: name, Data: content})} {
			s := store{}
			ref := layoutOf(t, s, artifactOf(t, s, orasLayer(s, title, content)))
			c := newClient(t, transport.Options{})
			brings(t, c, ref, PullOptions{Image: allowed}, raw)
			var out bytes.Buffer
			_, _, err := c.Pull(t.Context(), ref, "-", PullOptions{Image: allowed, Stdout: &out})
			require.NoError(t, err, title)
			require.True(t, bytes.Equal(raw, out.Bytes()), title)
			to := t.TempDir()
			_, _, err = c.Pull(t.Context(), ref, to, PullOptions{Image: allowed})
			require.NoError(t, err, title)
			onlyFile(t, to, "box.raw", raw)
			to, err = pull(t, ref, PullOptions{})
			require.ErrorContains(t, err, "\"kubevirt-disk convert ", title)
			emptyDir(t, to)
		}
		s := store{}
		ref := layoutOf(t, s, artifactOf(t, s, orasLayer(s, name, content)))
		brings(t, newClient(t, transport.Options{}), ref,
			PullOptions{Image: allowed, Original: true}, content)
		cut := layoutOf(t, s, artifactOf(t, s, orasLayer(s, name, content[:len(content)/2])))
		to, err := pull(t, cut, PullOptions{Image: allowed})
		require.ErrorContains(t, err, "is a damaged")
		emptyDir(t, to)

		m := newMemory(t)
		for _, opt := range []PushOptions{{Base: BaseNone, CompressRaw: "zstd"}, {Artifact: true}} {
			opt.Image = allowed
			pushes(t, m.client(t), []string{path}, m.ref(t, "vm/a:1"), opt)
			brings(t, m.client(t), m.ref(t, "vm/a:1"), PullOptions{}, raw)
		}
		_, err = m.client(t).Push(t.Context(), []string{path}, m.ref(t, "vm/a:2"),
			PushOptions{Base: BaseNone})
		require.ErrorContains(t, err, "kubevirt-disk convert")
		emptyDir(t, tmp)
	}
	// Only the end of a fixed VHD image tells what it is.
	qemuImg(t, dir, "convert", "-f", "raw", "-O", "vpc", "-o", "subformat=fixed,force_size=on",
		"raw", "fixed.img")
	fixed := bytesOf(t, filepath.Join(dir, "fixed.img"))
	for title, content := range map[string][]byte{"fixed.vhd": fixed,
		"fixed.img.gz": gzipped(t, fixed)} {
		s := store{}
		ref := layoutOf(t, s, artifactOf(t, s, orasLayer(s, title, content)))
		c := newClient(t, transport.Options{})
		brings(t, c, ref, PullOptions{Image: allowed}, raw)
		brings(t, c, ref, PullOptions{Image: allowed, Original: true}, fixed)
		to, err := pull(t, ref, PullOptions{})
		require.ErrorContains(t, err, "kubevirt-disk convert ")
		emptyDir(t, to)
	}
}
