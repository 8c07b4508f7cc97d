package main

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/stream"

	"kubevirt.io/disk/integration/peers"
)

// containerImages are container images to measure, with the size of each layer's files in KiB.
var containerImages = []struct {
	name   string
	layers []int
}{
	// Blobs of 1 GiB, as files compress to about two thirds.
	{"1 GiB in 12 layers", []int{640 << 10, 400 << 10, 256 << 10, 128 << 10, 80 << 10, 48 << 10,
		24 << 10, 12 << 10, 6 << 10, 3 << 10, 1 << 10, 1 << 10}},
	{"40 layers of 256 KiB", func() []int {
		all := make([]int, 40)
		for i := range all {
			all[i] = 256
		}
		return all
	}()},
}

// containerFile is the average size of a file in these layers, in bytes.
const containerFile = 27 << 10

// writeContainerLayer writes an archive of files whose content compresses to about two thirds.
func writeContainerLayer(w io.Writer, number, size int) error {
	random := rand.New(rand.NewPCG(uint64(number), 1))
	content := make([]byte, 1<<20)
	for i := range content {
		content[i] = byte(random.Uint32() & 0x1f)
	}
	t := tar.NewWriter(w)
	when := time.Unix(1700000000, 0)
	for i := 0; size > 0; i++ {
		n := min(size, containerFile/2+random.IntN(containerFile))
		size -= n
		name := fmt.Sprintf("layer%d/%d/file%d", number, i/100, i)
		if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Mode: 0o644, Name: name,
			Size: int64(n), ModTime: when}); err != nil {
			return err
		}
		if _, err := t.Write(content[random.IntN(len(content)-n):][:n]); err != nil {
			return err
		}
	}
	return t.Close()
}

// pushContainer puts a container image into the registry, and returns its reference without the
// registry, and its blobs.
func (r *shop) pushContainer(tag string, layers []int) (path string, blobs []v1.Descriptor,
	err error) {
	ref, err := name.ParseReference(r.address+"/vm/container:"+tag, name.Insecure)
	if err != nil {
		return "", nil, err
	}
	// Set the configuration before the layers: the digests of streamed layers are known only after
	// the layers were written.
	config := &v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH,
		RootFS: v1.RootFS{Type: "layers"}}
	image, err := mutate.ConfigFile(empty.Image, config)
	if err != nil {
		return "", nil, err
	}
	for i, kib := range layers {
		in, out := io.Pipe()
		go func() { out.CloseWithError(writeContainerLayer(out, i, kib<<10)) }()
		image, err = mutate.AppendLayers(image,
			stream.NewLayer(in, stream.WithCompressionLevel(gzip.BestSpeed)))
		if err != nil {
			return "", nil, err
		}
	}
	if err := remote.Write(ref, image); err != nil {
		return "", nil, err
	}
	manifest, err := image.Manifest()
	if err != nil {
		return "", nil, err
	}
	return "/vm/container:" + tag, manifest.Layers, nil
}

// measureContainer prints how long a daemon with a container image and without any of its levels
// takes from its start to ready LUNs, with a far registry and with one on this machine. Then it
// prints how long the next start takes to the first 4 KiB, when all levels exist.
func (r *shop) measureContainer(ctx context.Context) error {
	type server struct{ name, path string }
	servers := []server{{"kubevirt-disk", r.server}}
	if r.before != "" {
		servers = append(servers, server{beforeName, r.before})
	}
	out := table{head: []string{"image", "registry", "what", "time", "CPU", "peak memory"}}
	for i, image := range containerImages {
		path, blobs, err := r.pushContainer(fmt.Sprint(i), image.layers)
		if err != nil {
			return err
		}
		for _, registry := range []struct{ name, address string }{
			{"20 ms, 200 Mbit/s away", r.far.address}, {"on this machine", r.address},
		} {
			var fetched []float64
			took, again := make([][]usage, len(servers)), make([][]float64, len(servers))
			for round := range r.rounds {
				seconds, err := fetchBlobs(ctx, registry.address, blobs)
				if err != nil {
					return err
				}
				fetched = append(fetched, seconds)
				for turn := range servers {
					which := (round + turn) % len(servers)
					u, next, err := r.serveContainer(servers[which].path, registry.address+path)
					if err != nil {
						return err
					}
					took[which], again[which] = append(took[which], u), append(again[which], next)
					fmt.Fprintf(os.Stderr, "bench: container, %s, %s, %s: %.1f s, fetching alone "+
						"%.1f s\n", image.name, registry.name, servers[which].name, u.wall, seconds)
				}
			}
			out.add(image.name, registry.name, "fetching the blobs",
				fmt.Sprintf("%.2f s", median(fetched)), "–", "–")
			for which, s := range servers {
				out.add(image.name, registry.name, s.name,
					fmt.Sprintf("%.2f s", median(column(took[which], func(u usage) float64 {
						return u.wall
					}))), fmt.Sprintf("%.2f s", median(column(took[which], func(u usage) float64 {
						return u.cpu
					}))), mib(median(column(took[which], func(u usage) float64 {
						return u.memory
					}))))
				out.add(image.name, registry.name, s.name+", next start",
					fmt.Sprintf("%.0f ms", 1e3*median(again[which])), "–", "–")
			}
		}
	}
	fmt.Println("From the start of the process to LUNs of a container image, without any level:")
	out.print(os.Stdout)
	return nil
}

// serveContainer starts a daemon with a container image. It returns the cost until the daemon is
// ready, and the seconds until the first read from the next daemon on the same directories.
func (r *shop) serveContainer(binary, ref string) (u usage, again float64, err error) {
	dir, err := os.MkdirTemp(r.dir, "container-")
	if err != nil {
		return u, 0, err
	}
	defer os.RemoveAll(dir)
	start := func() (*peers.Daemon, error) {
		return peers.StartDaemon(peers.DaemonOptions{Binary: binary,
			DiskDir: filepath.Join(r.dir, "none"), StateDir: dir,
			Env: map[string]string{"CONTAINER_IMAGE": ref, "COPY_MODE": "copy-on-write",
				"PERSISTENT_DIR": filepath.Join(dir, "volume")},
			Args: []string{"--insecure-registry=" + r.far.address,
				"--insecure-registry=" + r.address}})
	}
	if err := os.Mkdir(filepath.Join(dir, "volume"), 0o755); err != nil {
		return u, 0, err
	}
	began := time.Now()
	d, err := start()
	if err != nil {
		return u, 0, err
	}
	u.wall = time.Since(began).Seconds()
	cpu, err := cpuTime(d.PID())
	u.cpu = cpu.Seconds()
	if err == nil {
		var peak int64
		peak, err = peakMemory(d.PID())
		u.memory = float64(peak)
	}
	err = errors.Join(err, d.Signal(syscall.SIGTERM), ended(d.Wait(time.Minute)))
	if err != nil {
		return u, 0, err
	}
	began = time.Now()
	if d, err = start(); err != nil {
		return u, 0, err
	}
	err = readFirst(urlOf(d))
	again = time.Since(began).Seconds()
	return u, again, errors.Join(err, d.Kill())
}

// fetchBlobs fetches blobs one after the other without using them, and returns how long that took.
func fetchBlobs(ctx context.Context, address string, blobs []v1.Descriptor) (float64, error) {
	began := time.Now()
	for _, b := range blobs {
		url := fmt.Sprintf("http://%s/v2/vm/container/blobs/%s", address, b.Digest)
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return 0, err
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			return 0, err
		}
		n, err := io.Copy(io.Discard, res.Body)
		if err = errors.Join(err, res.Body.Close()); err == nil && n != b.Size {
			err = fmt.Errorf("%s: %s with %d bytes instead of %d", url, res.Status, n, b.Size)
		}
		if err != nil {
			return 0, err
		}
	}
	return time.Since(began).Seconds(), nil
}
