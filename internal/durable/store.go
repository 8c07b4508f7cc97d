package durable

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/cespare/xxhash/v2"

	"kubevirt.io/disk/internal/osfile"
)

// Store has the records of a disk's logical unit, as one file per name in a directory. It belongs
// to the content of the disk: other content has another store. A name consists of a few lower case
// letters and hyphens. Any number of goroutines may use it.
type Store struct {
	// May returns why nothing can be saved now, or nil. A nil May always allows it. It is set
	// before the first call.
	May func() error

	dir string
	// syncs a file or a directory; nil: saved state survives the end of the process, but no crash
	sync func(*os.File) error

	mu sync.Mutex // one call at a time: a Save writes into the spare, which was a file a moment ago
}

// storeSum is the length of the checksum that follows the content in each file: xxhash64,
// little-endian.
const storeSum = 8

// NewStore returns a store in dir. The first Save makes dir; its parent must exist. With durable, a
// record is on storage when Save returns nil. A store must be as durable as its disk.
func NewStore(dir string, durable bool) *Store {
	s := &Store{dir: dir}
	if durable {
		s.sync = (*os.File).Sync
	}
	return s
}

// Where is the path of the file for that name. The file may not exist.
func (s *Store) Where(name string) string { return filepath.Join(s.dir, name) }

// spare is the path of the spare, which is no name of a record. See keepSpare.
func (s *Store) spare() string { return filepath.Join(s.dir, SpareSuffix) }

// Load returns the last saved content of the name, or nil if there is none. A file that Save did
// not write is an error.
func (s *Store) Load(name string) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	content, err := Read(s.Where(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		n := len(content) - storeSum
		if n > 0 && binary.LittleEndian.Uint64(content[n:]) == xxhash.Sum64(content[:n]) {
			return content[:n], nil
		}
		err = errors.New("is damaged: its checksum is wrong")
	}
	if IsUnread(err) {
		return nil, fmt.Errorf("%s %w", s.Where(name), err)
	}
	return nil, fmt.Errorf("%s %w; remove it to go on without what was kept in it", s.Where(name),
		err)
}

// Save replaces the content under the name. After an error it is the old or the new content.
// Without data Save removes the name. The content may have up to 1 MiB.
func (s *Store) Save(name string, data []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.May != nil {
		if err := s.May(); err != nil {
			return err
		}
	}
	if len(data) == 0 {
		if err := osfile.Remove(s.Where(name)); err != nil || s.sync == nil {
			return err
		}
		if err := SyncDir(s.dir, s.sync); errors.Is(err, fs.ErrNotExist) {
			return nil // a directory that does not exist has no records
		} else if err != nil {
			return err
		}
		keepSpare(s.spare()) // the removed file may have been the spare
		return nil
	}
	if err := osfile.MakeDir(s.dir); err == nil && s.sync != nil {
		if err := SyncDir(filepath.Dir(s.dir), s.sync); err != nil {
			return err
		}
	} else if err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	content := binary.LittleEndian.AppendUint64(append([]byte(nil), data...), xxhash.Sum64(data))
	return Replace(s.May, s.Where(name), content, s.spare(), s.sync)
}
