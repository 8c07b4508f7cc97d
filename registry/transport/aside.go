package transport

import (
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"kubevirt.io/disk/internal/osfile"
)

// maxAside is how often a file without a length is fetched from its beginning. It cannot be fetched
// from where a broken connection has ended.
const maxAside = 5

// ResolveAside is Resolve for who reads an image once. If a server does not say how long a file is,
// the file is fetched into dir first, where it has no name, until the source is closed.
func (c *Client) ResolveAside(ctx context.Context, ref Reference, dir string) (*Image, error) {
	src, err := c.Source(ref, "")
	if err != nil {
		return nil, err
	}
	if w := webOf(src); w != nil {
		w.asideDir = dir
	}
	r, err := Resolve(ctx, src, ref)
	if err != nil {
		return nil, errors.Join(err, src.Close())
	}
	return r, nil
}

// fetchAside fetches the file, and completes what is known of it.
func (w *webSource) fetchAside(ctx context.Context, desc v1.Descriptor) (v1.Descriptor, error) {
	e := w.endpoints[0]
	e.client.opt.Warn(fmt.Sprintf("%s does not say how long the file is: it is fetched into %q "+
		"first", w.file.url.Host, w.asideDir))
	file, err := osfile.Nameless(w.asideDir)
	if err != nil {
		return desc, err
	}
	want := desc.Digest
	for n, t := 1, e.tries(); ; n++ {
		desc, err = w.fetchOnce(ctx, t, file, want)
		if err == nil {
			w.aside = file
			return desc, nil
		}
		if n == maxAside {
			err = permanent(err)
		}
		if err := t.again(ctx, err); err != nil {
			return desc, errors.Join(err, file.Close())
		}
	}
}

// fetchOnce fetches all of the file, and checks its digest.
func (w *webSource) fetchOnce(ctx context.Context, t *tries, to *os.File, want v1.Hash) (
	desc v1.Descriptor, err error) {
	room, err := osfile.AvailableSpace(w.asideDir)
	if err == nil {
		err = to.Truncate(0)
	}
	if err == nil {
		_, err = to.Seek(0, io.SeekStart)
	}
	if err != nil {
		return desc, permanent(err)
	}
	e := w.endpoints[0]
	res, err := e.once(ctx, nil, request{method: http.MethodGet, accept: []int{http.StatusOK}})
	if err != nil {
		return desc, err
	}
	defer res.Body.Close()
	if res.ContentLength < 0 && len(res.TransferEncoding) == 0 && !w.file.known {
		return desc, permanent(fmt.Errorf("%s does not say where the file ends: name it by its "+
			"digest, ADDRESS@sha256:DIGEST", res.Request.URL.Host))
	}
	stream(res.Body, t.rate, t.timeout)
	room -= room / spoolRoom
	sum, sum512 := sha256.New(), sha512.New()
	size, err := io.Copy(io.MultiWriter(to, sum, sum512, arriving{t}), io.LimitReader(res.Body,
		room))
	var written *fs.PathError
	switch {
	case errors.As(err, &written), err == nil && size == room:
		return desc, permanent(fmt.Errorf("%q has no room for the file, of which %d MiB have "+
			"come: name a larger directory with TMPDIR", w.asideDir, size>>20))
	case err != nil:
		return desc, fmt.Errorf("the connection broke after %d bytes: %w", size, err)
	case size == 0:
		return desc, permanent(errEmpty)
	}
	got := DigestIn(sum)
	if is := hex.EncodeToString(sum512.Sum(nil)); w.sum512 != "" && w.sum512 != is {
		return desc, permanent(&DigestError{Want: "sha512:" + w.sum512, Got: "sha512:" + is})
	}
	if want != unknownDigest && want.String() != got {
		return desc, permanent(&DigestError{Want: want.String(), Got: got})
	}
	desc = v1.Descriptor{MediaType: mediaFile, Size: size,
		Annotations: map[string]string{titleAnnotation: w.file.file()}}
	desc.Digest, err = v1.NewHash(got)
	return desc, err
}

// arriving tells tries how much has come.
type arriving struct{ t *tries }

func (a arriving) Write(p []byte) (int, error) {
	a.t.came(len(p))
	return len(p), nil
}
