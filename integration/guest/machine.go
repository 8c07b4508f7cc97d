package guest

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// MemorySize is a size for QEMU of some MiB and 64 KiB. If an emulated guest has a multiple of 64
// pages, QEMU before 9.0 loses writes to its memory while it migrates (commit "physmem: Fix
// migration dirty bitmap coherency with TCG memory access"). Of 164 migrations of a guest that
// writes to a local file, three ended in a kernel that had lost parts of its lists.
func MemorySize(mib int) string { return fmt.Sprintf("%dK", mib<<10+64) }

// MachineOptions describe a machine.
type MachineOptions struct {
	// Guest is the content of the guest. Its Init runs once, before the first command, in the shell
	// that waits for commands.
	Guest Options
	// Dir receives the kernel, the initramfs and the console's log. It must exist.
	Dir string
	// Memory is the guest's memory in MiB; 0 means 512. It also holds the initramfs.
	Memory int
	// QEMU is the program; "" means qemu-system-x86_64.
	QEMU string
	// Args are additional arguments for QEMU.
	Args []string
	// In starts QEMU: a command that runs its arguments in place of itself, such as nsenter. Empty:
	// nothing does.
	In []string
	// Incoming is where another machine migrates to this one, as QEMU's -incoming has it. Start
	// does not wait then. Commands run when the other machine is here.
	Incoming string
	// FromDisk boots from a disk that BootDisk has made and that Args name. Guest is ignored then.
	FromDisk bool
}

// Machine is a running guest that executes commands. Its network card is in QEMU's user network and
// is not configured: the host's loopback is 10.0.2.2 there, and the guest may use 10.0.2.15. Only
// Close and Console may be called while another call runs.
type Machine struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	pipe    *os.File
	out     *bufio.Reader // of pipe
	errors  *bytes.Buffer // output of QEMU; readable after done is closed
	console string
	count   int
	done    chan struct{} // closed when QEMU has ended
}

// shellPort is the name of the virtio port that carries commands to the guest and output back. It
// keeps every byte, unlike a serial line with its line discipline.
const shellPort = "shell"

// shellModules are the modules for the machine's own devices.
var shellModules = []string{"virtio_pci", "virtio_console", "virtio_net"}

// shell reads scripts and runs them. A line with an end marker ends each script. A script's
// variables are gone when it ends.
const shell = `
for port in /sys/class/virtio-ports/*; do
	if [ "$(cat "$port/name")" = ` + shellPort + ` ]; then
		exec 3<>"/dev/${port##*/}"
	fi
done
echo "guest-ready" >&3
: >/tmp/.command
while IFS= read -r line <&3; do
	case $line in
	guest-run-*)
		sh /tmp/.command </dev/null >&3 2>&3
		printf '\n%s %d\n' "$line" $? >&3
		: >/tmp/.command
		;;
	*)
		printf '%s\n' "$line" >>/tmp/.command
		;;
	esac
done
`

// kernelArgs is the kernel's command line. On a busy machine, an emulated timer may be too late for
// the kernel's check of it, which then panics.
const kernelArgs = "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check"

// withShell adds the shell that waits for commands.
func withShell(opt Options) Options {
	opt.Init += shell
	opt.Modules = append(slices.Clone(shellModules), opt.Modules...)
	return opt
}

// Start builds a guest, boots it in QEMU under software emulation, and returns when the guest waits
// for commands. ctx limits the boot. The error is a *FetchError if a package cannot be fetched.
func Start(ctx context.Context, opt MachineOptions) (*Machine, error) {
	var boot []string
	if !opt.FromDisk {
		kernel, initrd, err := Build(opt.Dir, withShell(opt.Guest))
		if err != nil {
			return nil, err
		}
		boot = []string{"-kernel", kernel, "-initrd", initrd, "-append", kernelArgs}
	}
	if opt.Memory == 0 {
		opt.Memory = 512
	}
	console := filepath.Join(opt.Dir, "console")
	command := append(slices.Clone(opt.In), cmp.Or(opt.QEMU, "qemu-system-x86_64"),
		"-accel", "tcg", "-machine", "q35", "-cpu", "max", "-m", MemorySize(opt.Memory),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-chardev", "file,id=console,path="+console, "-serial", "chardev:console",
		"-chardev", "stdio,id=shell,signal=off", "-device", "virtio-serial-pci", "-device",
		"virtserialport,chardev=shell,name="+shellPort,
		"-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile=")
	command = append(command, append(boot, opt.Args...)...)
	if opt.Incoming != "" {
		command = append(command, "-incoming", opt.Incoming)
	}
	cmd := exec.Command(command[0], command[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	m := &Machine{cmd: cmd, errors: new(bytes.Buffer), console: console, done: make(chan struct{})}
	cmd.Stderr = m.errors
	var err error
	if m.in, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	// Do not use StdoutPipe: nobody may read it once Wait has been called.
	var theirs *os.File
	if m.pipe, theirs, err = os.Pipe(); err != nil {
		return nil, err
	}
	cmd.Stdout = theirs
	m.out = bufio.NewReader(m.pipe)
	err = cmd.Start()
	theirs.Close()
	if err != nil {
		m.pipe.Close()
		return nil, fmt.Errorf("guest: %w", err)
	}
	go func() {
		_ = cmd.Wait()
		close(m.done)
	}()
	if opt.Incoming != "" {
		return m, nil
	}
	defer context.AfterFunc(ctx, m.kill)()
	for {
		line, err := m.out.ReadString('\n')
		if err != nil {
			return nil, m.failed(ctx, "boot", err)
		}
		if line == "guest-ready\n" {
			return m, nil
		}
	}
}

// Result is what a script printed and how it ended.
type Result struct {
	Output string // standard output and standard error together
	Status int
}

// Run executes a script with /bin/sh, which is dash, in a new shell. If line is not nil, it gets
// each line as it is printed, without its end. An error is about the machine, never about the
// script's status. After an error, or when ctx is done, the machine is gone.
func (m *Machine) Run(ctx context.Context, script string, line func(string)) (Result, error) {
	defer context.AfterFunc(ctx, m.kill)()
	m.count++
	end := fmt.Sprintf("guest-run-%d", m.count)
	if _, err := io.WriteString(m.in, script+"\n"+end+"\n"); err != nil {
		return Result{}, m.failed(ctx, "command", err)
	}
	var output strings.Builder
	// an empty line that is not reported yet, because the last one belongs to the end marker
	blank := false
	for {
		text, err := m.out.ReadString('\n')
		if err != nil {
			return Result{Output: output.String()}, m.failed(ctx, "command", err)
		}
		if rest, ok := strings.CutPrefix(text, end+" "); ok {
			r := Result{Output: strings.TrimSuffix(output.String(), "\n")}
			if _, err := fmt.Sscan(rest, &r.Status); err != nil {
				return r, fmt.Errorf("guest: the end of a command has no status: %q", text)
			}
			return r, nil
		}
		output.WriteString(text)
		if line == nil {
			continue
		}
		if blank {
			line("")
		}
		if blank = text == "\n"; !blank {
			line(strings.TrimSuffix(text, "\n"))
		}
	}
}

// failed explains why the machine no longer answers.
func (m *Machine) failed(ctx context.Context, doing string, err error) error {
	m.Close()
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	return fmt.Errorf("guest: %s: %w; QEMU printed %q, the console ends:\n%s", doing, err, m.errors,
		lastLines(m.Console(), 20))
}

func lastLines(text string, n int) string {
	lines := strings.SplitAfter(text, "\n")
	return strings.Join(lines[max(0, len(lines)-n-1):], "")
}

// Console returns everything that the guest's console has shown so far: messages of the kernel and
// of Init.
func (m *Machine) Console() string {
	text, err := os.ReadFile(m.console)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err.Error()
	}
	return strings.ReplaceAll(string(text), "\r\n", "\n")
}

func (m *Machine) kill() { _ = m.cmd.Process.Kill() }

// Close switches the machine off, like pulling its plug. It may be called again.
func (m *Machine) Close() {
	m.kill()
	<-m.done
	m.in.Close()
	m.pipe.Close()
}
