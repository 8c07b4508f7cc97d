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

// Run does the system calls of a load on a file for a time. The result has no latencies.
func (f Floor) Run(ctx context.Context, file string, l Load, length time.Duration) (r Result,
	err error) {
	what, order := "r", "random"
	if l.Write {
		what = "w"
	}
	if l.Sequential {
		order = "sequential"
	}
	out, err := exec.CommandContext(ctx, f.binary, file, what, order, strconv.Itoa(l.Bytes),
		strconv.Itoa(l.Depth), strconv.FormatFloat(length.Seconds(), 'f', -1, 64)).Output()
	if err != nil {
		return r, fmt.Errorf("the floor: %w", err)
	}
	_, err = fmt.Sscan(string(out), &r.Operations, &r.Elapsed, &r.Servers)
	if err != nil {
		return r, fmt.Errorf("the floor printed %q: %w", out, err)
	}
	return r, nil
}
