package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// Blob is one blob of an image, known by its digest and read as a whole or by ranges.
type Blob struct {
	Desc v1.Descriptor
	from *repository                                                // nil: open is set
	open func(ctx context.Context, off, length int64) io.ReadCloser // see Stream
	// learned gets the digest of a file whose digest was unknown; nil: it is in Desc.
	learned *learned
	sum512  string // its SHA-512, in hexadecimal, if it is the only known digest
}

// Host is the host of the blob's registry; "": it is on this machine.
func (b *Blob) Host() string {
	if b.from == nil {
		return ""
	}
	return b.from.ref.Host()
}

// NewBlob is a blob that open reads, as Stream does.
func NewBlob(desc v1.Descriptor,
	open func(ctx context.Context, off, length int64) io.ReadCloser) *Blob {
	return &Blob{Desc: desc, open: open}
}

// Stream reads length bytes from off on. It returns io.EOF only behind the last of them. After a
// broken connection it goes on where that ended. It requests nothing before the first Read.
func (b *Blob) Stream(ctx context.Context, off, length int64) run {
	if b.from == nil {
		return run{ReadCloser: b.open(ctx, off, length)}
	}
	f := &fetch{ctx: ctx, desc: b.Desc, from: b.from, endpoints: b.from.order(), off: off,
		end: off + length, part: off > 0 || length < b.Desc.Size}
	if b.learned != nil {
		f.unproven = newUnproven(off)
	}
	return run{f, f}
}

// run is the reading of a range of a blob.
type run struct {
	io.ReadCloser
	fetch *fetch // nil: the blob is on this machine
}

// Doubt calls check for content that was read. If check returns an error, the endpoint that sent
// the content is asked last from then on. If there is no other endpoint, check is not called. A
// *fs.PathError does not mean wrong content: it cannot be checked now.
func (r run) Doubt(check func() error) {
	if r.fetch == nil || !r.fetch.mustCheck() {
		return
	}
	if err := check(); err != nil && !errors.As(err, new(*fs.PathError)) {
		r.fetch.wrong()
	}
}

// Again reports whether fetching again may help after wrong content, because another endpoint is
// asked next.
func (b *Blob) Again(err error, tries int) bool {
	return errors.As(err, new(*DigestError)) && b.from != nil && tries < len(b.from.order())
}

// FillChecked is Fill. If check returns an error, the endpoint that sent the content is asked last
// from then on.
func (b *Blob) FillChecked(ctx context.Context, p []byte, off int64, check func() error) error {
	n, r, err := b.readAt(ctx, p, off)
	if n < len(p) {
		return UnexpectedEnd(err)
	}
	r.Doubt(check)
	return nil
}

// DigestError says that content does not match its digest.
type DigestError struct{ Want, Got string }

func (e *DigestError) Error() string {
	return fmt.Sprintf("the content of %s has the digest %s: it was changed on its way or in the "+
		"registry", e.Want, e.Got)
}

// ReadAt reads a range: all of p, or an error. At the end of the blob it returns the bytes before
// the end, and io.EOF. It verifies nothing.
func (b *Blob) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	n, _, err := b.readAt(ctx, p, off)
	return n, err
}

// readAt is ReadAt, and also returns the run.
func (b *Blob) readAt(ctx context.Context, p []byte, off int64) (int, run, error) {
	if off < 0 {
		return 0, run{}, errors.New("read before the beginning of a blob")
	}
	if off >= b.Desc.Size {
		return 0, run{}, io.EOF
	}
	var atEnd error
	if rest := b.Desc.Size - off; int64(len(p)) > rest {
		p, atEnd = p[:rest], io.EOF
	}
	if len(p) == 0 {
		return 0, run{}, atEnd
	}
	r := b.Stream(ctx, off, int64(len(p)))
	defer r.Close()
	n, err := io.ReadFull(r, p)
	if err != nil {
		return n, r, err
	}
	return n, r, atEnd
}

// Fill reads a range: all of p, or an error. It verifies nothing.
func (b *Blob) Fill(ctx context.Context, p []byte, off int64) error {
	return b.FillChecked(ctx, p, off, func() error { return nil })
}

// fetch reads a range of a blob in a registry. After a broken connection it makes another, and goes
// on where the former ended.
type fetch struct {
	ctx       context.Context
	desc      v1.Descriptor
	from      *repository
	endpoints []*endpoint // those left to ask; the first is asked now
	tries     *tries
	last      time.Time // when enough last came, from any of them; zero: nothing was requested yet
	read      time.Time // when the last Read ended; zero: there was none
	off, end  int64
	part      bool          // it is only a part of the blob
	alone     bool          // it fills a spool itself, so it must not read from one
	body      io.ReadCloser // nil: no connection
	spool     *spool        // a spool that has brought data; nil: none has
	unproven  *unproven     // nil: a digest will show wrong content
}

var pullScopes = func(e *endpoint) []string { return []string{e.repo.Scope("pull")} }

func (f *fetch) Read(p []byte) (int, error) {
	if !f.read.IsZero() { // the time since the last Read is the reader's, not the registry's
		away := time.Since(f.read)
		if f.last = f.last.Add(away); f.tries != nil {
			f.tries.last = f.tries.last.Add(away)
		}
	}
	n, err := f.bring(p)
	f.read = time.Now()
	return n, err
}

// bring waits for the next bytes.
func (f *fetch) bring(p []byte) (int, error) {
	for {
		if f.off == f.end {
			return 0, io.EOF
		}
		if f.body == nil {
			if err := f.connect(); err != nil {
				return 0, err
			}
		}
		n, err := f.body.Read(p[:min(int64(len(p)), f.end-f.off)])
		f.off += int64(n)
		f.unproven.add(p[:n])
		if n > 0 {
			if f.tries.came(n); f.tries.few == 0 {
				f.last = f.tries.last
			}
		}
		if errors.Is(err, errAskAgain) {
			f.Close()
			f.tries, f.last = nil, time.Time{} // the wait was for the spool, not for an endpoint
			continue
		}
		if _, ok := f.body.(*spoolReader); ok && err != nil {
			f.Close()
			return n, err // after all attempts
		}
		if err != nil {
			f.Close()
			if f.off < f.end {
				if err == io.EOF {
					err = io.ErrUnexpectedEOF
				}
				err = fmt.Errorf("the connection broke after %d of %d bytes: %w", f.off,
					f.desc.Size, err)
				if err := f.next(err); err != nil {
					return n, err
				}
			}
		}
		if n > 0 {
			return n, nil
		}
	}
}

func (f *fetch) Close() error {
	if f.body == nil {
		return nil
	}
	err := f.body.Close()
	f.body = nil
	return err
}

// next waits for another attempt at the same endpoint, or goes on to the next one. An endpoint that
// failed for a while, or is slow, is asked again after all others, until the timeout, because
// mirrors come back. One whose answer is final is not asked again.
func (f *fetch) next(err error) error {
	slow := errors.Is(err, errSlow) || errors.Is(err, errSilent)
	if slow = slow && len(f.endpoints) > 1; !slow {
		if err = f.tries.waitForRetry(f.ctx, err); err == nil {
			return nil
		}
	}
	rest := f.endpoints[1:]
	if (slow || errors.As(err, new(*impatient))) && len(rest) > 0 && f.ctx.Err() == nil {
		f.from.shun(f.endpoints[0], rest[0], err)
		rest = append(slices.Clone(rest), f.endpoints[0])
	}
	timeout := f.endpoints[0].client.opt.Timeout
	if f.ctx.Err() != nil || len(rest) == 0 || time.Since(f.last) >= timeout {
		return fmt.Errorf("reading %s: %w", f.desc.Digest, err)
	}
	f.endpoints, f.tries = rest, nil
	return nil
}

// beginTurn begins to ask the first endpoint. Its time is limited if there are others.
func (f *fetch) beginTurn() {
	e := f.endpoints[0]
	f.tries = e.tries()
	if f.last.IsZero() {
		f.last = f.tries.last
	}
	if len(f.endpoints) > 1 {
		f.tries.timeout, f.tries.rate = e.client.opt.Turn, leastRate
	} else {
		f.tries.last, f.tries.timeout = f.last, e.client.opt.Timeout
	}
}

// connect asks for the rest of the range until an answer comes.
func (f *fetch) connect() error {
	for {
		e := f.endpoints[0]
		if f.tries == nil {
			f.beginTurn()
		}
		body, err := f.ask(e)
		if err == nil {
			f.body = body
			f.tries.renewed = false // the credential is good
			return nil
		}
		if err := f.next(err); err != nil {
			return err
		}
	}
}

// ask makes one request, for a closed range if the endpoint sends parts. Every request begins at
// the registry, so a signed address is never older than the request. If the blob is fetched as a
// whole, ask makes no request.
func (f *fetch) ask(e *endpoint) (io.ReadCloser, error) {
	if !f.alone {
		if s := f.from.spoolOf(f.desc); s != nil {
			return f.fromSpool(s), nil
		}
	}
	at := f.off // offset at which the answer begins
	res, err := f.request(e, at)
	if err == nil && res.StatusCode == http.StatusPartialContent && !f.unproven.goesOn(res, at) {
		_ = res.Body.Close()
		e.client.opt.Warn(fmt.Sprintf("%s: nothing shows that its next answer is of the same "+
			"file, whose digest nobody has said: it begins again, and the first %d bytes must "+
			"be the same", e.repo.RegistryStr(), f.off))
		at = f.unproven.start
		res, err = f.request(e, at)
	}
	switch {
	case err != nil:
		return nil, err
	case res.StatusCode == http.StatusPartialContent:
	case f.part && !f.alone && f.from.spoolDir != "":
		if s := f.from.spoolFrom(e, f.desc); s != nil {
			_ = res.Body.Close()
			return f.fromSpool(s), nil
		}
		fallthrough
	default:
		at = 0
	}
	if err = f.unproven.pass(res, at, f.off); err != nil {
		_ = res.Body.Close()
		return nil, err
	}
	return res.Body, nil
}

// request asks once for the bytes from at on.
func (f *fetch) request(e *endpoint, at int64) (*http.Response, error) {
	header := http.Header{"Range": {fmt.Sprintf("bytes=%d-%d", at, f.end-1)}}
	res, err := e.part(f.ctx, pullScopes(e), request{method: http.MethodGet,
		path: "blobs/" + f.desc.Digest.String(), header: header,
		accept: []int{http.StatusPartialContent, http.StatusOK}}, at)
	if err != nil {
		return nil, err
	}
	stream(res.Body, f.tries.rate, f.tries.timeout)
	if err := f.check(res); err != nil {
		_ = res.Body.Close()
		return nil, err
	}
	return res, nil
}

func (f *fetch) fromSpool(s *spool) io.ReadCloser {
	f.spool = s
	return &spoolReader{spool: s, ctx: f.ctx, off: f.off, part: f.part}
}

// mustCheck reports whether something can be done about wrong content.
func (f *fetch) mustCheck() bool { return f.spool != nil || len(f.from.order()) > 1 }

// wrong makes the endpoint that has sent wrong content the last to ask. Its content is not read
// again.
func (f *fetch) wrong() {
	if f.spool == nil {
		f.from.distrust(f.endpoints[0])
		return
	}
	f.spool.mu.Lock()
	sender := f.spool.sender
	f.spool.mu.Unlock()
	f.spool.drop()
	f.from.distrust(sender)
}

// check compares the answer with the request. A registry may send everything instead of the range.
func (f *fetch) check(res *http.Response) error {
	size := res.ContentLength
	if res.StatusCode == http.StatusPartialContent {
		_, size, _ = contentRange(res.Header.Get("Content-Range"))
	}
	if size >= 0 && size != f.desc.Size {
		return f.otherSize(res, size)
	}
	return nil
}

// otherSize is the error for an answer of another length.
func (f *fetch) otherSize(res *http.Response, is int64) error {
	if f.endpoints[0].web != nil {
		return permanent(&ReplacedError{Host: res.Request.URL.Host, Was: f.desc.Size, Is: is})
	}
	return permanent(fmt.Errorf("%s has %d bytes, and the manifest says %d", f.desc.Digest, is,
		f.desc.Size))
}

// contentRange parses "bytes FIRST-LAST/TOTAL" (RFC 9110, section 14.4); a total of "*" is -1.
func contentRange(value string) (first, total int64, ok bool) {
	rest, ok := strings.CutPrefix(value, "bytes ")
	if !ok {
		return 0, 0, false
	}
	span, totalText, ok := strings.Cut(rest, "/")
	firstText, _, ok2 := strings.Cut(span, "-")
	if !ok || !ok2 {
		return 0, 0, false
	}
	first, err := strconv.ParseInt(firstText, 10, 64)
	if err != nil || first < 0 {
		return 0, 0, false
	}
	if totalText == "*" {
		return first, -1, true
	}
	total, err = strconv.ParseInt(totalText, 10, 64)
	return first, total, err == nil && total >= 0
}

// withoutQuery removes the queries from the addresses in an error, because they may be signatures.
func withoutQuery(err error) error {
	var bad *url.Error
	if !errors.As(err, &bad) {
		return err
	}
	address := "the server"
	if u, perr := url.Parse(bad.URL); perr == nil && u.Host != "" {
		address = u.Host
	}
	return fmt.Errorf("asking %s: %w", address, bad.Err)
}

func UnexpectedEnd(err error) error {
	if err == nil || err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
