// Package peers starts iSCSI targets as processes: ours, and the ones that we compare it with (tgtd
// and gotgt). Each has its own loopback port and keeps its state in a directory that the caller
// chooses. The package is for Linux only.
package peers

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	startTimeout = 4 * time.Minute
	stopTimeout  = 4 * time.Minute
	pollInterval = time.Millisecond
)

// Process is a started server. Its methods may be called from any goroutine.
type Process struct {
	cmd    *exec.Cmd
	output *lockedBuffer
	done   chan struct{} // closed when the process has ended
	err    error         // what Wait returned; readable once done is closed
}

// startProcess starts a command and collects its output. The process ends with this one.
func startProcess(cmd *exec.Cmd) (*Process, error) {
	p := &Process{cmd: cmd, output: new(lockedBuffer), done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = p.output, p.output
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = new(syscall.SysProcAttr)
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// PID is the process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Output returns what the process has written so far, standard output and standard error together.
func (p *Process) Output() string { return p.output.String() }

// Running reports whether the process is running.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Signal sends a signal. It is no error if the process has ended.
func (p *Process) Signal(s os.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// Wait waits for the end and returns the exit status, or -1 if a signal ended the process.
func (p *Process) Wait(timeout time.Duration) (int, error) {
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode(), nil
	case <-time.After(timeout):
		return 0, fmt.Errorf("%s (process %d) has not ended after %v", p.cmd.Path, p.PID(), timeout)
	}
}

// Kill ends the process at once and waits for it.
func (p *Process) Kill() error {
	if err := p.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	_, err := p.Wait(stopTimeout)
	return err
}

// stop ends the process with SIGTERM, or with SIGKILL if that does not help.
func (p *Process) stop() error {
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	if _, err := p.Wait(stopTimeout / 24); err == nil {
		return nil
	}
	return p.Kill()
}

// until polls a condition while the process runs.
func (p *Process) until(what string, condition func() bool) error {
	deadline := time.Now().Add(startTimeout)
	for !condition() {
		if !p.Running() {
			return &ExitError{Path: p.cmd.Path, Status: p.cmd.ProcessState.ExitCode(),
				Output: p.Output()}
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: not %s after %v; it printed:\n%s", p.cmd.Path, what,
				startTimeout, p.Output())
		}
		time.Sleep(pollInterval)
	}
	return nil
}

// ExitError says that a server ended before it was ready.
type ExitError struct {
	Path   string
	Status int // exit status; -1: a signal ended it
	Output string
}

func (e *ExitError) Error() string {
	return fmt.Sprintf("%s ended with status %d; it printed:\n%s", e.Path, e.Status, e.Output)
}

// lockedBuffer collects output that others may read meanwhile.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer // guarded by mu
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// FreePort returns a TCP port of 127.0.0.1, for servers that cannot pick one themselves or that are
// started again on the same port. While this process lives, the kernel gives the port to nobody who
// asks for any port, because a socket is bound to it. That socket does not listen, so a server that
// asks for this very port can listen beside it, with SO_REUSEADDR as usual. Until then, connections
// are refused.
func FreePort() (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	address := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}
	err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
		unix.Bind(fd, address))
	bound, nameErr := unix.Getsockname(fd)
	if err := errors.Join(err, nameErr); err != nil {
		return 0, errors.Join(err, unix.Close(fd))
	}
	return bound.(*unix.SockaddrInet4).Port, nil
}

// accepting reports whether something listens on the port of 127.0.0.1.
func accepting(port int) bool {
	conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return false
	}
	conn.Close()
	return true
}
