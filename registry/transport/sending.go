package transport

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

const (
	// leastPiece, firstPiece and largestPiece limit the size of one request. A broken connection
	// loses at most one piece, and proxies limit what they accept. Bytes.
	firstPiece   = 8 << 20
	leastPiece   = 1 << 20
	largestPiece = 64 << 20
	// shortPiece and longPieceTime bound how long a piece should take. When a push is interrupted,
	// the present piece has time to end: see lastPiece.
	shortPiece    = time.Second
	longPieceTime = 4 * time.Second
	// lastPiece is how long an interrupted push goes on sending the present piece: distribution 2
	// refuses to go on after a part of a piece.
	lastPiece = 10 * time.Second
	// maxRestarts is how often a blob is begun again because the registry has refused the data.
	maxRestarts = 4
)

// nextPiece is the size of the next piece after one that has taken that long.
func nextPiece(size int64, took time.Duration) int64 {
	switch {
	case took < shortPiece:
		return min(2*size, largestPiece)
	case took > longPieceTime:
		return max(size/2, min(size, firstPiece))
	}
	return size
}

// sending is a blob that is being sent.
type sending struct {
	u     *Uploader
	desc  v1.Descriptor
	from  content
	tries *tries
	kept  *unfinished

	at    *url.URL // where the upload goes on; nil: it has not begun
	off   int64    // bytes that have arrived
	piece int64    // size of the next piece
	most  int64    // size of the largest allowed piece
	ask   bool     // only the registry knows how much has arrived
	// told: off is what the registry has said. Only the digest at the end shows whether it is
	// right.
	told     bool
	pieces   int  // sent in this upload
	whole    bool // send everything in one request
	restarts int
	ended    bool // everything was sent; it is unknown whether the registry has the blob
	done     bool
}

// Blob sends a blob, unless the registry has it. Data that arrived before a connection broke, or
// before a push was interrupted, is not sent again if the registry has kept it.
func (u *Uploader) Blob(ctx context.Context, desc v1.Descriptor, from content) error {
	there, err := u.has(ctx, desc)
	if err != nil {
		return err
	}
	if there {
		u.sent.Add(desc.Size)
		return nil
	}
	s := &sending{u: u, desc: desc, from: source{from}, tries: u.endpoint.tries(),
		piece: firstPiece, most: largestPiece}
	if desc.Size > firstPiece {
		s.kept = rememberUpload(u.kept, u.endpoint.repo.Name(), desc.Digest.String())
		defer s.kept.close()
	}
	s.at = s.kept.location()
	s.ask = s.at != nil
	for !s.done {
		if err := s.next(ctx); err != nil {
			s.arrived(0) // the caller may send it again
			return fmt.Errorf("sending %s: %w", desc.Digest, err)
		}
	}
	return nil
}

// next makes the next request, and decides how to go on after a failure.
func (s *sending) next(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	asking, ended := s.ask, s.ended
	err := s.request(ctx)
	switch {
	case err == nil:
		return nil
	case asking && (refused(err) || errors.Is(err, errUnsaid)) && s.restarts < maxRestarts:
		s.restarts++
		s.restart() // the registry does not know this upload any more
		return nil
	case s.tooLarge(err):
		s.most = max(min(s.piece, s.desc.Size)/2, leastPiece)
		s.piece, s.ask = s.most, true
		return nil
	case errors.Is(err, errNotKept) && s.restarts < maxRestarts:
		s.restarts++
		s.whole = true
		s.restart()
		return nil
	case s.whole && !refused(err) && s.restarts < maxRestarts && s.at != nil:
		s.restarts++ // the connection broke
		s.restart()
		s.tries.progress()
		return s.tries.waitForRetry(ctx, err)
	case s.at != nil && refused(err) && s.restarts < maxRestarts &&
		(s.told || ended || s.ended && s.pieces > 1 || 0 < s.off && s.off < s.desc.Size ||
			notFound(err)):
		// The registry has another amount than it should, or does not know the upload any more,
		// possibly because it is complete.
		if s.restarts++; s.told || s.ended {
			// If there were several pieces, the registry may be unable to join them.
			s.whole = s.whole || s.pieces > 0 && (!s.told || s.restarts > 1)
			s.restart()
		} else {
			s.ask = true
		}
		return nil
	}
	if statusOf(err) != http.StatusTooManyRequests && s.off < s.desc.Size {
		s.ask = s.at != nil // a busy registry has accepted nothing
	}
	return s.tries.waitForRetry(ctx, err)
}

// refused reports whether the registry refuses the data itself, whoever sends it.
func refused(err error) bool {
	status := statusOf(err)
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusRequestTimeout,
		http.StatusTooManyRequests:
		return false
	}
	return status/100 == 4
}

// tooLarge reports whether something on the way refuses pieces of this size, and a smaller one can
// be tried. Some answer 416, which may also mean that the registry has less than expected.
func (s *sending) tooLarge(err error) bool {
	if s.whole || min(s.piece, s.desc.Size-s.off) <= leastPiece {
		return false
	}
	status := statusOf(err)
	return status == http.StatusRequestEntityTooLarge ||
		status == http.StatusRequestedRangeNotSatisfiable && (s.off == 0 || s.told)
}

// restart begins the blob again.
func (s *sending) restart() {
	s.arrived(0)
	s.at, s.ask, s.told, s.pieces = nil, false, false, 0
	s.kept.forget()
}

// arrived notes how much has arrived.
func (s *sending) arrived(n int64) {
	s.u.sent.Add(n - s.off)
	s.off = n
}

func (s *sending) request(ctx context.Context) error {
	switch {
	case s.at == nil:
		return s.begin(ctx)
	case s.ask:
		at, n, err := s.u.status(ctx, s.at)
		if err != nil {
			return err
		}
		if n > s.desc.Size {
			return errUnsaid
		}
		s.at, s.ask, s.told = at, false, true
		s.arrived(n)
		s.kept.remember(at)
		return nil
	case s.whole:
		if err := s.u.whole(ctx, s.at, s.desc, s.from); err != nil {
			return err
		}
		s.arrived(s.desc.Size)
		s.done = true
		return nil
	case s.off == s.desc.Size:
		s.ended = true
		if err := s.u.finish(ctx, s.at, s.desc); err != nil {
			return err
		}
		s.done = true
		s.kept.forget()
		return nil
	}
	return s.sendPiece(ctx)
}

func (s *sending) begin(ctx context.Context) (err error) {
	if s.ended || s.whole { // the blob may be there, and only the answer was lost
		if s.done, err = s.u.has(ctx, s.desc); err != nil {
			return err
		}
	}
	if !s.done {
		s.at, err = s.u.begin(ctx, s.desc)
		s.done = err == nil && s.at == nil
	}
	if s.done {
		s.arrived(s.desc.Size)
	}
	return err
}

func (s *sending) sendPiece(ctx context.Context) error {
	if s.kept != nil {
		var end func()
		ctx, end = lingering(ctx, lastPiece, func() {
			s.u.endpoint.client.opt.Warn(fmt.Sprintf("interrupted: finishing the current piece "+
				"(up to %s), so that the push can be resumed; interrupt again to stop at once",
				lastPiece))
		})
		defer end()
	}
	n := min(s.piece, s.desc.Size-s.off)
	began := time.Now()
	at, err := s.u.piece(ctx, s.at, s.from, s.off, n)
	if err != nil {
		return err
	}
	s.at = at
	s.tries.progress()
	s.pieces++
	s.arrived(s.off + n)
	s.piece = min(nextPiece(s.piece, time.Since(began)), s.most)
	s.kept.remember(at)
	return nil
}

// lingering returns a context that ends a while after ctx. It calls warn when ctx ends.
func lingering(ctx context.Context, grace time.Duration, warn func()) (context.Context, func()) {
	on, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	warned := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(warned)
		warn()
		time.AfterFunc(grace, func() { cancel(context.Cause(ctx)) })
	})
	return on, func() {
		if !stop() {
			<-warned // so that no warning comes after the end
		}
		cancel(nil)
	}
}
