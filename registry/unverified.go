package registry

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/layer"
	"kubevirt.io/disk/registry/transport"
)

// unverified is a layer that is read by ranges before its digest is checked. Until verify has read
// all of it, only TLS vouches for its content.
//
// In the cache its chunks have a name of their own. So neither daemons that need verified chunks
// nor daemons that use another repository find them.
type unverified struct {
	name   string // says whose bytes of which layer these are: part of the identity of a disk
	layer  *transport.Blob
	cached *cache.Blob
	notes  *notes
	report reportRetry

	turn chan struct{} // has one element; its holder may verify
	hash hash.Hash     // of everything before next; only the holder of the turn uses it
	next int64
	// differsSince is when a fetched chunk first differed from its note; zero: no chunk differs.
	differsSince time.Time

	timeout time.Duration // how long a chunk may differ
}

const (
	// unverifiedChunk is the size of a fetch, in bytes.
	unverifiedChunk = layer.IndexChunk
	// maxUnverified bounds such a layer, because a manifest can claim any size. Bytes.
	maxUnverified = 2 << 40
	// wrongTimeout is how long a registry may send other content for a chunk than before, or than
	// the chunk's digest demands.
	wrongTimeout = time.Minute
	// verifiedAhead is how much is fetched ahead while the layer is verified, in bytes. Most
	// connections are left to a guest that reads meanwhile.
	verifiedAhead = 1 << 20
)

// unverifiedLayer opens a layer, once.
func (s *Stream) unverifiedLayer(desc descriptor) (*unverified, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	digest := desc.Digest.String()
	if u := s.unsure[digest]; u != nil {
		return u, nil
	}
	if desc.Size > maxUnverified {
		return nil, fmt.Errorf("layer %s has %d bytes: too large to be served unverified",
			digest, desc.Size)
	}
	layer, err := s.image.Source.Blob(desc)
	if err != nil {
		return nil, err
	}
	name, file := s.notesLocked(digest)
	n, err := openNotes(s.kept.dir, file)
	if err != nil {
		return nil, err
	}
	u := &unverified{name: name, layer: layer, notes: n, turn: make(chan struct{}, 1),
		hash: sha256.New(), report: s.retryOf(digest), timeout: wrongTimeout}
	u.turn <- struct{}{}
	u.cached, err = s.opt.Cache.Blob(cache.BlobOptions{
		Digest: unverifiedName(s.kept.Origin(), digest), From: layer.Host(),
		Size: desc.Size, ChunkSize: unverifiedChunk, Verify: n.check,
		Fetch: func(ctx context.Context, p []byte, off int64) error {
			return layer.FillChecked(ctx, p, off,
				func() error { return n.check(off/unverifiedChunk, p) })
		},
	})
	if err == nil && n.now() == noteWrong {
		err = fmt.Errorf("layer %s did not match its digest, and part of it was already served: "+
			"the disk made from it is wrong; remove the disk and the directory %q to make it "+
			"again", digest, s.kept.dir.Name())
	}
	if err != nil {
		return nil, errors.Join(err, n.close())
	}
	s.unsure[digest] = u
	return u, nil
}

// unverifiedName is the name of the chunks of an unverified layer in the cache.
func unverifiedName(origin, layer string) string {
	return transport.DigestOf([]byte("kubevirt-disk unverified\n" + origin + "\n" + layer))
}

// notesLocked returns a name for the layer in this repository, and the file of its notes. Earlier
// versions had one file for all repositories. An image that they have served goes on with that
// file, because its notes say what a disk was made from.
func (s *Stream) notesLocked(digest string) (name, file string) {
	shared := "notes-" + keptName(digest)
	name = transport.DigestOf([]byte(s.ref.RepositoryText() + "\n" + digest))
	own := shared + "-" + strings.TrimPrefix(name, "sha256:")
	if _, err := s.kept.dir.Lstat(own); errors.Is(err, fs.ErrNotExist) && s.record.Unverified {
		if _, err := s.kept.dir.Lstat(shared); err == nil {
			return digest, shared
		}
	}
	return name, own
}

// wrong is the error for a layer with wrong content.
func (u *unverified) wrong(why string) error {
	return fmt.Errorf("%w: layer %s, which was served before all of it was verified: %s",
		disk.ErrWrongContent, u.layer.Desc.Digest, why)
}

// verify reads the layer to its end and checks its digest. It waits for data that cannot be fetched
// now.
func (u *unverified) verify(ctx context.Context) error {
	select {
	case <-u.turn:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { u.turn <- struct{}{} }()
	switch u.notes.now() {
	case noteVerified:
		return nil
	case noteWrong:
		return u.wrong("it has another digest")
	}
	p, size := make([]byte, unverifiedChunk), u.cached.Size()
	for pause := transport.FirstPause; u.next < size; {
		part := p[:min(unverifiedChunk, size-u.next)]
		u.cached.Prefetch(u.next, verifiedAhead)
		if _, err := u.cached.ReadAt(ctx, part, u.next); err != nil {
			if err := u.awaitSame(ctx, err, pause); err != nil {
				return err
			}
			pause = min(2*pause, transport.LongPause)
			continue
		}
		u.hash.Write(part)
		u.next += int64(len(part))
		pause, u.differsSince = transport.FirstPause, time.Time{}
	}
	if got := transport.DigestIn(u.hash); got != u.layer.Desc.Digest.String() {
		return u.condemn("it has the digest " + got)
	}
	return u.notes.set(noteVerified)
}

// awaitSame waits after a failed read. If a chunk keeps differing from the served one, one of the
// two is wrong.
func (u *unverified) awaitSame(ctx context.Context, err error, pause time.Duration) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var changed *changedError
	if !errors.As(err, &changed) {
		u.differsSince = time.Time{}
	} else if u.differsSince.IsZero() {
		u.differsSince = time.Now()
	} else if time.Since(u.differsSince) > u.timeout {
		return u.condemn(changed.Error())
	}
	u.report(err, "the layer cannot be verified yet", pause)
	return transport.PauseFor(ctx, pause)
}

// condemn notes that the layer is wrong, and removes its chunks from the cache.
func (u *unverified) condemn(why string) error {
	err := u.notes.set(noteWrong)
	return errors.Join(u.wrong(why), err, u.cached.Remove())
}

func (u *unverified) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if u.notes.now() == noteWrong {
		return 0, u.wrong("it has another digest")
	}
	return u.cached.ReadAt(ctx, p, off)
}

func (u *unverified) Prefetch(off, length int64) { u.cached.Prefetch(off, length) }

func (u *unverified) Size() int64 { return u.cached.Size() }

func (u *unverified) Has(off, length int64) bool { return u.cached.Has(off, length) }

func (u *unverified) run(off, length int64) (int64, bool) { return length, false }

// unsureFile is a file of an image with layers that are not verified yet, or that have tables of
// contents.
type unsureFile struct {
	*farFile
	stream *Stream
	layers []*unverified
}

var _ image.Unsure = (*unsureFile)(nil)

func (f *unsureFile) Unverified() bool {
	return slices.ContainsFunc(f.layers, func(u *unverified) bool {
		return u.notes.now() != noteVerified
	})
}

// Agree compares the tables of contents with the headers in their layers.
func (f *unsureFile) Agree(ctx context.Context) error {
	return f.stream.compareTOCs(ctx, false)
}

// Verify also compares the tables of contents with all of their layers.
func (f *unsureFile) Verify(ctx context.Context) error {
	for _, u := range f.layers {
		if err := u.verify(ctx); err != nil {
			return err
		}
	}
	return f.stream.compareTOCs(ctx, true)
}

// open opens the file at off in the layer.
func (u *unverified) open(off, size int64) *farFile {
	name := transport.DigestOf([]byte("kubevirt-disk part\n" + u.name + "\n" +
		strconv.FormatInt(off, 10) + "\n" + strconv.FormatInt(size, 10)))
	return &farFile{farOptions: farOptions{report: u.report}, blob: section{u, off, size},
		name: name, chunk: unverifiedChunk}
}
