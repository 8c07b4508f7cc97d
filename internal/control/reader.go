package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"sort"
	"strconv"
	"sync"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/status"
)

// readsAtOnce is how many connections a client keeps.
const readsAtOnce = 16

// Reader is a snapshot of a daemon's disk, as a read-only disk. Any number of goroutines may call
// its methods, except Close.
type Reader struct {
	status.Content
	query  url.Values
	by     *http.Transport
	ranges *knownRanges
	// explain makes a message for a person of an error.
	explain func(error) error
}

// knownRanges are the ranges that were requested.
type knownRanges struct {
	mu     sync.Mutex
	stored ranges
	since  map[string]ranges // guarded by mu; the changes, by the snapshot since which
}

var (
	_ disk.Extenter  = (*Reader)(nil)
	_ disk.Historian = (*Reader)(nil)
	_ disk.Layered   = (*Reader)(nil)
)

// Reader opens a snapshot, and finds out which ranges are stored. The daemon keeps nothing open for
// it: if the snapshot is deleted, reads fail. They also fail once ctx has ended. Errors are those
// of a Client, after explain, or wrap disk.ErrNotNow and ctx's error.
func (c Client) Reader(ctx context.Context, disk, snapshot string, explain func(error) error) (
	*Reader, error) {
	r := &Reader{query: url.Values{"disk": {disk}, "snapshot": {snapshot}}, by: c.transport(),
		ranges: &knownRanges{since: map[string]ranges{}}, explain: explain}
	err := r.ask(ctx, status.PathContent, nil, decodeInto(&r.Content))
	if err == nil {
		r.query.Set("identity", r.Identity)
		r.ranges.stored, err = r.list(ctx, status.RangesStored, "")
	}
	if err != nil {
		_ = r.Close() // it cannot fail
		return nil, err
	}
	return r, nil
}

// Far implements disk.Far.
func (r *Reader) Far() bool { return true }

// Close implements disk.Disk: it closes the connections.
func (r *Reader) Close() error {
	r.by.CloseIdleConnections()
	return nil
}

// Size implements disk.Disk.
func (r *Reader) Size() int64 { return r.Content.Size }

// WriteAt implements disk.Disk.
func (r *Reader) WriteAt(context.Context, []byte, int64) (int, error) { return 0, disk.ErrReadOnly }

// Flush implements disk.Disk.
func (r *Reader) Flush() error { return nil }

func decodeInto(to any) func(body io.Reader) error {
	return func(body io.Reader) error { return json.NewDecoder(body).Decode(to) }
}

// contentTimeout is how long a daemon may answer that content cannot be read now. The daemon itself
// waits before each such answer.
const contentTimeout = 2 * time.Minute

// ask requests something about the snapshot. It asks again while the daemon waits for its image.
func (r *Reader) ask(ctx context.Context, path string, more url.Values,
	read func(body io.Reader) error) error {
	q := url.Values{}
	for _, from := range []url.Values{r.query, more} {
		maps.Copy(q, from)
	}
	for begin := time.Now(); ; {
		err := askBy(ctx, r.by, http.MethodGet, path+"?"+q.Encode(), nil, read)
		switch ended := ctx.Err(); {
		case err == nil:
			return nil
		case ended != nil:
			return fmt.Errorf("%w: %w", disk.ErrNotNow, ended)
		case !errors.Is(err, disk.ErrNotNow), time.Since(begin) > contentTimeout:
			return r.explain(err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

// ReadAt implements disk.Disk.
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

func (r *Reader) Extent(_ context.Context, off, length int64) (disk.Extent, error) {
	stored, n := r.ranges.stored.at(off, length)
	return disk.Extent{Length: n, Data: stored}, nil
}

// Since implements disk.Historian. The snapshots to compare with are in Content.Committed.
func (r *Reader) Since() []disk.Snapshot { return nil }

// Changed implements disk.Historian. It makes one request for each snapshot.
func (r *Reader) Changed(ctx context.Context, since string, off, length int64) (changed bool,
	n int64, err error) {
	known := r.ranges
	known.mu.Lock()
	defer known.mu.Unlock()
	all, ok := known.since[since]
	if !ok {
		if all, err = r.list(ctx, status.RangesChanged, since); err != nil {
			return false, 0, err
		}
		known.since[since] = all
	}
	changed, n = all.at(off, length)
	return changed, n, nil
}

// Depth implements disk.Layered: changes since the image are the disk's own.
func (r *Reader) Depth(ctx context.Context, off, length int64) (depth int, n int64, err error) {
	changed, n, err := r.Changed(ctx, "", off, length)
	if changed {
		return disk.DepthOwn, n, err
	}
	return disk.DepthImage, n, err
}

// ranges are ordered pairs of an offset and a length.
type ranges [][2]int64

// at reports whether the run at off belongs to the ranges, and its length.
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

// list requests all pages of ranges.
func (r *Reader) list(ctx context.Context, what, since string) (all ranges, err error) {
	for off := int64(0); off < r.Size(); {
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
