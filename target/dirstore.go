package target

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
)

// dirStore keeps each name as a file of a directory.
type dirStore struct {
	dir     string
	durable bool
	mu      sync.Mutex // one writer at a time
}

// maxStored is the longest content that is read back. Bytes.
const maxStored = 1 << 20

// NewDirStore returns a Store of files in dir, one per name, for one logical unit. The directory is made when something is
// saved. A file is replaced as a whole. With durable what is saved survives a loss of power, and without it the end of the
// process; it has to be what the disk is.
func NewDirStore(dir string, durable bool) Store { return &dirStore{dir: dir, durable: durable} }

func (s *dirStore) path(name string) string { return filepath.Join(s.dir, name) }

func (s *dirStore) Load(name string) ([]byte, error) {
	st, err := os.Stat(s.path(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if st.Size() > maxStored {
		return nil, fmt.Errorf("%s has %d bytes, and nothing of more than %d is kept there; remove it", s.path(name), st.Size(), maxStored)
	}
	return os.ReadFile(s.path(name))
}

func (s *dirStore) Save(name string, data []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(data) == 0 {
		if err := os.Remove(s.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return s.syncDir()
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	partial := s.path(name) + ".partial"
	f, err := os.OpenFile(partial, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil && s.durable {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(partial, s.path(name))
	}
	if err != nil {
		return errors.Join(err, os.Remove(partial))
	}
	return s.syncDir()
}

// syncDir makes the names in the directory durable; one that does not exist has none.
func (s *dirStore) syncDir() error {
	if !s.durable {
		return nil
	}
	d, err := os.Open(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
