package transport

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"kubevirt.io/disk/registry/internal/bounded"
)

// maxChecksums bounds a file of digests, in bytes.
const maxChecksums = 1 << 20

// checksum finds the digest of a file in the file of digests that the options name: from the file's
// own address on, as a link would be.
func (c *Client) checksum(ctx context.Context, a *address) (v1.Hash, error) {
	u, err := url.Parse(c.opt.Checksums)
	if err == nil {
		u, err = parseURL(a.url.ResolveReference(u).String())
	}
	if err != nil {
		return v1.Hash{}, errors.New("--checksums is neither a file beside it nor an address: " +
			"write SHA256SUMS, or https://HOST/SHA256SUMS")
	}
	if !c.vouched(u) {
		return v1.Hash{}, fmt.Errorf("the digests at %s come without TLS, so nothing says that "+
			"they are right: write the digest into the address", shown(u))
	}
	text, err := c.readAddress(ctx, &address{url: u, within: a.within})
	if err == nil {
		var digest string
		if digest, err = digestFor(text, a.url.Path); err == nil {
			return v1.NewHash("sha256:" + digest)
		}
	}
	return v1.Hash{}, fmt.Errorf("the digests at %s: %w", shown(u), err)
}

// readAddress reads a small file.
func (c *Client) readAddress(ctx context.Context, a *address) ([]byte, error) {
	e, err := c.webEndpoint(a)
	if err != nil {
		return nil, err
	}
	t := e.tries()
	for {
		text, err := e.readOnce(ctx)
		if err == nil {
			return text, nil
		}
		if err := t.again(ctx, err); err != nil {
			return nil, err
		}
	}
}

func (e *endpoint) readOnce(ctx context.Context) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, e.client.opt.Idle)
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

// digestFor finds the SHA-256 of a file in what sha256sum writes ("HEX  NAME"), also with --tag
// ("SHA256 (NAME) = HEX"). Everything else is passed over: signatures, comments, other digests.
func digestFor(text []byte, path string) (string, error) {
	found, name := "", path[strings.LastIndexByte(path, '/')+1:]
	for line := range bytes.Lines(text) {
		digest, of := checksumLine(strings.TrimSpace(string(line)))
		of = strings.TrimPrefix(of, "./")
		if of == "" || of != name && !strings.HasSuffix(path, "/"+of) {
			continue
		}
		if found != "" && found != digest {
			return "", fmt.Errorf("they name %q twice, with different digests: write the right "+
				"one into the address", name)
		}
		found = digest
	}
	if found == "" {
		return "", fmt.Errorf("they have no SHA-256 of %q", name)
	}
	return found, nil
}

// checksumLine reads a line. name "": it is no SHA-256 of a file.
func checksumLine(line string) (digest, name string) {
	const size = 64
	if rest, ok := strings.CutPrefix(line, "SHA256 ("); ok {
		i := strings.LastIndex(rest, ") = ")
		if i < 0 {
			return "", ""
		}
		name, digest = rest[:i], rest[i+len(") = "):]
	} else if len(line) > size {
		digest = line[:size]
		rest, ok := strings.CutPrefix(line[size:], " ")
		if !ok {
			return "", ""
		}
		name = strings.TrimPrefix(strings.TrimPrefix(rest, " "), "*")
	}
	digest = strings.ToLower(digest)
	if _, err := hex.DecodeString(digest); err != nil || len(digest) != size {
		return "", ""
	}
	return digest, name
}
