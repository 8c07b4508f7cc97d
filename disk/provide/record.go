package provide

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
)

// record says what one run has made, for the next one. It is next to the file, and is there before
// the file gets its name.
type record struct {
	File     string `json:"file"`     // name
	Instance string `json:"instance"` // tells the file from another one of that name
	Image    string `json:"image"`    // which image it was made of
	// ReadOnly: the file is never written. It may be an image's own; its mode is set accordingly.
	ReadOnly bool `json:"read_only,omitempty"`
}

// loadRecord returns nil if there is no record.
func loadRecord(path string) (*record, error) {
	text, err := durable.Read(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%q %w", path, err)
	}
	r := new(record)
	if err := json.Unmarshal(text, r); err != nil || r.File != filepath.Base(r.File) ||
		r.Instance == "" {
		return nil, fmt.Errorf("%q is damaged, so nobody knows whether a disk beside it was made "+
			"by this program: remove it and that disk", path)
	}
	return r, nil
}

// save makes a record durable.
func (r record) save(path string) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return durable.Write(path, 0o600, func(f *os.File) error {
		_, err := f.Write(append(text, '\n'))
		return err
	})
}

// instanceOf tells files of one name apart.
func instanceOf(f *os.File) string {
	if id := image.FileInstance(f); id != "" {
		return id
	}
	var st unix.Stat_t
	if err := osfile.Retry(func() error { return unix.Fstat(int(f.Fd()), &st) }); err != nil {
		return ""
	}
	return fmt.Sprintf("inode %d", st.Ino)
}

// describe says which image this is. In a new container the same image has other inode numbers, and
// another image may have the same name, size and time. So describe hashes samples of the content.
func (p *providing) describe() (record, error) {
	hash, err := p.img.Samples()
	return record{File: filepath.Base(p.path), ReadOnly: p.opt.ReadOnly,
		Image: fmt.Sprintf("%s %s %d %d %016x", p.img.Name(), p.img.Format(),
			p.img.Info().FileSize, p.img.Size(), hash)}, err
}
