package registry

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

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
			dir, err := pull(t, ref, PullOptions{})
			require.NoError(t, err)
			onlyFile(t, dir, "out.raw", raw)
			dir = t.TempDir()
			done, _, err := newClient(t, transport.Options{}).Pull(t.Context(), ref, dir,
				PullOptions{})
			require.NoError(t, err)
			require.Len(t, done, 1)
			if name == "a.raw.gz" {
				return // the cache gets it by the same way
			}
			st := newStreaming(t, newClient(t, transport.Options{}), t.TempDir(), t.TempDir())
			st.opt.WhenComplete = true
			require.Equal(t, []string{name}, namesOfDisks(st.open(t, ref).Disks()))
		})
	}
	// Alone, it was meant to be a disk, and the error says why it is none.
	s := store{}
	_, err := pull(t, layoutOf(t, s, artifactOf(t, s, orasLayer(s, "README.md",
		[]byte("# read me\n")))), PullOptions{})
	require.ErrorContains(t, err, "README.md")
}

// TestPullCompressedVMDK: a stream-optimised VMDK image may lie in two wrappings, wherever.
func TestPullCompressedVMDK(t *testing.T) {
	testtool.Need(t, "qemu-img")
	raw := noise(94, 1<<20)
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	require.NoError(t, os.WriteFile(at("a.raw"), raw, 0o644))
	out, err := exec.CommandContext(t.Context(), "qemu-img", "convert", "-f", "raw", "-O", "vmdk",
		"-o", "subformat=streamOptimized", at("a.raw"), at("a.vmdk")).CombinedOutput()
	require.NoError(t, err, string(out))
	vmdk, err := os.ReadFile(at("a.vmdk"))
	require.NoError(t, err)
	packed := gzipped(t, vmdk)
	for name, image := range map[string]func(s store) v1.Descriptor{
		"file of a layer": func(s store) v1.Descriptor {
			return s.Image(t, gzipped(t, tarOf(t, tarFile{Name: "disk/a.vmdk.gz",
				Content: packed})))
		},
		"artifact": func(s store) v1.Descriptor {
			return artifactOf(t, s, orasLayer(s, "a.vmdk.gz", packed))
		},
		"appliance": func(s store) v1.Descriptor {
			return artifactOf(t, s, orasLayer(s, "a.ova", packtest.Tar(t,
				packtest.File{Name: "a.ovf", Data: bytes.Repeat([]byte("<?xml?>"), 9)},
				packtest.File{Name: "a.vmdk.gz", Data: packed})))
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := store{}
			dir, err := pull(t, layoutOf(t, s, image(s)), PullOptions{})
			require.NoError(t, err)
			onlyFile(t, dir, "out.raw", raw)
		})
	}
}
