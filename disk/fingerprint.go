package disk

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// fingerprintChunk is what is hashed at once. It is part of what the hash means. Bytes.
const fingerprintChunk = 1 << 20

// fileFingerprint identifies the content of one file of an image. The hash decides; what follows it only saves hashing
// a file again that has not been touched. Times are nanoseconds since 1970.
type fileFingerprint struct {
	Name   string `json:"name"` // only for messages
	Format Format `json:"format"`
	Size   int64  `json:"size"`
	Hash   string `json:"xxhash64"`

	Dev   uint64 `json:"dev"`
	Ino   uint64 `json:"ino"`
	MTime int64  `json:"mtime"`
	CTime int64  `json:"ctime"`
}

// untouched reports whether both describe one file at one moment. That is what the time of the last change tells, where the kernel has
// set it: nobody else can. In read-only file systems that are made of an archive (squashfs, EROFS, those that fetch an image as it is read)
// it is a time of the archive, in whole seconds, and with builds that are reproducible all the other numbers of another image are often the
// same, too. A time in whole seconds only counts where there is no hash to go by.
func (f *fileFingerprint) untouched(g *fileFingerprint) bool {
	same := f.Size == g.Size && f.Dev == g.Dev && f.Ino == g.Ino && f.MTime == g.MTime && f.CTime == g.CTime
	return same && (f.CTime%int64(time.Second) != 0 || f.Hash == "" && g.Hash == "")
}

// fingerprintOf is what is known of a layer without reading it.
func fingerprintOf(l *layer, st *unix.Stat_t) fileFingerprint {
	return fileFingerprint{
		Name: l.name, Format: l.format, Size: st.Size,
		Dev: uint64(st.Dev), Ino: st.Ino, MTime: st.Mtim.Nano(), CTime: st.Ctim.Nano(),
	}
}

// fingerprint identifies the image by the content of every file of its chain, top first.
func (m *Image) fingerprint(ctx context.Context) ([]fileFingerprint, error) {
	prints := m.unhashed()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(cap(hashTurns.places)) // no more goroutines than can have their turn
	i := 0
	m.top.chain(func(l *layer) {
		print := &prints[i]
		i++
		group.Go(func() (err error) {
			print.Hash, err = hashContent(ctx, l.file, print.Size, 1, hashTurns)
			if err != nil {
				return fmt.Errorf("reading %s: %w", l.name, err)
			}
			return nil
		})
	})
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return prints, m.checkUntouched()
}

// errNotIdentified is an image of which nobody can tell whether it is the one of the fingerprint.
var errNotIdentified = errors.New("the disk was stopped before its image had been read once to recognise it")

// identified reports whether the fingerprint says what the content is.
func identified(prints []fileFingerprint) bool {
	return !slices.ContainsFunc(prints, func(p fileFingerprint) bool { return p.Hash == "" })
}

// unhashed is the fingerprint of the image without hashes.
func (m *Image) unhashed() []fileFingerprint {
	var prints []fileFingerprint
	m.top.chain(func(l *layer) { prints = append(prints, fingerprintOf(l, &l.stat)) })
	return prints
}

// checkUntouched returns an error if a file of the image was changed after it was opened: then what was read of it may
// be neither the old nor the new image.
func (m *Image) checkUntouched() (err error) {
	m.top.chain(func(l *layer) {
		var st unix.Stat_t
		if statErr := retry(func() error { return unix.Fstat(int(l.file.Fd()), &st) }); statErr != nil {
			err = fmt.Errorf("%s: %w", l.name, statErr)
			return
		}
		if st.Size != l.stat.Size || st.Mtim != l.stat.Mtim {
			err = fmt.Errorf("%s was changed while it was read; start again when nothing writes to it", l.name)
		}
	})
	return err
}

// hashContent hashes a file's chunks that are not all zeros, each with its offset, and adds the hashes up: so a hole and zeros
// that are stored give the same result, a hole costs nothing, and chunks are read and hashed side by side, by workers that have their turns.
func hashContent(ctx context.Context, f *os.File, size int64, workers int, turns *turns) (string, error) {
	chunks := chunkCursor{file: f, size: size}
	var sum atomic.Uint64
	group, ctx := errgroup.WithContext(ctx)
	for range workers {
		group.Go(func() error {
			digest := xxhash.New()
			for more := true; more; {
				turn, err := turns.take(ctx)
				if err != nil {
					return err
				}
				for more && err == nil && turn.more() {
					more, err = chunks.hash(ctx, turn.buffer(min(fingerprintChunk, size)), digest, &sum)
				}
				turn.end()
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return "", err
	}
	return fmt.Sprintf("%016x", sum.Load()), nil
}

// chunkCursor hands out the chunks of a file in which something is stored.
type chunkCursor struct {
	file *os.File
	size int64

	mu      sync.Mutex
	off     int64 // guarded by mu; everything before it was handed out
	dataEnd int64 // guarded by mu; to there the file is known to store something
}

// hash adds the hash of the next chunk to a sum, and tells whether there was one.
func (c *chunkCursor) hash(ctx context.Context, buf []byte, digest *xxhash.Digest, sum *atomic.Uint64) (more bool, err error) {
	off, err := c.next()
	if err != nil || off == c.size {
		return false, err
	}
	if err := ctx.Err(); err != nil {
		return false, err
	}
	p := buf[:min(fingerprintChunk, c.size-off)]
	if err := readFull(c.file, p, off); err != nil {
		return false, err
	}
	if zero, n := leadingRun(p, 0); zero && n == len(p) {
		return true, nil
	}
	digest.Reset()
	digest.Write(binary.LittleEndian.AppendUint64(nil, uint64(off)))
	digest.Write(p)
	sum.Add(digest.Sum64())
	return true, nil
}

// next returns where a chunk begins; size if there are no more.
func (c *chunkCursor) next() (int64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.off < c.size && c.off >= c.dataEnd {
		n, data, err := seekExtent(c.file, c.off, c.size-c.off)
		switch {
		case err != nil:
			return 0, err
		case data:
			c.dataEnd = c.off + n
		case c.off+n == c.size:
			c.off = c.size
		default:
			end := (c.off + n) / fingerprintChunk * fingerprintChunk
			if end <= c.off { // it ends inside of this chunk
				c.dataEnd = c.off + n
			}
			c.off = max(c.off, end)
		}
	}
	off := c.off
	c.off = min(c.off+fingerprintChunk, c.size)
	return off, nil
}

// touched reports whether a file of the image has to be read to know whether it is the one of the fingerprint.
func (m *Image) touched(old []fileFingerprint) bool {
	return !slices.EqualFunc(m.unhashed(), old, func(now, before fileFingerprint) bool { return now.untouched(&before) })
}

// compareImage reports why the image is not the one of the fingerprint, or "" if it is. Then it also returns the
// fingerprint as it is now. Only what may have changed is read. errNotIdentified: it cannot be told.
func (m *Image) compareImage(ctx context.Context, old []fileFingerprint) (reason string, now []fileFingerprint, err error) {
	now = m.unhashed()
	if len(now) != len(old) {
		return fmt.Sprintf("the image has %d backing files now, and had %d", len(now)-1, len(old)-1), nil, nil
	}
	for i := range now {
		if now[i].Format != old[i].Format {
			return fmt.Sprintf("%s is %s now, and was %s", now[i].Name, now[i].Format, old[i].Format), nil, nil
		}
		if now[i].Size != old[i].Size {
			return fmt.Sprintf("the image has changed: %s has %d bytes now, and had %d", now[i].Name, now[i].Size, old[i].Size), nil, nil
		}
	}
	workers := runtime.GOMAXPROCS(0) // the start waits for it, and not for the copying of other disks
	i := 0
	m.top.chain(func(l *layer) {
		print, before := &now[i], &old[i]
		i++
		switch {
		case reason != "" || err != nil:
		case print.untouched(before):
			print.Hash = before.Hash
		case before.Hash == "":
			err = fmt.Errorf("%s may have changed: %w", l.name, errNotIdentified)
		default:
			if print.Hash, err = hashContent(ctx, l.file, print.Size, workers, newTurns(workers)); err != nil {
				err = fmt.Errorf("reading %s: %w", l.name, err)
			} else if print.Hash != before.Hash {
				reason = fmt.Sprintf("the image has changed: the content of %s is another one, of the same size", l.name)
			}
		}
	})
	if reason != "" || err != nil {
		return reason, nil, err
	}
	return "", now, nil
}
