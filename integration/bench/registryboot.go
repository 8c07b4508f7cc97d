package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"kubevirt.io/disk/adapter/machine"
)

// dieWithParent ends a process with this one.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}

// bootImage is the image that guests boot, and bootTimeout the limit for one boot: the machine of
// these numbers has no KVM.
const (
	bootImage   = "zstd"
	bootTimeout = 15 * time.Minute
)

// measureBoot prints how long a guest takes to its login prompt, depending on where its disk comes
// from, how much that fetched, and how much other chunk sizes would fetch.
func (r *shop) measureBoot(ctx context.Context) error {
	if r.images[bootImage] == "" {
		return nil
	}
	plainGuest, err := r.plainGuest(ctx)
	if err != nil {
		return err
	}
	order, err := r.bootOrder(ctx)
	if err != nil {
		return err
	}
	boot := func(url string) (float64, error) { return plainGuest.boot(ctx, url) }
	local := func() (float64, error) { return r.bootLocally(ctx, plainGuest, "") }
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
			seconds, err := local()
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
			seconds, err := local()
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
	return nil
}

// bootOrder returns the reads of a booting guest. It is recorded once and kept, like the images.
func (r *shop) bootOrder(ctx context.Context) (path string, err error) {
	path = filepath.Join(r.cache, "boot.order")
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	g, err := r.plainGuest(ctx)
	if err != nil {
		return "", err
	}
	_, err = r.bootLocally(ctx, g, path)
	return path, err
}

// bootLocally boots a guest from the image as a local file, and records its reads in order; with
// "", it does not record them.
func (r *shop) bootLocally(ctx context.Context, g guest, order string) (seconds float64,
	err error) {
	place, err := os.MkdirTemp(r.cache, "local-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(place)
	d, err := r.startOn(r.images[bootImage], place,
		map[string]string{"COPY_MODE": "copy-on-write", "RECORD_BOOT": order})
	if err != nil {
		return 0, err
	}
	seconds, err = g.boot(ctx, urlOf(d))
	// Do not kill it: it writes the order when it stops.
	return seconds, errors.Join(err, d.Signal(syscall.SIGTERM), ended(d.Wait(time.Minute)))
}

func ended(status int, err error) error {
	if err == nil && status != 0 {
		err = fmt.Errorf("a daemon ended with status %d", status)
	}
	return err
}

// plainGuest is a guest with the kernel and the initramfs from the image.
func (r *shop) plainGuest(ctx context.Context) (g guest, err error) {
	g = guest{cmdline: "root=/dev/vda rw console=ttyS0 mitigations=off", says: " login: "}
	raw := filepath.Join(r.dir, "boot.raw")
	defer os.Remove(raw)
	err = runCommand(exec.CommandContext(ctx, r.server, "convert", r.images[bootImage], raw))
	if err != nil {
		return g, err
	}
	list, err := exec.CommandContext(ctx, "debugfs", "-R", "ls -p /boot", raw).Output()
	if err != nil {
		return g, fmt.Errorf("debugfs: %w", err)
	}
	for line := range strings.Lines(string(list)) {
		parts := strings.Split(line, "/")
		if len(parts) < 6 {
			continue
		}
		to := ""
		switch name := parts[5]; {
		case strings.HasPrefix(name, "vmlinuz-"):
			g.kernel = filepath.Join(r.dir, "vmlinuz")
			to = g.kernel
		case strings.HasPrefix(name, "initrd.img-"):
			g.initrd = filepath.Join(r.dir, "initrd")
			to = g.initrd
		}
		if to != "" {
			err := runCommand(exec.CommandContext(ctx, "debugfs", "-R",
				"dump /boot/"+parts[5]+" "+to, raw))
			if err != nil {
				return g, err
			}
		}
	}
	if g.kernel == "" || g.initrd == "" {
		return g, errors.New("the image has no kernel and no initramfs in /boot")
	}
	return g, nil
}

// guest is a virtual machine that boots from a LUN.
type guest struct {
	kernel, initrd string   // files
	cmdline        string   // of the kernel
	devices        []string // more arguments of QEMU
	says           string   // text on its console that ends the measurement
}

// boot boots a guest under software emulation, and returns how long it takes until the guest prints
// guest.says.
func (g guest) boot(ctx context.Context, url string) (seconds float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", append([]string{"-accel", "tcg",
		"-machine", "q35", "-cpu", "max", "-m", "1024", "-nodefaults", "-no-user-config",
		"-display", "none", "-no-reboot", "-kernel", g.kernel, "-initrd", g.initrd,
		"-append", g.cmdline, "-serial", "stdio",
		"-drive", "if=none,id=disk,format=raw,file=" + url,
		"-device", "virtio-blk-pci,drive=disk,serial=" + machine.DefaultSerial}, g.devices...)...)
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
	text, err := until(bufio.NewReader(out), g.says)
	seconds = time.Since(begin).Seconds()
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // it was killed
	if err != nil {
		return 0, fmt.Errorf("the guest does not say %q: %w: %s; its console ends: %s",
			g.says, err, &messages, text[max(0, len(text)-2000):])
	}
	return seconds, nil
}

// until reads up to a text, and returns everything before it.
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
	store, err := os.MkdirTemp("", "pull-") // podman takes a path of 50 characters at most
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
