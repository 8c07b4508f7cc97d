package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/integration/bench/guests"
	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/vhostuser/vhosttest"
)

// The names of the other rows, for -loads.
const (
	coldName    = "page cache has nothing, 4 KiB random read, depth 32"
	overlayName = "copy-on-write over qcow2, 30 % written, 4 KiB random read, depth 32"
	manyName    = "16 guests, 4 queues each, 4 KiB random read, depth 8"
	idleName    = "an idle guest"
)

// manySize is the size of the disk of each of many guests. A processor's cache does not hold it:
// otherwise one guest has that cache for itself, and reads a seventh faster by that alone.
const manySize = nbdSize / 4

// overlaySize is the size of the disk of the overlay, which takes twice that and a third.
const overlaySize = nbdSize / 2

// vhostColdTime is short, so that few of the blocks that are read have been read before.
const vhostColdTime = 300 * time.Millisecond

// vhostSettle is how long a server has had nothing to do before it counts as idle: ours looks for
// slow storage for two seconds after a request.
const vhostSettle = 3 * time.Second

// forget has the page cache forget a file.
func forget(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
}

// coldReader reads a file that the page cache does not have.
type coldReader struct {
	name   string
	read   func(ctx context.Context) (client, error)
	server *nbdServer // nil: it reads by itself
	rate   []float64
	cpu    []float64 // of the server for a read, seconds
}

// measure reads once.
func (c *coldReader) measure(ctx context.Context) error {
	server := c.server
	if server == nil {
		server = &nbdServer{} // without a process
	}
	before, err := server.cpuTime()
	if err != nil {
		return err
	}
	done, err := c.read(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", c.name, err)
	}
	after, err := server.cpuTime()
	c.rate = append(c.rate, done.rate())
	c.cpu = append(c.cpu, (after-before).Seconds()/done.operations)
	return err
}

// measureVhostCold compares random reads that storage must be waited for with fio on the same file.
func measureVhostCold(ctx context.Context, s settings) (err error) {
	if !s.loads.MatchString(coldName) {
		return nil
	}
	raws, remove, err := s.vhostFiles(1, nbdSize)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	var info unix.Statfs_t
	if err := unix.Statfs(raws[0], &info); err != nil {
		return err
	}
	if info.Type == unix.TMPFS_MAGIC {
		fmt.Fprintf(os.Stderr, "bench: %s is memory, so %q is left out: choose -cache on storage\n",
			s.cache, coldName)
		return nil
	}
	all, stop, err := s.coldReaders(raws)
	defer func() { err = errors.Join(err, stop()) }()
	if err != nil {
		return err
	}
	for round := range s.rounds {
		for turn := range all {
			c := all[(round+turn)%len(all)]
			if err := errors.Join(ctx.Err(), forget(raws[0])); err != nil {
				return err
			}
			if err := c.measure(ctx); err != nil {
				return err
			}
		}
	}
	out := table{head: []string{coldName, "per second", "CPU", "to fio", "to fio with O_DIRECT"}}
	for _, c := range all {
		cpu := ""
		if c.server != nil {
			cpu = microseconds(c.cpu)
		}
		out.add(c.name, fmt.Sprintf("%.0f", median(c.rate)), cpu,
			ratio(median(ratios(c.rate, all[0].rate)), 1),
			ratio(median(ratios(c.rate, all[1].rate)), 1))
	}
	fmt.Println("Random reads of a file that is on storage only:")
	out.print(os.Stdout)
	return nil
}

// coldReaders are fio, the servers by vhost-user, and our disks by NBD and iSCSI. stop ends them.
func (s settings) coldReaders(raws []string) (all []*coldReader, stop func() error, err error) {
	var stops []func() error
	stop = func() (err error) {
		for _, one := range slices.Backward(stops) {
			err = errors.Join(err, one())
		}
		return err
	}
	for _, direct := range []string{"0", "1"} {
		all = append(all, &coldReader{name: "fio, io_uring, direct=" + direct,
			read: func(ctx context.Context) (client, error) {
				return coldFio(ctx, raws[0], "--direct="+direct)
			}})
	}
	servers := s.vhostPeers()
	over := s.vhostOverNBD(servers)
	servers = append(servers, vhostQEMU("QEMU, O_DIRECT and native AIO",
		"aio=native,cache.direct=on"), over)
	for _, v := range servers {
		stops = append(stops, v.stop)
		if err := v.begin(s.cache, raws); err != nil {
			return nil, stop, err
		}
		all = append(all, &coldReader{name: v.name + ", vhost-user", server: &v.nbdServer,
			read: func(ctx context.Context) (client, error) {
				r, err := v.load(ctx, coldName, guests.Load{Bytes: 4 << 10, Depth: 32}, 1,
					vhostColdTime)
				return client{float64(r.Operations), r.Elapsed}, err
			}})
	}
	n := over.nbd()
	l := generatorLoad{bytes: 4 << 10, depth: 32, sessions: 1, luns: 1, size: nbdSize}
	all = append(all, &coldReader{name: "kubevirt-disk, NBD by fio", server: n,
		read: func(ctx context.Context) (client, error) {
			return n.fio(ctx, nbdLoad{"", "randread", l.bytes, l.depth}, vhostColdTime)
		}})
	// fio takes twice as long for an NBD read as our client, so two protocols have the same one.
	for _, by := range [][2]string{{"NBD", nbdScheme + n.socket()},
		{"iSCSI", "iscsi://" + n.portal + "/" + peers.DefaultTarget + "/1"}} {
		all = append(all, &coldReader{name: "kubevirt-disk, " + by[0], server: n,
			read: func(ctx context.Context) (client, error) {
				return generate(ctx, l, by[1], vhostColdTime)
			}})
	}
	return all, stop, nil
}

// coldFio reads a file by fio itself.
func coldFio(ctx context.Context, path, direct string) (client, error) {
	out, err := output(ctx, vhostColdTime, "fio", "--name=load", "--ioengine=io_uring", "--thread",
		"--filename="+path, "--rw=randread", "--bs=4096", "--iodepth=32", "--time_based",
		"--norandommap", direct, "--output-format=json",
		"--runtime="+strconv.FormatInt(vhostColdTime.Milliseconds(), 10)+"ms")
	if err != nil {
		return client{}, err
	}
	return parseFio(out)
}

// measureVhostOverlay compares a disk of ours over a qcow2 image with a raw file of ours.
func measureVhostOverlay(ctx context.Context, s settings) (err error) {
	if !s.loads.MatchString(overlayName) || !s.speaksVhost() || s.vhost != "" {
		return nil
	}
	raws, remove, err := s.vhostFiles(1, overlaySize)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	images, err := os.MkdirTemp(s.cache, "vhost-image-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(images)) }()
	image := filepath.Join(images, "disk.qcow2")
	if out, err := exec.CommandContext(ctx, "qemu-img", "convert", "-O", "qcow2", raws[0],
		image).CombinedOutput(); err != nil {
		return fmt.Errorf("qemu-img convert: %w: %s", err, out)
	}
	raw, overlay := s.vhostOurs("raw file", "none"), s.vhostOurs("overlay", "copy-on-write")
	defer func() { err = errors.Join(err, raw.stop(), overlay.stop()) }()
	if err := errors.Join(raw.begin(s.cache, raws),
		overlay.begin(s.cache, []string{image})); err != nil {
		return err
	}
	if err := writeThird(overlay.sockets[0]); err != nil {
		return err
	}
	l := guests.Load{Bytes: 4 << 10, Depth: 32}
	for range s.rounds {
		for _, v := range []*vhostServer{raw, overlay} {
			if _, err := v.load(ctx, overlayName, l, 1, s.length); err != nil {
				return err
			}
		}
	}
	out := table{head: []string{"load", "raw", "overlay", "to raw"}}
	out.add(overlayName, fmt.Sprintf("%.0f", median(raw.rates[overlayName])),
		fmt.Sprintf("%.0f", median(overlay.rates[overlayName])),
		ratio(median(ratios(overlay.rates[overlayName], raw.rates[overlayName])), 1))
	out.print(os.Stdout)
	return nil
}

// writeThird writes three of ten blocks of 64 KiB of a disk.
func writeThird(socket string) error {
	d, err := vhosttest.Dial(socket, vhosttest.Options{})
	if err != nil {
		return err
	}
	data := make([]byte, 64<<10)
	for off := int64(0); off < overlaySize && err == nil; off += int64(len(data)) {
		if off/int64(len(data))%10 < 3 {
			err = d.Write(0, off, data)
		}
	}
	return errors.Join(err, d.Shutdown())
}

// measureVhostGuests compares many guests on one server with one guest, and shows what a guest
// costs that does nothing, and the server's memory.
func measureVhostGuests(ctx context.Context, s settings) (err error) {
	if !s.loads.MatchString(manyName) && !s.loads.MatchString(idleName) {
		return nil
	}
	raws, remove, err := s.vhostFiles(vhostGuests, manySize)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	all := s.vhostPeers()
	if s.vhost != "" {
		all = all[1:] // a server that runs has not so many disks
	}
	bare, err := s.bareLoop()
	if err != nil {
		return err
	}
	all = append(all, bare)
	type row struct{ least, idle, memory []float64 }
	rows := map[string]*row{}
	l := guests.Load{Bytes: 4 << 10, Depth: 8, Queues: vhostQueues}
	err = s.vhostRounds(ctx, raws, all, func(v *vhostServer) error {
		if rows[v.name] == nil {
			rows[v.name] = &row{}
		}
		r := rows[v.name]
		if _, err := v.load(ctx, "one", l, 1, s.length); err != nil {
			return err
		}
		many, err := v.load(ctx, manyName, l, vhostGuests, s.length)
		if err != nil {
			return err
		}
		mean := float64(many.Operations) / vhostGuests
		r.least = append(r.least, float64(slices.Min(many.Guests))/mean)
		if v == bare {
			return nil
		}
		memory, err := anonymousMemory(v.pids[0])
		if err != nil {
			return err
		}
		r.memory = append(r.memory, float64(memory))
		idle, err := guests.Idle(v.sockets[0], vhostSettle, s.length, v.pids)
		r.idle = append(r.idle, idle.Seconds()/s.length.Seconds())
		return err
	})
	if err != nil {
		return err
	}
	out := table{head: []string{"server", "one guest", "CPU", "16 guests", "CPU", "to one",
		"least to mean", "anonymous memory", "idle guest, of a processor"}}
	for _, v := range all {
		r := rows[v.name]
		out.add(v.name, fmt.Sprintf("%.0f", median(v.rates["one"])),
			microseconds(v.cpu["one"]), fmt.Sprintf("%.0f", median(v.rates[manyName])),
			microseconds(v.cpu[manyName]),
			ratio(median(ratios(v.rates[manyName], v.rates["one"])), 1),
			ratio(median(r.least), 1), mib(median(r.memory)),
			fmt.Sprintf("%.4f %%", 100*median(r.idle)))
	}
	fmt.Println("Many guests on one server, " + manyName + ":")
	out.print(os.Stdout)
	return nil
}
