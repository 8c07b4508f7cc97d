package registry

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// squash pushes a disk onto an image, without the versions in between.
func (o *ontoCase) squash(t *testing.T, file, ref, onto string) string {
	t.Helper()
	opt := PushOptions{CompressRaw: qcow2.CompressionZstd, Progress: new(Progress),
		Onto: Onto{Image: o.m.ref(t, onto).String(), Squash: true}}
	digest := pushes(t, o.c, []string{file}, o.m.ref(t, ref), opt)
	require.Equal(t, opt.Progress.Total(), opt.Progress.Done())
	return digest
}

// layersOf are the digests of an image's layers, which must agree with its configuration.
func (o *ontoCase) layersOf(t *testing.T, ref string) (digests []string) {
	t.Helper()
	r := resolves(t, o.c, o.m.ref(t, ref))
	for _, l := range r.Manifest.Layers {
		digests = append(digests, l.Digest.String())
	}
	text := testtool.Must(r.Small(t.Context(), r.Manifest.Config, transport.MaxManifest))(t)
	require.Contains(t, string(text), "X-Own", "what is not known is kept")
	var config struct {
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		} `json:"rootfs"`
		History []struct {
			Empty bool `json:"empty_layer"`
		} `json:"history"`
	}
	require.NoError(t, json.Unmarshal(text, &config))
	require.Len(t, config.RootFS.DiffIDs, len(digests))
	ours := 0
	for i, id := range config.RootFS.DiffIDs {
		if id == digests[i] { // not compressed
			ours++
		}
	}
	require.NotZero(t, ours)
	stories := 0
	for _, h := range config.History {
		if !h.Empty {
			stories++
		}
	}
	if stories > 0 {
		require.Equal(t, len(digests), stories)
	}
	return digests
}

// TestPushOntoSquash: a new version of a disk becomes one layer on the oldest version, with what
// those in between have. Their layers are left out, and little is fetched.
func TestPushOntoSquash(t *testing.T) {
	for _, c := range []qcow2.Compression{qcow2.CompressionZstd, qcow2.CompressionNone, ""} {
		t.Run("compressed by "+string(c), func(t *testing.T) {
			o := newOnto(t)
			content := likeADisk(8, 16<<20+512)
			pushes(t, o.c, []string{o.file(t, "vm.raw", content)}, o.m.ref(t, "vm/a:0"),
				PushOptions{Base: o.base.String(), CompressRaw: c})
			whole, _ := o.m.traffic()
			next := func(ref, onto string, change func()) string {
				change()
				return o.push(t, o.file(t, "vm.raw", content), ref, onto)
			}
			next("vm/a:1", "vm/a:0", func() {
				copy(content[3<<20:], noise(390, 100<<10))
				clear(content[5<<20 : 6<<20])
			})
			// What the oldest version has behind this end must not come back.
			next("vm/a:2", "vm/a:1", func() { content = content[:12<<20+1024] })
			next("vm/a:3", "vm/a:2", func() {
				copy(content[3<<20+50<<10:], noise(391, 200<<10))
				content = append(content, make([]byte, 8<<20)...)
				copy(content[19<<20:], noise(392, 64<<10))
			})
			copy(content[9<<20:], noise(393, 1000))
			file := o.file(t, "vm.raw", content)
			o.m.traffic()
			digest := o.squash(t, file, "vm/a:4", "vm/a:3")
			came, went := o.m.traffic()
			o.push(t, file, "vm/a:long", "vm/a:3")
			_, without := o.m.traffic()
			require.Less(t, came, whole/5, "of %d bytes", whole)
			require.LessOrEqual(t, went, without, "what has to be fetched anyway")
			require.Equal(t, digest, o.squash(t, file, "vm/other:4", "vm/a:3"), "reproducible")
			name, bottom := "vm.1.qcow2", "disk/vm.qcow2"
			if c == "" {
				name, bottom = "vm.qcow2", "disk/vm.raw"
			}
			o.requireDisk(t, "vm/a:4", name, content, true)
			was, is := o.layersOf(t, "vm/a:0"), o.layersOf(t, "vm/a:4")
			require.Len(t, is, len(was)+2, "an index and the new layer")
			require.Equal(t, was, is[:len(was)], "a node that has the oldest one has these")
			r := resolves(t, o.c, o.m.ref(t, "vm/a:4"))
			var files []string
			for _, f := range fullIndex(t, r).Files {
				files = append(files, f.Name)
			}
			require.ElementsMatch(t, []string{bottom, "disk/" + name}, files)

			// It is an image like others, and so is one that has nothing in between.
			next("vm/a:5", "vm/a:4", func() { copy(content[1<<20:], noise(394, 5000)) })
			require.Len(t, o.layersOf(t, "vm/a:5"), len(is)+2)
			o.squash(t, file, "vm/a:6", "vm/a:5")
			require.Equal(t, was, o.layersOf(t, "vm/a:6")[:len(was)])
			o.requireDisk(t, "vm/a:6", name, content, true)
			require.Equal(t, o.push(t, file, "vm/a:7", "vm/a:0"),
				o.squash(t, file, "vm/a:8", "vm/a:0"))
		})
	}
}

// TestPushOntoSquashOneOfSeveral: the layers of other disks stay, with their versions.
func TestPushOntoSquashOneOfSeveral(t *testing.T) {
	o := newOnto(t)
	a, b := likeADisk(9, 4<<20), likeADisk(10, 6<<20)
	opt := PushOptions{Base: o.base.String(), CompressRaw: qcow2.CompressionZstd}
	pushes(t, o.c, []string{o.file(t, "a.raw", a), o.file(t, "b.raw", b)}, o.m.ref(t, "vm/a:1"),
		opt)
	for i, ref := range []string{"vm/a:2", "vm/a:3", "vm/a:4", "vm/a:5"} {
		name, content := "a.raw", a
		if i%2 == 0 {
			name, content = "b.raw", b
		}
		copy(content[(i+1)<<19:], noise(uint64(395+i), 1000))
		o.push(t, o.file(t, name, content), ref, "vm/a:"+string(rune('1'+i)))
	}
	copy(a, "and now")
	o.squash(t, o.file(t, "a.raw", a), "vm/a:6", "vm/a:5")
	s := newStreaming(t, o.c, t.TempDir(), t.TempDir())
	st := s.open(t, o.m.ref(t, "vm/a:6"))
	require.NotNil(t, st.index)
	require.Equal(t, []string{"a.1.qcow2", "b.2.qcow2"}, namesOfDisks(st.Disks()))
	require.True(t, bytes.Equal(a, contentOf(t, s.disk(t, st, "a.1.qcow2"))))
	require.True(t, bytes.Equal(b, contentOf(t, s.disk(t, st, "b.2.qcow2"))))
	require.Len(t, o.layersOf(t, "vm/a:6"), len(o.layersOf(t, "vm/a:1"))+2+2)
}

// TestPushOntoSquashRefusals: layers that something else needs, or of which nobody knows what they
// have, are not left out.
func TestPushOntoSquashRefusals(t *testing.T) {
	o := newOnto(t)
	content := likeADisk(11, 4<<20)
	o.file(t, "base.raw", content)
	img := func(args ...string) {
		t.Helper()
		filetest.QemuImg(t, o.dir, args...)
	}
	img("create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "mid.qcow2")
	for _, name := range []string{"a.qcow2", "b.qcow2"} {
		img("create", "-f", "qcow2", "-b", "mid.qcow2", "-F", "qcow2", name)
	}
	img("create", "-f", "qcow2", "-o", "extended_l2=on", "-b", "base.raw", "-F", "raw", "c.qcow2")
	push := func(ref string, names ...string) {
		t.Helper()
		var files []string
		for _, name := range names {
			files = append(files, filepath.Join(o.dir, name))
		}
		pushes(t, o.c, files, o.m.ref(t, ref), PushOptions{Base: o.base.String()})
	}
	push("vm/two:1", "a.qcow2", "b.qcow2")
	push("vm/sub:1", "c.qcow2")
	copy(content, "something else")
	docker := baseOf(t, gzipped(t, tarOf(t, tarFile{Name: "disk/vm.img", Content: content})))
	for onto, want := range map[string]string{
		o.m.ref(t, "vm/two:1").String(): `its file "b.qcow2" needs "mid.qcow2", too`,
		o.m.ref(t, "vm/sub:1").String(): `what its file "c.qcow2" has is not known`,
		docker.String():                 "not known without an index",
	} {
		file := o.file(t, "a.raw", content)
		_, err := o.c.Push(t.Context(), []string{file}, o.m.ref(t, "vm/a:2"), PushOptions{
			CompressRaw: qcow2.CompressionZstd, Onto: Onto{Image: onto, Squash: true}})
		require.ErrorContains(t, err, want)
	}
}
