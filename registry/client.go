package registry

import (
	"sync/atomic"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/registry/transport"
)

// Client pushes, pulls and serves images. Any number of goroutines may use it.
type Client struct{ *transport.Client }

// New makes a client as transport.New does.
func New(opt transport.Options) (*Client, error) {
	c, err := transport.New(opt)
	if err != nil {
		return nil, err
	}
	return &Client{c}, nil
}

// Progress tells how far a pull or a push is. The zero value is ready. Any goroutine may call any
// method at any time.
type Progress struct {
	done, total atomic.Int64
	stored      atomic.Int64
	making      atomic.Pointer[image.Progress] // the image that is being compressed; nil: none
}

// Done is how many bytes are done: compressed, hashed, sent, fetched, or there already.
func (p *Progress) Done() int64 {
	n := p.done.Load()
	if m := p.making.Load(); m != nil {
		data, _ := m.Data()
		n += data
	}
	return n
}

// Total is the expected number of bytes; 0: not known yet.
func (p *Progress) Total() int64 { return p.total.Load() }

// Expect sets how many bytes there will be, if the caller knows.
func (p *Progress) Expect(total int64) { p.total.Store(total) }

// Stored is how many bytes a push has in the registry at its end. A layer counts once, although it
// is read, compressed, hashed and sent, and may belong to several platforms.
func (p *Progress) Stored() int64 { return p.stored.Load() }

// Data returns Done and Total.
func (p *Progress) Data() (done, total int64) { return p.Done(), p.Total() }
