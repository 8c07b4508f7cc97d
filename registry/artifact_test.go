package registry

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/signature"
	"kubevirt.io/disk/registry/transport"
)

// TestPushArtifact: a file is a layer as it is, with its name, so that other clients find it. The
// index in a further layer makes it streamed and verified at once.
func TestPushArtifact(t *testing.T) {
	m := newMemory(t)
	raw := noise(95, 4<<20)
	dir := t.TempDir()
	write := func(name string, content []byte) string {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), content, 0o644))
		return filepath.Join(dir, name)
	}
	sign, key := newPrivateKey(t)
	qcow2 := qcow2Of(t, raw)
	for name, c := range map[string]struct {
		files     []string
		content   [][]byte
		mediaType []types.MediaType
		disks     []string
	}{
		"raw": {[]string{write("a.img", raw)}, [][]byte{raw},
			[]types.MediaType{mediaDisk + "raw"}, []string{"a.img"}},
		"qcow2": {[]string{write("a.qcow2", qcow2)}, [][]byte{qcow2},
			[]types.MediaType{mediaDisk + "qcow2"}, []string{"a.qcow2"}},
		"wrapped": {[]string{write("b.qcow2.gz", gzipped(t, qcow2))}, [][]byte{qcow2},
			[]types.MediaType{mediaDisk + "qcow2"}, []string{"b.qcow2"}},
		"two": {[]string{write("z.raw", raw), write("a.qcow2", qcow2)}, [][]byte{qcow2, raw},
			[]types.MediaType{mediaDisk + "qcow2", mediaDisk + "raw"},
			[]string{"a.qcow2", "z.raw"}},
	} {
		t.Run(name, func(t *testing.T) {
			ref := m.ref(t, "vm/"+name+":1")
			opt := PushOptions{Artifact: true, Progress: new(Progress)}
			digest := pushes(t, m.client(t), c.files, ref, opt)
			require.Equal(t, opt.Progress.Total(), opt.Progress.Done())
			opt.Sign = sign
			again := pushes(t, m.client(t), c.files, ref, opt)
			require.Equal(t, digest, again)

			r := resolves(t, m.client(t), ref)
			require.Equal(t, digest, r.Digest, "no index of platforms leads to it")
			require.Equal(t, types.MediaType(mediaEmpty), r.Manifest.Config.MediaType)
			require.Equal(t, typeArtifact, r.Manifest.ArtifactType)
			require.Len(t, r.Manifest.Layers, len(c.content)+1)
			for i, content := range c.content {
				l := r.Manifest.Layers[i]
				require.Equal(t, digestOf(content), l.Digest.String())
				require.Equal(t, int64(len(content)), l.Size)
				require.Equal(t, c.mediaType[i], l.MediaType)
				require.Equal(t, c.disks[i], l.Annotations["org.opencontainers.image.title"])
				require.Equal(t, strings.TrimSuffix(c.disks[i], filepath.Ext(c.disks[i])),
					l.Annotations["io.kubevirt.disk.name"])
				require.Equal(t, fmt.Sprint(len(raw)), l.Annotations["io.kubevirt.disk.size"])
			}
			require.Empty(t, r.Manifest.Layers[len(c.content)].
				Annotations["org.opencontainers.image.title"], "who wants files leaves it")

			to := t.TempDir()
			asked := transport.Options{Insecure: []string{m.host}}
			asked.Gate = testtool.Must(signature.NewGate(signature.Options{Keys: []string{key}}))(t)
			done, _ := testtool.Must2(newClient(t, asked).Pull(t.Context(), ref, to,
				PullOptions{Original: true}))(t)
			require.Len(t, done, len(c.content))
			for i, name := range c.disks {
				require.True(t, bytes.Equal(c.content[i], bytesOf(t, filepath.Join(to, name))))
			}

			s := newStreaming(t, m.client(t), t.TempDir(), t.TempDir())
			st := s.open(t, ref)
			require.Equal(t, c.disks, namesOfDisks(st.Disks()))
			img := s.disk(t, st, c.disks[0])
			require.False(t, img.Unverified())
			require.True(t, bytes.Equal(raw[2<<20:][:4096], readAt(t, img, 2<<20, 4096)))
			require.Less(t, s.opt.Cache.Stats().FetchedBytes, int64(3<<20), "by ranges")
			require.True(t, bytes.Equal(raw, contentOf(t, img)))
		})
	}
	qemuImg(t, dir, "create", "-q", "-f", "qcow2", "-b", "a.img", "-F", "raw", "top.qcow2")
	_, err := m.client(t).Push(t.Context(), []string{filepath.Join(dir, "top.qcow2")},
		m.ref(t, "vm/top:1"), PushOptions{Artifact: true})
	require.ErrorContains(t, err, `needs the backing file "a.img"`)
	for _, opt := range []PushOptions{{Base: m.ref(t, "vm/raw:1").String()},
		{Base: BaseNone, Onto: Onto{Image: m.ref(t, "vm/raw:1").String()}}} {
		_, err := m.client(t).Push(t.Context(), []string{filepath.Join(dir, "a.img")},
			m.ref(t, "vm/on:1"), opt)
		require.ErrorContains(t, err, "/vm/raw:1 is no container image, but an artifact")
	}
}

// platformNamed is a platform as podman names it.
func platformNamed(arch string) *v1.Platform {
	return &v1.Platform{OS: "linux", Architecture: map[string]string{"amd64": "x86_64",
		"arm64": "aarch64"}[arch]}
}

// TestArtifactsOfOthers: what other programs store as artifacts is pulled and served.
func TestArtifactsOfOthers(t *testing.T) {
	raw, other := noise(96, 2<<20), noise(97, 1<<20)
	s := store{}
	wrapped := func(m v1.Descriptor, p *v1.Platform, kind string) v1.Descriptor {
		m.Platform = p
		if kind != "" {
			m.Annotations = map[string]string{"disktype": kind}
		}
		return m
	}
	index := func(artifactType string, all ...v1.Descriptor) v1.Descriptor {
		return indexOf(t, s, artifactType, all...)
	}
	machine := func(kind string, content []byte) v1.Descriptor {
		l := s.Add(zstandard(t, content))
		l.MediaType = "application/zstd"
		l.Annotations = map[string]string{
			"org.opencontainers.image.title": "podman-machine." + kind + ".zst"}
		return artifactOf(t, s, l)
	}
	exported := func(names ...string) v1.Descriptor {
		var layers []v1.Descriptor
		for i, name := range names {
			l := s.Add(zstandard(t, [][]byte{raw, other}[i]))
			l.MediaType = mediaDisk + "raw+zstd"
			l.Annotations = map[string]string{"io.kubevirt.disk.name": name,
				"io.kubevirt.disk.size": "2Mi"}
			if len(names) > 1 {
				l.Annotations["org.opencontainers.image.title"] = name + ".raw.zst"
			}
			layers = append(layers, l)
		}
		config := s.Add([]byte(`{"kind": "VirtualMachine"}`))
		config.MediaType = "application/vnd.kubevirt.virtualmachine.config.v1+json"
		return s.Manifest(t, v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1,
			ArtifactType: "application/vnd.kubevirt.virtualmachine.v1", Config: config,
			Layers: layers})
	}
	untitled := func(content []byte) v1.Descriptor {
		l := s.Add(content)
		l.MediaType = "application/x-qcow2"
		return l
	}
	nameless := "disk-" + digestOf(qcow2Of(t, raw))[7:19] + ".qcow2"
	here, there := platformNamed(runtime.GOARCH), platformNamed(otherArch())
	const vm = "application/vnd.kubevirt.virtualmachine.v1"
	for name, c := range map[string]struct {
		image v1.Descriptor
		path  string
		disk  string
		err   string
	}{
		"KubeVirt's export": {image: exported("rootdisk"), disk: "rootdisk.raw"},
		"for another platform": {image: index(vm, wrapped(exported("rootdisk"),
			platformOf(otherArch()), "")), disk: "rootdisk.raw"},
		"for several platforms": {image: index(vm, wrapped(exported("other", "more"),
			platformOf(otherArch()), ""), wrapped(exported("rootdisk"),
			platformOf(runtime.GOARCH), "")), disk: "rootdisk.raw"},
		"two disks": {image: exported("rootdisk", "data"), err: `"data.raw", "rootdisk.raw"`},
		"two disks, by name": {image: exported("rootdisk", "data"), path: "rootdisk.raw",
			disk: "rootdisk.raw"},
		"podman's machine": {image: index("",
			wrapped(machine("applehv.raw", other), here, "applehv"),
			wrapped(machine("qemu.qcow2", qcow2Of(t, other)), there, "qemu"),
			wrapped(machine("qemu.qcow2", qcow2Of(t, raw)), here, "qemu"),
			wrapped(machine("hyperv.vhdx", other), here, "hyperv")),
			disk: "podman-machine.qemu.qcow2"},
		"no machine for QEMU": {image: index("", wrapped(machine("applehv.raw", other), here,
			"applehv"), wrapped(machine("wsl.tar", other), here, "wsl")), err: "(applehv)"},
		"an image for another platform": {image: index("", wrapped(exported("rootdisk"),
			platformOf(otherArch()), "")), err: "only for"},
		"no title": {image: artifactOf(t, s, untitled(qcow2Of(t, raw))), disk: "disk.qcow2"},
		"no titles": {image: artifactOf(t, s, untitled(qcow2Of(t, raw)),
			untitled(qcow2Of(t, other))), err: "2 disks"},
		"no titles, one named": {image: artifactOf(t, s, untitled(qcow2Of(t, raw)),
			untitled(qcow2Of(t, other))), path: nameless, disk: nameless},
		"no layers": {image: artifactOf(t, s), err: "no layers"},
	} {
		t.Run(name, func(t *testing.T) {
			ref := layoutOf(t, s, c.image)
			dir, err := pull(t, ref, PullOptions{Path: c.path})
			if c.err != "" {
				require.ErrorContains(t, err, c.err)
				emptyDir(t, dir)
				return
			}
			require.NoError(t, err)
			onlyFile(t, dir, "out.raw", raw)
			done, _ := testtool.Must2(newClient(t, transport.Options{}).Pull(t.Context(), ref,
				filepath.Join(t.TempDir(), "x"), PullOptions{Path: c.path}))(t)
			require.Equal(t, "disk/"+c.disk, done[0].Name)
			stream := newStreaming(t, newClient(t, transport.Options{}), t.TempDir(), t.TempDir())
			st := stream.open(t, ref)
			if c.path == "" {
				require.Len(t, st.Disks(), 1)
			} else {
				require.Len(t, st.Disks(), 2)
			}
			served := strings.TrimSuffix(c.disk, ".qcow2")
			for _, d := range st.Disks() {
				if strings.HasPrefix(d.Name, served) {
					require.True(t, bytes.Equal(raw, contentOf(t, stream.disk(t, st, d.Name))))
					served = ""
					break
				}
			}
			require.Empty(t, served)
		})
	}
}

// TestArtifactOfManyLayers: a manifest with ten thousand layers is soon an error.
func TestArtifactOfManyLayers(t *testing.T) {
	s := store{}
	layers := make([]v1.Descriptor, 10_000)
	for i := range layers {
		layers[i] = orasLayer(s, fmt.Sprintf("%d.raw", i), noise(98, 512))
	}
	ref := layoutOf(t, s, artifactOf(t, s, layers...))
	dir, err := pull(t, ref, PullOptions{})
	require.ErrorContains(t, err, "10000 layers, more than")
	emptyDir(t, dir)
	require.ErrorContains(t, opened(t, ref), "10000 layers, more than")
}

// TestArtifactWithTexts: what a publisher puts beside a disk is no disk, wherever it lies.
func TestArtifactWithTexts(t *testing.T) {
	raw := noise(92, 1<<20)
	for name, content := range map[string][]byte{"a.qcow2": qcow2Of(t, raw), "a.raw": raw,
		"a.raw.gz": gzipped(t, raw)} {
		t.Run(name, func(t *testing.T) {
			s := store{}
			var layers []v1.Descriptor
			add := func(name string, content []byte) {
				layers = append(layers, orasLayer(s, name, content))
			}
			add("LICENSE", []byte("do what you like\n"))
			add(name, content)
			add("README.md", []byte("# read me\n"))
			add("a.sig", noise(93, 512))
			ref := layoutOf(t, s, artifactOf(t, s, layers...))
			c := newClient(t, transport.Options{})
			brings(t, c, ref, PullOptions{}, raw)
			done, _ := testtool.Must2(c.Pull(t.Context(), ref, t.TempDir(), PullOptions{}))(t)
			require.Len(t, done, 1)
			if name == "a.raw.gz" {
				return // the cache gets it by the same way
			}
			st := newStreaming(t, c, t.TempDir(), t.TempDir())
			st.opt.WhenComplete = true
			require.Equal(t, []string{name}, namesOfDisks(st.open(t, ref).Disks()))
		})
	}
	// Alone, it was meant to be a disk, and the error says why it is none.
	_, err := pull(t, orasOf(t, "README.md", []byte("# read me\n")), PullOptions{})
	require.ErrorContains(t, err, "README.md")
}
