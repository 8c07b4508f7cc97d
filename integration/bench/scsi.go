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

// lunSize is the size of the raw file that each target serves: larger than any cache of the processor, small enough to stay in the page
// cache. It is a multiple of 256 KiB.
const lunSize = 1 << 30

// candidate is a target and what was measured of it.
type candidate struct {
	name   string
	dir    string
	raw    string
	server string // path of the program, "" where the package decides
	target *peers.Target

	rest       float64              // anonymous memory in bytes after the start
	small, all float64              // the most of it with loads of 4 KiB, and with all loads
	rates      map[string][]float64 // operations per second, by load
	cpu        map[string][]float64 // seconds of CPU per operation, by load
	trouble    map[string]string    // why a load has no numbers
}

func (c *candidate) start() error {
	var err error
	switch c.name {
	case "kubevirt-disk":
		c.target, err = peers.StartOurs(c.server, filepath.Join(c.dir, "state"), c.raw, nil)
	case "tgtd":
		c.target, err = peers.StartTgtd(c.raw)
	case "gotgt":
		c.target, err = peers.StartGotgt(c.server, filepath.Join(c.dir, "state"), c.raw)
	}
	return err
}

func measureSCSI(ctx context.Context, s settings) error {
	var all []*candidate
	defer func() {
		for _, c := range all {
			if c.target != nil {
				if err := c.target.Stop(); err != nil {
					fmt.Fprintln(os.Stderr, "bench:", err)
				}
			}
		}
	}()
	for _, name := range s.targets {
		c := &candidate{name: name, dir: filepath.Join(s.cache, name), server: map[string]string{"kubevirt-disk": s.server, "gotgt": s.gotgt}[name],
			rates: map[string][]float64{}, cpu: map[string][]float64{}, trouble: map[string]string{}}
		c.raw = filepath.Join(c.dir, "disk", "lun.raw")
		if err := makeContent(c.raw, lunSize); err != nil {
			return err
		}
		if err := c.start(); err != nil {
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
	for _, l := range loads {
		for round := range s.rounds {
			for turn := range all {
				c := all[(round+turn)%len(all)]
				if err := c.measure(ctx, l, s.length); err != nil {
					return err
				}
			}
			fmt.Fprintf(os.Stderr, "bench: %s: round %d of %d\n", l.name, round+1, s.rounds)
		}
	}
	printSCSI(all)
	return nil
}

// measure runs a load once. A target that hangs or dies is started again, and is not asked for this load again.
func (c *candidate) measure(ctx context.Context, l load, length time.Duration) error {
	if c.trouble[l.name] != "" {
		return nil
	}
	pid := c.target.PID()
	expected := median(c.rates[l.name])
	if l.write && expected == 0 { // qemu-img counts operations, so the first run finds out how many fit the time
		probe, err := drive(ctx, l, c.target.URL, length, 0)
		if err != nil {
			return c.failed(ctx, l, err)
		}
		expected = probe.rate()
	}
	before, err := cpuTime(pid)
	if err != nil {
		return c.failed(ctx, l, err)
	}
	stop := watchMemory(pid)
	done, err := drive(ctx, l, c.target.URL, length, expected)
	most := float64(stop())
	c.all = max(c.all, most)
	if l.bytes == 4<<10 {
		c.small = max(c.small, most)
	}
	if err != nil {
		return c.failed(ctx, l, err)
	}
	after, err := cpuTime(pid)
	if err != nil {
		return c.failed(ctx, l, err)
	}
	c.rates[l.name] = append(c.rates[l.name], done.rate())
	c.cpu[l.name] = append(c.cpu[l.name], (after-before).Seconds()/done.operations)
	return nil
}

func (c *candidate) failed(ctx context.Context, l load, err error) error {
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
	fmt.Fprintf(os.Stderr, "bench: %s %s at %s: %v\n", c.name, what, l.name, err)
	c.trouble[l.name] = what
	if err := c.target.Stop(); err != nil {
		return err
	}
	return c.start()
}

func printSCSI(all []*candidate) {
	rates := table{head: []string{"operations per second"}}
	cpu := table{head: []string{"server CPU per operation"}}
	memory := table{head: []string{"anonymous memory"}}
	for _, t := range []*table{&rates, &cpu, &memory} {
		for _, c := range all {
			t.head = append(t.head, c.name)
		}
		if len(all) > 1 && t != &memory {
			t.head = append(t.head, all[0].name+" to "+all[1].name)
		}
	}
	for _, l := range loads {
		rateRow, cpuRow := []string{l.name}, []string{l.name}
		for _, c := range all {
			if what := c.trouble[l.name]; what != "" {
				rateRow, cpuRow = append(rateRow, what), append(cpuRow, what)
				continue
			}
			rateRow = append(rateRow, fmt.Sprintf("%.0f", median(c.rates[l.name])))
			cpuRow = append(cpuRow, fmt.Sprintf("%.1f µs", 1e6*median(c.cpu[l.name])))
		}
		if len(all) > 1 {
			rateRow = append(rateRow, ratio(median(all[0].rates[l.name]), median(all[1].rates[l.name])))
			cpuRow = append(cpuRow, ratio(median(all[0].cpu[l.name]), median(all[1].cpu[l.name])))
		}
		rates.add(rateRow...)
		cpu.add(cpuRow...)
	}
	for _, row := range []struct {
		name  string
		value func(*candidate) float64
	}{
		{"at rest", func(c *candidate) float64 { return c.rest }},
		{"the most with 4 KiB commands", func(c *candidate) float64 { return c.small }},
		{"the most with 256 KiB commands", func(c *candidate) float64 { return c.all }},
	} {
		cells := []string{row.name}
		for _, c := range all {
			cells = append(cells, mib(row.value(c)))
		}
		memory.add(cells...)
	}
	rates.print(os.Stdout)
	cpu.print(os.Stdout)
	memory.print(os.Stdout)
}
