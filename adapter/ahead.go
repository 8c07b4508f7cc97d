package adapter

import (
	"context"
	"io"
)

// archives opens the archives of layers in order, and the next few ahead of time: opening one in a
// registry waits for an answer. An open archive is fetched and expanded in the background.
type archives struct {
	ctx    context.Context
	cancel context.CancelFunc
	left   []Layer       // not begun yet
	begun  []chan opened // opened ahead of time
}

// opened is the result of Open.
type opened struct {
	in  io.ReadCloser
	err error
}

// mostOpen is how many archives are open at once: the one being applied and the next ones.
// Container runtimes fetch as many layers at once.
const mostOpen = 3

func openAhead(ctx context.Context, layers []Layer) *archives {
	a := &archives{left: layers}
	a.ctx, a.cancel = context.WithCancel(ctx)
	return a
}

// next returns the archive of the next layer. The caller closes it.
func (a *archives) next() (io.ReadCloser, error) {
	for len(a.left) > 0 && len(a.begun) < mostOpen {
		l, got := a.left[0], make(chan opened, 1)
		a.left, a.begun = a.left[1:], append(a.begun, got)
		go func() {
			in, err := l.Open(a.ctx)
			got <- opened{in, err}
		}()
	}
	got := <-a.begun[0]
	a.begun = a.begun[1:]
	return got.in, got.err
}

// close closes the archives that were opened and not returned by next.
func (a *archives) close() {
	a.cancel()
	for _, got := range a.begun {
		if o := <-got; o.err == nil {
			_ = o.in.Close() // its content is not needed
		}
	}
}
