package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/registry"
)

// dieWithParent ends a process with this one.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}

// bootImage is the image that guests boot, and bootTimeout how long one may take: there is no KVM
// on the machine of the figures.
const (
	bootImage   = "zstd"
	bootTimeout = 15 * time.Minute
)

// measureBoot prints how long a guest takes to its login prompt, by where its disk comes from, and
// what that has fetched; and what other chunk sizes would fetch.
func (r *shop) measureBoot(ctx context.Context) error {
	if r.images[bootImage] == "" {
		return nil
	}
	kernel, initrd, err := r.bootFiles(ctx)
	if err != nil {
		return err
	}
	boot := func(url string) (float64, error) { return bootGuest(ctx, kernel, initrd, url) }
	order := filepath.Join(r.dir, "boot.order")
	local := func(env map[string]string) (seconds float64, err error) {
		place, err := os.MkdirTemp(r.cache, "local-")
		if err != nil {
			return 0, err
		}
		defer os.RemoveAll(place)
		env["COPY_MODE"] = "copy-on-write"
		d, err := r.startOn(r.images[bootImage], place, env)
		if err != nil {
			return 0, err
		}
		seconds, err = boot(urlOf(d))
		// Not killed: it writes the order when it stops.
		return seconds, errors.Join(err, d.Signal(syscall.SIGTERM), ended(d.Wait(time.Minute)))
	}
	if _, err := local(map[string]string{"RECORD_BOOT": order}); err != nil {
		return err
	}
	plain, err := r.push(bootImage, "1")
	if err != nil {
		return err
	}
	ordered, err := r.push(bootImage, "ordered", "--boot-order="+order)
	if err != nil {
		return err
	}
	streamed := func(ref, mode string) (float64, int64, error) {
		before := r.far.fetched.Load()
		d, dir, err := r.stream(ref, map[string]string{"COPY_MODE": mode})
		if err != nil {
			return 0, 0, err
		}
		defer os.RemoveAll(dir)
		seconds, err := boot(urlOf(d))
		fetched := r.far.fetched.Load() - before
		return seconds, fetched, errors.Join(err, d.Kill())
	}
	out := table{head: []string{"disk", "to the login prompt", "to the local file", "fetched"}}
	cases := []struct {
		name string
		run  func() (float64, int64, error)
	}{
		{"a local file", func() (float64, int64, error) {
			seconds, err := local(map[string]string{})
			return seconds, 0, err
		}},
		{"streamed, cold", func() (float64, int64, error) {
			return streamed(plain, "copy-on-write")
		}},
		{"streamed, recorded order", func() (float64, int64, error) {
			return streamed(ordered, "copy-on-write")
		}},
		{"streamed, recorded order, clone", func() (float64, int64, error) {
			return streamed(ordered, clone)
		}},
		{"pulled by podman, then served", func() (float64, int64, error) {
			before := r.far.fetched.Load()
			pull, err := r.podmanPull(ctx, plain)
			if err != nil {
				return 0, 0, err
			}
			seconds, err := local(map[string]string{})
			return pull + seconds, r.far.fetched.Load() - before, err
		}},
	}
	times, bytes := make([][]float64, len(cases)), make([][]float64, len(cases))
	for round := range r.rounds {
		for turn := range cases {
			i := (round + turn) % len(cases)
			seconds, fetched, err := cases[i].run()
			if err != nil {
				return fmt.Errorf("%s: %w", cases[i].name, err)
			}
			fmt.Fprintf(os.Stderr, "bench: boot, %s: %.1f s, %s\n", cases[i].name, seconds,
				mib(float64(fetched)))
			times[i], bytes[i] = append(times[i], seconds), append(bytes[i], float64(fetched))
		}
	}
	for i, c := range cases {
		var ratios []float64
		for round := range times[i] {
			ratios = append(ratios, times[i][round]/times[0][round])
		}
		out.add(c.name, fmt.Sprintf("%.1f s", median(times[i])), ratio(median(ratios), 1),
			mib(median(bytes[i])))
	}
	fmt.Println("From the start of QEMU to the guest's login prompt:")
	out.print(os.Stdout)
	return r.printChunks(order)
}

func ended(status int, err error) error {
	if err == nil && status != 0 {
		err = fmt.Errorf("a daemon ended with status %d", status)
	}
	return err
}

// bootFiles takes the kernel and the initramfs out of the image.
func (r *shop) bootFiles(ctx context.Context) (kernel, initrd string, err error) {
	raw := filepath.Join(r.dir, "boot.raw")
	defer os.Remove(raw)
	err = runCommand(exec.CommandContext(ctx, r.server, "convert", r.images[bootImage], raw))
	if err != nil {
		return "", "", err
	}
	list, err := exec.CommandContext(ctx, "debugfs", "-R", "ls -p /boot", raw).Output()
	if err != nil {
		return "", "", fmt.Errorf("debugfs: %w", err)
	}
	for line := range strings.Lines(string(list)) {
		parts := strings.Split(line, "/")
		if len(parts) < 6 {
			continue
		}
		to := ""
		switch name := parts[5]; {
		case strings.HasPrefix(name, "vmlinuz-"):
			kernel = filepath.Join(r.dir, "vmlinuz")
			to = kernel
		case strings.HasPrefix(name, "initrd.img-"):
			initrd = filepath.Join(r.dir, "initrd")
			to = initrd
		}
		if to != "" {
			err := runCommand(exec.CommandContext(ctx, "debugfs", "-R",
				"dump /boot/"+parts[5]+" "+to, raw))
			if err != nil {
				return "", "", err
			}
		}
	}
	if kernel == "" || initrd == "" {
		return "", "", errors.New("the image has no kernel and no initramfs in /boot")
	}
	return kernel, initrd, nil
}

// bootGuest boots a guest from a LUN under software emulation, and returns how long it takes to its
// login prompt.
func bootGuest(ctx context.Context, kernel, initrd, url string) (seconds float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", "-accel", "tcg", "-machine", "q35",
		"-cpu", "max", "-m", "1024", "-nodefaults", "-no-user-config", "-display", "none",
		"-no-reboot", "-kernel", kernel, "-initrd", initrd,
		"-append", "root=/dev/vda rw console=ttyS0 mitigations=off", "-serial", "stdio",
		"-drive", "if=none,id=disk,format=raw,file="+url, "-device", "virtio-blk-pci,drive=disk")
	cmd.SysProcAttr = dieWithParent()
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	var messages strings.Builder
	cmd.Stderr = &messages
	begin := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	text, err := until(bufio.NewReader(out), " login: ")
	seconds = time.Since(begin).Seconds()
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // it was killed
	if err != nil {
		return 0, fmt.Errorf("the guest shows no login prompt: %w: %s; its console ends: %s", err,
			&messages, text[max(0, len(text)-2000):])
	}
	return seconds, nil
}

// until reads until a text comes, and returns what was before it.
func until(r *bufio.Reader, want string) (string, error) {
	var text strings.Builder
	for {
		b, err := r.ReadByte()
		if err != nil {
			return text.String(), err
		}
		text.WriteByte(b)
		if strings.HasSuffix(text.String(), want) {
			return text.String(), nil
		}
	}
}

// podmanPull pulls an image into a store of its own, and returns how long that took.
func (r *shop) podmanPull(ctx context.Context, ref string) (seconds float64, err error) {
	store, err := os.MkdirTemp(r.dir, "podman-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(store)
	begin := time.Now()
	err = runCommand(exec.CommandContext(ctx, "podman", "--root", filepath.Join(store, "root"),
		"--runroot", filepath.Join(store, "run"), "--storage-driver=vfs",
		"pull", "--quiet", "--tls-verify=false", ref))
	return time.Since(begin).Seconds(), err
}

// noting is a file of an image that notes what is read of it.
type noting struct {
	*os.File
	size  int64
	mu    sync.Mutex
	reads [][2]int64 // begin and end; guarded by mu
}

func (n *noting) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	n.mu.Lock()
	n.reads = append(n.reads, [2]int64{off, off + int64(len(p))})
	n.mu.Unlock()
	return n.File.ReadAt(p, off)
}

func (n *noting) Size() int64              { return n.size }
func (n *noting) Identity() image.Identity { return image.Identity{} }
func (n *noting) Parallel() int            { return 1 }
func (n *noting) WillRead(_, _ int64)      {}
func (n *noting) Check() error             { return nil }

func (n *noting) Extent(_, length int64) (disk.Extent, error) {
	return disk.Extent{Length: length, Data: true}, nil
}

// printChunks prints how much has to be fetched for a recorded boot, by how much is fetched at
// once, to what its reads need of the compressed file.
func (r *shop) printChunks(order string) error {
	f, err := os.Open(order)
	if err != nil {
		return err
	}
	defer f.Close()
	recorded, err := registry.ReadBootOrder(f)
	if err != nil {
		return err
	}
	file, err := os.Open(r.images[bootImage])
	if err != nil {
		return err
	}
	info, err := file.Stat()
	if err != nil {
		return err
	}
	n := &noting{File: file, size: info.Size()}
	img, err := image.OpenSource(context.Background(), filepath.Base(file.Name()),
		func(context.Context, string) (image.Source, error) { return n, nil }, image.Options{})
	if err != nil {
		return err
	}
	defer img.Close()
	n.reads = nil
	blocks, p := int64(0), make([]byte, registry.BootBlock)
	for _, run := range recorded.Disks[0].Blocks {
		for block := run.First; block < run.First+run.Count; block++ {
			if _, err := img.ReadAt(p, block*registry.BootBlock); err != nil && err != io.EOF {
				return err
			}
			blocks++
		}
	}
	needed := int64(0)
	out := table{head: []string{"at once", "chunks", "bytes", "to what is needed"}}
	for _, read := range n.reads {
		needed += read[1] - read[0]
	}
	for _, size := range []int64{64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20} {
		chunks := map[int64]bool{}
		for _, read := range n.reads {
			for chunk := read[0] / size; chunk*size < read[1]; chunk++ {
				chunks[chunk] = true
			}
		}
		total := int64(len(chunks)) * size
		out.add(fmt.Sprintf("%d KiB", size>>10), fmt.Sprint(len(chunks)), mib(float64(total)),
			ratio(float64(total), float64(needed)))
	}
	fmt.Printf("That boot reads %s of the disk, which are %s of the compressed file:\n",
		mib(float64(blocks*registry.BootBlock)), mib(float64(needed)))
	out.print(os.Stdout)
	return nil
}
