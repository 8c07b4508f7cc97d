package main

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/readyfile"
)

const (
	flagFork    = "fork"
	flagPIDFile = "pid-file"

	// envForked tells a daemon in the background on which descriptor it reports that it is ready.
	envForked = "KUBEVIRT_DISK_FORKED"
)

// background is the state of --fork and --pid-file, which nbdkit and qemu-nbd have, too.
type background struct {
	fork  bool
	pid   readyfile.File
	ready *os.File // tells the waiting command; nil: no command waits

	mu    sync.Mutex // held while the PID file is made or removed
	ended bool       // guarded by mu
}

func (b *background) flags(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&b.fork, flagFork, false, "go on in the background, and return when the "+
		"disks can be used")
	b.pid = readyfile.File{PID: true, Name: "--" + flagPIDFile}
	cmd.Flags().StringVar(&b.pid.Path, flagPIDFile, "", "`file` that has the process number while "+
		"the disks can be used")
}

// begin reports whether this process has to start the daemon, and is not the daemon itself.
func (b *background) begin() bool {
	fd, err := strconv.Atoi(os.Getenv(envForked))
	if err != nil {
		return true
	}
	_ = os.Unsetenv(envForked)
	unix.CloseOnExec(fd)
	b.ready = os.NewFile(uintptr(fd), "the command that waits")
	return false
}

// fork starts this program again in a session of its own, and waits until its disks can be used, or
// until it ends. Go cannot fork.
func (a *app) fork() error {
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer read.Close()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdout, cmd.Stderr = a.stdout, a.stderr // until the disks can be used
	cmd.ExtraFiles = []*os.File{write}          // 3
	cmd.Env = append(os.Environ(), envForked+"=3")
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGHUP)
	err = cmd.Start()
	write.Close()
	if err != nil {
		return err
	}
	go func() {
		for s := range signals {
			_ = cmd.Process.Signal(s)
		}
	}()
	if n, _ := read.Read(make([]byte, 1)); n == 1 {
		return nil
	}
	if err := endOf(cmd, cmd.Wait()); err != nil {
		return err
	}
	return errors.New("interrupted before the disks could be used")
}

// logsToFile reports whether standard error is a file. The log goes on there in the background.
func logsToFile() bool {
	var st unix.Stat_t
	return unix.Fstat(2, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG
}

// silent reports whether the log ends when the disks can be used.
func (b *background) silent() bool { return b.ready != nil && !logsToFile() }

// usable reports that the disks can be used, and leaves the terminal.
func (b *background) usable() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended {
		return nil
	}
	if err := b.pid.Write(); err != nil {
		return err
	}
	if b.ready == nil {
		return nil
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	for fd := range 3 {
		if fd == 2 && logsToFile() {
			continue // no reader waits for the end of a file
		}
		if err := unix.Dup3(int(null.Fd()), fd, 0); err != nil {
			return err
		}
	}
	_, _ = b.ready.Write([]byte{1}) // the waiting command may have ended
	return b.ready.Close()
}

// end removes the PID file. When a daemon is stopped just as its disks become usable, another
// goroutine may still be making the file.
func (b *background) end() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ended = true
	return b.pid.Remove()
}
