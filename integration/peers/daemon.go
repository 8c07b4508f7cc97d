package peers

import (
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// DefaultTarget is the default target name of kubevirt-disk.
const DefaultTarget = "iqn.2017-01.io.kubevirt:wrapper"

// RaceOptions are GORACE for our binaries. A data race ends one with this status. It does not sleep
// for a second before it exits, as it otherwise would.
const RaceOptions = "halt_on_error=1 exitcode=66 atexit_sleep_ms=0"

// DaemonOptions are the options of StartDaemon.
type DaemonOptions struct {
	Binary   string
	DiskDir  string            // the images to serve
	StateDir string            // becomes the work directory; the ready file lies beside it
	Env      map[string]string // added to the defaults below; replaces them
	Args     []string          // flags of `serve`
}

// Daemon is a running kubevirt-disk.
type Daemon struct {
	*Process
	Portals   []string // "host:port", from its log
	Metrics   string   // "host:port" of the pages for monitoring; "": they are off
	ReadyFile string
}

// StartDaemon starts kubevirt-disk on free loopback ports with a log in JSON, and returns when it
// is ready. If it ends instead, the error is an *ExitError.
func StartDaemon(opt DaemonOptions) (*Daemon, error) {
	ready := filepath.Join(opt.StateDir, "ready")
	env := map[string]string{
		"PATH":           os.Getenv("PATH"),
		"DISK_DIR":       opt.DiskDir,
		"WORK_DIR":       filepath.Join(opt.StateDir, "work"),
		"READY_FILE":     ready,
		"LISTEN":         "127.0.0.1:0",
		"METRICS_LISTEN": "127.0.0.1:0",
		"LOG_FORMAT":     "json",
		"GORACE":         RaceOptions,
	}
	maps.Copy(env, opt.Env)
	if err := os.MkdirAll(opt.StateDir, 0o755); err != nil {
		return nil, err
	}
	cmd := exec.Command(opt.Binary, append([]string{"serve"}, opt.Args...)...)
	cmd.Dir = opt.StateDir
	for name, value := range env {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	// A killed daemon leaves its ready file behind. We must not take that for the file of the new
	// one.
	if err := os.Remove(ready); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	process, err := startProcess(cmd)
	if err != nil {
		return nil, err
	}
	d := &Daemon{Process: process, ReadyFile: ready}
	if err := process.until("ready", func() bool { return exists(ready) }); err != nil {
		process.stop()
		return nil, err
	}
	// Its output may arrive here after the ready file appears.
	if err := process.until("printing its portals", d.readPortals); err != nil {
		process.stop()
		return nil, err
	}
	return d, nil
}

// readPortals takes the addresses from the log, and reports whether there are any.
func (d *Daemon) readPortals() bool {
	d.Portals = nil
	for _, entry := range d.Log() {
		address, _ := entry["address"].(string)
		switch entry["msg"] {
		case "portal":
			d.Portals = append(d.Portals, address)
		case "metrics":
			d.Metrics = address
		case "ready":
			return len(d.Portals) > 0
		}
	}
	return false
}

// Log returns what the daemon has logged so far, one map per entry. Lines that are not JSON objects
// are left out.
func (d *Daemon) Log() []map[string]any {
	var entries []map[string]any
	for line := range strings.Lines(d.Output()) {
		var entry map[string]any
		if json.Unmarshal([]byte(line), &entry) == nil {
			entries = append(entries, entry)
		}
	}
	return entries
}

// Port is the port of the first portal.
func (d *Daemon) Port() string {
	_, port, _ := net.SplitHostPort(d.Portals[0])
	return port
}

// StartOurs serves one raw file in place with kubevirt-disk, for the comparison with the peers. Its
// directory must contain nothing else.
func StartOurs(binary, stateDir, raw string, env map[string]string) (*Target, error) {
	all := map[string]string{"COPY_MODE": "none", "ACCESS_MODE": "write-shared"}
	maps.Copy(all, env)
	d, err := StartDaemon(DaemonOptions{Binary: binary, DiskDir: filepath.Dir(raw),
		StateDir: stateDir, Env: all})
	if err != nil {
		return nil, err
	}
	return &Target{Name: "kubevirt-disk", Process: d.Process,
		URL: targetURL(d.Portals[0], DefaultTarget)}, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
