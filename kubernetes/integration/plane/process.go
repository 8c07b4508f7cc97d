package plane

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/peers"
)

// processes are the children of a plane. They end with the test binary, however that ends.
type processes struct {
	mu  sync.Mutex
	all []*process // guarded by mu
}

type process struct {
	name string
	path string
	args []string
	dir  string
	log  string
	done chan struct{} // closed when it has ended

	mu        sync.Mutex
	cmd       *exec.Cmd  // guarded by mu
	killed    bool       // guarded by mu
	restarted chan error // guarded by mu; gets the result of a requested restart
}

// run starts a binary of the plane, which logs to NAME.log.
func (p *Plane) run(name string, args ...string) error {
	return p.begin(name, args, func(one *process) {
		for one.wait() {
			restarted := one.asked()
			if restarted == nil {
				return
			}
			err := one.start()
			restarted <- err
			if err != nil {
				return
			}
		}
	})
}

// restart kills a binary that run has started, and starts it again.
func (p *Plane) restart(name string) error {
	p.processes.mu.Lock()
	i := slices.IndexFunc(p.processes.all, func(o *process) bool { return o.name == name })
	p.processes.mu.Unlock()
	one := p.processes.all[i]
	restarted := make(chan error, 1)
	one.mu.Lock()
	one.restarted = restarted
	_ = one.cmd.Process.Kill() // it may have ended
	one.mu.Unlock()
	select {
	case err := <-restarted:
		return err
	case <-one.done:
		return fmt.Errorf("%s has ended", name)
	}
}

// asked returns the channel of a requested restart, once, or nil.
func (o *process) asked() chan error {
	o.mu.Lock()
	defer o.mu.Unlock()
	restarted := o.restarted
	o.restarted = nil
	return restarted
}

// restartAfter is the pause before a binary that has ended is started again.
const restartAfter = 100 * time.Millisecond

// runAgain is run for a binary that is started again whenever it ends, as Kubernetes would.
func (p *Plane) runAgain(name string, args ...string) error {
	return p.begin(name, args, func(one *process) {
		for one.wait() {
			time.Sleep(restartAfter)
			if one.start() != nil {
				return
			}
		}
	})
}

func (p *Plane) begin(name string, args []string, follow func(*process)) error {
	one := &process{name: name, path: filepath.Join(p.Bin, name), args: args, dir: p.Dir,
		log: p.path(name + ".log"), done: make(chan struct{})}
	if err := one.start(); err != nil {
		return err
	}
	go func() {
		defer close(one.done)
		follow(one)
	}()
	p.processes.mu.Lock()
	defer p.processes.mu.Unlock()
	p.processes.all = append(p.processes.all, one)
	return nil
}

// start starts the process, unless it was killed.
func (o *process) start() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.killed {
		return os.ErrProcessDone
	}
	log, err := os.OpenFile(o.log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(o.path, o.args...)
	cmd.Dir = o.dir
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	o.cmd = cmd
	return nil
}

// wait returns when the process has ended, and reports whether it ended by itself. Its log says
// how.
func (o *process) wait() bool {
	o.mu.Lock()
	cmd := o.cmd
	o.mu.Unlock()
	_ = cmd.Wait()
	o.mu.Lock()
	defer o.mu.Unlock()
	return !o.killed
}

func (o *process) kill() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.killed = true
	_ = o.cmd.Process.Kill() // it may have ended
}

// ended returns the name of a process that has ended, or "".
func (p *processes) ended() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, one := range p.all {
		select {
		case <-one.done:
			return one.name
		default:
		}
	}
	return ""
}

func (p *processes) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, one := range p.all {
		one.kill()
	}
	for _, one := range p.all {
		<-one.done
	}
	p.all = nil
}

// logs returns the last lines of each process.
func (p *processes) logs() string {
	const last = 15
	p.mu.Lock()
	defer p.mu.Unlock()
	var b strings.Builder
	for _, one := range p.all {
		data, err := os.ReadFile(one.log)
		if err != nil {
			data = []byte(err.Error())
		}
		lines := bytes.Split(bytes.TrimSpace(data), []byte("\n"))
		fmt.Fprintf(&b, "%s:\n", one.name)
		for _, line := range lines[max(0, len(lines)-last):] {
			fmt.Fprintf(&b, "    %s\n", line)
		}
	}
	return b.String()
}

// freePorts returns different loopback ports on which nobody listens. Nobody else gets them.
func freePorts(n int) (ports []int, err error) {
	for range n {
		port, err := peers.FreePort()
		if err != nil {
			return nil, err
		}
		ports = append(ports, port)
	}
	return ports, nil
}

// FreeAddress returns a loopback address for a server that cannot choose its port. While this
// process lives, the kernel gives the port to nobody who asks for any port.
func FreeAddress(t testing.TB) string {
	t.Helper()
	ports, err := freePorts(1)
	require.NoError(t, err)
	return fmt.Sprintf("127.0.0.1:%d", ports[0])
}
