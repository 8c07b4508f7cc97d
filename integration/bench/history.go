package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const (
	// historySize is the size of the disk that is committed, and changed what its guest has written
	// since, in bytes.
	historySize = 2 << 30
	changed     = 200 << 20
	// everySnapshot is how often a snapshot is taken under a writer.
	everySnapshot = 500 * time.Millisecond
)

// measureHistory prints what snapshots cost reads and writes, and what commits, new versions and
// incremental backups move.
func measureHistory(ctx context.Context, s settings) error {
	for _, tool := range []string{"docker-registry", "fio", "nbdinfo", "nbdcopy", "buildah"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%w (scripts/install-tools.sh installs it)", err)
		}
	}
	if err := s.measureLayers(ctx); err != nil {
		return err
	}
	return s.measureShop(ctx, []shopPart{{"history, writes", (*shop).measureSnapshots},
		{"history, commit", (*shop).measureCommits}})
}

// historian is our server of one disk with a history.
type historian struct{ *nbdServer }

// historian starts our server. export is how NBD calls its disk.
func (r *shop) historian(name, export, images string, args ...string) (*historian, error) {
	h := &historian{&nbdServer{name: name, export: export, binary: r.server}}
	h.serve = func(_ *nbdServer, images string) error { return h.begin(images, args...) }
	return h, h.start(r.dir, images)
}

func (h *historian) begin(images string, args ...string) error {
	return h.daemon("server", images, append([]string{"--nbd=unix:" + h.socket(),
		"--access-mode=write-shared", "--control-socket=" + h.control()}, args...)...)
}

func (h *historian) control() string { return filepath.Join(h.dir, "control.sock") }

func (h *historian) uri() string {
	return "nbd+unix:///" + h.export + "?socket=" + url.QueryEscape(h.socket())
}

// ask runs one of our commands that ask a daemon.
func (h *historian) ask(ctx context.Context, args ...string) error {
	return runCommand(exec.CommandContext(ctx, h.binary, append(args,
		"--control-socket="+h.control())...))
}

// latency is how long writes took, in seconds.
type latency struct{ tail, longest float64 } // the 99.9th percentile

// write has fio write to the disk.
func (h *historian) write(ctx context.Context, length time.Duration, args ...string) (latency,
	error) {
	out, err := output(ctx, length, "fio", append([]string{"--name=write", "--ioengine=nbd",
		"--thread", "--uri=" + h.uri(), "--norandommap", "--refill_buffers",
		"--percentile_list=99.9", "--output-format=json"}, args...)...)
	if err != nil {
		return latency{}, err
	}
	var said struct {
		Jobs []struct {
			Write struct {
				Took struct {
					Max        float64
					Percentile map[string]float64
				} `json:"clat_ns"`
			}
		}
	}
	if err := json.Unmarshal([]byte(out[max(strings.Index(out, "{"), 0):]), &said); err != nil {
		return latency{}, fmt.Errorf("fio printed no JSON: %w", err)
	}
	if len(said.Jobs) != 1 {
		return latency{}, fmt.Errorf("fio has failed: %s", out)
	}
	took := said.Jobs[0].Write.Took
	return latency{took.Percentile["99.900000"] / 1e9, took.Max / 1e9}, nil
}

// measureSnapshots prints how long writes of 4 KiB take at full speed, alone, and while snapshots
// are taken.
func (r *shop) measureSnapshots(ctx context.Context) error {
	images := filepath.Join(r.dir, "images")
	raw := filepath.Join(images, "disk.raw")
	if err := errors.Join(os.MkdirAll(images, 0o755), makeContent(raw, nbdSize)); err != nil {
		return err
	}
	h := r.layered(ctx, "snapshots", "", 0)
	defer func() { _ = h.stop() }()
	if err := h.start(r.dir, images); err != nil {
		return err
	}
	out := table{head: []string{"4 KiB random writes", "p99.9", "with snapshots", "longest",
		"with snapshots", "the command takes"}}
	for _, depth := range []int{1, 32} {
		load := []string{wholeDisk, "--rw=randwrite", "--bs=4k", "--iodepth=" + strconv.Itoa(depth),
			"--time_based", fmt.Sprintf("--runtime=%dms", r.length.Milliseconds())}
		var alone, with []latency
		var commands []float64
		for round := range r.rounds {
			one, err := h.write(ctx, r.length, load...)
			if err != nil {
				return err
			}
			stop := make(chan struct{})
			took := make(chan []float64)
			go func() { took <- h.keepTaking(ctx, round, stop) }()
			two, err := h.write(ctx, r.length, load...)
			close(stop)
			commands = append(commands, <-took...)
			if err != nil {
				return err
			}
			alone, with = append(alone, one), append(with, two)
		}
		show := func(all []latency, value func(latency) float64) string {
			return fmt.Sprintf("%.2f ms", median(column(all, value))*1e3)
		}
		tail := func(l latency) float64 { return l.tail }
		longest := func(l latency) float64 { return l.longest }
		out.add(fmt.Sprintf("depth %d", depth), show(alone, tail), show(with, tail),
			show(alone, longest), show(with, longest),
			fmt.Sprintf("%.0f ms, %d taken", median(commands)*1e3, len(commands)))
	}
	fmt.Println("Writes while snapshots are taken:")
	out.print(os.Stdout)
	return nil
}

// keepTaking takes snapshots until stop is closed, and deletes them. It returns how long the
// command took each time, in seconds.
func (h *historian) keepTaking(ctx context.Context, round int, stop <-chan struct{}) (
	took []float64) {
	tick := time.NewTicker(everySnapshot)
	defer tick.Stop()
	var names []string
	defer func() {
		for _, name := range names {
			_ = h.ask(ctx, "snapshot", "delete", "1", name) // the table tells how many there were
		}
	}()
	for {
		select {
		case <-stop:
			return took
		case <-tick.C:
			name := fmt.Sprintf("s%d-%d", round, len(names))
			begin := time.Now()
			if h.ask(ctx, "snapshot", "create", "1", name) == nil {
				took, names = append(took, time.Since(begin).Seconds()), append(names, name)
			}
		}
	}
}

// bytesIn is how much the files below a directory have.
func bytesIn(dir string) (sum int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			sum += info.Size()
		}
		return err
	})
	return sum, err
}

// measureCommits prints the commit of a disk that its guest has changed in part, beside storing the
// whole disk with other tools, what a node fetches of the new version, and what an incremental
// backup has to read.
func (r *shop) measureCommits(ctx context.Context) error {
	raw := filepath.Join(r.dir, "history.raw")
	if err := makeContent(raw, historySize); err != nil {
		return err
	}
	r.images["history"] = raw
	if _, err := r.push("history", "1"); err != nil {
		return err
	}
	var ours, theirs []stored
	var seconds, sent, fetched, dirty []float64
	for round := range r.rounds {
		c, err := r.commitOnce(ctx, round)
		if err != nil {
			return err
		}
		ours, theirs = append(ours, c.ours), append(theirs, c.theirs)
		seconds = append(seconds, c.ours.seconds/c.theirs.seconds)
		sent = append(sent, float64(c.ours.bytes)/float64(c.theirs.bytes))
		fetched = append(fetched, float64(c.fetched)/float64(c.ours.bytes))
		dirty = append(dirty, float64(c.dirty)/historySize)
	}
	out := table{head: []string{"200 MiB of 2 GiB", "commit", "qemu-img, buildah, push", "time",
		"bytes sent", "fetched to new bytes", "backup of 1 % reads"}}
	show := func(all []stored) string {
		return fmt.Sprintf("%.1f s, %s", median(column(all, stored.took)),
			mib(median(column(all, stored.size))))
	}
	precise := func(values []float64) string { return fmt.Sprintf("%.3f×", median(values)) }
	out.add("", show(ours), show(theirs), precise(seconds), precise(sent), precise(fetched),
		precise(dirty))
	fmt.Println("Commits, new versions and backups:")
	out.print(os.Stdout)
	return nil
}

// stored is what it took to store an image.
type stored struct {
	seconds float64
	bytes   int64
}

func (s stored) took() float64 { return s.seconds }
func (s stored) size() float64 { return float64(s.bytes) }

type commitCosts struct {
	ours, theirs   stored
	fetched, dirty int64
}

// into measures what a step adds to the registry.
func (r *shop) into(step func() (float64, error)) (s stored, err error) {
	settle()
	before, err := bytesIn(filepath.Join(r.dir, "data"))
	if err != nil {
		return s, err
	}
	if s.seconds, err = step(); err != nil {
		return s, err
	}
	after, err := bytesIn(filepath.Join(r.dir, "data"))
	s.bytes = after - before
	return s, err
}

func (r *shop) commitOnce(ctx context.Context, round int) (c commitCosts, err error) {
	const first = "/vm/history:1"
	next := fmt.Sprintf("/vm/history:2-%d", round)
	insecure := "--insecure-registry=" + r.address
	h, err := r.historian("commit", "1", filepath.Join(r.dir, "none"), "--image="+r.address+first,
		insecure, "--copy-mode=copy-on-write", "--cache-dir="+filepath.Join(r.dir, "own-cache"))
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, h.stop()) }()
	if err := h.ask(ctx, "snapshot", "create", "1", "monday"); err != nil {
		return c, err
	}
	// A hundredth of the disk, in pieces of 64 KiB all over it.
	if _, err := h.write(ctx, time.Minute, "--rw=randwrite", "--bs=64k",
		"--size="+strconv.Itoa(historySize), "--io_size="+strconv.Itoa(historySize/100),
	); err != nil {
		return c, err
	}
	if c.dirty, err = h.dirty(ctx, "monday"); err != nil {
		return c, err
	}
	// That does not compress as the rest does.
	for _, do := range []string{"revert", "delete"} {
		if err := h.ask(ctx, "snapshot", do, "1", "monday"); err != nil {
			return c, err
		}
	}
	if err := r.change(ctx, h, round); err != nil {
		return c, err
	}
	if c.ours, err = r.into(func() (float64, error) {
		return timed(exec.CommandContext(ctx, r.server, "commit", "1", r.address+next,
			"--onto="+r.address+first, insecure, "--control-socket="+h.control()))
	}); err != nil {
		return c, err
	}
	if c.theirs, err = r.into(func() (float64, error) {
		name := fmt.Sprintf("whole-%d", round)
		r.images[name] = filepath.Join(r.dir, name+".qcow2")
		defer os.Remove(r.images[name])
		convert, err := timed(exec.CommandContext(ctx, "qemu-img", "convert", "-O", "qcow2",
			h.uri(), r.images[name]))
		if err != nil {
			return 0, err
		}
		rest, err := r.pushByBuildah(ctx, name, r.address+"/vm/"+name+":1")
		return convert + rest, err
	}); err != nil {
		return c, err
	}
	node := filepath.Join(r.dir, fmt.Sprintf("node-%d", round))
	if _, err := r.readAll(ctx, node, first); err != nil {
		return c, err
	}
	c.fetched, err = r.readAll(ctx, node, next)
	return c, err
}

// change has the guest write content that compresses as the rest of the disk does: it is from all
// over it. No block of it is in an image: it is moved by half a block, and by more each round.
func (r *shop) change(ctx context.Context, h *historian, round int) error {
	raw, err := os.Open(r.images["history"])
	if err != nil {
		return err
	}
	defer raw.Close()
	part := filepath.Join(h.dir, "changed.raw")
	out, err := os.Create(part)
	if err != nil {
		return err
	}
	const piece, every = 1 << 20, historySize / changed
	for i := int64(0); i < changed/piece && err == nil; i++ {
		off := (i*every+int64(round%every))*piece + blockSize/2
		_, err = io.Copy(out, io.NewSectionReader(raw, off, piece))
	}
	if err := errors.Join(err, out.Close()); err != nil {
		return err
	}
	return runCommand(exec.CommandContext(ctx, "nbdcopy", "--sparse=0", part, h.uri()))
}

// dirty asks by NBD how many bytes have changed since a snapshot.
func (h *historian) dirty(ctx context.Context, snapshot string) (sum int64, err error) {
	out, err := output(ctx, time.Minute, "nbdinfo", "--json",
		"--map=qemu:dirty-bitmap:"+snapshot, h.uri())
	if err != nil {
		return 0, err
	}
	var runs []struct{ Length, Type int64 }
	if err := json.Unmarshal([]byte(out), &runs); err != nil {
		return 0, fmt.Errorf("nbdinfo: %w", err)
	}
	for _, run := range runs {
		if run.Type&1 != 0 {
			sum += run.Length
		}
	}
	return sum, nil
}

// readAll reads a whole disk on a node with a cache, and returns how many bytes came from the
// registry.
func (r *shop) readAll(ctx context.Context, cache, ref string) (fetched int64, err error) {
	before := r.far.fetched.Load()
	h, err := r.historian("node", "1", filepath.Join(r.dir, "none"), "--image="+r.far.address+ref,
		"--insecure-registry="+r.far.address, "--copy-mode=copy-on-write", "--cache-dir="+cache)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, h.stop()) }()
	_, err = timed(exec.CommandContext(ctx, "nbdcopy", h.uri(), "null:"))
	return r.far.fetched.Load() - before, err
}
