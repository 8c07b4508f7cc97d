package guestinit

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// loadModules loads all modules of the initramfs, in the order in which adapter/initrd has written
// their names. A module that finds no device of its own does nothing.
func loadModules(dir string, insert func(file string) error) error {
	names, err := os.ReadFile(filepath.Join(dir, "order"))
	for _, name := range strings.Fields(string(names)) {
		if failed := insert(filepath.Join(dir, name+".ko")); failed != nil {
			err = errors.Join(err, fmt.Errorf("kernel module %s: %w", name, failed))
		}
	}
	return err
}

func insertModule(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	err = unix.FinitModule(int(f.Fd()), "", 0)
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EEXIST) {
		return nil // it is for another processor, or is there already
	}
	return err
}
