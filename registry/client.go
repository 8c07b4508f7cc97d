package registry

import "kubevirt.io/disk/registry/transport"

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
