package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/target/targettest"
)

// shop is a registry on this machine with images that our push has made, and a link to it that
// makes it look far away.
type shop struct {
	settings
	dir     string // for all files; removed at the end
	address string // of the registry
	far     *link
	images  map[string]string // paths by name; each is vm/NAME:1
	pushed  map[string]bool   // references in the registry
}

// shopPart is a measurement with a registry; -loads chooses some by name.
type shopPart struct {
	name    string
	measure func(*shop, context.Context) error
}

// registryParts are the measurements of images in a registry.
var registryParts = []shopPart{
	{"registry, first read", (*shop).measureFirst},
	{"registry, boot", (*shop).measureBoot},
	{"registry, reads of a boot", (*shop).measureBootReads},
	{"registry, cached", (*shop).measureCached},
	{"registry, pull, plain", pulling("plain")},
	{"registry, pull, zstd", pulling("zstd")},
	{"registry, push, plain", pushing("plain")},
	{"registry, push, zstd", pushing("zstd")},
	{"registry, shared", (*shop).measureShared},
	{"registry, container", (*shop).measureContainer},
	{"registry, machine", (*shop).measureMachine},
}

// measureRegistry prints the cost of images in a registry that is 20 ms and 200 Mbit/s away.
func measureRegistry(ctx context.Context, s settings) error {
	for _, tool := range []string{"docker-registry", "qemu-io"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%w (scripts/install-tools.sh installs it)", err)
		}
	}
	return s.measureShop(ctx, registryParts)
}

// measureShop does some measurements with one registry.
func (s settings) measureShop(ctx context.Context, parts []shopPart) (err error) {
	r, err := s.openShop()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	for _, part := range parts {
		if !s.loads.MatchString(part.name) {
			continue
		}
		if err := part.measure(r, ctx); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	return nil
}

func (s settings) openShop() (*shop, error) {
	dir, err := os.MkdirTemp(s.cache, "registry-")
	if err != nil {
		return nil, err
	}
	r := &shop{settings: s, dir: dir, pushed: map[string]bool{},
		images: findOSImages(s, "plain", "zlib", "zstd", "plain-tenfold", "zstd-tenfold")}
	if err := os.Mkdir(filepath.Join(dir, "none"), 0o755); err != nil {
		return nil, err
	}
	if r.address, err = startDockerRegistry(filepath.Join(dir, "data")); err != nil {
		return nil, err
	}
	r.far, err = newLink(r.address)
	return r, err
}

func (r *shop) close() error { return errors.Join(r.far.close(), os.RemoveAll(r.dir)) }

// startDockerRegistry starts Debian's registry. It ends with this process.
func startDockerRegistry(data string) (address string, err error) {
	port, err := peers.FreePort()
	if err != nil {
		return "", err
	}
	address = fmt.Sprintf("127.0.0.1:%d", port)
	config := data + ".yml"
	text := fmt.Sprintf("version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\n"+
		"storage: {filesystem: {rootdirectory: %q}}\nhttp: {addr: %q}\n", data, address)
	if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
		return "", err
	}
	cmd := exec.Command("docker-registry", "serve", config)
	cmd.SysProcAttr = dieWithParent()
	cmd.Env = append(os.Environ(), "OTEL_TRACES_EXPORTER=none")
	if err := cmd.Start(); err != nil {
		return "", err
	}
	for range 1000 {
		if c, err := net.Dial("tcp", address); err == nil {
			return address, c.Close()
		}
		time.Sleep(10 * time.Millisecond)
	}
	return "", errors.New("docker-registry does not listen")
}

// push puts an image into the registry, once, and returns its reference for the registry far away.
func (r *shop) push(name, tag string, args ...string) (string, error) {
	ref := "/vm/" + name + ":" + tag
	if !r.pushed[ref] {
		all := append([]string{"push", "--base=none", "--insecure-registry=" + r.address}, args...)
		if err := runCommand(exec.Command(r.server,
			append(all, r.images[name], r.address+ref)...)); err != nil {
			return "", err
		}
		r.pushed[ref] = true
	}
	return r.far.address + ref, nil
}

// runCommand runs a command, and shows its output if it fails.
func runCommand(cmd *exec.Cmd) error {
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err,
			strings.TrimSpace(string(out)))
	}
	return nil
}

// stream serves an image of the far registry, with a directory of its own.
func (r *shop) stream(ref string, env map[string]string) (d *peers.Daemon, dir string, err error) {
	if dir, err = os.MkdirTemp(r.dir, "serve-"); err != nil {
		return nil, "", err
	}
	all := map[string]string{"IMAGE": ref, "INSECURE_REGISTRY": r.far.address,
		"COPY_MODE": "copy-on-write", "ACCESS_MODE": "write-shared"}
	maps.Copy(all, env)
	d, err = peers.StartDaemon(peers.DaemonOptions{Binary: r.server,
		DiskDir: filepath.Join(r.dir, "none"), StateDir: dir, Env: all})
	return d, dir, err
}

func urlOf(d *peers.Daemon) string {
	return "iscsi://" + d.Portals[0] + "/" + peers.DefaultTarget + "/1"
}

// measureFirst prints the time from the start of the process to the first 4 KiB over iSCSI, with
// nothing in the cache, at the beginning of the disk and in the middle of its data.
func (r *shop) measureFirst(ctx context.Context) error {
	out := table{head: []string{"image", "to the first 4 KiB", "in the middle of the data",
		"fetched"}}
	names := slices.Sorted(maps.Keys(r.images))
	for _, name := range names {
		ref, err := r.push(name, "1")
		if err != nil {
			return err
		}
		var times [2][]float64
		var fetched []float64
		for range r.rounds {
			for i, block := range []uint32{0, 1 << 21} { // 1 GiB
				if err := ctx.Err(); err != nil {
					return err
				}
				before := r.far.fetched.Load()
				seconds, err := r.firstRead(ref, block)
				if err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
				times[i] = append(times[i], seconds)
				if i == 0 {
					fetched = append(fetched, float64(r.far.fetched.Load()-before))
				}
			}
		}
		out.add(name, fmt.Sprintf("%.0f ms", 1e3*median(times[0])),
			fmt.Sprintf("%.0f ms", 1e3*median(times[1])), mib(median(fetched)))
	}
	fmt.Println("From the start of the process to a read of an image in a registry far away:")
	out.print(os.Stdout)
	return nil
}

// firstRead starts a daemon and returns the time until it has read 4 KiB at a block.
func (r *shop) firstRead(ref string, block uint32) (seconds float64, err error) {
	begin := time.Now()
	d, dir, err := r.stream(ref, nil)
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	session, err := targettest.Login(mustResolve(d.Portals[0]),
		targettest.LoginOptions{Target: peers.DefaultTarget})
	if err != nil {
		return 0, errors.Join(err, d.Kill())
	}
	defer session.Close()
	_, err = session.ClearAttention(1)
	if err == nil {
		answer, doErr := session.Do(targettest.Read10(1, block, 8))
		if err = doErr; err == nil && (answer.Status != 0 || len(answer.Data) != 4096) {
			err = fmt.Errorf("the read ended with status %#x", answer.Status)
		}
	}
	seconds = time.Since(begin).Seconds()
	return seconds, errors.Join(err, d.Kill())
}

func mustResolve(address string) *net.TCPAddr {
	a, err := net.ResolveTCPAddr("tcp", address)
	if err != nil {
		panic(err) // the daemon listens at this address
	}
	return a
}

// sharing is how many daemons of a node share a cache.
const sharing = 16

// sharedRead is how many bytes each of them reads.
const sharedRead = 128 << 20

// measureShared prints how many bytes are fetched by several daemons that read the same with one
// cache at the same time, compared with one daemon.
func (r *shop) measureShared(ctx context.Context) error {
	ref, err := r.push("zstd", "1")
	if err != nil {
		return err
	}
	fetch := func(daemons int) (int64, error) {
		cache, err := os.MkdirTemp(r.dir, "cache-")
		if err != nil {
			return 0, err
		}
		defer os.RemoveAll(cache)
		before := r.far.fetched.Load()
		var all []*exec.Cmd
		for range daemons {
			d, dir, err := r.stream(ref, map[string]string{"CACHE_DIR": cache})
			if err != nil {
				return 0, err
			}
			defer os.RemoveAll(dir)
			defer d.Kill()
			all = append(all, readSequence(ctx, urlOf(d), sharedRead))
		}
		for _, cmd := range all {
			if err := cmd.Start(); err != nil {
				return 0, err
			}
		}
		for _, cmd := range all {
			err = errors.Join(err, cmd.Wait())
		}
		return r.far.fetched.Load() - before, err
	}
	one, err := fetch(1)
	if err != nil {
		return err
	}
	many, err := fetch(sharing)
	if err != nil {
		return err
	}
	fmt.Printf("%d daemons with one cache read the same %d MiB at once: %s from the registry, one "+
		"daemon %s, %s\n\n", sharing, sharedRead>>20, mib(float64(many)), mib(float64(one)),
		ratio(float64(many), float64(one)))
	return nil
}

// readSequence reads the beginning of a disk in order.
func readSequence(ctx context.Context, url string, length int64) *exec.Cmd {
	args := []string{"-r", "-f", "raw"}
	for off := int64(0); off < length; off += 1 << 20 {
		args = append(args, "-c", fmt.Sprintf("read %d 1M", off))
	}
	return exec.CommandContext(ctx, "qemu-io", append(args, url)...)
}

// cachedSize is how many bytes of a cached disk are read.
const cachedSize = 512 << 20

// measureCached prints how fast cached data is read again, compared with the same image as a local
// file.
func (r *shop) measureCached(ctx context.Context) error {
	out := table{head: []string{"image", "load", "from the cache", "from a local file", "ratio"}}
	for _, name := range []string{"plain", "zstd"} {
		ref, err := r.push(name, "1")
		if err != nil {
			return err
		}
		streamed, dir, err := r.stream(ref, nil)
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		defer streamed.Kill()
		place, err := os.MkdirTemp(r.cache, "local-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(place)
		local, err := r.startOn(r.images[name], place,
			map[string]string{"COPY_MODE": "copy-on-write"})
		if err != nil {
			return err
		}
		defer local.Kill()
		for _, d := range []*peers.Daemon{streamed, local} {
			if err := runCommand(readSequence(ctx, urlOf(d), cachedSize)); err != nil {
				return err
			}
		}
		for _, depth := range []int{1, 32} {
			l := generatorLoad{bytes: 4 << 10, depth: depth, sessions: 1, luns: 1, size: cachedSize}
			var rates [2][]float64
			var ratios []float64
			for round := range r.rounds {
				for turn := range 2 {
					i := (round + turn) % 2
					url := urlOf([]*peers.Daemon{streamed, local}[i])
					done, err := generate(ctx, l, url, r.length)
					if err != nil {
						return err
					}
					rates[i] = append(rates[i], done.rate())
				}
				ratios = append(ratios, rates[0][round]/rates[1][round])
			}
			out.add(name, l.String(), fmt.Sprintf("%.0f/s", median(rates[0])),
				fmt.Sprintf("%.0f/s", median(rates[1])), ratio(median(ratios), 1))
		}
		if err := errors.Join(streamed.Kill(), local.Kill()); err != nil {
			return err
		}
	}
	fmt.Println("4 KiB reads of what was fetched before, copy-on-write:")
	out.print(os.Stdout)
	return nil
}
