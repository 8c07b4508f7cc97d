package disk

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
)

// unitPrefix begins the name of a directory in which a logical unit keeps things.
const unitPrefix = "unit-"

// UnitDir is a directory for what belongs to the content of this disk, and goes when that is replaced: saved mode pages, or
// what an interrupted write has to put back. It lies in the work directory, and need not exist.
func (i *Instance) UnitDir() string {
	return filepath.Join(i.work.path, unitPrefix+escapeName(i.Identity.Serial))
}

// Durable tells whether a Flush reaches storage, so that what goes with the disk has to as well.
func (i *Instance) Durable() bool {
	f, ok := i.Disk.(*File)
	return !ok || f.opt.Durable
}

// clearUnits removes what units have kept of a disk that is about to be replaced.
func (w *workDir) clearUnits() error {
	entries, err := os.ReadDir(w.path)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), unitPrefix) {
			err = errors.Join(err, os.RemoveAll(filepath.Join(w.path, e.Name())))
		}
	}
	return err
}
