// Package guests measures a back end of vhost-user as guests would use it: each guest is a
// connection with a memory and rings of its own, and each ring has a thread that sleeps until the
// back end calls.
package guests

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/vhostuser/vhosttest"
)

// Load is the work of one guest.
type Load struct {
	Write      bool
	Sequential bool
	Bytes      int // of one request
	Depth      int // requests in flight, in each queue
	Queues     int
	Span       int64 // of the disk, bytes; 0: all of it
	Indirect   bool  // chains in tables of their own
}

// Result is what guests did together.
type Result struct {
	Operations      uint64
	Elapsed         time.Duration
	Latency         vhosttest.Latencies
	Kicks, Waits    uint64
	Driver, Servers time.Duration // processor time
	Guests          []uint64      // operations of each
}

// Rate is operations a second.
func (r Result) Rate() float64 { return float64(r.Operations) / r.Elapsed.Seconds() }

// ServerTime is the servers' processor time for an operation.
func (r Result) ServerTime() time.Duration { return r.each(r.Servers) }

func (r Result) each(all time.Duration) time.Duration {
	return time.Duration(float64(all) / float64(max(r.Operations, 1)))
}

func (r Result) String() string {
	each := func(n uint64) float64 { return float64(n) / float64(max(r.Operations, 1)) }
	return fmt.Sprintf("%.0f/s, mean %.1f µs, p99 %.1f µs, kicks %.2f, waits %.2f, processor: "+
		"guest %.1f µs, servers %.1f µs", r.Rate(), microseconds(r.Latency.Mean()),
		microseconds(r.Latency.Quantile(0.99)), each(r.Kicks), each(r.Waits),
		microseconds(r.each(r.Driver)), microseconds(r.ServerTime()))
}

func microseconds(d time.Duration) float64 { return float64(d) / 1e3 }

// guest is one connection, ready to run.
type guest struct {
	driver  *vhosttest.Driver
	streams []*vhosttest.Stream
}

func newGuest(socket string, l Load, number int) (_ guest, err error) {
	size := uint16(128)
	for int(size) < 3*l.Depth {
		size *= 2
	}
	var g guest
	// Room for the data of all requests, for the rings and for what gets lost between them.
	memory := l.Queues*(l.Depth*(l.Bytes+2*vhosttest.LogPage)+64<<10) + 1<<20
	g.driver, err = vhosttest.Dial(socket, vhosttest.Options{Queues: l.Queues, QueueSize: size,
		Memory: (uint64(memory) + 4095) &^ 4095, Timeout: 20 * time.Second})
	if err != nil {
		return g, fmt.Errorf("%s: %w", socket, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%s: %w", socket, err), g.driver.Close())
		}
	}()
	for i := range l.Queues {
		s, err := g.driver.Queue(i).Stream(vhosttest.StreamOptions{Write: l.Write,
			Sequential: l.Sequential, Bytes: l.Bytes, Depth: l.Depth, Span: l.Span,
			Seed: uint64(number*64 + i), Indirect: l.Indirect})
		if err != nil {
			return g, err
		}
		g.streams = append(g.streams, s)
	}
	return g, nil
}

// Run connects a guest to each socket, and measures them together for a time. The processes are the
// servers, whose processor time is taken.
func Run(sockets []string, l Load, length time.Duration, pids []int) (r Result, err error) {
	l.Queues = max(l.Queues, 1)
	var all []guest
	defer func() {
		for _, g := range all {
			// What QEMU does when its guest ends: the server has nothing left to do then.
			err = errors.Join(err, g.driver.Shutdown())
		}
	}()
	for i, socket := range sockets {
		g, err := newGuest(socket, l, i)
		if err != nil {
			return r, err
		}
		all = append(all, g)
	}
	// A thread that sleeps in a system call keeps its P, so that none waits for another one's.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(len(all)*l.Queues + runtime.NumCPU()))
	totals := make([]vhosttest.Totals, len(all)*l.Queues)
	errs := make([]error, len(totals))
	var group sync.WaitGroup
	servers, err := threadTimes(pids)
	if err != nil {
		return r, err
	}
	driver := ownTime()
	for i, g := range all {
		for j, s := range g.streams {
			group.Go(func() {
				totals[i*l.Queues+j], errs[i*l.Queues+j] = s.Run(length)
			})
		}
	}
	group.Wait()
	r.Driver = ownTime() - driver
	after, err := threadTimes(pids)
	if err := errors.Join(append(errs, err)...); err != nil {
		return r, err
	}
	for thread, now := range after {
		r.Servers += now - servers[thread]
	}
	r.Guests = make([]uint64, len(all))
	for i := range totals {
		t := &totals[i]
		r.Operations, r.Kicks, r.Waits = r.Operations+t.Operations, r.Kicks+t.Kicks, r.Waits+t.Waits
		r.Elapsed = max(r.Elapsed, t.Elapsed)
		r.Latency.Add(&t.Latency)
		r.Guests[i/l.Queues] += t.Operations
	}
	return r, nil
}

// ownTime is the processor time of this process.
func ownTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// threadTimes is the processor time of each thread of some processes, to the nanosecond
// (/proc/PID/task/*/schedstat). What a thread used that ends before the next look is lost.
func threadTimes(pids []int) (map[string]time.Duration, error) {
	times := map[string]time.Duration{}
	for _, pid := range pids {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
		if err != nil || len(threads) == 0 {
			return nil, fmt.Errorf("process %d has no threads: %w", pid, os.ErrNotExist)
		}
		for _, path := range threads {
			text, err := os.ReadFile(path)
			if err != nil {
				continue // it has just ended
			}
			first, _, _ := strings.Cut(string(text), " ")
			ns, err := strconv.ParseInt(first, 10, 64)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", path, err)
			}
			times[path] = time.Duration(ns)
		}
	}
	return times, nil
}

// Idle connects a guest that has done something, lets the server settle, and returns the servers'
// processor time while the guest does nothing for a time.
func Idle(socket string, settle, length time.Duration, pids []int) (used time.Duration,
	err error) {
	g, err := newGuest(socket, Load{Bytes: 4096, Depth: 1, Queues: 1}, 0)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, g.driver.Shutdown()) }()
	if _, err := g.streams[0].Run(time.Millisecond); err != nil {
		return 0, err
	}
	time.Sleep(settle)
	before, err := threadTimes(pids)
	if err != nil {
		return 0, err
	}
	time.Sleep(length)
	after, err := threadTimes(pids)
	for thread, now := range after {
		used += now - before[thread]
	}
	return used, err
}
