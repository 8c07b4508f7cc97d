package main

import (
	"context"
	"errors"
	"fmt"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/nbd"
	"kubevirt.io/disk/registry"
)

// openExport returns a function that opens an export of a daemon.
func openExport(text string) (openCommitted, error) {
	uri, err := nbd.ParseURI(text)
	if err == nil && uri.TLS {
		err = errors.New("commit is for daemons of this machine: use a socket or 127.0.0.1")
	}
	if err != nil {
		return nil, fmt.Errorf("the disk: %w", err)
	}
	return func(ctx context.Context, _ *registry.Client) (*committed, error) {
		r, err := nbd.OpenRemote(ctx, nbd.RemoteOptions{Address: uri.Address, Export: uri.Export,
			Once: true})
		if err != nil {
			return nil, err
		}
		return &committed{name: uri.Export, content: exported{r, ctx}, close: r.Close}, nil
	}, nil
}

// exported is an export that nobody else writes to while it is open, so that it has extents.
type exported struct {
	*nbd.Remote
	ctx context.Context
}

var _ disk.Extenter = exported{}

// Extent implements disk.Extenter.
func (e exported) Extent(ctx context.Context, off, length int64) (disk.Extent, error) {
	return e.Allocated(e.ctx, off, length)
}
