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
	"strconv"
	"strings"
	"time"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/target/targettest"
)

// startImages are the images with an operating system for measuring the start.
// scripts/make-os-images.sh makes them. The tenfold ones have ten times as much data. Missing
// images are left out with a message.
var startImages = []string{"plain", "zlib", "zstd", "zlib-100g", "plain-tenfold", "zlib-tenfold",
	"zstd-tenfold"}

// tenfold is the end of the names of images that take long to copy.
const tenfold = "-tenfold"

// findOSImages returns the paths of the images that exist, by name.
func findOSImages(s settings, names ...string) map[string]string {
	found := make(map[string]string)
	for _, name := range names {
		path := filepath.Join(filepath.Dir(s.cache), "os", name+".qcow2")
		if _, err := os.Stat(path); err != nil {
			with := ""
			if strings.HasSuffix(name, tenfold) {
				with = " " + name
			}
			fmt.Fprintf(os.Stderr, "bench: no %s image with an operating system: "+
				"scripts/make-os-images.sh cache/os%s makes it\n", name, with)
			continue
		}
		found[name] = path
	}
	return found
}

// starter is a way to serve an image as a LUN.
type starter struct {
	name  string
	start func(image, dir string) (url string, stop func() error, err error)
}

func (s settings) starters() []starter {
	ours := func(mode string) func(image, dir string) (string, func() error, error) {
		return func(image, dir string) (string, func() error, error) {
			d, err := s.startOn(image, dir, map[string]string{"COPY_MODE": mode})
			if err != nil {
				return "", nil, err
			}
			return "iscsi://" + d.Portals[0] + "/" + peers.DefaultTarget + "/1", d.Kill, nil
		}
	}
	all := []starter{
		{"kubevirt-disk, copy-on-write", ours("copy-on-write")},
		{"kubevirt-disk, clone", ours("clone")},
		{"qemu-img convert, tgtd", func(image, dir string) (string, func() error, error) {
			raw := filepath.Join(dir, "disk.raw")
			if out, err := exec.Command("qemu-img", "convert", "-O", "raw", image,
				raw).CombinedOutput(); err != nil {
				return "", nil, fmt.Errorf("qemu-img convert: %w: %s", err, out)
			}
			t, err := peers.StartTgtd(raw)
			if err != nil {
				return "", nil, err
			}
			return t.URL, t.Stop, nil
		}},
	}
	if earlier, ok := s.earlier(); ok {
		for _, c := range earlier.starters()[:2] {
			all = append(all, starter{c.name + ", " + beforeName, c.start})
		}
	}
	return all
}

// startOn serves one image of a directory that may hold others.
func (s settings) startOn(image, dir string, env map[string]string) (*peers.Daemon, error) {
	disks := filepath.Join(dir, "disk")
	if err := os.MkdirAll(disks, 0o755); err != nil {
		return nil, err
	}
	link := filepath.Join(disks, filepath.Base(image))
	if err := os.Link(image, link); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	all := map[string]string{"ACCESS_MODE": "write-shared"}
	maps.Copy(all, env)
	return peers.StartDaemon(peers.DaemonOptions{Binary: s.server, DiskDir: disks, StateDir: dir,
		Env: all})
}

// measureStart prints the time from the start of a process until an initiator has read the first 4
// KiB.
func measureStart(ctx context.Context, s settings) error {
	images := findOSImages(s, startImages...)
	out := table{head: []string{"image", "candidate", "to the first 4 KiB read"}}
	for _, image := range startImages {
		path := images[image]
		if path == "" {
			continue
		}
		all := s.starters()
		if strings.HasSuffix(image, tenfold) {
			all = slices.Delete(all, 2, 3) // each takes a minute and 18 GiB
		}
		times := make([][]float64, len(all))
		for round := range s.rounds {
			for turn := range all {
				i := (round + turn) % len(all)
				if err := ctx.Err(); err != nil {
					return err
				}
				seconds, err := s.timeToFirstRead(all[i], path)
				if err != nil {
					return fmt.Errorf("%s on the %s image: %w", all[i].name, image, err)
				}
				times[i] = append(times[i], seconds)
			}
		}
		for i, c := range all {
			out.add(image, c.name, fmt.Sprintf("%.0f ms", median(times[i])*1e3))
		}
	}
	fmt.Println("From the start of the process to the first read:")
	out.print(os.Stdout)
	return nil
}

func (s settings) timeToFirstRead(c starter, image string) (seconds float64, err error) {
	dir, err := os.MkdirTemp(s.cache, "start-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	begin := time.Now()
	url, stop, err := c.start(image, dir)
	if err != nil {
		return 0, err
	}
	err = readFirst(url)
	elapsed := time.Since(begin)
	return elapsed.Seconds(), errors.Join(err, stop())
}

// readFirst logs in and reads the first 4 KiB of LUN 1.
func readFirst(url string) error {
	portal, name, _ := strings.Cut(strings.TrimSuffix(strings.TrimPrefix(url, "iscsi://"), "/1"),
		"/")
	addr, err := net.ResolveTCPAddr("tcp", portal)
	if err != nil {
		return err
	}
	session, err := targettest.Login(addr, targettest.LoginOptions{Target: name})
	if err != nil {
		return err
	}
	defer session.Close()
	if _, err := session.ClearAttention(1); err != nil {
		return err
	}
	r, err := session.Do(targettest.Read10(1, 0, 8))
	if err == nil && (r.Status != 0 || len(r.Data) != 4096) {
		err = fmt.Errorf("the first read ended with status %#x and %d bytes", r.Status, len(r.Data))
	}
	return err
}

// coldStep is the distance between cold reads: each is in another cluster. One turn around an image
// of 10 GiB takes 10,000 reads. The addresses of the next turn lie 160 KiB before those, again in
// other clusters. Before a cluster is read twice, many times the size of our cache of decoded
// clusters is read.
const coldStep = 1<<20 + 4096

// measureColdReads prints how fast an image can be read without a copy: the load generator reads 4
// KiB everywhere in it, through our server and through QEMU's.
func measureColdReads(ctx context.Context, s settings) error {
	images := findOSImages(s, "plain", "zlib", "zstd")
	out := table{head: []string{"image", "depth", "server", "reads per second", "to qemu-nbd"}}
	for _, image := range []string{"plain", "zlib", "zstd"} {
		path := images[image]
		if path == "" {
			continue
		}
		if err := warm(path); err != nil {
			return err
		}
		for _, depth := range []int{1, 16} {
			all := s.imageServers()
			rates := make([][]float64, len(all))
			for round := range s.rounds {
				for turn := range all {
					i := (round + turn) % len(all)
					rate, err := s.coldRate(ctx, all[i], path, depth)
					if err != nil {
						return fmt.Errorf("%s on the %s image: %w", all[i].name, image, err)
					}
					rates[i] = append(rates[i], rate)
				}
			}
			fmt.Fprintf(os.Stderr, "bench: reads of the %s image, depth %d: done\n", image, depth)
			for i, c := range all {
				var ratios []float64
				for round := range rates[i] {
					ratios = append(ratios, rates[i][round]/rates[1][round])
				}
				out.add(image, strconv.Itoa(depth), c.name, fmt.Sprintf("%.0f", median(rates[i])),
					ratio(median(ratios), 1))
			}
		}
	}
	fmt.Println("4 KiB reads of an image that has not been copied:")
	out.print(os.Stdout)
	return nil
}

// untilListens waits until somebody listens at a Unix socket.
func untilListens(socket string) error {
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if c, err := net.Dial("unix", socket); err == nil {
			return c.Close()
		} else if time.Now().After(deadline) {
			return err
		}
	}
}

// imageServers are our server and QEMU's. The second one is the baseline.
func (s settings) imageServers() []starter {
	run := func(socket string, command ...string) (string, func() error, error) {
		cmd := exec.Command(command[0], command[1:]...)
		if err := cmd.Start(); err != nil {
			return "", nil, err
		}
		stop := func() error {
			err := cmd.Process.Kill()
			_ = cmd.Wait() // it was killed
			return err
		}
		if err := untilListens(socket); err != nil {
			return "", nil, errors.Join(err, stop())
		}
		return nbdScheme + socket, stop, nil
	}
	all := []starter{
		s.starters()[0],
		{"qemu-nbd", func(image, dir string) (string, func() error, error) {
			socket := filepath.Join(dir, "nbd")
			return run(socket, "qemu-nbd", "-r", "-t", "-e", "8", "-f", "qcow2", "-k", socket,
				image)
		}},
		{"qemu-storage-daemon", func(image, dir string) (string, func() error, error) {
			socket := filepath.Join(dir, "qsd")
			url, stop, err := run(socket, "qemu-storage-daemon", "--blockdev",
				"driver=qcow2,node-name=disk,read-only=on,file.driver=file,file.read-only=on,"+
					"file.filename="+image, "--nbd-server", "addr.type=unix,addr.path="+socket,
				"--export", "type=nbd,id=export,node-name=disk,name=")
			return url, stop, err
		}},
	}
	if earlier, ok := s.earlier(); ok {
		all = append(all, earlier.imageServers()[0])
		all[3].name += ", " + beforeName
	}
	return all
}

// coldRate starts a server of an image and returns how many reads per second it answers.
func (s settings) coldRate(ctx context.Context, c starter, image string, depth int) (rate float64,
	err error) {
	l, err := coldLoad(image, depth)
	if err != nil {
		return 0, err
	}
	dir, err := os.MkdirTemp(s.cache, "cold-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	url, stop, err := c.start(image, dir)
	if err != nil {
		return 0, err
	}
	done, err := generate(ctx, l, url, s.length)
	if err = errors.Join(err, stop()); err != nil {
		return 0, err
	}
	return done.rate(), nil
}

// coldLoad is the load of cold reads of an image.
func coldLoad(path string, depth int) (generatorLoad, error) {
	opened, err := image.Open(path, image.Options{})
	if err != nil {
		return generatorLoad{}, err
	}
	return generatorLoad{bytes: 4 << 10, depth: depth, sessions: 1, luns: 1, size: opened.Size(),
		step: coldStep}, opened.Close()
}

// replicas is the number of disks of one image that are served at once.
const replicas = 16

// measureReplicas prints the memory and disk space that each of many disks of one image takes in
// mode copy-on-write.
func measureReplicas(_ context.Context, s settings) (err error) {
	image := findOSImages(s, "zlib")["zlib"]
	if image == "" {
		return nil
	}
	dir, err := os.MkdirTemp(s.cache, "replicas-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var memory, disk int64
	for i := range replicas {
		own := filepath.Join(dir, strconv.Itoa(i))
		if err := os.MkdirAll(own, 0o755); err != nil {
			return err
		}
		d, err := s.startOn(image, own, map[string]string{"COPY_MODE": "copy-on-write"})
		if err != nil {
			return err
		}
		defer d.Kill()
		err = readFirst("iscsi://" + d.Portals[0] + "/" + peers.DefaultTarget + "/1")
		if err != nil {
			return err
		}
		used, err := anonymousMemory(d.PID())
		if err != nil {
			return err
		}
		memory += used
		taken, err := allocatedBelow(filepath.Join(own, "work"))
		if err != nil {
			return err
		}
		disk += taken
	}
	fmt.Printf("%d replicas of one 10 GiB image, copy-on-write, after the first read: %s of "+
		"anonymous memory and %d KiB of disk each\n",
		replicas, mib(float64(memory)/replicas), disk/replicas>>10)
	return nil
}

// allocatedBelow returns how many bytes the files of a directory take.
func allocatedBelow(dir string) (sum int64, err error) {
	out, err := exec.Command("du", "-s", "-B1", dir).Output()
	if err != nil {
		return 0, err
	}
	first, _, _ := strings.Cut(string(out), "\t")
	return strconv.ParseInt(first, 10, 64)
}
