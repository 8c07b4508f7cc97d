package transport

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

const (
	FirstPause = 100 * time.Millisecond
	LongPause  = 10 * time.Second
	// maxRefused is how often a refusal may count as an expired token or signature.
	maxRefused = 4
	// retryHeader says when to ask again.
	retryHeader = "Retry-After"
	// maxErrorBody is how much of an answer with an error is read, in bytes.
	maxErrorBody = 16 << 10
)

// permanentError is an error after which there is no other attempt.
type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

func permanent(err error) error { return &permanentError{err} }

// StatusError is a registry's refusal.
type StatusError struct {
	Host   string
	Method string
	Status int
	Detail string // the registry's message; may be empty

	away  bool          // the answer came from where the registry has redirected to
	known bool          // the request had a credential
	basic bool          // the credential was a password, and no token
	after time.Duration // how long to wait before the next try; 0: the registry does not say
}

func (e *StatusError) Error() string {
	text := fmt.Sprintf("%s answers %d %s", e.Host, e.Status, http.StatusText(e.Status))
	if e.Detail != "" {
		text += ": " + e.Detail
	}
	switch {
	case e.away:
	case e.Status == http.StatusUnauthorized || e.Status == http.StatusForbidden:
		text += "; the credential is missing or wrong, or may not do this: name a file with one " +
			"by --registry-config, or set REGISTRY_USERNAME and REGISTRY_PASSWORD"
	}
	return text
}

// passes reports whether the refusal may be because a token or a signed address has expired.
func (e *StatusError) passes() bool {
	return e.away && e.Status == http.StatusBadRequest ||
		(e.away || e.known) && e.Status == http.StatusForbidden
}

// statusOf is the status of a registry's refusal, or 0 for any other error.
func statusOf(err error) int {
	if refused, ok := errors.AsType[*StatusError](err); ok {
		return refused.Status
	}
	return 0
}

// notFound reports whether the registry does not have the requested thing.
func notFound(err error) bool { return statusOf(err) == http.StatusNotFound }

// impatient is an error that might pass, but nothing, or too little, has come for too long.
type impatient struct {
	err    error
	after  time.Duration
	silent bool          // there was no answer at all
	wait   time.Duration // the registry demands that wait; 0: none
	most   time.Duration // the longest wait
}

func (e *impatient) Error() string {
	if e.silent {
		return fmt.Sprintf("given up after %s without any answer: %v; check the name and the "+
			"port, and whether the registry runs", e.after.Round(time.Second), e.err)
	}
	if e.wait > 0 {
		return fmt.Sprintf("given up: %v; it says that the next try is for in %s, and no try "+
			"waits for longer than %s: try again later", e.err, e.wait.Round(time.Second), e.most)
	}
	return fmt.Sprintf("given up after %s in which nothing or too little came: %v",
		e.after.Round(time.Second), e.err)
}

func (e *impatient) Unwrap() error { return e.err }

// GaveUp reports whether an error says that nothing, or too little, has come for too long.
func GaveUp(err error) bool { return errors.As(err, new(*impatient)) }

// tries is work that is repeated until it is done, its context ends, nothing has come for too long,
// or an error is permanent.
type tries struct {
	endpoint *endpoint
	timeout  time.Duration
	last     time.Time // when enough last came
	few      int64     // bytes that have come since; fewer than enough
	pause    time.Duration
	rate     float64 // the least that must come, in bytes per second
	refused  int
	renewed  bool // the credential was renewed, after a refusal that may be permanent
}

func (e *endpoint) tries() *tries {
	timeout := e.client.opt.Timeout
	if e.mirror { // there is another endpoint to ask
		timeout = e.client.opt.Turn
	}
	return &tries{
		endpoint: e,
		timeout:  timeout,
		rate:     loneRate,
		last:     time.Now(),
		pause:    FirstPause,
	}
}

// progress notes that enough has come.
func (t *tries) progress() {
	t.last, t.few, t.pause, t.refused, t.renewed = time.Now(), 0, FirstPause, 0, false
}

// came notes that n bytes have come. A few bytes are not enough: an endpoint may send one byte in
// each connection, for ever.
func (t *tries) came(n int) {
	t.pause, t.refused = FirstPause, 0
	if t.few += int64(n); t.few >= int64(t.rate*t.timeout.Seconds()) {
		t.progress()
	}
}

// waitForRetry waits before the next attempt, or returns err if there is none.
func (t *tries) waitForRetry(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if errors.As(err, new(*permanentError)) {
		return err
	}
	pause := t.pause/2 + rand.N(t.pause/2+1)
	t.pause = min(2*t.pause, LongPause)
	var status *StatusError
	if errors.As(err, &status) {
		switch s := status.Status; {
		case s == http.StatusUnauthorized && !status.basic && (status.known || status.away),
			status.away && status.passes():
			// A token or a signed address has expired: ask for new ones.
			if t.refused++; t.refused > maxRefused {
				return err
			}
			t.endpoint.forget()
		case (s == http.StatusUnauthorized || s == http.StatusForbidden && status.known) &&
			!t.renewed:
			// The password may have been replaced, or made. It is tried once more and not again,
			// because registries lock accounts. For some of them 403 is an expired token, too.
			t.renewed = true
			t.endpoint.forget()
		case s == http.StatusTooManyRequests, s == http.StatusRequestTimeout, s >= 500:
			pause = max(pause, status.after)
		default:
			return err
		}
	}
	timeout, silent := t.timeout, t.endpoint.silent()
	if silent {
		if dns, ok := errors.AsType[*net.DNSError](err); ok && dns.IsNotFound {
			return fmt.Errorf("%w; check the name", err)
		}
		timeout = min(timeout, t.endpoint.client.opt.FirstTimeout)
	}
	if left := timeout - time.Since(t.last); pause > left {
		held := &impatient{err: err, after: time.Since(t.last), silent: silent, most: timeout}
		if status != nil && pause == status.after {
			held.wait = pause
		}
		return held
	}
	t.endpoint.client.TryAgain(t.endpoint.repo.RegistryStr(), err, "", pause)
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(pause):
		return nil
	}
}

// TryAgain tells a person that something has failed, and after which pause it is tried again. of is
// a registry or a reference. meanwhile says what waits, unless it is "".
func (c *Client) TryAgain(of string, err error, meanwhile string, pause time.Duration) {
	if c.opt.Failed != nil {
		c.opt.Failed(of, err)
	}
	if meanwhile != "" {
		meanwhile += ", "
	}
	c.opt.Warn(fmt.Sprintf("%s: %v; %snext try in %s", of, err, meanwhile,
		pause.Round(time.Millisecond)))
}

// request is one request to a repository, which can be made more than once.
type request struct {
	method string
	path   string // below /v2/NAME/
	header http.Header
	accept []int // accepted statuses; others are an error
}

// once sends a request. The caller closes the body.
func (e *endpoint) once(ctx context.Context, scopes []string, r request) (*http.Response, error) {
	if e.web != nil {
		return e.web.once(ctx, e, r)
	}
	a, err := e.authorize(ctx, scopes)
	if err != nil {
		return nil, explain(err)
	}
	req, err := http.NewRequestWithContext(ctx, r.method, e.address(r), nil)
	if err != nil {
		return nil, permanent(err)
	}
	maps.Copy(req.Header, r.header)
	return e.send(a, req, r.accept)
}

// send sends a prepared request. An answer that is not accepted is an error.
func (e *endpoint) send(a *http.Client, req *http.Request, accept []int) (*http.Response, error) {
	res, err := a.Do(req)
	if err != nil {
		return nil, withoutSecrets(explain(err), req)
	}
	if slices.Contains(accept, res.StatusCode) {
		return res, nil
	}
	defer res.Body.Close()
	return nil, e.statusError(res)
}

// retry repeats work until it succeeds, or another attempt is useless.
func (e *endpoint) retry(ctx context.Context, once func() error) error {
	for t := e.tries(); ; {
		err := once()
		if err == nil {
			return nil
		}
		if err := t.waitForRetry(ctx, err); err != nil {
			return err
		}
	}
}

func (e *endpoint) statusError(res *http.Response) *StatusError {
	s := &StatusError{Host: e.repo.RegistryStr(), Status: res.StatusCode}
	if res.Request != nil {
		s.Host, s.Method = res.Request.URL.Host, res.Request.Method
		s.away = res.Request.Response != nil // after a redirect
		_, _, s.basic = res.Request.BasicAuth()
		s.known = res.Request.Header.Get("Authorization") != ""
	}
	body, _ := io.ReadAll(io.LimitReader(res.Body, maxErrorBody))
	s.Detail = errorDetail(body, res.Request)
	s.after = retryAfter(res.Header.Get(retryHeader), time.Now())
	return s
}

// errorDetail is the registry's explanation in the body of an error. Other text, such as the page
// of a proxy, is not repeated.
func errorDetail(body []byte, req *http.Request) string {
	var answer struct {
		Errors []struct{ Code, Message string }
	}
	if json.Unmarshal(body, &answer) != nil {
		return ""
	}
	var parts []string
	for _, e := range answer.Errors[:min(len(answer.Errors), 3)] {
		parts = append(parts, problem(e.Code, e.Message, req))
	}
	return strings.Join(parts, ", ")
}

// retryAfter reads the header Retry-After: seconds, or a date (RFC 9110, section 10.2.3).
func retryAfter(value string, now time.Time) time.Duration {
	seconds, err := strconv.ParseInt(value, 10, 32)
	if err == nil || errors.Is(err, strconv.ErrRange) { // if too large: the largest one
		return max(0, time.Duration(seconds)*time.Second)
	}
	if at, err := http.ParseTime(value); err == nil {
		return max(0, at.Sub(now))
	}
	return 0
}

// explain turns the errors of the library and of the network into one kind.
func explain(err error) error {
	if answered, ok := errors.AsType[*transport.Error](err); ok {
		s := &StatusError{Status: answered.StatusCode, basic: true} // of a token server
		if answered.Request != nil {
			s.Host, s.Method = answered.Request.URL.Host, answered.Request.Method
			s.after = retryAfter(answered.Request.Header.Get(retryHeader), time.Now())
		}
		var parts []string
		for _, d := range answered.Errors[:min(len(answered.Errors), 3)] {
			parts = append(parts, problem(string(d.Code), d.Message, answered.Request))
		}
		s.Detail = strings.Join(parts, ", ")
		return s
	}
	if token, ok := errors.AsType[*tokenError](err); ok {
		err = token
	}
	plain := new(plainError)
	if errors.Is(err, http.ErrSchemeMismatch) && errors.As(err, &plain) {
		err = plain // it was asked by TLS first, which it does not have
	}
	err = withoutQuery(err)
	switch {
	case errors.As(err, new(x509.CertificateInvalidError)), errors.As(err, new(x509.HostnameError)):
		return permanent(fmt.Errorf("%w; it needs another certificate; --insecure-registry uses "+
			"this one nevertheless", err))
	case errors.As(err, new(*tls.CertificateVerificationError)):
		return permanent(fmt.Errorf("%w; name a file with its certificates by --registry-ca", err))
	case errors.Is(err, http.ErrSchemeMismatch):
		return permanent(fmt.Errorf("%w; if that is intended, name it with --insecure-registry",
			err))
	}
	return err
}

// WaitFor is how long to wait after such an error, by the registry's demand.
func WaitFor(err error) time.Duration {
	if status, ok := errors.AsType[*StatusError](err); ok {
		return status.after
	}
	return 0
}

// PauseFor waits, or returns the error of ctx if that ends first.
func PauseFor(ctx context.Context, pause time.Duration) error {
	select {
	case <-time.After(pause):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
