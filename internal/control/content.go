package control

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/status"
)

// contentTime is how long a request for content waits for a far image. It is shorter than the
// client's timeout.
const contentTime = timeout - 5*time.Second

// Content is a snapshot that is being read.
type Content struct {
	Described status.Content
	disk.Disk // it has the optional interfaces; closed after the request
}

// contentControl answers the requests for the content of snapshots.
type contentControl struct{ disks Snapshots }

// handle makes a handler that opens the snapshot first.
func (c *contentControl) handle(answerTo func(ctx context.Context, w http.ResponseWriter,
	q url.Values, of *Content) error) http.HandlerFunc {
	return authorized(func(w http.ResponseWriter, r *http.Request, _ uint32) {
		q := r.URL.Query()
		of, err := c.disks.OpenContent(q.Get("disk"), q.Get("snapshot"))
		if err == nil {
			defer of.Close() // it only ends the use of the snapshot
			// net/http cancels the context of a request at the server's ReadTimeout.
			ctx, stop := context.WithTimeout(context.WithoutCancel(r.Context()), contentTime)
			defer stop()
			if id := q.Get("identity"); id != "" && id != of.Described.Identity {
				err = fmt.Errorf("the snapshot %q is another one than before", q.Get("snapshot"))
			} else {
				err = answerTo(ctx, w, q, of)
			}
		}
		switch {
		case errors.Is(err, disk.ErrNotNow):
			answer(w, http.StatusServiceUnavailable, status.Refusal{Error: err.Error()})
		case err != nil:
			answer(w, http.StatusConflict, status.Refusal{Error: err.Error()})
		}
	})
}

func describe(_ context.Context, w http.ResponseWriter, _ url.Values, of *Content) error {
	answer(w, http.StatusOK, of.Described)
	return nil
}

func readBytes(ctx context.Context, w http.ResponseWriter, q url.Values, of *Content) error {
	off, err := strconv.ParseInt(q.Get("offset"), 10, 64)
	length, lengthErr := strconv.ParseInt(q.Get("length"), 10, 64)
	if err != nil || lengthErr != nil || length <= 0 || length > status.MaxContentBytes ||
		off < 0 || off > of.Size()-length {
		return fmt.Errorf("there are no bytes %s+%s to read: the disk has %d", q.Get("offset"),
			q.Get("length"), of.Size())
	}
	p := make([]byte, length)
	if _, err := of.ReadAt(ctx, p, off); err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(length, 10))
	_, _ = w.Write(p) // if this fails, the client is gone
	return nil
}

// pageRanges and pageTime end a page of ranges.
const (
	pageRanges = 4096
	pageTime   = 2 * time.Second
)

func listRanges(ctx context.Context, w http.ResponseWriter, q url.Values, of *Content) error {
	size := of.Size()
	off, err := strconv.ParseInt(q.Get("offset"), 10, 64)
	if err != nil || off < 0 || off > size {
		return fmt.Errorf("there is no offset %q: the disk has %d bytes", q.Get("offset"), size)
	}
	belongs, err := rangesOf(ctx, of.Disk, q.Get("what"), q.Get("since"))
	if err != nil {
		return err
	}
	end := time.Now().Add(pageTime)
	page := status.ContentRanges{Ranges: [][2]int64{}, Next: off}
	for page.Next < size && len(page.Ranges) < pageRanges && time.Now().Before(end) {
		in, n, err := belongs(page.Next, size-page.Next)
		if err != nil {
			return err
		}
		if in {
			add(&page.Ranges, page.Next, n)
		}
		page.Next += n
	}
	answer(w, http.StatusOK, page)
	return nil
}

// add adds a range behind the others.
func add(ranges *[][2]int64, off, length int64) {
	if last := len(*ranges) - 1; last >= 0 && (*ranges)[last][0]+(*ranges)[last][1] == off {
		(*ranges)[last][1] += length
		return
	}
	*ranges = append(*ranges, [2]int64{off, length})
}

// rangesOf returns a function that reports whether the run at an offset belongs to the ranges, and
// its length.
func rangesOf(ctx context.Context, d disk.Disk, what, since string) (
	func(off, length int64) (bool, int64, error), error) {
	extents, ok := d.(disk.Extenter)
	switch {
	case what == status.RangesChanged:
		return func(off, length int64) (bool, int64, error) {
			return disk.Changed(ctx, d, since, off, length)
		}, nil
	case what != status.RangesStored:
		return nil, fmt.Errorf("there are no ranges %q of a disk", what)
	case !ok:
		return func(_, length int64) (bool, int64, error) { return true, length, nil }, nil
	}
	return func(off, length int64) (bool, int64, error) {
		e, err := extents.Extent(ctx, off, length)
		return e.Data, e.Length, err
	}, nil
}
