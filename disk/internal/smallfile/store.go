package smallfile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/cespare/xxhash/v2"

	"kubevirt.io/disk/disk/internal/osfile"
)

// Store keeps what the logical unit of a disk must remember, as files of a directory, one for each
// name. It belongs to the content of the disk: a store of other content is another one. A name is a
// few lower case letters and hyphens. Any number of goroutines.
type Store struct {
	dir string
	// of a file and of a directory; nil: what is saved survives the end of the process, and no more
	sync func(*os.File) error

	mu sync.Mutex // one call at a time: a Save writes into what was a file a moment ago
}

// storeSum is the length of the xxhash64, little-endian, that follows the content in a file of a
// Store.
const storeSum = 8

// NewStore returns a store in a directory, which is made when something is saved; the one it is in
// exists. With durable what is saved has reached storage: it has to be what the disk is.
func NewStore(dir string, durable bool) *Store {
	s := &Store{dir: dir}
	if durable {
		s.sync = (*os.File).Sync
	}
	return s
}

// Where is the file that has what is kept under the name, if anything is.
func (s *Store) Where(name string) string { return filepath.Join(s.dir, name) }

// spare is a file that no name is that of, see keepSpare.
func (s *Store) spare() string { return filepath.Join(s.dir, SpareSuffix) }

// Load returns what was saved last under the name, or nil if nothing was. A file that no Save has
// left like that is an error.
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

// Save replaces what is kept under the name: after an error that is the old or the new content. No
// data: forget it. What is kept can have up to 1 MiB.
func (s *Store) Save(name string, data []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(data) == 0 {
		if err := osfile.Remove(s.Where(name)); err != nil || s.sync == nil {
			return err
		}
		if err := SyncDir(s.dir, s.sync); errors.Is(err, fs.ErrNotExist) {
			return nil // a directory that does not exist keeps nothing
		} else if err != nil {
			return err
		}
		keepSpare(s.spare()) // which may have become what is forgotten now
		return nil
	}
	if len(data) > maxSmall-storeSum {
		return fmt.Errorf("%s cannot hold %d bytes, but at most %d", s.Where(name), len(data),
			maxSmall-storeSum)
	}
	if err := osfile.MakeDir(s.dir); err == nil && s.sync != nil {
		if err := SyncDir(filepath.Dir(s.dir), s.sync); err != nil {
			return err
		}
	} else if err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return Replace(s.Where(name), binary.LittleEndian.AppendUint64(append([]byte(nil), data...),
		xxhash.Sum64(data)), s.spare(), s.sync)
}
