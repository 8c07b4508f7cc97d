package transfer

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
)

// maxLine is the longest line of a stream that is accepted, in bytes.
const maxLine = 8 << 10

// maxFiles bounds how many files a sender may send. No disk has nearly as many.
const maxFiles = 10_000

// Target is a directory that receives a disk. Nobody else uses it until Close.
type Target struct {
	dir string
	locks
}

// OpenTarget locks a directory and makes it empty. It removes what an earlier attempt left, and
// with replace everything. Without replace, it refuses a directory that holds anything else. If a
// daemon has a disk there, that is an error, and everything stays.
func OpenTarget(dir string, replace bool) (*Target, error) {
	dir, err := osfile.Resolved(dir)
	if err != nil {
		return nil, err
	}
	lock, err := durable.AcquireLock(filepath.Join(dir, lockName), dir)
	if err != nil {
		return nil, err
	}
	t := &Target{dir: dir, locks: locks{lock}}
	if replace {
		_, err = t.take(dir)
	}
	var entries []fs.DirEntry
	if err == nil {
		entries, err = os.ReadDir(dir)
	}
	if err != nil {
		return nil, errors.Join(err, t.Close())
	}
	// A disk without its name cannot be served. So names are removed first, and the disk's file
	// before the others.
	slices.SortStableFunc(entries, func(a, b fs.DirEntry) int {
		return order(entry{Name: b.Name()}) - order(entry{Name: a.Name()})
	})
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		switch {
		case e.Name() == lockName || e.Name() == lostFound:
			continue
		case e.Name() != receiving && !replace:
			err = fmt.Errorf("%q is not empty: it has %s; name another directory, or say "+
				"--replace to lose what is in it", dir, e.Name())
		default:
			if e.IsDir() { // a disk without its state would be taken for a complete one
				err = osfile.Remove(filepath.Join(path, diskName))
			}
			if err == nil {
				err = osfile.RemoveAll(path)
			}
		}
		if err != nil {
			return nil, errors.Join(err, t.Close())
		}
	}
	return t, nil
}

// Receive makes the files of a stream, and checks them.
func (t *Target) Receive(ctx context.Context, r io.Reader, p *Progress) error {
	in := bufio.NewReaderSize(r, 4*blockSize)
	var head begin
	if err := readLine(in, &head); err != nil {
		return err
	}
	if head.Version != version {
		return fmt.Errorf("the other side sends version %d, and this program knows %d: use the "+
			"same program on both sides", head.Version, version)
	}
	if err := t.room(head.Bytes); err != nil {
		return err
	}
	into := filepath.Join(t.dir, receiving)
	if err := osfile.MakeDir(into); err != nil {
		return err
	}
	var all []entry
	var sums [][]byte
	for {
		var e entry
		if err := readLine(in, &e); err != nil {
			return err
		}
		if e.End {
			break
		}
		if err := check(e, len(all)); err != nil {
			return err
		}
		sum, err := t.entry(ctx, in, into, e, p)
		if err != nil {
			return t.explain(fmt.Errorf("%s: %w", e.Name, err))
		}
		all, sums = append(all, e), append(sums, sum)
	}
	for i, e := range all {
		if err := verify(ctx, filepath.Join(into, e.Name), e, sums[i]); err != nil {
			return fmt.Errorf("%s: %w", e.Name, err)
		}
	}
	return t.name(into, all)
}

// room refuses a disk that does not fit.
func (t *Target) room(need int64) error {
	has, err := osfile.AvailableSpace(t.dir)
	if err == nil && has < need {
		err = fmt.Errorf("%q has room for %d bytes, and the disk has %d: make room, or use a "+
			"larger volume", t.dir, has, need)
	}
	return err
}

func (t *Target) explain(err error) error {
	if disk.IsNoSpace(err) {
		return fmt.Errorf("%w; make room in %q, or use a larger volume", err, t.dir)
	}
	return err
}

// check refuses entries that no directory of a disk has, and every name that leads out of it.
func check(e entry, before int) error {
	bad := e.Size < 0 || e.Mode != e.Mode.Perm() || !filepath.IsLocal(e.Name) ||
		filepath.Clean(e.Name) != e.Name || e.Name == "." || before >= maxFiles
	parts := strings.Split(e.Name, "/")
	for i, part := range parts {
		bad = bad || skipped(part, e.Dir || i < len(parts)-1)
	}
	if bad {
		return fmt.Errorf("the other side sends a file %q that no disk has", e.Name)
	}
	return nil
}

// entry makes a file or a directory, durably. It returns the digest that the source has sent.
func (t *Target) entry(ctx context.Context, in io.Reader, into string, e entry, p *Progress) (
	[]byte, error) {
	path := filepath.Join(into, e.Name)
	if e.Dir {
		if err := osfile.MakeDir(path); err != nil {
			return nil, err
		}
		return nil, os.Chmod(path, e.Mode|0o700)
	}
	f, err := osfile.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	sum, err := fill(ctx, f, in, e, p)
	if err == nil {
		err = f.Chmod(e.Mode | 0o600)
	}
	if err == nil {
		err = osfile.Retry(f.Sync)
	}
	return sum, errors.Join(err, f.Close())
}

func fill(ctx context.Context, f *os.File, in io.Reader, e entry, p *Progress) ([]byte, error) {
	if err := osfile.Retry(func() error { return f.Truncate(e.Size) }); err != nil {
		return nil, err
	}
	header, buf := make([]byte, blockHeader), make([]byte, blockSize)
	for from := int64(0); ; {
		if _, err := io.ReadFull(in, header); err != nil {
			return nil, cut(err)
		}
		off := int64(binary.BigEndian.Uint64(header))
		n := int64(binary.BigEndian.Uint32(header[8:]))
		if n == 0 {
			break
		}
		if off < from || off%blockSize != 0 || off >= e.Size || n != min(blockSize, e.Size-off) {
			return nil, errors.New("the other side sends a block that is out of place")
		}
		from = off + n
		if _, err := io.ReadFull(in, buf[:n]); err != nil {
			return nil, cut(err)
		}
		if _, err := f.WriteAt(buf[:n], off); err != nil {
			return nil, err
		}
		p.done.Add(n)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
	digest := newSum(0).Sum(nil)
	_, err := io.ReadFull(in, digest)
	return digest, cut(err)
}

// verify reads from storage what was written, and compares the digest.
func verify(ctx context.Context, path string, e entry, want []byte) error {
	if e.Dir {
		return durable.SyncDir(path, (*os.File).Sync)
	}
	f, err := osfile.OpenFile(path, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	// Drop the synced data from memory, so that the next read is one of storage. A file system that
	// cannot do that is no reason to fail.
	_ = osfile.Call(f, func(fd int) error {
		return unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED)
	})
	digest := newSum(e.Size)
	err = blocks(f, e.Size, func(off int64, block []byte) error {
		digest.add(off, block)
		return ctx.Err()
	})
	if err == nil && !bytes.Equal(digest.Sum(nil), want) {
		err = errors.New("what was written differs from what was sent: the network or the " +
			"storage is damaged")
	}
	return err
}

// name moves the received files to their places, the disks last.
func (t *Target) name(into string, all []entry) error {
	if err := durable.SyncDir(into, (*os.File).Sync); err != nil {
		return err
	}
	var top []string
	for _, e := range all {
		if filepath.Dir(e.Name) == "." {
			top = append(top, e.Name)
		}
	}
	for i, name := range top {
		if i == len(top)-1 { // all other names are made durable before the last one
			if err := durable.SyncDir(t.dir, (*os.File).Sync); err != nil {
				return err
			}
		}
		err := os.Rename(filepath.Join(into, name), filepath.Join(t.dir, name))
		if err != nil {
			return err
		}
	}
	if err := osfile.RemoveAll(into); err != nil {
		return err
	}
	return durable.SyncDir(t.dir, (*os.File).Sync)
}

func readLine(in *bufio.Reader, into any) error {
	text, err := in.ReadSlice('\n')
	switch {
	case errors.Is(err, bufio.ErrBufferFull) || err == nil && len(text) > maxLine:
		return errors.New("the other side sends no disk")
	case err != nil:
		return fmt.Errorf("the other side has ended too early: %w", cut(err))
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("the other side sends no disk: %w", err)
	}
	return nil
}

// cut says that a stream has ended too early.
func cut(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
