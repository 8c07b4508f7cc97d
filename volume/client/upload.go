package client

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"syscall"
	"time"

	"kubevirt.io/disk/volume/api"
)

// UploadOptions are the options of an upload. The zero value works.
type UploadOptions struct {
	// Timeout is how long an upload is tried again while no data gets through. 0: two minutes.
	Timeout time.Duration
	// Sent is called with the number of bytes that the server has, or that are on their way to it.
	// The number may go down.
	Sent func(bytes int64)
	// Again is called with the reason when a request is tried again.
	Again func(err error)
}

const (
	defaultTimeout = 2 * time.Minute
	// firstWait and lastWait bound the pause before another try. It doubles each time.
	firstWait = 200 * time.Millisecond
	lastWait  = 10 * time.Second
	// answerTimeout is how long the server may take to answer a question.
	answerTimeout = 30 * time.Second
	// stuck is how long a connection may accept no data before it is closed.
	stuck = time.Minute
)

// Upload sends the content of a volume. It returns when the volume can be used, or is being made
// ready. If the volume does not exist, the server makes it with the size of the data. If a
// connection breaks, the upload goes on from what the server has, also if an earlier process began
// it. At the end the server compares a digest of all data.
//
// Errors of the server are *api.Error. If ctx ends, a later call with the same data goes on.
func (c *Client) Upload(ctx context.Context, name string, from io.ReaderAt, size int64,
	opt UploadOptions) (api.Volume, error) {
	opt.Timeout = cmp.Or(opt.Timeout, defaultTimeout)
	if opt.Sent == nil {
		opt.Sent = func(int64) {}
	}
	if opt.Again == nil {
		opt.Again = func(error) {}
	}
	u := &upload{c: c, name: name, size: size, opt: opt,
		data: &hashed{from: from, size: size}, moved: time.Now()}
	u.data.reset()
	if f, ok := from.(interface{ Stat() (fs.FileInfo, error) }); ok {
		u.file = f.Stat
		var err error
		if u.began, err = f.Stat(); err != nil {
			return api.Volume{}, unreadable(err)
		}
	}
	for wait := firstWait; ; wait = min(2*wait, lastWait) {
		before := u.offset
		u.tries++
		v, err := u.step(ctx)
		if err == nil && u.done {
			return v, nil
		}
		if ctx.Err() != nil {
			return api.Volume{}, ctx.Err()
		}
		if err == nil || u.offset > before {
			u.moved, wait = time.Now(), firstWait
		}
		if err == nil {
			continue
		}
		if fatal := u.fatal(err); fatal != nil {
			return api.Volume{}, fatal
		}
		if time.Since(u.moved) > opt.Timeout {
			if u.sent {
				err = fmt.Errorf("%w: the server may have everything, and may still complete the "+
					"volume: ask for it before you send it again", err)
			}
			return api.Volume{}, fmt.Errorf("the upload made no progress for %s and is given up "+
				"at %d of %d bytes: %w", opt.Timeout, u.offset, size, err)
		}
		opt.Again(err)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return api.Volume{}, ctx.Err()
		}
	}
}

// upload is one upload, in any number of requests.
type upload struct {
	c    *Client
	name string
	size int64
	opt  UploadOptions
	data *hashed

	file  func() (fs.FileInfo, error) // returns the state of the data's file; nil: it is no file
	began fs.FileInfo                 // the state at the beginning

	tries  int    // how many steps were tried
	there  bool   // the volume was there before the upload
	at     string // address of the upload; "": it has not begun
	known  bool   // offset is what the server has
	offset int64
	sent   bool // all data was sent at least once
	again  int  // how often it was begun again
	moved  time.Time
	done   bool
}

// step makes one request.
func (u *upload) step(ctx context.Context) (api.Volume, error) {
	switch {
	case u.at == "":
		return api.Volume{}, u.begin(ctx)
	case !u.known:
		return u.ask(ctx)
	case u.offset < u.size:
		return api.Volume{}, u.send(ctx)
	}
	return u.end(ctx)
}

// unreadableError says that the data itself cannot be read.
type unreadableError struct{ err error }

func unreadable(err error) error { return &unreadableError{err} }

func (e *unreadableError) Error() string {
	return "the data to send cannot be read: " + e.err.Error()
}
func (e *unreadableError) Unwrap() error { return e.err }

// errAgain says that a step must be repeated.
var errAgain = errors.New("the server does not have all that was sent")

// unexpected is the error for an answer that no volumes server gives: a proxy before it may have
// answered, and the server may know nothing of the request.
func unexpected(answer *http.Response) error {
	return fmt.Errorf("%w: the answer is %s, which may be of a proxy before it", errAgain,
		answer.Status)
}

// fatal returns err if another attempt is useless.
func (u *upload) fatal(err error) error {
	var refused *api.Error
	again := errors.Is(err, errAgain) || errors.As(err, new(*url.Error)) &&
		!errors.As(err, new(*tls.CertificateVerificationError))
	if errors.As(err, &refused) {
		switch refused.Status {
		case http.StatusRequestTimeout, http.StatusTooManyRequests: // of a proxy before the server
			again = true
		default:
			again = refused.Status >= 500 && refused.Status != http.StatusInsufficientStorage
		}
	}
	if advice := u.wrongAddress(err); advice != "" {
		return fmt.Errorf("%w: %s", err, advice)
	}
	if !again || errors.As(err, new(*unreadableError)) {
		return err
	}
	u.known = false
	return nil
}

// wrongAddress says what to do if the first try shows that the address must be wrong. A server that
// was there before may be restarting.
func (u *upload) wrongAddress(err error) string {
	var dns *net.DNSError
	var refused *api.Error
	host := u.c.base.Host
	switch {
	case u.tries > 1:
		return ""
	case errors.Is(err, http.ErrSchemeMismatch), errors.As(err, new(tls.RecordHeaderError)):
		return "the server does not use TLS: write http://" + host
	case errors.As(err, &refused) && refused.Status == http.StatusBadRequest &&
		u.c.base.Scheme == "http":
		return "if the server uses TLS, write https://" + host
	case errors.As(err, &dns) && dns.IsNotFound:
		return "check the name of the host"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "nothing listens there: check the port, and that the server runs with " +
			"--volumes-listen"
	}
	return ""
}

func (u *upload) request(ctx context.Context, method, path string, body io.Reader, length int64,
	header ...string) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, u.c.base.String(), body)
	if err != nil {
		return nil, err
	}
	r.ContentLength = length
	r.Header.Set("Accept", "application/json")
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	answer, err := u.c.Do(r, path)
	if cause := context.Cause(ctx); err != nil && cause != ctx.Err() {
		err = fmt.Errorf("%w: %w", cause, err)
	}
	return answer, err
}

// begin creates the upload, or finds the one of an earlier process.
func (u *upload) begin(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	if u.tries == 1 {
		_, err := u.c.Get(ctx, u.name)
		u.there = err == nil
	}
	answer, err := u.request(ctx, http.MethodPut, "/volume/"+url.PathEscape(u.name)+"/data", nil, 0,
		"Upload-Complete", "?0", "Upload-Length", strconv.FormatInt(u.size, 10))
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	location := answer.Header.Get("Location")
	if refused := Refusal(answer); refused != nil && answer.StatusCode != http.StatusConflict {
		return refused
	} else if refused != nil && location == "" {
		return refused
	} else if refused != nil {
		return u.takeUp(location, refused)
	}
	if location == "" {
		return fmt.Errorf("the server does not say where the upload goes on: %s cannot be resumed",
			u.name)
	}
	u.at, u.known, u.offset = location, true, 0
	return nil
}

// takeUp continues the existing upload.
func (u *upload) takeUp(location string, refused error) error {
	if u.again > 0 {
		return refused
	}
	u.at, u.known = location, false
	return nil
}

// attend returns a context for a request that may wait for the server to expand an image, for any
// time. The context ends when the server stops answering other requests meanwhile. The caller calls
// stop.
func (u *upload) attend(ctx context.Context) (attended context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	var work sync.WaitGroup
	work.Go(func() {
		pause := min(answerTimeout, u.opt.Timeout/4)
		for {
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return
			}
			one, end := context.WithTimeout(ctx, pause)
			_, err := u.c.Get(one, u.name)
			end()
			refused, ok := errors.AsType[*api.Error](err)
			if err != nil && !ok || ok && refused.Status >= 500 { // possibly of a proxy
				cancel(errors.New("the server answers nothing"))
				return
			}
			u.moved = time.Now()
		}
	})
	return ctx, func() {
		cancel(nil)
		work.Wait()
	}
}

// ask asks the server how much it has. The server answers when an earlier request of the upload has
// ended.
func (u *upload) ask(ctx context.Context) (api.Volume, error) {
	ctx, stop := u.attend(ctx)
	defer stop()
	answer, err := u.request(ctx, http.MethodHead, u.at, nil, 0)
	if err != nil {
		return api.Volume{}, err
	}
	defer answer.Body.Close()
	if answer.StatusCode == http.StatusNotFound || answer.StatusCode == http.StatusConflict {
		return u.lost(ctx)
	}
	if refused := Refusal(answer); refused != nil {
		return api.Volume{}, refused
	}
	if answer.StatusCode != http.StatusNoContent {
		return api.Volume{}, unexpected(answer)
	}
	offset, err := strconv.ParseInt(answer.Header.Get("Upload-Offset"), 10, 64)
	if err != nil || offset < 0 || offset > u.size {
		return api.Volume{}, u.another("with %q", answer.Header.Get("Upload-Offset"))
	}
	length := answer.Header.Get("Upload-Length")
	if length != "" && length != strconv.FormatInt(u.size, 10) {
		return api.Volume{}, u.another("of %s", length)
	}
	u.offset, u.known = offset, true
	if answer.Header.Get("Upload-Complete") == "?1" {
		return u.finished(ctx)
	}
	return api.Volume{}, nil
}

// another is the error for an interrupted upload of another file, which has to be given up first.
// what completes the sentence "an upload ...".
func (u *upload) another(what, number string) error {
	return &api.Error{Status: http.StatusConflict, Message: fmt.Sprintf("an upload "+what+
		" bytes to the volume %q was interrupted, and the file has %d: it is of another file; "+
		"give it up with DELETE of %s", number, u.name, u.size, u.at)}
}

// lost handles a server that does not know the upload. If the volume has all data, only the last
// answer was lost. Otherwise the upload begins again, but not if somebody has deleted the volume.
func (u *upload) lost(ctx context.Context) (api.Volume, error) {
	if u.sent || u.there {
		v, err := u.c.Get(ctx, u.name)
		refused, ok := errors.AsType[*api.Error](err)
		gone := ok && refused.Status == http.StatusNotFound
		switch {
		case gone && u.there:
			return api.Volume{}, &api.Error{Status: refused.Status, Code: refused.Code,
				Message: fmt.Sprintf("the volume %q was deleted while data was sent to it", u.name)}
		case err != nil && !gone:
			return api.Volume{}, err
		case u.sent && (v.Info.State == api.StateReady || v.Info.State == api.StateFilling):
			u.done = true
			return v, nil
		}
	}
	const most = 3
	if u.again++; u.again > most {
		return api.Volume{}, &api.Error{Status: http.StatusNotFound,
			Message: "the server has forgotten the upload again and again"}
	}
	u.at, u.known, u.offset = "", false, 0
	return api.Volume{}, errAgain
}

func (u *upload) finished(ctx context.Context) (api.Volume, error) {
	v, err := u.c.Get(ctx, u.name)
	u.done = err == nil
	return v, err
}

// send sends the data that the server does not have yet.
func (u *upload) send(ctx context.Context) error {
	if err := u.data.seek(ctx, u.offset); err != nil {
		return unreadable(err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	body := &reading{u: u, watch: time.AfterFunc(stuck, func() {
		cancel(fmt.Errorf("the server accepted no data for %s", stuck))
	})}
	answer, err := u.request(ctx, http.MethodPatch, u.at, body, u.size-u.offset,
		"Content-Type", "application/partial-upload", "Upload-Complete", "?0",
		"Upload-Offset", strconv.FormatInt(u.offset, 10))
	u.known = false
	if failed := body.stop(); failed != nil {
		err = errors.Join(err, unreadable(failed))
	}
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode == http.StatusNotFound ||
		answer.StatusCode == http.StatusConflict && answer.Header.Get("Upload-Offset") != "" {
		return errAgain // the next step asks the server how much it has
	}
	if refused := Refusal(answer); refused != nil {
		return refused
	}
	u.offset, u.known, u.sent = u.size, true, true
	return nil
}

// end asks the server to compare the digest and make the volume from the data.
func (u *upload) end(ctx context.Context) (api.Volume, error) {
	digest, err := u.data.digest(ctx)
	if err != nil {
		return api.Volume{}, unreadable(err)
	}
	if err := u.untouched(ctx); err != nil {
		return api.Volume{}, err
	}
	u.known, u.sent = false, true
	ctx, stop := u.attend(ctx)
	defer stop()
	answer, err := u.request(ctx, http.MethodPatch, u.at, nil, 0,
		"Content-Type", "application/partial-upload", "Upload-Complete", "?1",
		"Upload-Offset", strconv.FormatInt(u.size, 10), "Repr-Digest", digest)
	if err != nil {
		return api.Volume{}, err
	}
	defer answer.Body.Close()
	if answer.StatusCode == http.StatusNotFound ||
		answer.StatusCode == http.StatusConflict && answer.Header.Get("Upload-Offset") != "" {
		return api.Volume{}, errAgain
	}
	if refused := Refusal(answer); refused != nil {
		return api.Volume{}, refused
	}
	if answer.StatusCode != http.StatusCreated {
		return api.Volume{}, unexpected(answer)
	}
	var v api.Volume
	if err := json.NewDecoder(io.LimitReader(answer.Body, maxAnswer)).Decode(&v); err != nil {
		return api.Volume{}, fmt.Errorf("%w: its answer cannot be read: %w", errAgain, err)
	}
	u.done = true
	return v, nil
}

// untouched gives the upload up if the file was changed meanwhile: the sent data and its digest may
// belong to neither the old content nor the new one.
func (u *upload) untouched(ctx context.Context) error {
	if u.file == nil {
		return nil
	}
	now, err := u.file()
	if err != nil {
		return unreadable(err)
	}
	if now.Size() == u.began.Size() && now.ModTime().Equal(u.began.ModTime()) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	if answer, err := u.request(ctx, http.MethodDelete, u.at, nil, 0); err == nil {
		answer.Body.Close()
	}
	return errors.New("the file was changed while it was sent, and the upload is given up: start " +
		"again when nothing writes to it")
}

// reading is the body of a request. The answer may come while the body is still being read. stop
// ends the reading.
type reading struct {
	u     *upload
	watch *time.Timer

	mu     sync.Mutex
	ended  bool  // guarded by mu
	failed error // guarded by mu; of reading the file
}

func (r *reading) Read(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return 0, io.ErrClosedPipe
	}
	r.watch.Reset(stuck)
	n, err := r.u.data.Read(p)
	if err != nil && err != io.EOF {
		r.failed = err
	}
	r.u.opt.Sent(r.u.data.off)
	return n, err
}

// stop ends reading, and returns the error of reading the file, if any.
func (r *reading) stop() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	r.watch.Stop()
	return r.failed
}
