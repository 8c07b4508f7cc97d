package adapter

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"strings"

	"kubevirt.io/disk/adapter/ext4"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/osfile"
)

// A state records what the writer knew when a level was complete. It is a file next to the level.
// With a state, a layer above can be applied without reading the layers below again. A state only
// saves time: if it is missing, damaged or of another version, the layers are read.
//
// The file consists of stateMagic, the number of files and of bytes in the layers (8 bytes each,
// big-endian), the output of ext4.Writer.Save, and the SHA-256 of all of these. The magic changes
// with the format.
const (
	stateMagic  = "kubevirt-disk level state 1\n"
	stateSuffix = ".state"
)

func stateName(level string) string { return strings.TrimSuffix(level, ".qcow2") + stateSuffix }

// wantsState reports whether a level, of that many levels, gets a state. The layers that change are
// usually the top ones, so the two highest levels get a state. Below them, each state is twice as
// far from the top as the one before. States are few, because each lists all files of the levels
// below.
func wantsState(level, levels int) bool {
	fromTop := levels - level
	return fromTop&(fromTop-1) == 0
}

// resume returns an applier that has applied the layers below level next, which is at most first.
// Without any state, next is 0.
func (b *builder) resume(first int) (a *applier, next int) {
	for i := first - 1; i >= 0; i-- {
		a, err := b.load(i)
		if err == nil {
			return a, i + 1
		}
	}
	return newApplier(b.opt.MaxBytes, b.opt.MaxFiles), 0
}

// load reads the state of a level.
func (b *builder) load(i int) (*applier, error) {
	f, err := osfile.OpenRegular(filepath.Join(b.dir, stateName(b.levels[i].File)))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	sum := sha256.New()
	length := info.Size() - int64(sum.Size())
	if length < 0 {
		return nil, errors.New("it is too short")
	}
	if _, err := io.Copy(sum, io.NewSectionReader(f, 0, length)); err != nil {
		return nil, err
	}
	want := make([]byte, sum.Size())
	if _, err := f.ReadAt(want, length); err != nil {
		return nil, err
	}
	if !bytes.Equal(sum.Sum(nil), want) {
		return nil, errors.New("it is damaged")
	}
	in := io.NewSectionReader(f, 0, length)
	head := make([]byte, len(stateMagic)+16)
	if _, err := io.ReadFull(in, head); err != nil {
		return nil, err
	}
	numbers, ok := bytes.CutPrefix(head, []byte(stateMagic))
	if !ok {
		return nil, errors.New("it is of another version")
	}
	files := int64(binary.BigEndian.Uint64(numbers))
	taken := int64(binary.BigEndian.Uint64(numbers[8:]))
	if files > int64(b.opt.MaxFiles) || taken > b.opt.MaxBytes {
		return nil, errors.New("it has more than is allowed") // reading the layers reports it, too
	}
	a := newApplier(b.opt.MaxBytes, b.opt.MaxFiles)
	a.bytesLeft, a.filesLeft = a.bytesLeft-taken, a.filesLeft-int(files)
	a.fs, err = ext4.Load(in)
	return a, err
}

// save writes the state of a level, if the level should have one and has none. It does not sync the
// file, because a load checks it.
func (b *builder) save(ctx context.Context, i int, a *applier) error {
	path := filepath.Join(b.dir, stateName(b.levels[i].File))
	if _, err := os.Lstat(path); err == nil || !wantsState(i, len(b.levels)) {
		return nil
	}
	f, err := flock.Claim(ctx, b.partial(filepath.Base(path)))
	if err != nil {
		return err
	}
	b.shared.Share(f)
	if _, err := os.Lstat(path); err == nil { // another process has just made it
		return errors.Join(os.Remove(f.Name()), f.Close())
	}
	out := &hashing{f, sha256.New()}
	head := binary.BigEndian.AppendUint64([]byte(stateMagic), uint64(b.opt.MaxFiles-a.filesLeft))
	head = binary.BigEndian.AppendUint64(head, uint64(b.opt.MaxBytes-a.bytesLeft))
	err = f.Truncate(0)
	if err == nil {
		_, err = out.Write(head)
	}
	if err == nil {
		err = a.fs.Save(out)
	}
	if err == nil {
		_, err = f.Write(out.sum.Sum(nil))
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		err = errors.Join(fmt.Errorf("the state of a level: %w", err), os.Remove(f.Name()))
	}
	return errors.Join(err, f.Close()) // Close last: until then the file is locked
}

// hashing writes data and hashes it.
type hashing struct {
	out io.Writer
	sum hash.Hash
}

func (h *hashing) Write(p []byte) (int, error) {
	n, err := h.out.Write(p)
	h.sum.Write(p[:n])
	return n, err
}
