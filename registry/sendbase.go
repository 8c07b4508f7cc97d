package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"kubevirt.io/disk/registry/transport"
)

// sendBase sends the layers of the base: mounted from its repository, or copied.
func (p *pusher) sendBase(ctx context.Context, u *transport.Uploader) error {
	var sent []v1.Hash
	for _, platform := range p.base.platforms {
		for _, l := range platform.manifest.Layers {
			if slices.Contains(sent, l.Digest) {
				continue
			}
			sent = append(sent, l.Digest)
			p.opt.Progress.total.Add(l.Size)
			p.opt.Progress.stored.Add(l.Size)
			b, err := p.base.source.Blob(l)
			if err != nil {
				return err
			}
			for try := 1; ; try++ {
				f := &fetched{ctx: ctx, blob: b}
				err := u.Blob(ctx, l, f)
				if err == nil {
					break
				}
				// If a mirror has sent something else, its registry is asked now.
				if err = errors.Join(f.wrong(), err); !b.Again(err, try) {
					return fmt.Errorf("base image: %w", err)
				}
			}
		}
	}
	return nil
}

// fetched is a blob of another repository that is sent on. The receiving registry checks it, but
// cannot say whether a mirror has changed it.
type fetched struct {
	ctx  context.Context
	blob *transport.Blob

	// An upload that was given up may still read when the next one begins.
	mu  sync.Mutex
	in  io.ReadCloser // guarded by mu
	at  int64         // guarded by mu
	bad error         // what was last read from its beginning to its end is wrong; guarded by mu
}

func (f *fetched) Size() int64 { return f.blob.Desc.Size }

// ReadAt is mostly called at the offset where the last call ended. Then one request fetches
// everything.
func (f *fetched) ReadAt(p []byte, off int64) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.in == nil || f.at != off {
		if f.in != nil {
			f.in.Close()
		}
		if f.at = off; off == 0 {
			f.in = f.blob.Verified(f.ctx)
		} else {
			f.in = f.blob.Stream(f.ctx, off, f.Size()-off)
		}
	}
	n, err := io.ReadFull(f.in, p[:min(int64(len(p)), f.Size()-off)])
	if f.at += int64(n); f.at == f.Size() && err == nil {
		_, f.bad = io.Copy(io.Discard, f.in) // verifies it
	}
	if f.at == f.Size() || err != nil {
		f.in.Close()
		f.in = nil
	}
	if err == nil && n < len(p) {
		err = io.EOF
	}
	return n, err
}

// wrong is an error if the content that was read last has another digest than it should.
func (f *fetched) wrong() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.bad
}
