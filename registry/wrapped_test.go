package registry

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// orasLayer is the layer that "oras push" makes of a file.
func orasLayer(s store, title string, content []byte) v1.Descriptor {
	desc := s.Add(content)
	desc.MediaType = types.OCIUncompressedLayer // what it says unless it is told otherwise
	desc.Annotations = map[string]string{"org.opencontainers.image.title": title}
	return desc
}

// artifactOf makes an artifact as "oras push" does.
func artifactOf(t testing.TB, s store, layers ...v1.Descriptor) v1.Descriptor {
	config := s.Add([]byte("{}"))
	config.MediaType = "application/vnd.oci.empty.v1+json"
	return s.Manifest(t, v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1,
		ArtifactType: "application/vnd.unknown.artifact.v1", Config: config, Layers: layers})
}

// TestPullWrapped takes a disk out of what publishers wrap it in, in one pass and by its content.
func TestPullWrapped(t *testing.T) {
	testtool.Need(t, "xz", "bzip2")
	raw := noise(90, 1<<20) // as large as a raw disk has to be whose name does not say so
	qcow2 := qcow2Of(t, raw)
	compressed := qcow2Of(t, raw, "-c")
	xz := func(p []byte) []byte { return packtest.Tool(t, p, "xz", "-1") }
	bz := func(p []byte) []byte { return packtest.Tool(t, p, "bzip2") }
	in := func(name string, p []byte) []byte {
		return packtest.Tar(t, packtest.File{Name: "README", Data: []byte("read me\n")},
			packtest.File{Name: "x/" + name, Data: p},
			packtest.File{Name: "x/disk.sig", Data: noise(91, 512)})
	}
	for title, content := range map[string][]byte{
		"disk.raw.xz": xz(raw), "disk.raw.bz2": bz(raw), "disk.qcow2.xz": xz(qcow2),
		"disk.qcow2.zst": zstandard(t, compressed), "disk.qcow2.gz": gzipped(t, compressed),
		"disk.tar.xz": xz(in("disk.qcow2", qcow2)), "disk.tar": in("disk.raw", raw),
		"disk.tgz":        gzipped(t, in("disk.raw", raw)),
		"tar-of-xz":       in("disk.qcow2.xz", xz(compressed)),
		"tar-of-bz2":      in("disk.raw.bz2", bz(raw)),
		"misnamed.qcow2":  xz(in("disk", raw)),
		"disk.raw.gz.bz2": bz(gzipped(t, raw)),
	} {
		t.Run(title, func(t *testing.T) {
			ref := orasOf(t, title, content)
			dir := testtool.Must(pull(t, ref, PullOptions{}))(t)
			onlyFile(t, dir, "out.raw", raw)
			p := new(Progress)
			require.NoError(t, testtool.Err(pull(t, ref, PullOptions{Progress: p})))
			require.Equal(t, int64(len(content)), p.Done(), "it is read once")

			dir = t.TempDir() // a name without the wrapping
			c := newClient(t, transport.Options{})
			done, _ := testtool.Must2(c.Pull(t.Context(), ref, dir, PullOptions{}))(t)
			require.Len(t, done, 1)
			onlyFile(t, dir, filepath.Base(done[0].To), raw)
			require.NotContains(t, []string{".xz", ".gz", ".bz2", ".zst"}, filepath.Ext(done[0].To))

			var stdout bytes.Buffer
			_, _, err := c.Pull(t.Context(), ref, "-", PullOptions{Stdout: &stdout})
			require.NoError(t, err)
			require.True(t, bytes.Equal(raw, stdout.Bytes()))

			served, _ := testtool.Must2(serveOne(t, ref))(t)
			require.True(t, bytes.Equal(raw, served))
		})
	}
}

// TestPullCompressedInLayer fetches a compressed file that lies in the directory of the disks of a
// container image.
func TestPullCompressedInLayer(t *testing.T) {
	testtool.Need(t, "xz")
	raw := noise(92, 1<<20)
	ref := imageOf(t, gzipped(t, tarOf(t, tarFile{Name: "disk/a.qcow2.xz",
		Content: packtest.Tool(t, qcow2Of(t, raw), "xz")})))
	brings(t, newClient(t, transport.Options{}), ref, PullOptions{}, raw)
	served, name := testtool.Must2(serveOne(t, ref))(t)
	require.Equal(t, "a.raw", name)
	require.True(t, bytes.Equal(raw, served))

	plain := imageOf(t, tarOf(t, tarFile{Name: "disk/a.img.gz", Content: gzipped(t, raw)}))
	served, _ = testtool.Must2(serveOne(t, plain))(t)
	require.True(t, bytes.Equal(raw, served))
}

// TestPullWrappedRefused: nothing stays of an artifact that is not a disk, or more than one.
func TestPullWrappedRefused(t *testing.T) {
	testtool.Need(t, "xz")
	raw := noise(93, 1<<20)
	xz := packtest.Tool(t, raw, "xz", "-1")
	two := packtest.Tar(t, packtest.File{Name: "a.raw", Data: raw},
		packtest.File{Name: "b.qcow2", Data: qcow2Of(t, raw)})
	cut := packtest.Tar(t, packtest.File{Name: "a.raw", Data: raw})
	for name, c := range map[string]struct {
		content []byte
		want    string
	}{
		"two disks": {two, `"a.raw", "b.qcow2"`},
		"no disk": {packtest.Tar(t, packtest.File{Name: "README", Data: []byte("x\n")}),
			"has no disk"},
		"a link": {packtest.Tar(t, packtest.File{Name: "a.raw", Type: '2', Link: "/etc/passwd"}),
			"has no disk"},
		"cut xz":   {xz[:len(xz)-40], "in the middle of its xz data"},
		"after xz": {append(bytes.Clone(xz), make([]byte, 5)...), "cannot be decompressed"},
		"cut tar":  {cut[:len(cut)-99<<10], "unexpected EOF"},
		"three":    {gzipped(t, gzipped(t, gzipped(t, raw))), "gzip"},
		"three in tar": {gzipped(t, packtest.Tar(t, packtest.File{Name: "a.xz", Data: xz})),
			"no disk"},
		"much memory": {packtest.XzNeeding(raw, 28), "--unpack-memory"},
	} {
		dir, err := pull(t, orasOf(t, "disk", c.content), PullOptions{UnpackMemory: 16 << 20})
		require.ErrorContains(t, err, c.want, name)
		emptyDir(t, dir)
	}
	c := newClient(t, transport.Options{})
	brings(t, c, orasOf(t, "disks.tar", two), PullOptions{Path: "b.qcow2"}, raw)
	brings(t, c, orasOf(t, "disk", packtest.XzNeeding(raw, 28)),
		PullOptions{UnpackMemory: 64 << 20}, raw)
}

// TestPushWrapped: a wrapped file is pushed as the disk in it.
func TestPushWrapped(t *testing.T) {
	testtool.Need(t, "xz", "bzip2")
	raw := noise(94, 2<<20)
	qcow2 := qcow2Of(t, raw, "-c")
	dir, tmp := t.TempDir(), t.TempDir()
	t.Setenv("TMPDIR", tmp)
	write := func(name string, content []byte) string {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), content, 0o644))
		return filepath.Join(dir, name)
	}
	m := newMemory(t)
	digests := make(map[string]string)
	for i, file := range []string{write("a.qcow2", qcow2),
		write("a.qcow2.xz", packtest.Tool(t, qcow2, "xz")),
		write("wrapped.tar.bz2", packtest.Tool(t, packtest.Tar(t,
			packtest.File{Name: "a.qcow2", Data: qcow2}), "bzip2"))} {
		p := new(Progress)
		digest := pushes(t, m.client(t), []string{file}, m.ref(t, fmt.Sprintf("vm/a:%d", i)),
			PushOptions{Base: BaseNone, Progress: p})
		require.Equal(t, p.Total(), p.Done())
		digests[digest] = file
		emptyDir(t, tmp)
	}
	require.Len(t, digests, 1, "it is the same image")

	file := write("b.gz", gzipped(t, raw))
	pushes(t, m.client(t), []string{file}, m.ref(t, "vm/b:1"), PushOptions{Base: BaseNone,
		CompressRaw: "zstd"})
	to := t.TempDir()
	done, _, err := m.client(t).Pull(t.Context(), m.ref(t, "vm/b:1"), to, PullOptions{})
	require.NoError(t, err)
	require.Equal(t, "disk/b.qcow2", done[0].Name)
	onlyFile(t, to, "b.raw", raw)

	_, err = m.client(t).Push(t.Context(), []string{write("cut.gz", gzipped(t, raw)[:1<<20])},
		m.ref(t, "vm/c:1"), PushOptions{Base: BaseNone})
	require.ErrorContains(t, err, "middle of its gzip data")
	emptyDir(t, tmp)
}

// TestAppliance: the disk of an appliance (OVA) is pulled, served and pushed. It lies there as a
// stream-optimised VMDK image, as "qemu-img convert" can make it, too.
func TestAppliance(t *testing.T) {
	testtool.Need(t, "qemu-img")
	raw := append(noise(99, 3<<20), make([]byte, 4<<20)...)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "raw"), raw, 0o644))
	qemuImg(t, dir, "convert", "-f", "raw", "-O", "vmdk", "-o", "subformat=streamOptimized", "raw",
		"box-disk1.vmdk")
	disk := bytesOf(t, filepath.Join(dir, "box-disk1.vmdk"))
	file := func(name string, content []byte) packtest.File {
		return packtest.File{Name: name, Data: content}
	}
	ova := packtest.Tar(t, file("box.ovf", []byte("<?xml version='1.0'?>\n")),
		file("box.mf", []byte("SHA256(box.ovf)= 00\n")), file("box-disk1.vmdk", disk))
	for title, content := range map[string][]byte{"box.ova": ova, "box-disk1.vmdk": disk,
		"box.vmdk.gz": gzipped(t, disk), "box.ova.gz": gzipped(t, ova)} {
		ref := orasOf(t, title, content)
		onlyFile(t, testtool.Must(pull(t, ref, PullOptions{}))(t, title), "out.raw", raw)
		served, _ := testtool.Must2(serveOne(t, ref))(t, title)
		require.True(t, bytes.Equal(raw, served), title)

		path := filepath.Join(dir, title)
		require.NoError(t, os.WriteFile(path, content, 0o644))
		m := newMemory(t)
		_, err := m.client(t).Push(t.Context(), []string{path}, m.ref(t, "vm/a:1"),
			PushOptions{Base: BaseNone, CompressRaw: "zstd"})
		require.NoError(t, err, title)
		brings(t, m.client(t), m.ref(t, "vm/a:1"), PullOptions{}, raw)
	}
	two := packtest.Tar(t, file("box-disk1.vmdk", disk), file("box-disk2.vmdk", disk))
	to, err := pull(t, orasOf(t, "box.ova", two), PullOptions{})
	require.ErrorContains(t, err, `"box-disk1.vmdk", "box-disk2.vmdk"`)
	emptyDir(t, to)
	cut := packtest.Tar(t, file("box-disk1.vmdk", disk[:len(disk)/2]))
	to, err = pull(t, orasOf(t, "box.ova", cut), PullOptions{})
	require.Error(t, err)
	emptyDir(t, to)
	qemuImg(t, dir, "convert", "-f", "raw", "-O", "vmdk", "raw", "sparse.vmdk")
	sparse := bytesOf(t, filepath.Join(dir, "sparse.vmdk"))
	to, err = pull(t, orasOf(t, "sparse.vmdk", sparse), PullOptions{})
	require.ErrorContains(t, err, "kubevirt-disk convert ")
	emptyDir(t, to)
}

// TestInterruptedUnpacking: some KiB are gigabytes of zeros. An interrupt does not wait for these,
// whether the layer is compressed or a file in it.
func TestInterruptedUnpacking(t *testing.T) {
	zeros := bytes.Repeat(packtest.Tool(t, make([]byte, 64<<20), "bzip2"), 64)
	var head bytes.Buffer
	require.NoError(t, tar.NewWriter(&head).WriteHeader(&tar.Header{Name: "large",
		Typeflag: tar.TypeReg, Size: 1 << 40, Format: tar.FormatPAX}))
	layer := append(packtest.Tool(t, head.Bytes(), "bzip2"), zeros...)
	ctx, cancel := context.WithCancel(t.Context())
	ref, p, to := imageOf(t, layer), new(Progress), filepath.Join(t.TempDir(), "a.raw")
	pulled := testtool.Go(func() error {
		return testtool.Err2(newClient(t, transport.Options{}).Pull(ctx, ref, to,
			PullOptions{Progress: p}))
	})
	testtool.Eventually(t, func() bool { return p.Done() == int64(len(layer)) })
	cancel()
	require.ErrorIs(t, <-pulled, context.Canceled)

	ctx, cancel = context.WithCancel(t.Context())
	in, done := new(puller).unpacked(ctx, &file{packed: []image.Format{"bzip2"}},
		bytes.NewReader(zeros))
	defer done()
	require.NoError(t, testtool.Err(in.Read(make([]byte, 1))))
	cancel()
	require.ErrorIs(t, testtool.Err(in.Read(make([]byte, 1))), context.Canceled)
}
