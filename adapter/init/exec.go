package guestinit

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/adapter/machine"
)

// startError says why an entry point could not be started. It has the exit status for this.
type startError struct {
	status int
	err    error
}

func (e *startError) Error() string { return e.err.Error() }

// findProgram returns the path of a program for its user: a name with a slash is relative to the
// working directory, another one is looked for in PATH.
func findProgram(name, searchPath string) (string, error) {
	if name == "" { // it would match each directory of PATH
		return "", &startError{machine.StatusNotFound, errors.New("the entry point is empty")}
	}
	if strings.Contains(name, "/") {
		return name, executable(name)
	}
	var denied error
	for dir := range strings.SplitSeq(searchPath, ":") {
		dir = cmp.Or(dir, ".")
		file := path.Join(dir, name)
		if dir == "." {
			file = "./" + name
		}
		err := executable(file)
		if err == nil {
			return file, nil
		}
		if denied == nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
			denied = err
		}
	}
	if denied != nil {
		return "", denied
	}
	return "", &startError{machine.StatusNotFound,
		fmt.Errorf("%q is in no directory of PATH (%s)", name, searchPath)}
}

// executable returns the reason why this process cannot execute a file.
func executable(file string) error {
	info, err := os.Stat(file)
	switch {
	case err != nil:
		return explainStart(file, err)
	case info.IsDir():
		return explainStart(file, unix.EISDIR)
	case info.Mode()&0o111 == 0:
		return explainStart(file, unix.EACCES)
	}
	if err := unix.Access(file, unix.X_OK); err != nil {
		return explainStart(file, err)
	}
	return nil
}

// explainStart turns an error of the kernel into the exit status and the message of a container
// runtime.
func explainStart(file string, err error) error {
	status := machine.StatusExec
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		status = machine.StatusNotFound
	}
	if inner, ok := errors.AsType[*fs.PathError](err); ok {
		err = inner.Err
	}
	return &startError{status, fmt.Errorf("%q cannot be executed: %w", file, err)}
}

func (e *startError) Unwrap() error { return e.err }

// explainExec is explainStart for a file that exists: ENOENT is about its interpreter.
func explainExec(file string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return &startError{machine.StatusNotFound, fmt.Errorf("%q cannot be executed: the "+
			"interpreter or loader that it names is not in the image", file)}
	case errors.Is(err, unix.ENOEXEC):
		return &startError{machine.StatusExec, fmt.Errorf("%q cannot be executed: it is neither "+
			"a program for this machine nor a script with #! at its beginning", file)}
	}
	return explainStart(file, err)
}

// initSystems are programs that only work as process 1.
var initSystems = []string{"init", "systemd", "s6-svscan", "runit", "runit-init", "openrc-init",
	"tini", "tini-static", "dumb-init", "catatonit", "docker-init"}
