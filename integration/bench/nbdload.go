package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"kubevirt.io/disk/integration/peers"
)

// nbdSize is the size of the disk of NBD load in bytes. The page cache holds all of it.
const nbdSize = 256 << 20

// nbdLoad is one kind of work that fio does with its NBD engine.
type nbdLoad struct {
	name, rw string
	bytes    int
	depth    int // requests in flight
}

func nbdLoads() (all []nbdLoad) {
	for _, depth := range []int{1, 32} {
		for _, rw := range []string{"read", "write"} {
			all = append(all, nbdLoad{fmt.Sprintf("4 KiB random %s, depth %d", rw, depth),
				"rand" + rw, 4 << 10, depth})
		}
	}
	for _, depth := range []int{1, 32} {
		for _, rw := range []string{"read", "write"} {
			all = append(all, nbdLoad{fmt.Sprintf("256 KiB sequential %s, depth %d", rw, depth),
				rw, 256 << 10, depth})
		}
	}
	return all
}

// nbdServer is a server of one raw file at a Unix socket.
type nbdServer struct {
	name   string
	export string
	// command is nil for our own server
	command func(socket, raw string) []string
	binary  string // of our own server
	// copies has nbdcopy copy the whole disk from or to this URI, in place of fio. The processor
	// time is that of the whole machine then: with the client, and with the kernel that writes to
	// storage. "": unused
	copies string
	source string // the file that copies write
	// behind is the server whose disk this one hands on; nil: it has its own
	behind *nbdServer
	// serve starts it with the disks of a directory; nil: start knows how
	serve func(s *nbdServer, images string) error
	// reset comes before each measurement; may be nil
	reset func(ctx context.Context) error

	dir    string
	portal string // where our own server has the disk by iSCSI, "host:port"
	pids   []int
	stops  []func() error
	rates  map[string][]float64 // requests a second, by load
	cpu    map[string][]float64 // of a request, seconds
}

func (s *nbdServer) socket() string { return filepath.Join(s.dir, "nbd.sock") }

// nbdServers are ours and its peers. Others are compared with the first one.
func (s settings) nbdServers() []*nbdServer {
	all := []*nbdServer{
		{name: "kubevirt-disk", export: "disk.raw", binary: s.server},
		{name: "nbdkit", command: func(socket, raw string) []string {
			return []string{"nbdkit", "--foreground", "--unix", socket, "file", raw}
		}},
		{name: "qemu-nbd", command: func(socket, raw string) []string {
			return []string{"qemu-nbd", "--persistent", "--shared=8", "--format=raw",
				"--socket=" + socket, raw}
		}},
	}
	if s.before != "" {
		all = append(all, &nbdServer{name: beforeName, export: "disk.raw", binary: s.before})
	}
	return all
}

// start serves the file disk.raw of a directory.
func (s *nbdServer) start(cache, images string) (err error) {
	if s.dir, err = os.MkdirTemp(cache, "nbd-"); err != nil {
		return err
	}
	s.rates, s.cpu = map[string][]float64{}, map[string][]float64{}
	switch {
	case s.command != nil:
		return s.run(s.socket(), s.command(s.socket(), filepath.Join(images, "disk.raw")))
	case s.serve != nil:
		if s.behind != nil {
			s.pids = slices.Clone(s.behind.pids)
		}
		return s.serve(s, images)
	}
	return s.daemon("server", images, "--nbd=unix:"+s.socket(), "--copy-mode=none",
		"--access-mode=write-shared")
}

// daemon starts our own server.
func (s *nbdServer) daemon(name, images string, args ...string) error {
	d, err := peers.StartDaemon(peers.DaemonOptions{Binary: s.binary, DiskDir: images,
		StateDir: filepath.Join(s.dir, name), Args: args})
	if err != nil {
		return err
	}
	s.pids, s.stops = append(s.pids, d.PID()), append(s.stops, d.Kill)
	s.portal = d.Portals[0]
	return nil
}

// run starts a command that listens on a Unix socket.
func (s *nbdServer) run(socket string, command []string) error {
	cmd := exec.Command(command[0], command[1:]...)
	if err := cmd.Start(); err != nil {
		return err
	}
	s.pids = append(s.pids, cmd.Process.Pid)
	s.stops = append(s.stops, func() error {
		err := cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
		return err
	})
	return untilListens(socket)
}

// stop ends what was started, and removes its files.
func (s *nbdServer) stop() (err error) {
	for _, stop := range slices.Backward(s.stops) {
		err = errors.Join(err, stop())
	}
	if s.dir != "" {
		err = errors.Join(err, os.RemoveAll(s.dir))
	}
	return err
}

// cpuTime is that of all processes. Some peers have one for each connection, whose time is known
// when it has ended.
func (s *nbdServer) cpuTime() (sum time.Duration, err error) {
	if s.copies != "" {
		return machineTime()
	}
	for _, pid := range s.pids {
		if err := childless(pid, time.Second); err != nil {
			return 0, err
		}
		one, err := cpuTime(pid)
		if err != nil {
			return 0, err
		}
		sum += one
	}
	return sum, nil
}

// measure runs a load once.
func (s *nbdServer) measure(ctx context.Context, l nbdLoad, length time.Duration) error {
	if s.reset != nil {
		if err := s.reset(ctx); err != nil {
			return err
		}
	}
	before, err := s.cpuTime()
	if err != nil {
		return err
	}
	work := s.fio
	if s.copies != "" {
		work = s.copyDisk
	}
	done, err := work(ctx, l, length)
	if err != nil {
		return fmt.Errorf("%s, %s: %w", s.name, l.name, err)
	}
	after, err := s.cpuTime()
	if err != nil {
		return err
	}
	s.rates[l.name] = append(s.rates[l.name], done.rate())
	s.cpu[l.name] = append(s.cpu[l.name], (after-before).Seconds()/done.operations)
	return nil
}

// uri is where clients reach the server without TLS.
func (s *nbdServer) uri() string {
	return "nbd+unix:///" + s.export + "?socket=" + url.QueryEscape(s.socket())
}

func (s *nbdServer) fio(ctx context.Context, l nbdLoad, length time.Duration) (client, error) {
	out, err := output(ctx, length, "fio", "--name=load", "--ioengine=nbd", "--thread",
		"--uri="+s.uri(), "--rw="+l.rw,
		"--bs="+strconv.Itoa(l.bytes), "--iodepth="+strconv.Itoa(l.depth),
		"--size="+strconv.Itoa(nbdSize), "--time_based", "--norandommap",
		"--runtime="+strconv.Itoa(int(length.Milliseconds()))+"ms", "--output-format=json")
	if err != nil {
		return client{}, err
	}
	return parseFio(out)
}

// copyDisk copies the whole disk, in order. What is written is durable at the end. The source of
// writes is in memory.
func (s *nbdServer) copyDisk(ctx context.Context, l nbdLoad, _ time.Duration) (client, error) {
	args := []string{"--connections=1", "--request-size=" + strconv.Itoa(l.bytes),
		"--requests=" + strconv.Itoa(l.depth)}
	if strings.HasSuffix(l.rw, "read") {
		args = append(args, s.copies, "null:")
	} else {
		args = append(args, "--flush", s.source, s.copies)
	}
	begin := time.Now()
	_, err := output(ctx, time.Minute, "nbdcopy", args...)
	return client{operations: nbdSize / float64(l.bytes), elapsed: time.Since(begin)}, err
}

// parseFio returns what the only job of fio has done.
func parseFio(out string) (client, error) {
	type work struct {
		Total   float64 `json:"total_ios"`
		Runtime float64 `json:"runtime"` // milliseconds
	}
	var said struct {
		Jobs []struct {
			Error       int
			Read, Write work
		}
	}
	notes := max(strings.Index(out, "{"), 0) // fio's, before the JSON
	if err := json.Unmarshal([]byte(out[notes:]), &said); err != nil {
		return client{}, fmt.Errorf("fio printed no JSON: %w", err)
	}
	if len(said.Jobs) != 1 || said.Jobs[0].Error != 0 {
		return client{}, fmt.Errorf("fio has failed: %s", out)
	}
	j := said.Jobs[0]
	done := client{operations: j.Read.Total + j.Write.Total,
		elapsed: time.Duration(max(j.Read.Runtime, j.Write.Runtime)) * time.Millisecond}
	if done.operations == 0 || done.elapsed == 0 {
		return client{}, errors.New("fio has done nothing")
	}
	return done, nil
}

// measureNBD prints how fast the disks are by NBD, beside other servers of raw files.
func measureNBD(ctx context.Context, s settings) error {
	all := s.nbdServers()
	loads, err := s.measureServers(ctx, all)
	if err == nil {
		printNBD(loads, all)
	}
	return err
}

// measureServers measures servers in turn. All serve the same file: copies of it differ by up to a
// third, by where they lie in the page cache.
func (s settings) measureServers(ctx context.Context, all []*nbdServer) (loads []nbdLoad,
	err error) {
	loads = slices.DeleteFunc(nbdLoads(), func(l nbdLoad) bool {
		return !s.loads.MatchString(l.name)
	})
	if len(loads) == 0 {
		return nil, nil
	}
	images, err := os.MkdirTemp(s.cache, "nbd-disk-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(images)) }()
	raw := filepath.Join(images, "disk.raw")
	if err := errors.Join(makeContent(raw, nbdSize), fill(raw, s.folio<<10)); err != nil {
		return nil, err
	}
	defer func() {
		for _, one := range slices.Backward(all) {
			err = errors.Join(err, one.stop())
		}
	}()
	for _, one := range all {
		if err := one.start(s.cache, images); err != nil {
			return nil, fmt.Errorf("%s: %w", one.name, err)
		}
	}
	for _, l := range loads {
		for round := range s.rounds {
			for turn := range all {
				if err := all[(round+turn)%len(all)].measure(ctx, l, s.length); err != nil {
					return nil, err
				}
			}
		}
		fmt.Fprintf(os.Stderr, "bench: NBD, %s: done\n", l.name)
	}
	return loads, nil
}

// printNBD prints the medians, and those of the ratios of each round, with the least and the
// greatest ratio: they tell how noisy the machine was.
func printNBD(loads []nbdLoad, all []*nbdServer) {
	head := []string{"load", all[0].name + " per second", "CPU"}
	for _, other := range all[1:] {
		head = append(head, other.name, "CPU", "ours to it", "from", "to")
	}
	out := table{head: head}
	for _, l := range loads {
		row := []string{l.name, fmt.Sprintf("%.0f", median(all[0].rates[l.name])),
			microseconds(all[0].cpu[l.name])}
		for _, other := range all[1:] {
			ratios := ratios(all[0].rates[l.name], other.rates[l.name])
			row = append(row, fmt.Sprintf("%.0f", median(other.rates[l.name])),
				microseconds(other.cpu[l.name]), ratio(median(ratios), 1),
				ratio(slices.Min(ratios), 1), ratio(slices.Max(ratios), 1))
		}
		out.add(row...)
	}
	fmt.Println("NBD by fio, one connection over a Unix socket:")
	out.print(os.Stdout)
}

// printAdded prints how much longer requests take, and how much more processor time, than with the
// first server.
func printAdded(title string, loads []nbdLoad, all []*nbdServer) {
	out := table{head: []string{"load", "per second", "CPU"}}
	for _, other := range all[1:] {
		out.head = append(out.head, "with "+other.name, "CPU", "times the time", "times the CPU")
	}
	for _, l := range loads {
		row := []string{l.name, fmt.Sprintf("%.0f", median(all[0].rates[l.name])),
			microseconds(all[0].cpu[l.name])}
		for _, other := range all[1:] {
			row = append(row, fmt.Sprintf("%.0f", median(other.rates[l.name])),
				microseconds(other.cpu[l.name]),
				ratio(median(ratios(all[0].rates[l.name], other.rates[l.name])), 1),
				ratio(median(ratios(other.cpu[l.name], all[0].cpu[l.name])), 1))
		}
		out.add(row...)
	}
	fmt.Println(title)
	out.print(os.Stdout)
}

// ratios are those of each round.
func ratios(a, b []float64) (all []float64) {
	for round := range a {
		all = append(all, a[round]/b[round])
	}
	return all
}

func microseconds(values []float64) string { return fmt.Sprintf("%.1f µs", median(values)*1e6) }
