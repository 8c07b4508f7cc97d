package main

import (
	"context"
	"errors"
	"fmt"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
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
		return &committed{name: uri.Export, close: r.Close,
			source: func(context.Context) (image.Source, error) { return exported{r}, nil }}, nil
	}, nil
}

// exported is an export as the bytes of an image. Nobody else writes to it while it is open.
type exported struct{ *nbd.Remote }

func (e exported) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	return e.Within(ctx).ReadAt(p, off)
}

func (e exported) Identity() image.Identity   { return image.Identity{} }
func (e exported) Parallel() int              { return 1 }
func (e exported) WillRead(off, length int64) {}
func (e exported) Check() error               { return nil }

// Close does nothing: with a second connection, the first one might still have the disk.
func (e exported) Close() error { return nil }

// Extent knows nothing: the client of a relay asks for no extents.
func (e exported) Extent(off, length int64) (disk.Extent, error) {
	return disk.Extent{Length: min(length, e.Size()-off), Data: true}, nil
}
