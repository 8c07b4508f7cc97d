// Command kubevirt-disk serves every disk image of a directory as an iSCSI LUN, protected by CHAP.
//
// Exit status: 0 done, 1 failed while running, 2 wrong usage or configuration.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"
)

// Set by the linker: -X main.version=v1.2.3 -X main.commit=0123abcd.
var (
	version = ""
	commit  = ""
)

// The kernel gives a signal to the first thread of the process, even while that thread hangs in a
// call of storage, and then wakes no other thread for it: a SIGTERM would not be noticed. So the
// first thread only waits, and all work is done by others.
func init() { runtime.LockOSThread() }

func main() {
	a := &app{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, exit: os.Exit,
		sameRequest: 100 * time.Millisecond}
	status := make(chan int)
	go func() { status <- a.run(os.Args) }()
	os.Exit(<-status)
}

// Callers of the original wrapper use these names: the pod's command is /entry-point.sh PORT, and
// its readiness probe runs cat /tmp/healthy. An image from scratch has neither a shell nor cat, so
// the binary acts as the program whose name it has.
const (
	nameEntryPoint = "entry-point.sh"
	nameCat        = "cat"
)

// entryPoint serves on the port in its argument, or on the port from the environment. Callers of
// the original file wrapper give no port, but the path of the file.
func (a *app) entryPoint(args []string) int {
	a.asWrapper = true
	// Desktops set USERNAME, too. Here it shows that the password was forgotten.
	if os.Getenv("USERNAME") != "" && os.Getenv("PASSWORD") == "" &&
		os.Getenv("PASSWORD_BASE64") == "" {
		return a.report(errors.New("USERNAME is set but PASSWORD is not; a credential needs both"))
	}
	switch len(args) {
	case 0:
		if os.Getenv(envCopyPath) != "" {
			return a.execute([]string{"provide"})
		}
		return a.execute([]string{"serve"})
	case 1:
		return a.execute([]string{"serve", "--" + keyPort + "=" + args[0]})
	}
	return a.report(fmt.Errorf("%s takes one argument, the port", nameEntryPoint))
}

// cat prints files. A missing file is status 1, as the readiness probe expects.
func (a *app) cat(args []string) int {
	if len(args) == 0 {
		return a.report(fmt.Errorf("%s: want the name of a file", nameCat))
	}
	status := exitDone
	for _, path := range args {
		if err := a.catFile(path); err != nil {
			fmt.Fprintf(a.stderr, "%s: %v\n", nameCat, err)
			status = exitFailed
		}
	}
	return status
}

func (a *app) catFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(a.stdout, f)
	return err
}
