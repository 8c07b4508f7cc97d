package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"

	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/volume/api"
)

// Store is an open directory of volumes. Any number of goroutines may call its methods, but only
// one at a time for each volume.
type Store struct {
	dir  string
	root *os.Root
	lock *os.File

	mu      sync.Mutex // guards numbers
	numbers numbers
}

const lockName = durable.LockName

// Private reports whether a name is one of the store's own files next to the volumes, or could be.
func Private(name string) bool {
	return name == lockName || name == numbersName || strings.HasPrefix(name, numbersName+".")
}

// Open opens the directory of the volumes and locks it. It makes the directory if it is missing. It
// returns an error if another process uses it.
func Open(dir string) (*Store, error) {
	explain := func(err error) error {
		return fmt.Errorf("the directory %q of the volumes cannot be used: %w", dir, err)
	}
	if err := durable.MakeDirs(dir, true); err != nil {
		return nil, explain(err)
	}
	resolved, err := osfile.Resolved(dir) // once: links below it are not followed
	if err != nil {
		return nil, explain(err)
	}
	root, err := osfile.OpenRoot(resolved)
	if err != nil {
		return nil, explain(err)
	}
	s := &Store{dir: resolved, root: root}
	if s.lock, err = durable.AcquireLock(s.Dir(lockName), dir); err == nil {
		err = s.loadNumbers()
	}
	if err != nil {
		return nil, errors.Join(explain(err), s.Close())
	}
	return s, nil
}

// Close releases the directory.
func (s *Store) Close() error {
	err := s.root.Close()
	if s.lock != nil {
		err = errors.Join(err, s.lock.Close())
	}
	return err
}

// Dir is the directory of a volume.
func (s *Store) Dir(name string) string { return filepath.Join(s.dir, name) }

// Load returns the records of all volumes, by name. If the record of a volume cannot be used, Load
// returns a record with only the name, and a *DamagedError in damaged. foreign are names in the
// directory that are not volumes'. They stay.
func (s *Store) Load() (records []Record, damaged map[string]error, foreign []string, err error) {
	entries, err := fs.ReadDir(s.root.FS(), ".")
	if err != nil {
		return nil, nil, nil, err
	}
	damaged = map[string]error{}
	for _, e := range entries {
		name := e.Name()
		if !e.IsDir() {
			continue
		}
		if api.CheckName(name) != nil {
			foreign = append(foreign, name)
			continue
		}
		at := path.Join(name, recordName)
		var r saved
		err := durable.LoadRecord(s.Dir(at), &r, recordVersion)
		if errors.Is(err, fs.ErrNotExist) {
			if !s.removeRest(name) {
				foreign = append(foreign, name)
			}
			continue
		}
		if err == nil {
			err = r.check(name)
		}
		if err != nil {
			r.Record = Record{Name: name}
			damaged[name] = &DamagedError{Path: filepath.Join(s.dir, at), Err: err}
		}
		records = append(records, r.Record)
	}
	return records, damaged, foreign, nil
}

// removeRest removes a directory that an interrupted Make or Remove has left. It may contain a part
// of a record and its spare, but no other file.
func (s *Store) removeRest(name string) (done bool) {
	for _, suffix := range []string{durable.PartialSuffix, durable.SpareSuffix} {
		_ = s.root.Remove(path.Join(name, recordName+suffix))
	}
	return s.root.Remove(name) == nil
}

// Make begins a volume: it makes its directory and record. It returns fs.ErrExist if the directory
// exists.
func (s *Store) Make(r Record) error {
	if err := s.root.Mkdir(r.Name, 0o700); err != nil {
		return err
	}
	err := s.Save(r)
	if err == nil {
		err = s.syncDir(".")
	}
	if err != nil {
		_ = s.root.Remove(path.Join(r.Name, recordName))
		s.removeRest(r.Name)
	}
	return err
}

// Save replaces the record of a volume.
func (s *Store) Save(r Record) error {
	return s.replace(path.Join(r.Name, recordName), saved{recordVersion, r})
}

// Remove ends a volume: it removes the record and then the directory. The caller has already
// removed every other file.
func (s *Store) Remove(name string) error {
	entries, err := fs.ReadDir(s.root.FS(), name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if e.Name() != recordName {
			err = errors.Join(err, s.root.RemoveAll(path.Join(name, e.Name())))
		}
	}
	if err != nil {
		return err
	}
	// Make the other removals durable first: a crash must not leave files without a record.
	if err := s.syncDir(name); err != nil {
		return err
	}
	if err := s.root.RemoveAll(name); err != nil {
		return err
	}
	return s.syncDir(".")
}

// replace stores a file in one step. That works on a full volume, too.
func (s *Store) replace(name string, content any) error {
	still := func() error { return durable.Holds(s.lock, s.Dir(lockName)) }
	if err := still(); err != nil { // before the new file is there
		return err
	}
	return durable.SaveRecord(filepath.Join(s.dir, name), content, still, (*os.File).Sync)
}

func (s *Store) syncDir(name string) error {
	return durable.SyncDir(s.Dir(name), (*os.File).Sync)
}
