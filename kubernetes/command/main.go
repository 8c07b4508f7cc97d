// Command kubevirt-disk-controller keeps the disks of virtual machines in Kubernetes: it makes the
// claims and credentials of VMIdentity objects, and lets pods start when their disk is ready. See
// package kubernetes/controller.
//
// Exit status: 0 done, 1 failed while running, 2 wrong usage or configuration.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// Set by the linker: -X main.version=v1.2.3 -X main.commit=0123abcd.
var (
	version = "dev"
	commit  = "unknown"
)

// The documented exit statuses.
const (
	exitDone   = 0
	exitFailed = 1
	exitUsage  = 2
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// failure is an error while running. Every other error that reaches run is about usage or
// configuration.
type failure struct{ err error }

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// run executes a command line and returns the exit status.
func run(args []string, stdout, stderr io.Writer) int {
	root := command(stdout, stderr)
	root.SetArgs(args)
	err := root.Execute()
	if err == nil {
		return exitDone
	}
	fmt.Fprintf(stderr, "kubevirt-disk-controller: %v\n", err)
	if errors.As(err, new(*failure)) {
		return exitFailed
	}
	return exitUsage
}
