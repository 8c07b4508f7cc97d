package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	// imageData is the amount of data in the images, and imageSize their virtual size. The rest was
	// never written.
	imageData = 5 << 28 // 1.25 GiB
	imageSize = 2 << 30
	// idleBefore is how long the machine rests before each command.
	idleBefore = 8 * time.Second
)

// imageKind is a way to store the same disk.
type imageKind struct {
	name    string
	options []string // of qemu-img convert
}

var imageKinds = []imageKind{
	{"plain", nil},
	{"zlib", []string{"-c"}},
	{"zstd", []string{"-c", "-o", "compression_type=zstd"}},
}

// expander is a command that expands an image to a raw file.
type expander struct {
	name    string
	command func(image, raw string) []string
}

// usage is the cost of one expansion.
type usage struct {
	wall, cpu float64 // seconds
	memory    float64 // peak resident set, bytes; 0: not measured
	anonymous float64 // the most anonymous memory seen, bytes; 0: not measured
}

func measureExpansion(ctx context.Context, s settings) error {
	images, err := makeImages(ctx, filepath.Join(s.cache, "images"))
	if err != nil {
		return err
	}
	expanders := []expander{
		{"kubevirt-disk convert",
			func(image, raw string) []string { return []string{s.server, "convert", image, raw} }},
		{"qemu-img convert", func(image, raw string) []string {
			return []string{"qemu-img", "convert", "-O", "raw", image, raw}
		}},
		{"qemu-img convert -m 8 -W", func(image, raw string) []string {
			return []string{"qemu-img", "convert", "-m", "8", "-W", "-O", "raw", image, raw}
		}},
	}
	if s.before != "" {
		expanders = append(expanders, expander{"kubevirt-disk convert, " + beforeName,
			func(image, raw string) []string { return []string{s.before, "convert", image, raw} }})
	}
	out := table{head: []string{"image", "command", "time", "to qemu-img convert", "MiB/s", "CPU",
		"to qemu-img convert", "peak memory"}}
	raw := filepath.Join(s.cache, "expanded.raw")
	defer os.Remove(raw)
	for _, kind := range imageKinds {
		if !s.loads.MatchString(kind.name + ", convert") {
			continue
		}
		measured := make([][]usage, len(expanders))
		for round := range s.rounds {
			// In random order: the memory that one command leaves helps or hinders the next one.
			for _, i := range rand.Perm(len(expanders)) {
				u, err := expand(ctx, expanders[i].command(images[kind.name], raw), raw)
				if err != nil {
					return err
				}
				measured[i] = append(measured[i], u)
			}
			fmt.Fprintf(os.Stderr, "bench: expansion of the %s image: round %d of %d\n", kind.name,
				round+1, s.rounds)
		}
		wall, cpu := func(u usage) float64 { return u.wall }, func(u usage) float64 { return u.cpu }
		for i, e := range expanders {
			seconds, baseline := measured[i], measured[1]
			out.add(kind.name, e.name, fmt.Sprintf("%.2f s", median(column(seconds, wall))),
				pairedRatio(seconds, baseline, wall),
				fmt.Sprintf("%.0f", imageData/median(column(seconds, wall))/(1<<20)),
				fmt.Sprintf("%.2f s", median(column(seconds, cpu))),
				pairedRatio(seconds, baseline, cpu),
				mib(median(column(seconds, func(u usage) float64 { return u.memory }))))
		}
	}
	out.print(os.Stdout)
	return nil
}

// pairedRatio is the median of the ratios of all rounds. Other work on the machine slows both
// commands of a round.
func pairedRatio(all, baseline []usage, value func(usage) float64) string {
	var ratios []float64
	for i, u := range all {
		ratios = append(ratios, value(u)/value(baseline[i]))
	}
	return ratio(median(ratios), 1)
}

func column[T any](all []T, value func(T) float64) []float64 {
	var values []float64
	for _, u := range all {
		values = append(values, value(u))
	}
	return values
}

// expand runs one command. It first removes the raw file and writes back dirty pages, so that no
// command pays for the output of another.
func expand(ctx context.Context, command []string, raw string) (usage, error) {
	if err := os.Remove(raw); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return usage{}, err
	}
	settle()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	begin := time.Now()
	if err := cmd.Start(); err != nil {
		return usage{}, err
	}
	stop := watchMemory(cmd.Process.Pid)
	err := cmd.Wait()
	wall := time.Since(begin)
	anonymous := stop()
	if err != nil {
		return usage{}, fmt.Errorf("%s: %w: %s", cmd, err, strings.TrimSpace(out.String()))
	}
	state := cmd.ProcessState
	u := usage{wall: wall.Seconds(), cpu: (state.UserTime() + state.SystemTime()).Seconds(),
		anonymous: float64(anonymous)}
	if r, ok := state.SysUsage().(*syscall.Rusage); ok {
		u.memory = float64(r.Maxrss) * 1024 // getrusage(2): in KiB
	}
	return u, nil
}

// settle puts the machine into the same state before each command: nothing is dirty, and no memory
// is ready for use. The host of a virtual machine takes back memory that is free for a while, and
// getting it again costs ten times as much as copying into it. Without settle, a command soon after
// the removal of a large file would find some of that memory by chance.
func settle() {
	syscall.Sync()
	time.Sleep(idleBefore)
}

// makeImages makes the missing images and returns the paths of all by kind.
func makeImages(ctx context.Context, dir string) (map[string]string, error) {
	raw := filepath.Join(dir, "source.raw")
	paths := make(map[string]string)
	for _, kind := range imageKinds {
		path := filepath.Join(dir, kind.name+".qcow2")
		paths[kind.name] = path
		if _, err := os.Stat(path); err == nil {
			continue
		}
		if err := makeContent(raw, imageData); err != nil {
			return nil, err
		}
		padded := raw + ".padded"
		if err := pad(raw, padded); err != nil {
			return nil, err
		}
		fmt.Fprintf(os.Stderr, "bench: making the %s image\n", kind.name)
		args := append([]string{"convert", "-f", "raw", "-O", "qcow2"}, kind.options...)
		out, err := exec.CommandContext(ctx, "qemu-img",
			append(args, padded, path+".new")...).CombinedOutput()
		if err = errors.Join(err, os.Remove(padded)); err != nil {
			return nil, fmt.Errorf("make the %s image: %w: %s", kind.name, err, out)
		}
		if err := os.Rename(path+".new", path); err != nil {
			return nil, err
		}
	}
	return paths, nil
}

// pad copies the source into a disk of imageSize: the data, and then a hole.
func pad(raw, padded string) error {
	if err := os.Remove(padded); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	in, err := os.Open(raw)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(padded)
	if err != nil {
		return err
	}
	_, err = out.ReadFrom(in)
	return errors.Join(err, out.Truncate(imageSize), out.Close())
}
