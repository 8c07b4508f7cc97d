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
	"strings"
	"time"

	"kubevirt.io/disk/integration/bench/guests"
)

const (
	vhostGuests = 16 // on one server, in the row with many
	vhostQueues = 4  // of each guest there
)

// vhostServer is a server of disks by vhost-user.
type vhostServer struct {
	nbdServer // its processes and files; what it measured, by load
	sockets   []string
	serves    func(v *vhostServer, raws []string) error
	floor     *guests.Floor // what runs in the place of a server; nil: there is one
}

// bareLoop does what is the least that a server must do.
func (s settings) bareLoop() (*vhostServer, error) {
	floor, err := guests.BuildFloor(filepath.Dir(s.cache))
	return &vhostServer{nbdServer: nbdServer{name: "bare loop"}, floor: &floor,
		serves: func(v *vhostServer, raws []string) error { v.sockets = raws; return nil }}, err
}

// vhostPeers are servers of raw files; ours is the first, unless it has no such sockets.
func (s settings) vhostPeers() (all []*vhostServer) {
	if s.speaksVhost() {
		all = append(all, s.vhostOurs("kubevirt-disk", "none"))
	}
	return append(all, vhostQEMU("QEMU, threads", "aio=threads"),
		vhostQEMU("QEMU, io_uring", "aio=io_uring"))
}

// speaksVhost reports whether there is a server of ours to measure: one that runs, or a program
// that has the front end.
func (s settings) speaksVhost() bool {
	help, _ := exec.Command(s.server, "serve", "--help=all").CombinedOutput() // it may be missing
	return s.vhost != "" || strings.Contains(string(help), "--vhost-user ")
}

// vhostOurs is our server.
func (s settings) vhostOurs(name, mode string) *vhostServer {
	v := &vhostServer{nbdServer: nbdServer{name: name, binary: s.server}}
	v.serves = func(v *vhostServer, raws []string) (err error) {
		if s.vhost != "" && mode == "none" {
			return v.running(s.vhost)
		}
		sockets := filepath.Join(v.dir, "sockets")
		err = v.daemon("server", filepath.Dir(raws[0]), "--vhost-user="+sockets,
			"--nbd=unix:"+v.socket(), "--copy-mode="+mode, "--access-mode=write-shared")
		if err != nil {
			return err
		}
		v.sockets, err = filepath.Glob(filepath.Join(sockets, "*.sock"))
		return err
	}
	return v
}

// running takes a server that somebody else has started: "SOCKET[,SOCKET...],PID".
func (v *vhostServer) running(what string) error {
	parts := strings.Split(what, ",")
	pid, err := strconv.Atoi(parts[len(parts)-1])
	if err != nil || len(parts) < 2 {
		return fmt.Errorf("-vhost %s: must be SOCKET[,SOCKET...],PID", what)
	}
	v.pids, v.sockets = []int{pid}, parts[:len(parts)-1]
	return nil
}

// vhostQEMU is qemu-storage-daemon over raw files, each in an I/O thread.
func vhostQEMU(name, options string) *vhostServer {
	return &vhostServer{nbdServer: nbdServer{name: name},
		serves: func(v *vhostServer, raws []string) error {
			var nodes []string
			for i, raw := range raws {
				nodes = append(nodes,
					fmt.Sprintf("driver=file,node-name=n%d,filename=%s,%s", i, raw, options))
			}
			return v.qemu(nodes)
		}}
}

// vhostOverNBD is qemu-storage-daemon over our disk by NBD: what a guest has of NBD today. The disk
// is that of our server if it is among the others, as a disk has one server.
func (s settings) vhostOverNBD(all []*vhostServer) *vhostServer {
	v := &vhostServer{nbdServer: nbdServer{name: "our NBD under QEMU", binary: s.server}}
	if all[0].binary != "" && s.vhost == "" {
		v.behind = &all[0].nbdServer
	}
	v.serves = func(v *vhostServer, raws []string) error {
		if v.behind != nil {
			v.pids = slices.Clone(v.behind.pids)
		} else if err := v.daemon("nbd", filepath.Dir(raws[0]), "--nbd=unix:"+v.socket(),
			"--copy-mode=none", "--access-mode=write-shared"); err != nil {
			return err
		}
		return v.qemu([]string{"driver=nbd,node-name=n0,server.type=unix,export=" +
			filepath.Base(raws[0]) + ",server.path=" + v.nbd().socket()})
	}
	return v
}

// nbd is the server of the disk that this one hands on.
func (v *vhostServer) nbd() *nbdServer {
	if v.behind != nil {
		return v.behind
	}
	return &v.nbdServer
}

// qemu starts qemu-storage-daemon with an export for each node.
func (v *vhostServer) qemu(nodes []string) error {
	command := []string{"qemu-storage-daemon"}
	for i, node := range nodes {
		v.sockets = append(v.sockets, filepath.Join(v.dir, fmt.Sprintf("vhost%d.sock", i)))
		command = append(command, "--object", fmt.Sprintf("iothread,id=t%d", i), "--blockdev", node,
			"--export", fmt.Sprintf("type=vhost-user-blk,id=e%d,node-name=n%d,iothread=t%d,"+
				"writable=on,num-queues=%d,addr.type=unix,addr.path=%s", i, i, i, vhostQueues,
				v.sockets[i]))
	}
	return v.run(v.sockets[len(nodes)-1], command)
}

// begin starts the server of raw files, which have a directory for themselves.
func (v *vhostServer) begin(cache string, raws []string) (err error) {
	if v.dir, err = os.MkdirTemp(cache, "vhost-"); err != nil {
		return err
	}
	v.export = filepath.Base(raws[0])
	v.rates, v.cpu = map[string][]float64{}, map[string][]float64{}
	if err := v.serves(v, raws); err != nil {
		return fmt.Errorf("%s: %w", v.name, err)
	}
	if len(v.sockets) != len(raws) {
		return fmt.Errorf("%s: %d sockets for %d disks", v.name, len(v.sockets), len(raws))
	}
	return nil
}

// load runs a load once, with a guest for each of the first sockets.
func (v *vhostServer) load(ctx context.Context, name string, l guests.Load, count int,
	length time.Duration) (r guests.Result, err error) {
	if v.floor != nil {
		r, err = v.floor.Run(ctx, v.sockets[:count], l, length)
	} else {
		r, err = guests.Run(v.sockets[:count], l, length, v.pids)
	}
	if err != nil {
		return r, fmt.Errorf("%s, %s: %w", v.name, name, err)
	}
	v.note(name, r)
	return r, nil
}

// note keeps what a load has shown.
func (s *nbdServer) note(name string, r guests.Result) {
	s.rates[name] = append(s.rates[name], r.Rate())
	s.cpu[name] = append(s.cpu[name], r.ServerTime().Seconds())
}

// guestLoad is the same work by a guest's ring.
func (l nbdLoad) guestLoad() guests.Load {
	return guests.Load{Write: strings.HasSuffix(l.rw, "write"),
		Sequential: !strings.HasPrefix(l.rw, "rand"), Bytes: l.bytes, Depth: l.depth}
}

// measureVhost prints how fast guests have their disks by vhost-user.
func measureVhost(ctx context.Context, s settings) error {
	if !s.speaksVhost() {
		fmt.Fprintf(os.Stderr, "bench: %s has no --vhost-user, and -vhost names no socket: only "+
			"its peers are measured\n", s.server)
	}
	for _, measure := range []func(context.Context, settings) error{measureVhostLoads,
		measureVhostCold, measureVhostOverlay, measureVhostGuests} {
		if err := measure(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// vhostFiles makes raw files of a size in a directory of their own, which the page cache holds.
func (s settings) vhostFiles(count int, size int64) (raws []string, remove func() error,
	err error) {
	dir, err := os.MkdirTemp(s.cache, "vhost-disk-")
	if err != nil {
		return nil, nil, err
	}
	for i := range count {
		raw := filepath.Join(dir, fmt.Sprintf("disk%02d.raw", i))
		if err := errors.Join(makeContent(raw, size), warm(raw)); err != nil {
			return nil, nil, errors.Join(err, os.RemoveAll(dir))
		}
		raws = append(raws, raw)
	}
	return raws, func() error { return os.RemoveAll(dir) }, nil
}

// vhostRounds starts servers of the same raw files, and takes each measurement of all of them in
// turn before the next one.
func (s settings) vhostRounds(ctx context.Context, raws []string, all []*vhostServer,
	measure ...func(*vhostServer) error) (err error) {
	defer func() {
		for _, v := range slices.Backward(all) {
			err = errors.Join(err, v.stop())
		}
	}()
	for _, v := range all {
		if err := v.begin(s.cache, raws); err != nil {
			return err
		}
	}
	for _, one := range measure {
		for i := range s.rounds * len(all) {
			round, turn := i/len(all), i%len(all)
			err := errors.Join(ctx.Err(), one(all[(round+turn)%len(all)]))
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// measureVhostLoads compares one guest's disk in the page cache, and prints the bars beside it.
func measureVhostLoads(ctx context.Context, s settings) (err error) {
	loads := slices.DeleteFunc(nbdLoads(), func(l nbdLoad) bool {
		return !s.loads.MatchString(l.name)
	})
	if len(loads) == 0 {
		return nil
	}
	raws, remove, err := s.vhostFiles(1, nbdSize)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	bare, err := s.bareLoop()
	if err != nil {
		return err
	}
	all := s.vhostPeers()
	all = append(all, s.vhostOverNBD(all), bare)
	var measure []func(*vhostServer) error
	for _, l := range loads {
		measure = append(measure, func(v *vhostServer) error {
			_, err := v.load(ctx, l.name, l.guestLoad(), 1, s.length)
			return err
		})
	}
	if err := s.vhostRounds(ctx, raws, all, measure...); err != nil {
		return err
	}
	fmt.Println("One guest by vhost-user, its disk a raw file in the page cache:")
	printVhost(loads, all)
	return nil
}

// printVhost prints the medians of each server, and those of ours in times of the better local
// file by QEMU, of NBD under QEMU, and of the bare loop's processor time.
func printVhost(loads []nbdLoad, all []*vhostServer) {
	out := table{head: []string{"load"}}
	for _, v := range all {
		out.head = append(out.head, v.name, "CPU")
	}
	ours := len(all) == 5
	if ours {
		out.head = append(out.head, "to QEMU's best", "to NBD", "CPU to QEMU's best",
			"CPU to the loop")
	}
	for _, l := range loads {
		row := []string{l.name}
		for _, v := range all {
			row = append(row, fmt.Sprintf("%.0f", median(v.rates[l.name])),
				microseconds(v.cpu[l.name]))
		}
		if ours {
			best := all[1]
			if median(all[2].rates[l.name]) > median(best.rates[l.name]) {
				best = all[2]
			}
			to := func(a, b []float64) string { return ratio(median(ratios(a, b)), 1) }
			row = append(row, to(all[0].rates[l.name], best.rates[l.name]),
				to(all[0].rates[l.name], all[3].rates[l.name]),
				to(all[0].cpu[l.name], best.cpu[l.name]),
				to(all[0].cpu[l.name], all[4].cpu[l.name]))
		}
		out.add(row...)
	}
	out.print(os.Stdout)
}
