package image

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sync/errgroup"

	"kubevirt.io/disk/disk/internal/slots"
)

// Fingerprint identifies the content of one file of an image: by its digest if that is known when
// the file is opened, otherwise by its hash.
type Fingerprint struct {
	Name   string `json:"name"` // only for messages
	Format Format `json:"format"`
	Size   int64  `json:"size"`
	Hash   string `json:"xxh3"` // "" if not known or not needed
	Identity
}

// identified reports whether the fingerprint says what the content is.
func (f *Fingerprint) identified() bool { return f.Hash != "" || f.Digest != "" }

// untouched reports whether both describe the same file at the same moment. Usually the time of the
// last change (ctime) tells, because only the kernel can set it. But some read-only file systems
// take it from an archive, in whole seconds: squashfs, EROFS, and those that fetch an image while
// it is read. With reproducible builds, the other numbers of two images are often the same, too. So
// a time in whole seconds counts only if there is no hash.
func (f *Fingerprint) untouched(g *Fingerprint) bool {
	if f.Digest != "" || g.Digest != "" {
		return f.Digest == g.Digest && f.Size == g.Size
	}
	same := f.Size == g.Size && f.Dev == g.Dev && f.Ino == g.Ino && f.MTime == g.MTime &&
		f.CTime == g.CTime
	return same && (f.CTime%int64(time.Second) != 0 || f.Hash == "" && g.Hash == "")
}

// Hashes returns the hashes of the image's files, top first. They have read nothing yet. pace says
// how long to leave the storage to the guest after a step that took took. It is nil if there is no
// guest.
func (m *Image) Hashes(pace func(took time.Duration) time.Duration) (all []*Hash) {
	m.top.chain(func(l *layer) {
		c := newHash(l.bytes)
		c.pace = pace
		all = append(all, c)
	})
	return all
}

// Fingerprint identifies the image by the content of every file of its chain, top first. It does
// not read again what one of contents has read, even after an error. The error of a failed read is
// a *disk.MediumError.
func (m *Image) Fingerprint(ctx context.Context, contents []*Hash, s *slots.Slots) (
	[]Fingerprint, error,
) {
	prints := m.Unhashed()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(s.Count()) // no more goroutines than slots
	for i, content := range contents {
		if prints[i].identified() {
			continue
		}
		group.Go(func() (err error) {
			prints[i].Hash, err = content.run(ctx, 1, s)
			if err != nil {
				return fmt.Errorf("reading %q: %w", prints[i].Name, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return prints, m.CheckUntouched()
}

const (
	samples    = 64       // of a file
	sampleSize = 64 << 10 // bytes
)

// Samples returns a hash of samples of each file of the chain, also of its tables. It tells images
// apart well enough where reading a large image would delay a machine for long.
func (m *Image) Samples() (sum uint64, err error) {
	hash, buf := xxhash.New(), make([]byte, sampleSize)
	m.top.chain(func(l *layer) {
		size := l.bytes.Size()
		step := max(size/samples, sampleSize)
		for off := int64(0); off < size && err == nil; off += step {
			p := buf[:min(sampleSize, size-off)]
			if err = readFull(context.Background(), l.bytes, p, off); err != nil {
				err = fmt.Errorf("image %q: %w", l.name, err)
			}
			_, _ = hash.Write(p) // never fails
		}
	})
	return hash.Sum64(), err
}

// ErrNotIdentified says that it is unknown whether an image matches the fingerprint.
var ErrNotIdentified = errors.New("the disk was stopped before its image had been read once to " +
	"recognise it, or the image could not be read")

// Identified reports whether the fingerprint says what the content of every file is.
func Identified(prints []Fingerprint) bool {
	return !slices.ContainsFunc(prints, func(p Fingerprint) bool { return !p.identified() })
}

// Contents returns a string for each file, of its digest and its format. It returns nil if a file
// has no digest. Images with the same contents are the same disk.
func Contents(prints []Fingerprint) (all []string) {
	for _, p := range prints {
		if p.Digest == "" {
			return nil
		}
		all = append(all, string(p.Format)+" "+p.Digest)
	}
	return all
}

// Unhashed returns the fingerprint of the image without hashes.
func (m *Image) Unhashed() []Fingerprint {
	var prints []Fingerprint
	m.top.chain(func(l *layer) {
		prints = append(prints, Fingerprint{
			Name: l.name, Format: l.format, Size: l.bytes.Size(), Identity: l.bytes.Identity(),
		})
	})
	return prints
}

// CheckUntouched returns an error if a file of the image was changed after it was opened. Then the
// data that was read may be a mixture of two images.
func (m *Image) CheckUntouched() (err error) {
	m.top.chain(func(l *layer) {
		if changed := l.bytes.Check(); changed != nil {
			err = fmt.Errorf("%q %w", l.name, changed)
		}
	})
	return err
}

// Touched reports whether a file of the image has to be read to compare the image with the
// fingerprint.
func (m *Image) Touched(old []Fingerprint) bool {
	return !slices.EqualFunc(m.Unhashed(), old,
		func(now, before Fingerprint) bool { return now.untouched(&before) })
}

// Compare returns why the image does not match the fingerprint, or "" if it does. If it does,
// Compare also returns the current fingerprint. It reads only files that may have changed. It
// returns ErrNotIdentified if it cannot tell.
func (m *Image) Compare(ctx context.Context, old []Fingerprint) (reason string, now []Fingerprint,
	err error) {
	now = m.Unhashed()
	if len(now) != len(old) {
		return fmt.Sprintf("the image has %d backing files now, and had %d", len(now)-1,
			len(old)-1), nil, nil
	}
	for i := range now {
		if now[i].Format != old[i].Format {
			return fmt.Sprintf("%q is %s now, and was %s", now[i].Name, now[i].Format,
				old[i].Format), nil, nil
		}
		if now[i].Size != old[i].Size && !m.alike(now[i].Digest, old[i].Digest) {
			return fmt.Sprintf("the image has changed: %q has %d bytes now, and had %d",
				now[i].Name, now[i].Size, old[i].Size), nil, nil
		}
	}
	// The start waits for this. It does not wait for slots that other disks copy with.
	workers := runtime.GOMAXPROCS(0)
	i := 0
	m.top.chain(func(l *layer) {
		print, before := &now[i], &old[i]
		i++
		switch {
		case reason != "" || err != nil:
		case print.untouched(before):
			print.Hash = before.Hash
		case print.Digest != "" && m.alike(print.Digest, before.Digest):
		case print.Digest != "" && before.Digest != "":
			reason = fmt.Sprintf("the image has changed: %q is %s now, and was %s",
				l.name, print.Digest, before.Digest)
		case before.Digest != "":
			reason = fmt.Sprintf("the image has changed: %q was known by its digest, %s, and has "+
				"none now", l.name, before.Digest)
		case before.Hash == "":
			err = fmt.Errorf("%q may have changed: %w", l.name, ErrNotIdentified)
		default:
			s := slots.New(workers, slots.Options{})
			if print.Hash, err = newHash(l.bytes).run(ctx, workers, s); err != nil {
				err = fmt.Errorf("reading %q: %w", l.name, err)
			} else if print.Hash != before.Hash {
				reason = fmt.Sprintf("the image has changed: the content of %q differs, with the "+
					"same size", l.name)
			}
		}
	})
	if reason != "" || err != nil {
		return reason, nil, err
	}
	return "", now, nil
}
