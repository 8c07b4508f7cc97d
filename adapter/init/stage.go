package guestinit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/adapter/machine"
)

// stageName is the name by which the init starts itself as the stage: the process that makes the
// disk its root and becomes the entry point. It has a mount namespace of its own.
const stageName = "kubevirt-disk-stage"

// The further open files of the stage: the description of the process, and a pipe for an error.
const (
	stageSpec   = 3
	stageErrors = 4
)

// diskDir is where the init mounts the disk.
const diskDir = "/disk"

// stage runs in the child. It only returns if the entry point cannot be executed, and then returns
// the exit status of the machine.
func stage() int {
	syscall.CloseOnExec(stageSpec)
	syscall.CloseOnExec(stageErrors)
	errorsTo := os.NewFile(stageErrors, "errors")
	err := becomeEntryPoint(os.NewFile(stageSpec, "spec"))
	status := machine.StatusMachine
	if failed, ok := errors.AsType[*startError](err); ok {
		status = failed.status
	}
	fmt.Fprintf(errorsTo, "%d %v", status, err)
	return status
}

func becomeEntryPoint(spec io.Reader) error {
	var p process
	if err := json.NewDecoder(spec).Decode(&p); err != nil {
		return err
	}
	files, err := openNetworkFiles()
	if err != nil {
		return err
	}
	if err := enterRoot(); err != nil {
		return err
	}
	if err := mountAll(p.ReadOnly); err != nil {
		return err
	}
	makeDirectories(p)
	if err := bindNetworkFiles(files, os.Stderr); err != nil {
		return err
	}
	return p.execute()
}

// enterRoot makes the disk the root of this process. pivot_root does not work in an initramfs.
func enterRoot() error {
	if err := os.Chdir(diskDir); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("the disk cannot become the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("the disk cannot become the root: %w", err)
	}
	return os.Chdir("/")
}

// The limits of open files of a process, like those of systemd and container runtimes. Programs
// that need more raise their own limit.
var openFiles = unix.Rlimit{Cur: 1024, Max: 524288}

// execute becomes the user and executes the entry point.
func (p process) execute() error {
	id, err := findUser(p.User, readUserFile("/etc/passwd"), readUserFile("/etc/group"))
	if err != nil {
		return &startError{machine.StatusExec, err}
	}
	p.Env = mergeEnv([]string{"HOME=" + id.home}, p.Env)
	for fd := range 3 {
		// Let the user open /dev/stderr. Everybody can open /dev/null already.
		if info := new(unix.Stat_t); unix.Fstat(fd, info) == nil && info.Rdev != nullDevice {
			_ = unix.Fchown(fd, id.uid, int(info.Gid)) // not important for a terminal
		}
	}
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("0"), 0)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &openFiles); err != nil {
		return fmt.Errorf("limit of open files: %w", err)
	}
	if !p.ReadOnly {
		_ = os.MkdirAll(p.Dir, 0o755) // Chdir reports the error
	}
	syscall.Umask(0o022)
	entered := os.Chdir(p.Dir) // before the user changes: only root may have access
	if err := id.become(); err != nil {
		return err
	}
	if entered != nil {
		entered = os.Chdir(p.Dir)
	}
	if entered != nil {
		return &startError{machine.StatusExec,
			fmt.Errorf("the working directory cannot be entered: %w", entered)}
	}
	file, err := findProgram(p.Args[0], getEnv(p.Env, "PATH"))
	if err != nil {
		return err
	}
	return explainExec(file, syscall.Exec(file, p.Args, p.Env))
}

// nullDevice is /dev/null.
var nullDevice = unix.Mkdev(1, 3)

func (id identity) become() error {
	if err := syscall.Setgroups(id.groups); err != nil {
		return fmt.Errorf("supplementary groups: %w", err)
	}
	if err := syscall.Setgid(id.gid); err != nil {
		return fmt.Errorf("group %d: %w", id.gid, err)
	}
	if err := syscall.Setuid(id.uid); err != nil {
		return fmt.Errorf("user %d: %w", id.uid, err)
	}
	return nil
}

// systemdPowerOff is SIGRTMIN+4 (systemd(1)).
const systemdPowerOff = machine.SignalRTMin + 4

// recogniseInit finds out whether the program has to be process 1. It follows links and looks at
// their last names. systemd is powered off by another signal than SIGTERM.
func (p *process) recogniseInit(root string) {
	program := p.Args[0]
	for range maxLinks {
		p.Init = p.Init || slices.Contains(initSystems, filepath.Base(program))
		to, err := os.Readlink(filepath.Join(root, program))
		if err != nil || !filepath.IsAbs(program) {
			break
		}
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(program), to)
		}
		program = to
	}
	if p.Init && !p.stopGiven && filepath.Base(program) == "systemd" {
		p.StopSignal = systemdPowerOff
	}
}

// start runs the stage with these standard streams. It returns the process when the entry point has
// been executed, or a *startError.
func (p process) start(stdin, stdout *os.File) (pid int, err error) {
	specRead, specWrite, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer specWrite.Close()
	errorsRead, errorsWrite, err := os.Pipe()
	if err != nil {
		return 0, errors.Join(err, specRead.Close())
	}
	defer errorsRead.Close()
	attr := &syscall.ProcAttr{
		Files: []uintptr{stdin.Fd(), stdout.Fd(), stdout.Fd(), specRead.Fd(), errorsWrite.Fd()},
		Sys: &syscall.SysProcAttr{Setsid: true, Setctty: p.TTY, Ctty: 0,
			Cloneflags: unix.CLONE_NEWNS},
	}
	if p.Init {
		attr.Sys.Cloneflags |= unix.CLONE_NEWPID
	}
	pid, err = syscall.ForkExec("/proc/self/exe", []string{stageName}, attr)
	specRead.Close()
	errorsWrite.Close()
	if err != nil {
		return 0, fmt.Errorf("the entry point's process cannot be made: %w", err)
	}
	if err := json.NewEncoder(specWrite).Encode(p); err != nil {
		return pid, err
	}
	specWrite.Close()
	// The pipe ends without text when the entry point is executed.
	text, err := io.ReadAll(errorsRead)
	if err != nil || len(text) == 0 {
		return pid, err
	}
	return pid, parseStageError(string(text))
}

func parseStageError(text string) error {
	for i, c := range text {
		if c == ' ' {
			if status, err := strconv.Atoi(text[:i]); err == nil {
				return &startError{status, errors.New(text[i+1:])}
			}
			break
		}
	}
	return &startError{machine.StatusMachine, errors.New(text)}
}
