package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"runtime"
	"strings"
	"sync/atomic"
	"time"
)

// generatorLoad is one load of the load generator: reads or writes of one size.
type generatorLoad struct {
	write    bool
	bytes    int // of one command, a multiple of 512
	depth    int // commands in flight, per session
	sessions int
	luns     int // LUN 1 and up, in random order
	digests  bool
	size     int64 // of each LUN, bytes
	step     int64 // from one command to the next, bytes, around LUN 1; 0: random
}

func (l generatorLoad) String() string {
	what := map[bool]string{false: "read", true: "write"}[l.write]
	order := "random"
	if l.step > 0 {
		order = "scattered"
	}
	name := fmt.Sprintf("%d KiB %s %s, depth %d", l.bytes>>10, order, what, l.depth)
	if l.sessions > 1 {
		name += fmt.Sprintf(", %d sessions", l.sessions)
	}
	if l.luns > 1 {
		name += fmt.Sprintf(", %d LUNs", l.luns)
	}
	if l.digests {
		name += ", digests"
	}
	return name
}

// addresses are where the commands of one connection go.
type addresses struct {
	l      generatorLoad
	random uint64 // state of the generator of random addresses
	at     int64  // of the next command, if step is set
}

// next returns the LUN and the address in bytes of the next command.
func (a *addresses) next() (lun uint16, offset int64) {
	places := a.l.size / int64(a.l.bytes)
	if a.l.step > 0 {
		offset = a.at
		a.at = (a.at + a.l.step) % (places * int64(a.l.bytes))
		return 1, offset
	}
	a.random ^= a.random << 13
	a.random ^= a.random >> 7
	a.random ^= a.random << 17
	return uint16(a.random>>40%uint64(a.l.luns)) + 1,
		int64(a.random%uint64(places)) * int64(a.l.bytes)
}

// manyLUNs is the number of LUNs of the loads for many LUNs.
const manyLUNs = 64

// generatorLoads returns the loads for a target with that many LUNs of a size: all loads for one
// LUN, and a few for many LUNs, to see whether their number matters.
func generatorLoads(luns int, size int64) []generatorLoad {
	var list []generatorLoad
	if luns > 1 {
		for _, write := range []bool{false, true} {
			for _, sessions := range []int{1, 4} {
				list = append(list,
					generatorLoad{write: write, bytes: 4 << 10, depth: 32, sessions: sessions,
						luns: luns, size: size})
			}
		}
		return list
	}
	for _, digests := range []bool{false, true} {
		for _, sessions := range []int{1, 4, 16} {
			for _, shape := range []struct{ bytes, depth int }{{4 << 10, 1}, {4 << 10, 32},
				{256 << 10, 1}, {256 << 10, 16}} {
				if sessions == 16 && (digests || shape.depth != 32) {
					continue
				}
				for _, write := range []bool{false, true} {
					list = append(list,
						generatorLoad{write: write, bytes: shape.bytes, depth: shape.depth,
							sessions: sessions, luns: 1, size: size,
							digests: digests})
				}
			}
		}
	}
	return list
}

func generatorJobs(loads []generatorLoad) []job {
	var jobs []job
	for _, l := range loads {
		jobs = append(jobs, job{name: l.String(), bytes: l.bytes, inside: true,
			bare: !l.digests && l.bytes <= 256<<10,
			run: func(ctx context.Context, url string, length time.Duration, _ float64) (client,
				error) {
				return generate(ctx, l, url, length)
			}})
	}
	return jobs
}

// connection is one connection of a load to its server.
type connection interface {
	// run keeps the load's number of commands in flight until stop returns true, and returns how
	// many have ended. It always sends at least one, even if a busy machine starts it only when the
	// time is over.
	run(stop func() bool) (uint64, error)
	close() error
}

// connect makes the n-th connection of a load, to a LUN ("iscsi://host:port/target/1") or to an NBD
// server ("nbd+unix:///?socket=path").
func connect(target string, n int, l generatorLoad, timeout time.Duration) (connection, error) {
	if socket, ok := strings.CutPrefix(target, nbdScheme); ok {
		return newNBDClient(socket, l, timeout)
	}
	address, name, err := parseURL(target)
	if err != nil {
		return nil, err
	}
	return newInitiator(address, name, n, l, timeout)
}

// generate runs a load for a time. The sessions log in before the time begins.
func generate(ctx context.Context, l generatorLoad, target string, length time.Duration) (client,
	error) {
	all := make([]connection, l.sessions)
	for n := range all {
		var err error
		if all[n], err = connect(target, n, l, length+silence); err != nil {
			return client{}, err
		}
		defer all[n].close()
	}
	var stop atomic.Bool
	type outcome struct {
		done uint64
		err  error
	}
	outcomes := make(chan outcome, len(all))
	began := time.Now()
	for _, c := range all {
		go func() {
			runtime.LockOSThread() // the connection waits in system calls
			defer runtime.UnlockOSThread()
			done, err := c.run(stop.Load)
			outcomes <- outcome{done, err}
		}()
	}
	timer := time.NewTimer(length)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	stop.Store(true)
	var total client
	var failures []error
	for range all {
		o := <-outcomes
		total.operations += float64(o.done)
		failures = append(failures, o.err)
	}
	total.elapsed = time.Since(began)
	return total, errors.Join(append(failures, ctx.Err())...)
}

// parseURL splits an iSCSI URL.
func parseURL(text string) (address, target string, err error) {
	u, err := url.Parse(text)
	if err != nil {
		return "", "", err
	}
	target, _, _ = strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
	if u.Scheme != "iscsi" || target == "" {
		return "", "", fmt.Errorf("%q is not an iSCSI URL of a LUN", text)
	}
	return u.Host, target, nil
}
