package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/stream"

	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/integration/peers"
)

// helloSays is the first output of the entry point of examples/container/hello.
const helloSays = "Hello from a container image"

// measureMachine prints the time from power on to the entry point of a small container image, and
// to the login prompt of a plain Debian 12, in turns. Each boots from a LUN, with the same QEMU,
// under software emulation.
func (r *shop) measureMachine(ctx context.Context) error {
	if r.images[bootImage] == "" {
		return nil
	}
	boot := filepath.Join(filepath.Dir(r.cache), "machine", runtime.GOARCH)
	hello := guest{kernel: filepath.Join(boot, "vmlinuz"), initrd: filepath.Join(boot, "initrd"),
		cmdline: machine.KernelArgs(runtime.GOARCH, machine.DefaultSerial), says: helloSays,
		devices: []string{"-netdev", "user,id=net", "-device",
			"virtio-net-pci,netdev=net,romfile="}}
	if _, err := os.Stat(hello.initrd); err != nil {
		return fmt.Errorf("%w: \"make machine\" makes what boots container images", err)
	}
	debian, err := r.plainGuest(ctx)
	if err != nil {
		return err
	}
	debian.devices = hello.devices
	ref, err := r.pushHello(ctx)
	if err != nil {
		return err
	}
	var took [2][]float64
	for range r.rounds {
		for which, run := range []func() (float64, error){
			func() (float64, error) {
				return r.bootServed(ctx, hello, map[string]string{"CONTAINER_IMAGE": ref})
			},
			func() (float64, error) { return r.bootLocally(ctx, debian, "") },
		} {
			seconds, err := run()
			if err != nil {
				return err
			}
			fmt.Fprintf(os.Stderr, "bench: machine %d: %.1f s\n", which, seconds)
			took[which] = append(took[which], seconds)
		}
	}
	var ratios []float64
	for round := range took[0] {
		ratios = append(ratios, took[0][round]/took[1][round])
	}
	out := table{head: []string{"power on to", "time", "to the login prompt"}}
	out.add("the entry point of a container image", fmt.Sprintf("%.1f s", median(took[0])),
		ratio(median(ratios), 1))
	out.add("the login prompt of Debian 12", fmt.Sprintf("%.1f s", median(took[1])), ratio(1, 1))
	fmt.Println("From the start of QEMU, with the disk as a LUN:")
	out.print(os.Stdout)
	return nil
}

// bootServed boots a guest from the first LUN of a daemon with these variables.
func (r *shop) bootServed(ctx context.Context, g guest, env map[string]string) (seconds float64,
	err error) {
	dir, err := os.MkdirTemp(r.dir, "machine-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	env["COPY_MODE"], env["INSECURE_REGISTRY"] = "copy-on-write", r.address
	d, err := peers.StartDaemon(peers.DaemonOptions{Binary: r.server,
		DiskDir: filepath.Join(r.dir, "none"), StateDir: dir, Env: env})
	if err != nil {
		return 0, err
	}
	seconds, err = g.boot(ctx, urlOf(d))
	return seconds, errors.Join(err, d.Kill())
}

// pushHello builds the program of `make run-container`, and pushes an image with nothing else to
// the registry.
func (r *shop) pushHello(ctx context.Context) (reference string, err error) {
	program := filepath.Join(r.dir, "hello")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program,
		"./examples/container/hello")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if err := runCommand(cmd); err != nil {
		return "", err
	}
	content, err := os.ReadFile(program)
	if err != nil {
		return "", err
	}
	var layer bytes.Buffer
	t := tar.NewWriter(&layer)
	err = t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "hello", Mode: 0o755,
		Size: int64(len(content))})
	if err != nil {
		return "", err
	}
	if _, err := t.Write(content); err != nil {
		return "", err
	}
	if err := t.Close(); err != nil {
		return "", err
	}
	image, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux",
		Architecture: runtime.GOARCH, RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{Entrypoint: []string{"/hello"}}})
	if err != nil {
		return "", err
	}
	image, err = mutate.AppendLayers(image, stream.NewLayer(io.NopCloser(&layer),
		stream.WithCompressionLevel(gzip.BestSpeed)))
	if err != nil {
		return "", err
	}
	reference = r.address + "/vm/hello:1"
	ref, err := name.ParseReference(reference, name.Insecure)
	if err != nil {
		return "", err
	}
	return reference, remote.Write(ref, image)
}
