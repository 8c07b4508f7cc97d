package machines

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// benchLayer is a layer of an image that exists only for measurements.
type benchLayer struct {
	name         string // of the directory that it fills
	files, bytes int    // of each file on average
	seed         uint64
}

// benchImage writes an OCI layout with layers in gzip, as registries have them.
func benchImage(b *testing.B, dir string, layers ...benchLayer) {
	b.Helper()
	type descriptor struct {
		MediaType string `json:"mediaType"`
		Digest    string `json:"digest"`
		Size      int64  `json:"size"`
	}
	blobs := filepath.Join(dir, "blobs", "sha256")
	require.NoError(b, os.MkdirAll(blobs, 0o755))
	add := func(kind string, write func(w io.Writer)) descriptor {
		f := testtool.Must(os.CreateTemp(blobs, ""))(b)
		defer f.Close()
		sum := sha256.New()
		write(io.MultiWriter(f, sum))
		size := testtool.Must(f.Seek(0, io.SeekCurrent))(b)
		digest := fmt.Sprintf("%x", sum.Sum(nil))
		require.NoError(b, os.Rename(f.Name(), filepath.Join(blobs, digest)))
		return descriptor{"application/vnd.oci.image." + kind, "sha256:" + digest, size}
	}
	object := func(kind string, value any) descriptor {
		return add(kind, func(w io.Writer) { require.NoError(b, json.NewEncoder(w).Encode(value)) })
	}
	var found []descriptor
	var ids []string
	for _, l := range layers {
		id := sha256.New()
		found = append(found, add("layer.v1.tar+gzip", func(w io.Writer) {
			packed := testtool.Must(gzip.NewWriterLevel(w, gzip.BestSpeed))(b)
			l.write(b, io.MultiWriter(packed, id))
			require.NoError(b, packed.Close())
		}))
		ids = append(ids, fmt.Sprintf("sha256:%x", id.Sum(nil)))
	}
	config := object("config.v1+json", map[string]any{"os": "linux", "architecture": runtime.GOARCH,
		"config": map[string]any{"Cmd": []string{"sh"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": ids}})
	manifest := object("manifest.v1+json", map[string]any{"schemaVersion": 2, "config": config,
		"mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": found})
	index := testtool.Must(json.Marshal(map[string]any{"schemaVersion": 2,
		"manifests": []descriptor{manifest}}))(b)
	require.NoError(b, os.WriteFile(filepath.Join(dir, "index.json"), index, 0o644))
	require.NoError(b, os.WriteFile(filepath.Join(dir, "oci-layout"),
		[]byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644))
}

// write writes the archive: files of half to one and a half times the size, a hundred in each
// directory, whose content compresses to about two thirds.
func (l benchLayer) write(b *testing.B, w io.Writer) {
	b.Helper()
	random := rand.New(rand.NewPCG(l.seed, 1))
	content := make([]byte, 1<<20)
	for i := range content {
		content[i] = byte(random.Uint32() & 0x1f)
	}
	t := tar.NewWriter(w)
	when := time.Unix(1700000000, 0)
	for i := range l.files {
		if i%100 == 0 {
			require.NoError(b, t.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Mode: 0o755,
				Name: fmt.Sprintf("%s/%d/", l.name, i/100), ModTime: when}))
		}
		size := l.bytes/2 + random.IntN(l.bytes+1)
		require.NoError(b, t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Mode: 0o644,
			Name: fmt.Sprintf("%s/%d/file%d", l.name, i/100, i), Size: int64(size), ModTime: when}))
		for size > 0 {
			from := random.IntN(len(content) / 2)
			n := min(size, len(content)/2)
			require.NoError(b, testtool.Err(t.Write(content[from:from+n])))
			size -= n
		}
	}
	require.NoError(b, t.Close())
}

// cost is the cost of a command.
type cost struct {
	took, cpu time.Duration
	memory    int64 // peak of a process, bytes
}

func measured(b *testing.B, name string, args ...string) (c cost, out string) {
	b.Helper()
	cmd := exec.Command(name, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	began := time.Now()
	require.NoError(b, cmd.Run(), "%v: %s", cmd, &stderr)
	c.took = time.Since(began)
	c.cpu = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	if r, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		c.memory = r.Maxrss << 10
	}
	return c, strings.TrimSpace(stdout.String())
}

func (c cost) add(other cost) cost {
	return cost{c.took + other.took, c.cpu + other.cpu, max(c.memory, other.memory)}
}

// BenchmarkAdapt measures the numbers about container images in evidence/benchmarks.md. It makes a
// disk from an image of 1.5 GiB and 59,000 files in two layers, in a layout, and lets podman do the
// same. Then it does that for the same image again, and for one with another top layer.
func BenchmarkAdapt(b *testing.B) {
	testtool.Need(b, "podman")
	path := rig.Program(b)
	root := testtool.Must(os.MkdirTemp("", "adapt-"))(b)
	defer func() { require.NoError(b, os.RemoveAll(root)) }()
	below := []benchLayer{{"one", 40000, 27000, 1}, {"two", 18990, 28000, 2}}
	first, second := filepath.Join(root, "first"), filepath.Join(root, "second")
	benchImage(b, first, append(below, benchLayer{"top", 10, 2000, 3})...)
	benchImage(b, second, append(below, benchLayer{"top", 1, 20 << 10, 4})...)
	empty := filepath.Join(root, "kernel")
	require.NoError(b, os.WriteFile(empty, []byte("kernel"), 0o644))

	report := func(what string, c cost) {
		b.Logf("%-34s %6.2f s, %6.2f s of CPU, %4d MiB", what, c.took.Seconds(), c.cpu.Seconds(),
			c.memory>>20)
	}
	driver := rig.StorageDriver(root)
	for round := range 2 {
		dir := filepath.Join(root, fmt.Sprint("disk", round))
		adapt := func(layout, what string) {
			c, _ := measured(b, path, "adapt", "oci:"+layout, "--to", dir, "--kernel", empty,
				"--initrd", empty)
			report(what, c)
			require.NoError(b, os.Remove(filepath.Join(dir, "disk.qcow2")))
		}
		adapt(first, "adapt")
		adapt(first, "adapt, all levels there")
		adapt(second, "adapt, another top layer")
		states, _ := filepath.Glob(filepath.Join(dir, "*.state"))
		for _, s := range states {
			require.NoError(b, os.Remove(s))
		}
		tops, _ := filepath.Glob(filepath.Join(dir, "image-*.qcow2"))
		require.Len(b, tops, 2)
		levels, _ := filepath.Glob(filepath.Join(dir, "layer-*.qcow2"))
		for _, l := range levels {
			if info, err := os.Stat(l); err == nil && info.Size() < 1<<20 {
				b.Logf("level of the top layer: %d KiB", info.Size()>>10)
				require.NoError(b, os.Remove(l))
			}
		}
		adapt(second, "the same without states")
		require.NoError(b, os.RemoveAll(dir))

		store := filepath.Join(root, "store")
		options := []string{"--root", store, "--runroot", filepath.Join(root, "run"),
			"--storage-driver", driver}
		podman := func(args ...string) (cost, string) {
			return measured(b, "podman", append(options, args...)...)
		}
		pull, id := podman("pull", "-q", "oci:"+first)
		mount, _ := podman("image", "mount", id)
		report("podman pull and mount, "+driver, pull.add(mount))
		podman("image", "unmount", id)
		podman("rmi", "-f", id)
	}
}
