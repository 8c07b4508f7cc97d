package guestinit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"kubevirt.io/disk/adapter/machine"
)

// diskConfig is the configuration on the disk (adapter.Config).
type diskConfig struct {
	Image imageConfig     `json:"image"`
	Extra machine.Options `json:"extra"`
}

// imageConfig has the needed fields of an image's configuration (OCI image specification,
// config.md).
type imageConfig struct {
	Config struct {
		User       string
		Env        []string
		Entrypoint []string
		Cmd        []string
		WorkingDir string
		StopSignal string
		Volumes    map[string]struct{}
	} `json:"config"`
}

// process describes the entry point. It is passed to the stage as JSON.
type process struct {
	Args       []string
	Env        []string
	User       string
	Dir        string
	TTY        bool
	Volumes    []string // directories that must exist
	ReadOnly   bool     // the disk is read-only
	StopSignal syscall.Signal
	stopGiven  bool // the image or the host has set it
	// Init: the program is an init system, which has to be process 1.
	Init bool
}

// defaultPath has the directories in which container runtimes look for programs.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// readProcess reads the description of the entry point from the disk.
func readProcess(disk io.ReaderAt, p params) (process, machine.Options, error) {
	text, err := readConfig(disk)
	if err != nil {
		return process{}, machine.Options{}, err
	}
	var c diskConfig
	if err := json.Unmarshal(text, &c); err != nil {
		return process{}, c.Extra, fmt.Errorf("the configuration of the image on the disk "+
			"cannot be read: %w", err)
	}
	c.Extra.TTY = c.Extra.TTY || p.tty
	process, err := newProcess(c.Image, c.Extra)
	return process, c.Extra, err
}

// configPiece is how much of the configuration is read at once, in bytes. This is mostly all of it,
// and then the rest of its area is not fetched from a remote LUN.
const configPiece = 16 << 10

// readConfig reads the configuration from its place on the disk: JSON, then zeros.
func readConfig(disk io.ReaderAt) (text []byte, err error) {
	for len(text) < machine.ConfigSize {
		piece := make([]byte, configPiece)
		_, err := disk.ReadAt(piece, machine.ConfigOffset+int64(len(text)))
		if err == io.EOF { // a small disk with other content
			break
		}
		if err != nil {
			return nil, fmt.Errorf("the configuration of the image on the disk: %w", err)
		}
		if end := bytes.IndexByte(piece, 0); end >= 0 {
			text = append(text, piece[:end]...)
			break
		}
		text = append(text, piece...)
	}
	if len(text) == 0 {
		return nil, errors.New("the disk has no configuration of an image: was it made by " +
			"kubevirt-disk adapt?")
	}
	return text, nil
}

// newProcess combines the configuration of an image with the options of the host.
func newProcess(image imageConfig, o machine.Options) (process, error) {
	c := image.Config
	p := process{User: c.User, Dir: c.WorkingDir, TTY: o.TTY}
	entrypoint, args := c.Entrypoint, c.Cmd
	if len(o.Entrypoint) > 0 {
		// The image's arguments were meant for its own entry point.
		entrypoint, args = o.Entrypoint, nil
	}
	if slices.Equal(o.Entrypoint, []string{""}) { // only the arguments, as in container runtimes
		entrypoint = nil
	}
	if len(o.Args) > 0 {
		args = o.Args
	}
	p.Args = slices.Concat(entrypoint, args)
	if len(p.Args) == 0 {
		return p, &startError{machine.StatusNotFound, errors.New("the image has no entry point " +
			"and no command: name one when you make its disk (--entrypoint, or arguments)")}
	}
	override(&p.User, o.User)
	override(&p.Dir, o.WorkDir)
	if !path.IsAbs(p.Dir) {
		p.Dir = "/" + p.Dir
	}
	p.Env = mergeEnv([]string{"PATH=" + defaultPath}, c.Env, o.Env)
	if p.TTY {
		p.Env = mergeEnv([]string{"TERM=xterm"}, p.Env)
	}
	for volume := range c.Volumes {
		if path.IsAbs(volume) {
			p.Volumes = append(p.Volumes, path.Clean(volume))
		}
	}
	slices.Sort(p.Volumes)
	stop := c.StopSignal
	override(&stop, o.StopSignal)
	p.stopGiven = stop != ""
	var err error
	p.StopSignal, err = machine.ParseSignal(stop)
	return p, err
}

// graceOf returns how long the entry point may take to stop.
func graceOf(o machine.Options, p params) time.Duration {
	switch {
	case p.grace != nil:
		return *p.grace
	case o.Grace > 0:
		return time.Duration(min(o.Grace, machine.MaxSeconds)) * time.Second
	}
	return machine.DefaultGrace
}

func override(value *string, by string) {
	if by != "" {
		*value = by
	}
}

// mergeEnv joins environments. If a variable appears twice, the later value takes the place of the
// first one.
func mergeEnv(lists ...[]string) (env []string) {
	place := map[string]int{}
	for _, variable := range slices.Concat(lists...) {
		name, _, ok := strings.Cut(variable, "=")
		if !ok || name == "" {
			continue
		}
		if at, ok := place[name]; ok {
			env[at] = variable
			continue
		}
		place[name] = len(env)
		env = append(env, variable)
	}
	return env
}

// getEnv returns the value of a variable of an environment.
func getEnv(env []string, name string) string {
	for _, variable := range env {
		if value, ok := strings.CutPrefix(variable, name+"="); ok {
			return value
		}
	}
	return ""
}
