package transport

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"

	"kubevirt.io/disk/registry/internal/bounded"
)

// maxChecksums bounds a file of digests, in bytes.
const maxChecksums = 1 << 20

// checksum finds the digest of a file in the file of digests that the options name. The name is
// relative to the file's own address, like a link.
func (c *Client) checksum(ctx context.Context, a *address) (sums, error) {
	u, err := url.Parse(c.opt.Checksums)
	if err == nil {
		u, err = parseURL(a.url.ResolveReference(u).String())
	}
	if err != nil {
		return sums{}, errors.New("--checksums is neither a file beside it nor an address: " +
			"write SHA256SUMS, or https://HOST/SHA256SUMS")
	}
	if !c.vouched(u) {
		return sums{}, fmt.Errorf("the digests at %s come without TLS, so nothing says that "+
			"they are right: write the digest into the address", shown(u))
	}
	text, err := c.readAddress(ctx, &address{url: u, within: a.within})
	var found sums
	if err == nil {
		found, err = sumsFor(text, a.url.Path)
	}
	if err != nil {
		return sums{}, fmt.Errorf("the digests at %s: %w", shown(u), err)
	}
	return found, nil
}

// readAddress reads a small file.
func (c *Client) readAddress(ctx context.Context, a *address) ([]byte, error) {
	e, err := c.webEndpoint(a)
	if err != nil {
		return nil, err
	}
	var text []byte
	err = e.retry(ctx, func() error {
		text, err = e.readOnce(ctx)
		return err
	})
	return text, err
}

func (e *endpoint) readOnce(ctx context.Context) ([]byte, error) {
	ctx, cancel := e.within(ctx)
	defer cancel()
	res, err := e.once(ctx, nil, request{method: http.MethodGet, accept: []int{http.StatusOK}})
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	text, err := bounded.Read(res.Body, maxChecksums)
	if len(text) > maxChecksums {
		err = permanent(err)
	}
	return text, err
}
