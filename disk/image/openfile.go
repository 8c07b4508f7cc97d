package image

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// OpenFile opens the image's own file again, for reading. It is the file that was validated. Its
// backing files are not opened. It fails for an image that is no file of this machine.
func (m *Image) OpenFile() (*os.File, error) {
	if m.path == "" {
		return nil, fmt.Errorf("image %q is not a file of this machine", m.name)
	}
	dir, err := openDirectory(m.dir)
	if err != nil {
		return nil, err
	}
	defer dir.close()
	dir.devices = m.top.source == SourceDevice
	file, st, err := dir.openAs(filepath.Base(m.path), unix.O_RDONLY)
	if err != nil {
		return nil, fmt.Errorf("image %q: %w", m.path, err)
	}
	was := m.top.bytes.Identity()
	if uint64(st.Dev) != was.Dev || st.Ino != was.Ino || st.Mtim.Nano() != was.MTime ||
		st.Size != m.top.bytes.Size() {
		err := errors.New("was exchanged after it was validated; start again")
		return nil, errors.Join(fmt.Errorf("image %q %w", m.path, err), file.Close())
	}
	return file, nil
}
