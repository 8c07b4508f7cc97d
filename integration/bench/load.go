package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// load is one kind of work that a client does.
type load struct {
	name  string
	write bool
	bytes int // of one command
	depth int // commands in flight
}

// loads are the loads to measure, small commands first, so that their memory can be told from that
// of the large ones.
var loads = []load{
	{"4 KiB random read, depth 1", false, 4 << 10, 1},
	{"4 KiB random read, depth 32", false, 4 << 10, 32},
	{"4 KiB scattered write, depth 1", true, 4 << 10, 1},
	{"4 KiB scattered write, depth 32", true, 4 << 10, 32},
	{"256 KiB random read, depth 1", false, 256 << 10, 1},
	{"256 KiB random read, depth 32", false, 256 << 10, 32},
	{"256 KiB scattered write, depth 1", true, 256 << 10, 1},
	{"256 KiB scattered write, depth 32", true, 256 << 10, 32},
}

// errHung says that a client did not end, because its target stopped answering.
var errHung = errors.New("hangs")

// client is the outcome of one run of a client.
type client struct {
	operations float64
	elapsed    time.Duration // of the load, without login
}

// clientJobs are the loads of common clients.
func clientJobs() []job {
	var jobs []job
	for _, l := range loads {
		jobs = append(jobs, job{name: l.name, bytes: l.bytes, probe: l.write,
			run: func(ctx context.Context, url string, length time.Duration,
				expected float64) (client, error) {
				return drive(ctx, l, url, length, expected)
			}})
	}
	return jobs
}

func (c client) rate() float64 { return c.operations / c.elapsed.Seconds() }

// drive runs the load for about that time. iscsi-perf does the reads; it cannot write. qemu-img
// bench does the writes, with a large step, so that neighbouring blocks are not written together.
// It needs a number of operations, so expected is the rate of an earlier run.
func drive(ctx context.Context, l load, url string, length time.Duration, expected float64) (client,
	error) {
	if !l.write {
		return iscsiPerf(ctx, l, url, length)
	}
	if expected == 0 {
		probe, err := qemuBench(ctx, l, url, length, 100)
		if err != nil {
			return client{}, err
		}
		expected = probe.rate()
	}
	return qemuBench(ctx, l, url, length, max(100, int(expected*length.Seconds())))
}

func iscsiPerf(ctx context.Context, l load, url string, length time.Duration) (client, error) {
	seconds := int(length.Seconds())
	out, err := output(ctx, length, "iscsi-perf", "-r", "-b", strconv.Itoa(l.bytes/512), "-m",
		strconv.Itoa(l.depth), "-t", strconv.Itoa(seconds), url)
	if err != nil {
		return client{}, err
	}
	rate, err := parseIscsiPerf(out)
	if err != nil {
		return client{}, err
	}
	return client{operations: rate * float64(seconds),
		elapsed: time.Duration(seconds) * time.Second}, nil
}

var iopsAverage = regexp.MustCompile(`(?m)iops average ([0-9]+) \(`)

// parseIscsiPerf returns the last average of the output, the one over the whole run.
func parseIscsiPerf(out string) (float64, error) {
	all := iopsAverage.FindAllStringSubmatch(out, -1)
	if len(all) == 0 {
		return 0, fmt.Errorf("iscsi-perf printed no average: %s", strings.TrimSpace(out))
	}
	rate, err := strconv.ParseFloat(all[len(all)-1][1], 64)
	if err == nil && rate == 0 {
		err = errHung // it counts seconds, not answers
	}
	return rate, err
}

func qemuBench(ctx context.Context, l load, url string, length time.Duration, count int) (client,
	error) {
	const stride = 1009 // prime, so that every block of the disk gets its turn
	out, err := output(ctx, length, "qemu-img", "bench", "-w", "-f", "raw", "-t", "none", "-c",
		strconv.Itoa(count), "-d", strconv.Itoa(l.depth),
		"-s", strconv.Itoa(l.bytes), "-S", strconv.Itoa(l.bytes*stride), url)
	if err != nil {
		return client{}, err
	}
	elapsed, err := parseQemuBench(out)
	return client{operations: float64(count), elapsed: elapsed}, err
}

var completedIn = regexp.MustCompile(`Run completed in ([0-9.]+) seconds`)

func parseQemuBench(out string) (time.Duration, error) {
	match := completedIn.FindStringSubmatch(out)
	if match == nil {
		return 0, fmt.Errorf("qemu-img bench printed no time: %s", strings.TrimSpace(out))
	}
	seconds, err := strconv.ParseFloat(match[1], 64)
	// qemu-img prints milliseconds, and a run may take less than one.
	return max(time.Millisecond, time.Duration(seconds*float64(time.Second))), err
}

// output runs a client that should take about that time. It gives up well after that.
func output(ctx context.Context, length time.Duration, name string, args ...string) (string,
	error) {
	limited, cancel := context.WithTimeout(ctx, 4*length+5*time.Second)
	defer cancel()
	cmd := exec.CommandContext(limited, name, args...)
	cmd.WaitDelay = time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	switch {
	case ctx.Err() != nil:
		return "", ctx.Err()
	case limited.Err() != nil:
		return "", errHung
	case err != nil:
		return "", fmt.Errorf("%s: %w: %s", cmd, err, strings.TrimSpace(out.String()))
	}
	return out.String(), nil
}
