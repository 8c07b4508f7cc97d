package adapt

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/adapter"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/words"
)

// CheckWritable refuses a file that WritableDisk cannot use. It changes nothing.
func (m *Made) CheckWritable(path string) error {
	_, err := m.former(path)
	return err
}

// WritableDisk makes the qcow2 file that the machine writes to. The top level is its backing file.
// An existing file has the machine's writes, so it stays. If only the configuration of the image
// has changed, it gets the new top level as its backing file.
func (m *Made) WritableDisk(path string) (err error) {
	if _, err := os.Lstat(path); err == nil {
		return m.rebase(path)
	}
	out, err := durable.CreateNew(path, 0o644)
	if err != nil {
		return err
	}
	w, err := qcow2.NewAppender(out.File, qcow2.AppendOptions{ClusterSize: 64 << 10,
		Backing: filepath.Base(m.Path)})
	if err == nil {
		_, err = w.Finish(m.Size)
	}
	err = out.FinishSynced(err)
	if errors.Is(err, fs.ErrExist) { // another process has made the same machine meanwhile
		return m.rebase(path)
	}
	return err
}

// former returns the top level below an existing file that has to be rebased, or "" if there is no
// file, or if it can stay. A file above other layers is an error.
func (m *Made) former(path string) (level string, err error) {
	// Look at the file first: another process may make it at any moment, and image.Open has the
	// same error if a level is missing.
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	img, err := image.Open(path, image.Options{})
	if err != nil {
		return "", err
	}
	defer img.Close()
	var below, want []string
	for _, file := range img.Info().BackingChain {
		below = append(below, filepath.Base(file.Name))
	}
	for _, level := range slices.Backward(m.Levels) {
		want = append(want, level.File)
	}
	if len(below) != len(want) || !slices.Equal(below[1:], want[1:]) ||
		!adapter.IsLevel(below[0]) || len(below[0]) != len(want[0]) {
		return "", fmt.Errorf("%q holds the writes of a machine from another version of the "+
			"image: move it away, or make the machine in another directory", path)
	}
	if img.Size() < m.Size {
		return "", fmt.Errorf("%q has %d bytes, and the machine is to have %d: shut it down, and "+
			"run \"qemu-img resize %s %d\" first", path, img.Size(), m.Size, words.Shell(path),
			m.Size)
	}
	if below[0] == want[0] {
		return "", nil
	}
	return below[0], nil
}

// rebase makes the top level the backing file of an existing file, instead of one that differs in
// the configuration only. The guest never writes to the place of the configuration. Both names have
// the same length, so this is one write into the header.
func (m *Made) rebase(path string) (err error) {
	before, err := m.former(path)
	if err != nil || before == "" {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	// QEMU holds locks on these bytes while it uses an image. Until f is closed, none can start.
	const first, many = 100, 200
	lock := unix.Flock_t{Type: unix.F_WRLCK, Start: first, Len: many}
	err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lock)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%q is in use by a running machine: shut it down, and try again", path)
	}
	if err != nil {
		return fmt.Errorf("lock %q: %w", path, err)
	}
	var head [20]byte
	if _, err := f.ReadAt(head[:], 0); err != nil {
		return err
	}
	at := int64(binary.BigEndian.Uint64(head[8:]))
	name, top := make([]byte, len(before)), filepath.Base(m.Path)
	if _, err := f.ReadAt(name, at); err != nil {
		return err
	}
	if int(binary.BigEndian.Uint32(head[16:])) != len(before) || string(name) != before ||
		len(top) != len(before) || strings.ContainsRune(top, '/') {
		return fmt.Errorf("%q names its backing file in another way than %q: run \"qemu-img "+
			"rebase -u -F qcow2 -b %s %s\"", path, before, top, words.Shell(path))
	}
	if _, err := f.WriteAt([]byte(top), at); err != nil {
		return err
	}
	return f.Sync()
}
