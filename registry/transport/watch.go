package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"
)

const (
	// leastRate is how much a blob must bring, in bytes per second, if another endpoint has it,
	// too.
	leastRate = 4 << 10
	// loneRate is the same if no other endpoint has it. Even the slowest modem is faster.
	loneRate = 256
)

var (
	errSilent = errors.New("nothing came")
	errSlow   = errors.New("too little comes")
)

// exchange watches one request and its answer, so that neither can hang. Until the answer begins,
// data must be sent or received now and then. Then its body must end in time or, if it is the
// stream of a blob, data must come now and then.
type exchange struct {
	io.ReadCloser // the body of the answer
	ctx           context.Context
	cancel        context.CancelCauseFunc
	timer         *time.Timer
	idle          time.Duration

	blob   bool
	turn   time.Duration // the rate is measured over this time
	rate   float64       // the least that must come, in bytes per second
	waited time.Duration // for the bytes below
	came   int64
}

// within bounds an answer that is read as a whole, and what is asked before it.
func (e *endpoint) within(ctx context.Context) (context.Context, context.CancelFunc) {
	idle := e.client.opt.Idle
	return context.WithTimeoutCause(ctx, idle, fmt.Errorf("%w: %s has not answered within %s",
		errSilent, e.repo.RegistryStr(), idle))
}

// begin starts the watch over a request.
func begin(ctx context.Context, idle time.Duration) *exchange {
	ctx, cancel := context.WithCancelCause(ctx)
	return &exchange{ctx: ctx, cancel: cancel, idle: idle, timer: time.AfterFunc(idle, func() {
		cancel(fmt.Errorf("%w for %s", errSilent, idle))
	})}
}

// answered goes on with the answer, whose body may take that long.
func (x *exchange) answered(res *http.Response, idle time.Duration) {
	x.timer.Stop()
	x.timer = time.AfterFunc(idle, func() {
		x.cancel(fmt.Errorf("%w: the answer has not ended within %s", errSilent, idle))
	})
	x.idle, x.ReadCloser, res.Body = idle, res.Body, x
}

// stream makes an answer the stream of a blob. Its reader may take any time with the data. The
// sender may not be silent or slow for longer than turn.
func stream(body io.ReadCloser, rate float64, turn time.Duration) {
	x, ok := body.(*exchange)
	if !ok {
		return
	}
	x.timer.Stop()
	x.idle, x.turn, x.rate = min(x.idle, turn), turn, rate
	x.timer = time.AfterFunc(x.idle, func() {
		x.cancel(fmt.Errorf("%w for %s", errSilent, x.idle))
	})
	x.timer.Stop()
	x.blob = true
}

// explain returns the reason of an error, if the watch has ended the exchange.
func (x *exchange) explain(err error) error {
	if cause := context.Cause(x.ctx); err != nil && errors.Is(cause, errSilent) {
		return cause
	}
	return err
}

func (x *exchange) Read(p []byte) (int, error) {
	if !x.blob {
		n, err := x.ReadCloser.Read(p)
		if err == io.EOF {
			return n, err
		}
		return n, x.explain(err)
	}
	began := time.Now()
	x.timer.Reset(x.idle)
	n, err := x.ReadCloser.Read(p)
	x.timer.Stop()
	x.waited, x.came = x.waited+time.Since(began), x.came+int64(n)
	if err == nil && x.waited >= x.turn {
		if x.came < int64(x.rate*x.waited.Seconds()) {
			return n, fmt.Errorf("%w: %d bytes in %s", errSlow, x.came,
				x.waited.Round(time.Millisecond))
		}
		x.waited, x.came = 0, 0
	}
	if err == io.EOF {
		return n, err
	}
	return n, x.explain(err)
}

func (x *exchange) Close() error {
	err := x.ReadCloser.Close()
	x.end()
	return err
}

// end ends the watch.
func (x *exchange) end() {
	x.timer.Stop()
	x.cancel(nil)
}

// sentBody is the body of a request. As long as it is read, something is being sent.
type sentBody struct {
	io.ReadCloser
	timer *time.Timer
	idle  time.Duration
}

func (s *sentBody) Read(p []byte) (int, error) {
	n, err := s.ReadCloser.Read(p)
	s.timer.Reset(s.idle)
	return n, err
}
