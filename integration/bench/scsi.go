package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"kubevirt.io/disk/integration/peers"
)

// lunSize is the size of the raw file that each target serves: larger than any cache of the
// processor, small enough to stay in the page cache. It is a multiple of 256 KiB.
const lunSize = 1 << 30

// floorName is the candidate that is not a target: the bare system calls, in C.
const floorName = "floor"

// beforeName is the name of the earlier build.
const beforeName = "before"

// candidate is a target and its measurements.
type candidate struct {
	name   string
	dir    string
	server string // path of the program; "": package peers decides
	luns   *luns
	target *peers.Target // nil: it does not run

	rest       float64              // anonymous memory in bytes after the start
	small, all float64              // the maximum with loads of 4 KiB, and with all loads
	rates      map[string][]float64 // operations per second, by load
	cpu        map[string][]float64 // seconds of CPU per operation, by load
	own        map[string][]float64 // seconds of CPU of this process per operation, by load
	trouble    map[string]string    // why a load has no numbers
}

func (c *candidate) start() error {
	raws := c.luns.raws
	var err error
	switch c.name {
	case "kubevirt-disk", beforeName:
		c.target, err = peers.StartOurs(c.server, filepath.Join(c.dir, "state"), raws[0], nil)
	case "tgtd":
		c.target, err = peers.StartTgtd(raws...)
	case floorName:
		c.target, err = peers.StartFloor(filepath.Join(c.dir, "state"), raws...)
	case "gotgt":
		c.target, err = peers.StartGotgt(c.server, filepath.Join(c.dir, "state"), raws...)
	}
	return err
}

// luns are the raw files that all candidates serve: LUN 1 and up, alone in their directory. Files
// of the same size differ in cost, by up to a third with commands of 256 KiB: it depends on the
// place of their pages in the memory of this machine and its host.
type luns struct {
	raws   []string
	holder *candidate // the build of ours that has locked them
}

// ready starts a target, unless it runs. Only one of our builds can have the files at a time.
func (c *candidate) ready() error {
	if c.name == "kubevirt-disk" || c.name == beforeName {
		if h := c.luns.holder; h != nil && h != c {
			if err := h.stop(); err != nil {
				return err
			}
		}
		c.luns.holder = c
	}
	if c.target != nil {
		return nil
	}
	return c.start()
}

func (c *candidate) stop() error {
	if c.target == nil {
		return nil
	}
	err := c.target.Stop()
	c.target = nil
	return err
}

// job is one measurement, the same for all candidates.
type job struct {
	name  string
	bytes int // of one command
	// probe says that run needs to know the expected rate. A first run measures it.
	probe  bool
	inside bool // the client is part of this process
	bare   bool // the floor can serve it, too
	run    func(ctx context.Context, url string, length time.Duration, expected float64) (client,
		error)
}

// measureSCSI runs the jobs on all candidates. Each serves that many LUNs of size bytes.
func measureSCSI(ctx context.Context, s settings, title string, jobs []job, count int,
	size int64) error {
	if len(jobs) == 0 {
		return nil
	}
	var all []*candidate
	defer func() {
		for _, c := range all {
			if err := c.stop(); err != nil {
				fmt.Fprintln(os.Stderr, "bench:", err)
			}
		}
	}()
	files := new(luns)
	for n := range count {
		raw := filepath.Join(s.cache, fmt.Sprintf("disk-%d", count),
			fmt.Sprintf("lun-%03d.raw", n+1))
		if err := errors.Join(makeContent(raw, size), fill(raw, s.folio<<10)); err != nil {
			return err
		}
		files.raws = append(files.raws, raw)
	}
	for _, name := range s.targets {
		c := &candidate{name: name, dir: filepath.Join(s.cache, name), luns: files,
			server: map[string]string{
				"kubevirt-disk": s.server, beforeName: s.before, "gotgt": s.gotgt}[name],
			rates: map[string][]float64{}, cpu: map[string][]float64{}, own: map[string][]float64{},
			trouble: map[string]string{}}
		if err := c.ready(); err != nil {
			return err
		}
		all = append(all, c)
		time.Sleep(time.Second) // at rest
		rest, err := anonymousMemory(c.target.PID())
		if err != nil {
			return err
		}
		c.rest = float64(rest)
	}
	for _, j := range jobs {
		for round := range s.rounds {
			for turn := range all {
				c := all[(round+turn)%len(all)]
				if err := c.measure(ctx, j, s.length); err != nil {
					return err
				}
			}
			fmt.Fprintf(os.Stderr, "bench: %s: round %d of %d\n", j.name, round+1, s.rounds)
		}
	}
	fmt.Printf("%s\n\n", title)
	printSCSI(jobs, all)
	return nil
}

// measure runs a job once. If the target hangs or dies, it is started again, but not for this job.
func (c *candidate) measure(ctx context.Context, j job, length time.Duration) error {
	if c.name == floorName && !j.bare {
		c.trouble[j.name] = "–"
	}
	if c.trouble[j.name] != "" {
		return nil
	}
	if err := c.ready(); err != nil {
		return err
	}
	pid := c.target.PID()
	expected := median(c.rates[j.name])
	if j.probe && expected == 0 {
		probe, err := j.run(ctx, c.target.URL, length, 0)
		if err != nil {
			return c.failed(ctx, j, err)
		}
		expected = probe.rate()
	}
	before, err := cpuTime(pid)
	if err != nil {
		return c.failed(ctx, j, err)
	}
	ownBefore, err := cpuTime(os.Getpid())
	if err != nil {
		return err
	}
	stop := watchMemory(pid)
	done, err := j.run(ctx, c.target.URL, length, expected)
	most := float64(stop())
	c.all = max(c.all, most)
	if j.bytes == 4<<10 {
		c.small = max(c.small, most)
	}
	if err != nil {
		return c.failed(ctx, j, err)
	}
	after, err := cpuTime(pid)
	if err != nil {
		return c.failed(ctx, j, err)
	}
	c.rates[j.name] = append(c.rates[j.name], done.rate())
	c.cpu[j.name] = append(c.cpu[j.name], (after-before).Seconds()/done.operations)
	own, err := cpuTime(os.Getpid())
	if err != nil {
		return err
	}
	if j.inside {
		c.own[j.name] = append(c.own[j.name], (own-ownBefore).Seconds()/done.operations)
	}
	return nil
}

func (c *candidate) failed(ctx context.Context, j job, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	what := "fails"
	switch {
	case !c.target.Running():
		what = "died"
	case errors.Is(err, errHung):
		what = "hangs"
	}
	fmt.Fprintf(os.Stderr, "bench: %s %s at %s: %v\n", c.name, what, j.name, err)
	c.trouble[j.name] = what
	if err := c.stop(); err != nil {
		return err
	}
	return c.ready()
}

func printSCSI(jobs []job, all []*candidate) {
	rates := table{head: []string{"operations per second"}}
	cpu := table{head: []string{"server CPU per operation"}}
	own := table{head: []string{"the client's CPU per operation"}}
	memory := table{head: []string{"anonymous memory"}}
	var floor *candidate
	for _, c := range all[1:] {
		if c.name == floorName {
			floor = c
		}
	}
	for _, t := range []*table{&rates, &cpu, &own, &memory} {
		for _, c := range all {
			t.head = append(t.head, c.name)
		}
		if len(all) > 1 && t != &memory && t != &own {
			t.head = append(t.head, all[0].name+" to "+all[1].name)
			if floor != nil {
				t.head = append(t.head, all[0].name+" to the floor")
			}
		}
	}
	for _, l := range jobs {
		rateRow, cpuRow, ownRow := []string{l.name}, []string{l.name}, []string{l.name}
		for _, c := range all {
			if what := c.trouble[l.name]; what != "" {
				rateRow, cpuRow, ownRow = append(rateRow, what), append(cpuRow, what),
					append(ownRow, what)
				continue
			}
			rateRow = append(rateRow, fmt.Sprintf("%.0f", median(c.rates[l.name])))
			cpuRow = append(cpuRow, fmt.Sprintf("%.1f µs", 1e6*median(c.cpu[l.name])))
			ownRow = append(ownRow, fmt.Sprintf("%.1f µs", 1e6*median(c.own[l.name])))
		}
		if len(all) > 1 {
			rateRow = append(rateRow,
				ratio(median(all[0].rates[l.name]), median(all[1].rates[l.name])))
			cpuRow = append(cpuRow, ratio(median(all[0].cpu[l.name]), median(all[1].cpu[l.name])))
			if floor != nil {
				rateRow = append(rateRow,
					ratio(median(all[0].rates[l.name]), median(floor.rates[l.name])))
				cpuRow = append(cpuRow,
					ratio(median(all[0].cpu[l.name]), median(floor.cpu[l.name])))
			}
		}
		rates.add(rateRow...)
		cpu.add(cpuRow...)
		if l.inside {
			own.add(ownRow...)
		}
	}
	for _, row := range []struct {
		name  string
		value func(*candidate) float64
	}{
		{"at rest", func(c *candidate) float64 { return c.rest }},
		{"maximum with 4 KiB commands", func(c *candidate) float64 { return c.small }},
		{"maximum with 256 KiB commands", func(c *candidate) float64 { return c.all }},
	} {
		cells := []string{row.name}
		for _, c := range all {
			cells = append(cells, mib(row.value(c)))
		}
		memory.add(cells...)
	}
	rates.print(os.Stdout)
	cpu.print(os.Stdout)
	if len(own.rows) > 0 {
		own.print(os.Stdout)
	}
	memory.print(os.Stdout)
}
