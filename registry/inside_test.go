package registry

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// TestInside: what an image has inside is told without fetching it, whether it is streamed or not.
func TestInside(t *testing.T) {
	testtool.Need(t, "qemu-img")
	dir := t.TempDir()
	raw := append(noise(41, 40<<20), make([]byte, 1<<20)...) // more than a layer that is read whole
	require.NoError(t, os.WriteFile(filepath.Join(dir, "b.raw"), raw, 0o644))
	qemuImg(t, dir, "create", "-f", "qcow2", "below.qcow2", "1G")
	qemuImg(t, dir, "create", "-f", "qcow2", "-b", "below.qcow2", "-F", "qcow2", "a.qcow2", "2G")
	m := newMemory(t)
	pushes(t, m.client(t), []string{filepath.Join(dir, "a.qcow2"), filepath.Join(dir, "b.raw")},
		m.ref(t, "vm/a:1"), PushOptions{Base: BaseNone})

	look := func(c *Client, ref transport.Reference) *Inside {
		t.Helper()
		return testtool.Must(c.Inside(t.Context(), ref, t.TempDir()))(t)
	}
	all := look(m.client(t), m.ref(t, "vm/a:1"))
	require.Empty(t, all.Whole)
	require.Len(t, all.Disks, 2)
	require.Equal(t, "a.qcow2", all.Disks[0].Name)
	require.Equal(t, image.FormatQcow2, all.Disks[0].Format)
	require.EqualValues(t, 2<<30, all.Disks[0].VirtualSize)
	require.Equal(t, "below.qcow2", all.Disks[0].BackingChain[0].Name)
	require.Equal(t, "b.raw", all.Disks[1].Name)
	require.EqualValues(t, len(raw), all.Disks[1].VirtualSize)

	qcow2 := bytesOf(t, filepath.Join(dir, "a.qcow2"))
	local := newClient(t, transport.Options{})
	for _, c := range []struct {
		title   string
		content []byte
		name    string
		format  image.Format
		size    int64 // of the disk; 0: only known when it is fetched
	}{
		{"a.qcow2.gz", gzipped(t, qcow2), "a.qcow2", image.FormatQcow2, 2 << 30},
		{"b.raw.gz", gzipped(t, raw), "b.raw", image.FormatRaw, 0},
		{"box.tar", packtest.Tar(t, packtest.File{Name: "readme", Data: []byte("hello")},
			packtest.File{Name: "a.qcow2", Data: qcow2}), "a.qcow2", image.FormatQcow2, 2 << 30},
	} {
		s := store{}
		one := look(local, layoutOf(t, s, artifactOf(t, s, orasLayer(s, c.title, c.content))))
		require.NotEmpty(t, one.Whole, c.title)
		require.Len(t, one.Disks, 1, c.title)
		require.Equal(t, c.name, one.Disks[0].Name)
		require.Equal(t, c.format, one.Disks[0].Format, c.title)
		require.Equal(t, c.size, one.Disks[0].VirtualSize, c.title)
		require.False(t, one.Disks[0].Servable, "nobody has opened it")
	}
}
