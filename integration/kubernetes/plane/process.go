package plane

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
)

// processes are the children of a plane. They end with the test binary, however that ends.
type processes struct {
	mu  sync.Mutex
	all []*process // guarded by mu
}

type process struct {
	name string
	log  string
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
}

// run starts a binary of the plane, which logs to NAME.log.
func (p *Plane) run(name string, args ...string) error {
	log, err := os.Create(p.path(name + ".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(filepath.Join(p.Bin, name), args...)
	cmd.Dir = p.Dir
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	one := &process{name: name, log: log.Name(), cmd: cmd, done: make(chan struct{})}
	go func() {
		defer close(one.done)
		_ = cmd.Wait() // how it ended is in its log
	}()
	p.processes.mu.Lock()
	defer p.processes.mu.Unlock()
	p.processes.all = append(p.processes.all, one)
	return nil
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
		_ = one.cmd.Process.Kill() // it may have ended
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

// freePorts returns different ports of loopback where nobody listens.
func freePorts(n int) (ports []int, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, l.Close()) }()
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}
