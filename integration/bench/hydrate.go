package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

// duplicator is a way to make a whole raw copy of an image. It has a directory of its own, which is
// removed afterwards.
type duplicator struct {
	name      string
	duplicate func(ctx context.Context, image, dir string) (usage, error)
}

// The modes of a disk that copies its image.
const (
	clone           = "clone"
	persistentClone = "persistent clone"
)

// duplicators are our server, which serves the disk meanwhile, and qemu-img. The second one is the
// baseline. Persistent copies are flushed: our server flushes now and then and before it calls the
// disk complete, qemu-img when it closes a file. It does so only if its cache mode is not the
// default, "unsafe".
func (s settings) duplicators(mode string) []duplicator {
	if earlier, ok := s.earlier(); ok {
		s.before = ""
		before := earlier.duplicators(mode)[0]
		before.name += ", " + beforeName
		return append(s.duplicators(mode), before)
	}
	qemu := func(name string, options ...string) duplicator {
		return duplicator{name, func(ctx context.Context, image, dir string) (usage, error) {
			raw := filepath.Join(dir, "disk.raw")
			command := append([]string{"qemu-img", "convert", "-O", "raw"}, options...)
			return expand(ctx, append(command, image, raw), raw)
		}}
	}
	if mode == persistentClone {
		return []duplicator{
			{"kubevirt-disk, " + mode, s.hydrate("PERSISTENT_DIR")},
			qemu("qemu-img convert -t writeback", "-t", "writeback"),
			qemu("qemu-img convert -t writeback -m 8 -W", "-t", "writeback", "-m", "8", "-W"),
		}
	}
	return []duplicator{
		{"kubevirt-disk, " + mode, s.hydrate("WORK_DIR")},
		qemu("qemu-img convert"),
		qemu("qemu-img convert -m 8 -W", "-m", "8", "-W"),
	}
}

// hydrate serves an image in mode clone until the disk is complete. No initiator logs in. setting
// is the setting for the directory of the disk.
func (s settings) hydrate(setting string) func(ctx context.Context, image, dir string) (usage,
	error) {
	return func(ctx context.Context, image, dir string) (u usage, err error) {
		place := filepath.Join(dir, "copy")
		if err := os.MkdirAll(place, 0o755); err != nil {
			return usage{}, err
		}
		settle()
		begin := time.Now()
		d, err := s.startOn(image, dir, map[string]string{"COPY_MODE": clone, setting: place})
		if err != nil {
			return usage{}, err
		}
		defer func() { err = errors.Join(err, d.Kill()) }()
		stop := watchMemory(d.PID())
		err = untilComplete(ctx, d.Metrics)
		u.wall = time.Since(begin).Seconds()
		u.anonymous = float64(stop())
		if err != nil {
			return usage{}, fmt.Errorf("%w; it printed:\n%s", err, d.Output())
		}
		cpu, err := cpuTime(d.PID())
		u.cpu = cpu.Seconds()
		return u, err
	}
}

const (
	// completePoll is the interval at which a server is asked whether it has copied its image. One
	// answer takes about 0.1 ms of its time.
	completePoll = 10 * time.Millisecond
	// completeTimeout is how long the copying may take.
	completeTimeout = 5 * time.Minute
)

// untilComplete waits until the status page shows every LUN as complete.
func untilComplete(ctx context.Context, address string) error {
	ctx, cancel := context.WithTimeout(ctx, completeTimeout)
	defer cancel()
	// A new client keeps one connection for all requests.
	client := &http.Client{Transport: new(http.Transport)}
	defer client.CloseIdleConnections()
	for {
		complete, err := askComplete(ctx, client, "http://"+address+"/status")
		if err != nil || complete {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the disk is not complete: %w", ctx.Err())
		case <-time.After(completePoll):
		}
	}
}

func askComplete(ctx context.Context, client *http.Client, url string) (complete bool, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false, err
	}
	answer, err := client.Do(request)
	if err != nil {
		return false, err
	}
	defer answer.Body.Close()
	var status struct {
		LUNs []struct {
			Copy struct {
				Complete bool `json:"complete"`
			} `json:"copy"`
		} `json:"luns"`
	}
	if err := json.NewDecoder(answer.Body).Decode(&status); err != nil {
		return false, fmt.Errorf("%s answers %s: %w", url, answer.Status, err)
	}
	for _, lun := range status.LUNs {
		if !lun.Copy.Complete {
			return false, nil
		}
	}
	return len(status.LUNs) > 0, nil
}

// measureHydration prints the time from the start of the process until the disk no longer needs its
// image, without a guest.
func measureHydration(ctx context.Context, s settings) error {
	images := findOSImages(s, "plain", "zlib", "zstd")
	out := table{head: []string{"image", "command", "time", "to qemu-img convert", "CPU",
		"to qemu-img convert", "anonymous memory"}}
	for _, mode := range []string{clone, persistentClone} {
		all := s.duplicators(mode)
		for _, kind := range imageKinds {
			path := images[kind.name]
			if path == "" || !s.loads.MatchString(kind.name+", "+mode) {
				continue
			}
			measured := make([][]usage, len(all))
			for i := range all {
				measured[i] = make([]usage, s.rounds)
			}
			for round := range s.rounds {
				// In random order: the memory that one command leaves helps or hinders the next
				// one.
				for _, i := range rand.Perm(len(all)) {
					u, err := duplicateOnce(ctx, s, all[i], path)
					if err != nil {
						return fmt.Errorf("%s of the %s image: %w", all[i].name, kind.name, err)
					}
					measured[i][round] = u
				}
				fmt.Fprintf(os.Stderr, "bench: copies of the %s image: round %d of %d: %.2f s, "+
					"%.2f s with qemu-img\n",
					kind.name, round+1, s.rounds, measured[0][round].wall, measured[1][round].wall)
			}
			wall, cpu := func(u usage) float64 { return u.wall },
				func(u usage) float64 { return u.cpu }
			for i, d := range all {
				out.add(kind.name, d.name, fmt.Sprintf("%.2f s", median(column(measured[i], wall))),
					pairedRatio(measured[i], measured[1], wall),
					fmt.Sprintf("%.2f s", median(column(measured[i], cpu))),
					pairedRatio(measured[i], measured[1], cpu),
					mib(median(column(measured[i], func(u usage) float64 { return u.anonymous }))))
			}
		}
	}
	fmt.Println("From the start of the process to a whole raw copy, without a guest:")
	out.print(os.Stdout)
	return nil
}

func duplicateOnce(ctx context.Context, s settings, d duplicator, image string) (u usage,
	err error) {
	dir, err := os.MkdirTemp(s.cache, "hydrate-")
	if err != nil {
		return usage{}, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	return d.duplicate(ctx, image, dir)
}
