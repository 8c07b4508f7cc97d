package upload

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/unpack"
	"kubevirt.io/disk/volume/api"
)

// request has the values of a request's header.
type request struct {
	resumable bool
	last      bool    // its content is the end of the data
	offset    int64   // where its content goes; -1: not given
	length    int64   // of all data; -1: not given
	content   int64   // its own length; -1: not given
	repr      digests // of all data
	part      digests // of its content
	coding    string  // the packing of the data, if the client gives one
	// trailers are the fields with digests that are announced to follow its content
	trailers []string
}

// parseRequest reads a request that begins an upload.
func parseRequest(r *http.Request) (*request, error) {
	q := &request{last: true, offset: -1, length: intField(r.Header, fieldLength),
		content: r.ContentLength}
	if complete, ok := boolField(r.Header, fieldComplete); ok {
		q.resumable, q.last = true, complete
	}
	var err error
	if q.repr, err = digestField(r.Header, "Repr-Digest"); err != nil {
		return nil, wrong("%v", err)
	}
	if q.part, err = digestField(r.Header, "Content-Digest"); err != nil {
		return nil, wrong("%v", err)
	}
	if q.coding, err = coding(r); err != nil {
		return nil, err
	}
	if t := mediaType(r); strings.HasPrefix(t, "multipart/") || strings.HasPrefix(t, "message/") {
		return nil, refusal(http.StatusUnsupportedMediaType, "the request has the Content-Type "+
			"%s, and the disk would be a part of it: send the file itself as the content, as "+
			"\"curl -T FILE\" does", t)
	}
	for field := range r.Trailer {
		if slices.Contains(digestFields, field) {
			q.trailers = append(q.trailers, field)
		}
	}
	if r.Method == http.MethodPatch {
		q.offset = intField(r.Header, fieldOffset)
	}
	switch whole := q.last && q.content >= 0; {
	case r.Method == http.MethodPatch: // the length depends on where the upload goes on
	case whole && q.length >= 0 && q.length != q.content:
		return nil, wrong("%s is %d, and the content has %d bytes", fieldLength, q.length,
			q.content)
	case whole:
		q.length = q.content
	case q.length >= 0 && q.content > q.length:
		return nil, wrong("%s is %d, and the content has %d bytes", fieldLength, q.length,
			q.content)
	}
	return q, nil
}

// digestFields are the fields that may also follow the content.
var digestFields = []string{"Content-Digest", "Repr-Digest"}

// coding returns the packing of a request's content that is removed here. A part of the data that
// is appended has no coding of its own.
func coding(r *http.Request) (string, error) {
	var all []string
	listed := strings.Join(r.Header.Values("Content-Encoding"), ",")
	for name := range strings.SplitSeq(listed, ",") {
		name = strings.TrimPrefix(strings.ToLower(strings.TrimSpace(name)), "x-")
		if name != "" && name != "identity" {
			all = append(all, name)
		}
	}
	switch {
	case len(all) == 0:
		return "", nil
	case len(all) == 1 && unpack.Known(image.Format(all[0])) && r.Method != http.MethodPatch:
		return all[0], nil
	}
	return "", refusal(http.StatusUnsupportedMediaType, "the Content-Encoding %s is not undone "+
		"here: send the file as it is, or as one that gzip, zstd, xz or bzip2 has made",
		strings.Join(all, ", "))
}

// parsePatch reads a request that appends to an upload.
func parsePatch(r *http.Request) (*request, error) {
	if mediaType(r) != partialUpload {
		return nil, refusal(http.StatusUnsupportedMediaType, "Content-Type must be %s",
			partialUpload)
	}
	q, err := parseRequest(r)
	switch {
	case err != nil:
		return nil, err
	case q.offset < 0:
		return nil, wrong("%s is missing, or not a number", fieldOffset)
	case !q.resumable:
		return nil, wrong("%s is missing: say ?1 where this is the end of the data, else ?0",
			fieldComplete)
	}
	return q, nil
}

// receive receives the content of a request, and answers.
func (h *Handler) receive(w http.ResponseWriter, r *http.Request, t *turn, s *session, q *request) {
	part := summerFor(q.part)
	if len(q.trailers) > 0 {
		part = newSummer("sha-256", "sha-512")
	}
	t.total.Store(s.length)
	t.from.Store(s.offset)
	t.received.Store(s.offset)
	told := func() { t.received.Store(s.offset) }
	content := summed{body{r.Body, t.transfer}, part, h}
	err := s.take(context.WithoutCancel(r.Context()), content, told)
	if err == nil {
		err = h.checkDigests(r, s, q, part)
	}
	if cut := t.close(); (cut || errors.Is(err, errCut)) && r.ProtoMajor == 1 {
		// net/http ends the context of all later requests of a connection on which a read has
		// failed.
		w.Header().Set("Connection", "close")
	}
	switch {
	case errors.Is(err, errCut) && q.resumable:
		err = h.pause(t, s)
		if err == nil {
			setState(w.Header(), s.offset, s.length, false)
			h.refuse(w, r, refusal(http.StatusConflict, "the upload was interrupted"))
			return
		}
	case err == nil && !q.last:
		if err = h.pause(t, s); err == nil {
			h.answerPart(w, r, s)
			return
		}
	case err == nil:
		w.Header().Del("Location")
		if q.resumable {
			setState(w.Header(), s.offset, s.offset, true)
		}
		// The upload is complete, whether or not its client waits for the answer.
		if err = s.finish(context.WithoutCancel(r.Context())); err == nil {
			h.complete(w, r, t, s)
			return
		}
		if api.Is(err, api.CodeUnavailable) { // the next request goes on, or clears
			s.free()
			h.refuse(w, r, err)
			return
		}
	}
	h.failed.Add(1)
	h.log.Warn("an upload has failed", zap.String("volume", t.name), zap.Int64("bytes", s.offset),
		zap.Error(err))
	w.Header().Del("Location")
	h.refuse(w, r, h.giveUp(r.Context(), t, s, err))
}

// answerPart answers a request whose content is not the end of the data.
func (h *Handler) answerPart(w http.ResponseWriter, r *http.Request, s *session) {
	setState(w.Header(), s.offset, s.length, false)
	status := http.StatusNoContent
	if r.Method == http.MethodPut {
		status = http.StatusCreated
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(silence))
	w.WriteHeader(status)
}

func (h *Handler) complete(w http.ResponseWriter, r *http.Request, t *turn, s *session) {
	h.done.Add(1)
	took := time.Since(t.began)
	h.log.Info("an upload is complete", zap.String("volume", t.name), zap.Int64("bytes", s.offset),
		zap.String("format", string(s.format)), zap.Duration("duration", took))
	_ = t.control.SetWriteDeadline(time.Now().Add(silence))
	h.opt.Done(w, r, t.name)
}

// checkDigests compares the content of a request with its digest. At the end of the data, it also
// compares all data with its digest.
func (h *Handler) checkDigests(r *http.Request, s *session, q *request, part summer) error {
	parts, reprs := []digests{q.part}, []digests{s.base.Want, q.repr}
	for _, name := range digestFields {
		announced := slices.Contains(q.trailers, name)
		d, err := digestField(r.Trailer, name)
		switch {
		case err != nil:
			return wrong("%v", err)
		case announced && d == nil:
			return wrong("the field %s was announced to follow the content, and has not come: "+
				"the content may not be whole", name)
		case !announced && d != nil:
			return wrong("the field %s follows the content without having been announced by "+
				"the field Trailer, so its digest was not computed", name)
		case name == "Content-Digest":
			parts = append(parts, d)
		default:
			reprs = append(reprs, d)
		}
	}
	for _, want := range parts {
		if err := part.check(want, "Content-Digest"); err != nil {
			return err
		}
	}
	sums := s.sums
	if !s.base.Resumable && len(q.trailers) > 0 {
		sums = part // its content is all data
	}
	for _, want := range reprs {
		if !q.last {
			break
		}
		if err := sums.check(want, "Repr-Digest"); err != nil {
			return err
		}
	}
	return nil
}

// summed reads content, adds it to digests and counts it.
type summed struct {
	body
	sums summer
	h    *Handler
}

func (r summed) Read(p []byte) (int, error) {
	n, err := r.body.Read(p)
	r.sums.add(p[:n])
	r.h.bytes.Add(uint64(n))
	return n, err
}
