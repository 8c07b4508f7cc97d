package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/daemon"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/status"
)

// A command behind -- runs while the disks are served, as with nbdkit --run. It has the streams and
// the environment of this process, and learns from placeholders and variables where the disks are.

// The exit statuses of a shell for a command that cannot be run, and for one that a signal ended.
const (
	exitNotRun   = 126
	exitNotFound = 127
	exitSignal   = 128
)

// The variables of a command, and the placeholders in braces for them. Those of the second disk end
// with 2.
const (
	varURI   = "uri"
	varNBD   = "nbd"
	varISCSI = "iscsi"
)

// commandError is the end of a command with another status than 0, or of another process whose
// status is passed on.
type commandError struct {
	status int
	text   string // "": the command has printed the error itself
}

func (e *commandError) Error() string { return e.text }

// useCommand sets defaults for a command for all settings without a value: nothing stays, and
// nothing conflicts with other daemons.
func (l loader) useCommand(c *config) {
	switch {
	case c.command[0] == "":
		l.Problems.Add("--", "names no command: write serve IMAGE... -- COMMAND")
	case c.Hook != nil:
		l.Problems.Add("--", "a hook of KubeVirt runs no command")
	case l.Flags.Changed(flagFork):
		l.Problems.Add("--"+flagFork, "does not wait, and a command is waited for: leave one out")
	case len(c.Portals) == 0 && l.Source(keyISCSI) != "" &&
		strings.Contains(strings.Join(c.command, " "), "{"+varISCSI):
		l.Problems.Add("{"+varISCSI+"}", "there is no iSCSI: %s has turned it off",
			l.Source(keyISCSI))
	}
	if l.Source(keyReadyFile) == "" {
		c.ReadyFile = ""
	}
	if !c.metricsChosen {
		c.Pages = nil
	}
	if l.Source(keyLogFormat) == "" {
		c.log.Format = console.Text
	}
	if l.Source(keyWorkDir) == "" {
		l.useTemporary(c)
	}
	if l.Source(keyListen) == "" && l.Source(keyPort) == "" && len(c.Portals) > 0 {
		c.Portals = []options.Address{{Addr: loopback4()}} // the kernel finds a port
	}
}

// command runs during the life of a daemon.
type command struct {
	words []string

	mu       sync.Mutex
	started  *exec.Cmd // guarded by mu; nil: not yet
	over     bool      // guarded by mu; it has ended, or must not be started any more
	deferred os.Signal // guarded by mu; the last one from the terminal, which both have got
	err      error     // its result; set before ended is closed, or by stop if it was not started
	ended    chan struct{}
}

// find looks for the program before anything is served.
func (c *command) find() error {
	_, err := exec.LookPath(c.words[0])
	return c.cannot(err)
}

// cannot explains why the command cannot be run.
func (c *command) cannot(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		return &commandError{exitNotFound, fmt.Sprintf("there is no command %q", c.words[0])}
	}
	return &commandError{exitNotRun, fmt.Sprintf("the command cannot be run: %v", err)}
}

// run runs the command to its end. It does nothing if stop was called before.
func (c *command) run(a *app, now *status.Status, user string) {
	vars := variablesOf(now, user)
	var words, env []string
	for name, value := range vars {
		words = append(words, "{"+name+"}", value)
		env = append(env, name+"="+value)
	}
	put := strings.NewReplacer(words...)
	args := make([]string, len(c.words))
	for i, word := range c.words {
		args[i] = put.Replace(word)
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = a.stdin, a.stdout, a.stderr
	cmd.Env = append(os.Environ(), env...)
	defer close(c.ended)
	// Register before the command runs: it may send a signal at once, which would end this process.
	others := make(chan os.Signal, 4)
	signal.Notify(others, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2)
	defer close(others)
	defer signal.Stop(others)
	c.mu.Lock()
	if c.over {
		c.mu.Unlock()
		return
	}
	err := cmd.Start()
	c.started, c.over = cmd, err != nil
	c.mu.Unlock()
	if err != nil {
		c.err = c.cannot(err)
		return
	}
	go func() {
		for s := range others {
			c.pass(s)
		}
	}()
	err = cmd.Wait()
	c.mu.Lock()
	c.over = true
	c.mu.Unlock()
	c.err = endOf(cmd, err)
}

// errNotRun says that the daemon was stopped before its disks could be used.
var errNotRun = &failure{errors.New("interrupted before the command was run")}

// endOf makes the exit status of a command that of this process.
func endOf(cmd *exec.Cmd, err error) error {
	state := cmd.ProcessState
	switch {
	case err == nil:
		return nil
	case state == nil:
		return &failure{err}
	}
	if how, ok := state.Sys().(syscall.WaitStatus); ok && how.Signaled() {
		return &commandError{exitSignal + int(how.Signal()),
			fmt.Sprintf("the command was ended by a signal: %v", how.Signal())}
	}
	if state.ExitCode() > 0 {
		return &commandError{status: state.ExitCode()}
	}
	return &failure{err} // its output could not be copied
}

// pass gives a signal to the command, and reports whether the command runs. Otherwise the signal is
// meant for this process.
func (c *command) pass(s os.Signal) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.started == nil || c.over {
		return false
	}
	// Keys at a terminal send a signal to both processes. Pass it on only if it comes again.
	if (s == unix.SIGINT || s == unix.SIGQUIT) && s != c.deferred && inForeground() {
		c.deferred = s
		return true
	}
	_ = c.started.Process.Signal(s) // it may have ended
	return true
}

// stop ends the command, because the disks are not served any more, and waits for its end.
func (c *command) stop() {
	c.mu.Lock()
	running := c.started != nil
	if running && !c.over {
		_ = c.started.Process.Signal(unix.SIGTERM)
	}
	c.over = c.over || !running
	c.mu.Unlock()
	if running {
		<-c.ended
	} else {
		c.err = errNotRun
	}
}

// inForeground reports whether this process gets the signals of the keys at its terminal.
func inForeground() bool {
	tty, err := os.OpenFile("/dev/tty", os.O_RDONLY|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer tty.Close()
	group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// variablesOf are the variables of a command. user is the name for CHAP, or "".
func variablesOf(now *status.Status, user string) map[string]string {
	vars := map[string]string{}
	for i, l := range now.LUNs {
		end := ""
		if i > 0 {
			end = fmt.Sprint(i + 1)
		}
		if len(now.Portals) > 0 {
			vars[varISCSI+end] = daemon.ISCSIURI(now, user, l.LUN)
		}
		if len(now.NBDPortals) > 0 {
			vars[varNBD+end] = daemon.NBDURI(now, &l)
			vars[varURI+end] = vars[varNBD+end]
		}
	}
	return vars
}
