package disk

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
)

// unitInfix parts the name of the disk's file from the serial number, in the name of the directory where a logical unit keeps
// things.
const unitInfix = ".unit-"

// UnitDir is a directory for what belongs to the content of this disk, and goes when that is replaced: saved mode pages, or
// what an interrupted write has to put back. It lies beside the disk, and need not exist.
func (i *Instance) UnitDir() string { return i.dir.disk() + unitInfix + escapeName(i.Identity.Serial) }

// Durable tells whether a Flush reaches storage, so that what goes with the disk has to as well.
func (i *Instance) Durable() bool {
	switch d := i.Disk.(type) {
	case *File:
		return d.opt.Durable
	case *overlay:
		f, ok := d.file.(*File)
		return !ok || f.opt.Durable
	}
	return true
}

// clearUnits removes what units have kept of a disk that is about to be replaced.
func (d *diskDir) clearUnits() error {
	entries, err := os.ReadDir(d.path)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), d.diskFile+unitInfix) {
			err = errors.Join(err, os.RemoveAll(filepath.Join(d.path, e.Name())))
		}
	}
	return err
}
