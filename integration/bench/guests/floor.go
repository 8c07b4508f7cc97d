package guests

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"
)

// floorSource is a bare loop of the system calls; see its first comment.
//
//go:embed floor/floor.c
var floorSource []byte

// Floor is what a back end costs that makes the system calls of requests and does nothing else.
type Floor struct{ binary string }

// BuildFloor builds it in a directory. It needs gcc.
func BuildFloor(dir string) (Floor, error) {
	source, f := filepath.Join(dir, "vhostfloor.c"), Floor{filepath.Join(dir, "vhostfloor")}
	if err := os.WriteFile(source, floorSource, 0o644); err != nil {
		return f, err
	}
	build := exec.Command("gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", f.binary,
		source)
	if out, err := build.CombinedOutput(); err != nil {
		return f, fmt.Errorf("build the floor (package gcc): %w: %s", err, out)
	}
	return f, nil
}

// Run does the system calls of a load for a time, with a guest for each file. The result has no
// latencies.
func (f Floor) Run(ctx context.Context, files []string, l Load, length time.Duration) (r Result,
	err error) {
	what, order := "r", "random"
	if l.Write {
		what = "w"
	}
	if l.Sequential {
		order = "sequential"
	}
	args := []string{what, order, strconv.Itoa(l.Bytes), strconv.Itoa(l.Depth),
		strconv.Itoa(max(l.Queues, 1)), strconv.FormatFloat(length.Seconds(), 'f', -1, 64)}
	out, err := exec.CommandContext(ctx, f.binary, append(args, files...)...).Output()
	if err != nil {
		return r, fmt.Errorf("the floor: %w", err)
	}
	r.Guests = make([]uint64, len(files))
	values := []any{&r.Elapsed, &r.Servers}
	for i := range r.Guests {
		values = append(values, &r.Guests[i])
	}
	if _, err := fmt.Sscan(string(out), values...); err != nil {
		return r, fmt.Errorf("the floor printed %q: %w", out, err)
	}
	for _, done := range r.Guests {
		r.Operations += done
	}
	return r, nil
}
