package main

import (
	"fmt"
	"io"
	"os"
)

// The names by which callers of the original wrapper start what is in the image: the pod's command
// is /entry-point.sh PORT, and its readiness probe runs cat /tmp/healthy. An image from scratch has
// neither a shell nor cat, so the binary answers by the name it is called.
const (
	nameEntryPoint = "entry-point.sh"
	nameCat        = "cat"
)

// entryPoint serves on the port that is its one argument; without it, as the environment says.
func (a *app) entryPoint(args []string) int {
	a.asWrapper = true
	switch len(args) {
	case 0:
		return a.execute([]string{"serve"})
	case 1:
		return a.execute([]string{"serve", "--" + keyPort + "=" + args[0]})
	}
	return a.report(fmt.Errorf("%s takes one argument, the port", nameEntryPoint))
}

// cat prints files. A file that is absent is status 1, which is what a probe asks for.
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
