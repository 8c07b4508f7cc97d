package peers

import (
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
)

// floorSource is the source of a server that only makes the system calls; see its first comment.
//
//go:embed floor/floor.c
var floorSource []byte

// StartFloor serves raw files, LUN 1 and up, with a bare loop in C of the system calls that every
// target must make. gcc builds it in stateDir. It serves only the load generator, without digests.
func StartFloor(stateDir string, raws ...string) (*Target, error) {
	if err := os.MkdirAll(stateDir, 0o755); err != nil {
		return nil, err
	}
	source, binary := filepath.Join(stateDir, "floor.c"), filepath.Join(stateDir, "floor")
	if err := os.WriteFile(source, floorSource, 0o644); err != nil {
		return nil, err
	}
	build := exec.Command("gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", binary,
		source)
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build the floor (package gcc): %w: %s", err, out)
	}
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	process, err := startProcess(exec.Command(binary,
		append([]string{strconv.Itoa(port)}, raws...)...))
	if err != nil {
		return nil, err
	}
	if err := process.until("listening", func() bool { return accepting(port) }); err != nil {
		process.Kill()
		return nil, err
	}
	url := targetURL("127.0.0.1:"+strconv.Itoa(port), DefaultTarget)
	return &Target{Name: "floor", Process: process, URL: url}, nil
}
