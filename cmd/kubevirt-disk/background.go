package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/flock"
)

const (
	flagFork    = "fork"
	flagPIDFile = "pid-file"

	// envForked tells a daemon in the background by which descriptor it says that it is ready.
	envForked = "KUBEVIRT_DISK_FORKED"
)

// background is how a daemon goes on behind the command that has started it, as with nbdkit and
// qemu-nbd: --fork and --pid-file.
type background struct {
	fork    bool
	pidFile string
	ready   *os.File // tells the command that waits; nil: none does
	made    *os.File // the PID file, locked for as long as it is this daemon's; nil: none yet
}

// flags adds the flags to a command.
func (b *background) flags(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&b.fork, flagFork, false, "go on in the background, and return when the "+
		"disks can be used")
	cmd.Flags().StringVar(&b.pidFile, flagPIDFile, "", "`file` that has the process number while "+
		"the disks can be used")
}

// begin reports whether this process is to start the daemon, and is not the daemon itself.
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

// logsToFile reports whether standard error is a file, which goes on in the background.
func logsToFile() bool {
	var st unix.Stat_t
	return unix.Fstat(2, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG
}

// silent reports whether the log ends when the disks can be used.
func (b *background) silent() bool { return b.ready != nil && !logsToFile() }

// usable says that the disks can be used, and lets go of the terminal.
func (b *background) usable() error {
	if err := b.writePID(); err != nil {
		return fmt.Errorf("--%s: %w", flagPIDFile, err)
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
			continue // nobody waits for its end
		}
		if err := unix.Dup3(int(null.Fd()), fd, 0); err != nil {
			return err
		}
	}
	_, _ = b.ready.Write([]byte{1}) // who waited may be gone
	return b.ready.Close()
}

// writePID makes the PID file, complete from the beginning. It replaces only what may be one: the
// name may be a mistake, such as the path of an image.
func (b *background) writePID() error {
	if b.pidFile == "" {
		return nil
	}
	made := fmt.Sprintf("%s.%d", b.pidFile, os.Getpid())
	f, err := os.OpenFile(made, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_ = flock.Lock(f, unix.LOCK_EX|unix.LOCK_NB) // it works without, too
	if _, err = fmt.Fprintln(f, os.Getpid()); err == nil {
		err = durable.RenameNewNamed(made, b.pidFile)
	}
	if errors.Is(err, fs.ErrExist) { // perhaps a killed daemon's
		if err = isPIDFile(b.pidFile); err == nil {
			err = os.Rename(made, b.pidFile)
		}
	}
	if err != nil {
		return errors.Join(err, os.Remove(made), f.Close())
	}
	b.made = f
	return nil
}

// check checks whether the PID file can be made.
func (b *background) check() error {
	if b.pidFile == "" {
		return nil
	}
	err := isPIDFile(b.pidFile)
	if err == nil {
		err = unix.Access(filepath.Dir(b.pidFile), unix.W_OK|unix.X_OK)
	}
	if err != nil {
		return fmt.Errorf("--%s=%s: %w", flagPIDFile, b.pidFile, err)
	}
	return nil
}

// isPIDFile checks that nothing but a PID file is replaced.
func isPIDFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	var text []byte
	if info.Mode().IsRegular() { // /dev/null reads as an empty file
		if errors.Is(flock.Lock(f, unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK) {
			return fmt.Errorf("%q is the file of another running daemon: name another one", path)
		}
		if text, err = io.ReadAll(io.LimitReader(f, 32)); err != nil {
			return err
		}
	}
	if _, err := strconv.Atoi(string(bytes.TrimSpace(text))); err != nil &&
		(len(text) > 0 || !info.Mode().IsRegular()) {
		return fmt.Errorf("%q is there, and is not a file with a process number: name another one",
			path)
	}
	return nil
}

// end removes the PID file, unless it is another daemon's by now.
func (b *background) end() error {
	if b.made == nil {
		return nil
	}
	defer b.made.Close()
	if there, err := flock.HasName(b.made, b.pidFile); err != nil || !there {
		return nil
	}
	return os.Remove(b.pidFile)
}
