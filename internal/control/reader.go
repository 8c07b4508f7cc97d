package control

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"sort"
	"strconv"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/status"
)

// readsAtOnce is how many connections a client keeps.
const readsAtOnce = 16

// Reader reads a snapshot of a daemon's disk. Its methods, except Close, may be called by any
// number of goroutines. Errors are those of a Client.
type Reader struct {
	status.Content
	query  url.Values
	by     *http.Transport
	stored ranges
}

// Reader opens a snapshot, and finds out what of it is stored. The daemon keeps nothing open for
// it: if the snapshot is deleted, reads fail.
func (c Client) Reader(ctx context.Context, disk, snapshot string) (*Reader, error) {
	r := &Reader{query: url.Values{"disk": {disk}, "snapshot": {snapshot}}, by: c.transport()}
	err := r.ask(ctx, status.PathContent, nil, decodeInto(&r.Content))
	if err == nil {
		r.query.Set("identity", r.Identity)
		r.stored, err = r.ranges(ctx, status.RangesStored, "")
	}
	if err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// Close closes the connections.
func (r *Reader) Close() { r.by.CloseIdleConnections() }

func decodeInto(to any) func(body io.Reader) error {
	return func(body io.Reader) error { return json.NewDecoder(body).Decode(to) }
}

// contentTimeout is how long a daemon may say that content cannot be read now. It waits itself
// before it says so.
const contentTimeout = 2 * time.Minute

// ask asks for something of the snapshot. It asks again while the daemon waits for its image.
func (r *Reader) ask(ctx context.Context, path string, more url.Values,
	read func(body io.Reader) error) error {
	q := url.Values{}
	for _, from := range []url.Values{r.query, more} {
		for key, values := range from {
			q[key] = values
		}
	}
	for begin := time.Now(); ; {
		err := askBy(ctx, r.by, http.MethodGet, path+"?"+q.Encode(), nil, read)
		if !errors.Is(err, disk.ErrNotNow) || time.Since(begin) > contentTimeout {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

// ReadAt fills p with the bytes at off.
func (r *Reader) ReadAt(ctx context.Context, p []byte, off int64) (n int, err error) {
	for n < len(p) {
		part := p[n:min(len(p), n+status.MaxContentBytes)]
		err := r.ask(ctx, status.PathContentBytes, url.Values{
			"offset": {strconv.FormatInt(off+int64(n), 10)},
			"length": {strconv.Itoa(len(part))}}, func(body io.Reader) error {
			_, err := io.ReadFull(body, part)
			return err
		})
		if err != nil {
			return n, err
		}
		n += len(part)
	}
	return n, nil
}

// Stored reports whether the run at off is no hole, and how long it is, at most length bytes.
func (r *Reader) Stored(off, length int64) (stored bool, n int64) {
	return r.stored.at(off, length)
}

// Changed returns a function like Stored, for what may differ from an earlier snapshot, or from the
// image for "".
func (r *Reader) Changed(ctx context.Context, since string) (
	func(off, length int64) (changed bool, n int64), error) {
	all, err := r.ranges(ctx, status.RangesChanged, since)
	return all.at, err
}

// ranges are in order, and have an offset and a length.
type ranges [][2]int64

// at reports whether the run at off belongs to the ranges, and how long it is.
func (all ranges) at(off, length int64) (in bool, n int64) {
	i := sort.Search(len(all), func(i int) bool { return all[i][0]+all[i][1] > off })
	switch {
	case i == len(all) || all[i][0] >= off+length:
		return false, length
	case all[i][0] > off:
		return false, all[i][0] - off
	}
	return true, min(length, all[i][0]+all[i][1]-off)
}

// ranges asks for all pages.
func (r *Reader) ranges(ctx context.Context, what, since string) (all ranges, err error) {
	for off := int64(0); off < r.Size; {
		var page status.ContentRanges
		err := r.ask(ctx, status.PathContentRanges, url.Values{"what": {what}, "since": {since},
			"offset": {strconv.FormatInt(off, 10)}}, decodeInto(&page))
		if err != nil {
			return nil, err
		}
		if page.Next <= off {
			return nil, &AnswerError{errors.New("a page of ranges has no end")}
		}
		for _, one := range page.Ranges {
			add((*[][2]int64)(&all), one[0], one[1])
		}
		off = page.Next
	}
	return all, nil
}
