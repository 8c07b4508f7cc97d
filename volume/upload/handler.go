package upload

import (
	"cmp"
	"context"
	"crypto/rand"
	"io"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/status"
)

// Options are the options of a Handler. All functions are required.
type Options struct {
	// Fill claims a volume that awaits content: nobody else can fill it until Release. If mayMake
	// is set, it makes a missing volume, and then made is true.
	Fill func(ctx context.Context, name string, mayMake bool) (v Volume, made bool, err error)
	// Done answers a request whose upload is complete, with the status 201.
	Done func(w http.ResponseWriter, r *http.Request, name string)
	// Refuse answers a refused request. err is an *api.Error, or another error of Volumes. The
	// answer must have a Content-Length, because the client may read it before the connection ends.
	Refuse func(w http.ResponseWriter, r *http.Request, err error)
	// UnpackMemory is how far back compressed data may refer, in bytes: see unpack.Options. 0: the
	// default there.
	UnpackMemory int64
	Log          *zap.Logger // nil: no log
}

// Volume is a volume that is being filled. Progress may be called during any other method.
type Volume interface {
	// Disk is the path of the disk. The paths of all files that the upload makes begin with it.
	Disk() string
	// Files lists the files that may be removed: those that the upload has made, and the disk with
	// its files, without those that the volume itself needs.
	Files() (paths []string, err error)
	Context() context.Context // ends when the upload must end
	Size() int64              // of the disk, bytes; 0: the size of the data
	Reserve(size int64) error // checks whether the volume may have that size, before data comes
	// Progress notes how far the upload is, in bytes. total 0: unknown.
	Progress(received, total int64)
	// Complete serves the volume. With image "", the disk is the file Disk. Otherwise image is the
	// path of an image next to it, which is removed when it is no longer needed. After an error the
	// volume awaits content as before. With api.CodeUnavailable all files stay: the server stops,
	// or storage may say that the volume has its content.
	Complete(ctx context.Context, image string) error
	// Undo removes the volume, which was made for an upload and has not been filled.
	Undo(ctx context.Context) error
	Release() // is called last
}

// Handler receives uploads. It serves two patterns of http.ServeMux:
//
//	.../{name}/data            the content of a volume
//	.../{name}/data/{upload}   one upload that can be resumed
type Handler struct {
	opt     Options
	log     *zap.Logger
	slots   slots
	timeout time.Duration // how long the rest of a refused upload is read

	bytes, done, failed atomic.Uint64
}

// New makes a Handler.
func New(opt Options) *Handler {
	opt.Log = cmp.Or(opt.Log, zap.NewNop())
	return &Handler{opt: opt, log: opt.Log, slots: slots{all: map[string]*slot{}},
		timeout: lingerTime}
}

// Close ends all running requests. Resumable uploads keep the data that has come.
func (h *Handler) Close() {
	for _, s := range h.slots.close() {
		s.free()
	}
}

// Forget says that a volume was deleted. A paused upload to it is dropped, because its open file
// would keep space.
func (h *Handler) Forget(name string) {
	if s := h.slots.forget(name); s != nil {
		s.free()
	}
}

// Receiving returns the running uploads, by the names of the volumes.
func (h *Handler) Receiving() (all []status.Upload) {
	for _, t := range h.slots.running() {
		all = append(all, status.Upload{Volume: t.name, ReceivedBytes: t.received.Load(),
			TotalBytes: max(t.total.Load(), 0), StartedAt: t.began, StartedBytes: t.from.Load()})
	}
	return all
}

// Totals are counts since the start.
type Totals struct {
	Active                   int
	Bytes, Completed, Failed uint64
}

// Totals returns the counts.
func (h *Handler) Totals() Totals {
	return Totals{Active: len(h.slots.running()), Bytes: h.bytes.Load(), Completed: h.done.Load(),
		Failed: h.failed.Load()}
}

// ServeHTTP answers a request. The caller has checked that it is allowed.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name, id := r.PathValue("name"), r.PathValue("upload")
	// An earlier request of the connection may have set a deadline for its own answer.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Time{})
	defer h.linger(w, r)
	if id == "" {
		switch r.Method {
		case http.MethodPut:
			h.create(w, r, name)
		case http.MethodOptions:
			w.Header().Set("Allow", "PUT, OPTIONS")
			w.Header().Set("Accept-Patch", partialUpload)
			w.Header().Set(fieldLimit, limits(0))
			w.WriteHeader(http.StatusNoContent)
		default:
			h.notAllowed(w, r, "PUT, OPTIONS")
		}
		return
	}
	switch r.Method {
	case http.MethodHead:
		h.look(w, r, name, id)
	case http.MethodPatch:
		h.patch(w, r, name, id)
	case http.MethodDelete:
		h.cancel(w, r, name, id)
	default:
		h.notAllowed(w, r, "HEAD, PATCH, DELETE")
	}
}

func (h *Handler) notAllowed(w http.ResponseWriter, r *http.Request, allow string) {
	w.Header().Set("Allow", allow)
	h.refuse(w, r, refusal(http.StatusMethodNotAllowed, "%s is not possible here: use one of %s",
		r.Method, allow))
}

func (h *Handler) refuse(w http.ResponseWriter, r *http.Request, err error) {
	control := http.NewResponseController(w)
	_ = control.SetWriteDeadline(time.Now().Add(silence))
	if r.ContentLength != 0 {
		// The answer may have to wait for data that may never come.
		_ = control.SetReadDeadline(time.Now().Add(h.timeout))
	}
	h.opt.Refuse(w, r, explain(err))
}

// limits is the value of Upload-Limit. size is the size of the largest upload; 0: unknown.
func limits(size int64) string {
	text := "max-age=" + strconv.Itoa(int(maxAge.Seconds()))
	if size > 0 {
		text += ", max-size=" + strconv.FormatInt(size, 10)
	}
	return text
}

// create begins an upload.
func (h *Handler) create(w http.ResponseWriter, r *http.Request, name string) {
	q, err := parseRequest(r)
	if err == nil && r.Header.Get("Content-Range") != "" {
		err = wrong("Content-Range is not possible with PUT: an upload that can be resumed has " +
			"the header Upload-Complete")
	}
	if err != nil {
		h.refuse(w, r, err)
		return
	}
	t, err := h.begin(w, r, name, "")
	if err != nil {
		h.refuse(w, r, err)
		return
	}
	defer h.end(t)
	s, err := h.start(w, r, t, q)
	if err != nil {
		if t.made {
			err = h.unmake(r.Context(), t, err)
		}
		h.refuse(w, r, err)
		return
	}
	if q.resumable {
		at := r.URL.Path + "/" + s.base.ID
		h.slots.name(t.transfer, s.base.ID)
		w.Header().Set("Location", at)
		w.Header().Set(fieldLimit, limits(fileLimit(t.volume.Size())))
		if r.ProtoAtLeast(1, 1) {
			w.WriteHeader(statusResumable)
		}
	}
	h.receive(w, r, t, s, q)
}

// start checks whether an upload may begin, and writes its record.
func (h *Handler) start(w http.ResponseWriter, r *http.Request, t *turn, q *request) (
	*session, error) {
	if err := h.vacant(w, r, t); err != nil {
		return nil, err
	}
	if err := checkRoom(t.volume, q.length, 0); err != nil {
		return nil, err
	}
	rec := record{Version: recordVersion, ID: rand.Text(), Resumable: q.resumable, Made: t.made,
		Coding: q.coding, Touched: time.Now(), Length: q.length, Want: q.repr}
	if err := rec.save(t.volume.Disk()); err != nil {
		return nil, err
	}
	s := newSession(t.name, t.volume, rec)
	s.memory = h.opt.UnpackMemory
	return s, nil
}

// fileLimit is the size of the largest file that a volume accepts: a qcow2 image of a full disk. 0:
// unknown.
func fileLimit(size int64) int64 {
	if size == 0 {
		return 0
	}
	return size + size/16 + 64<<20
}

// checkRoom refuses an upload that is larger than the volume, or whose rest is larger than the free
// space. come is how much has come.
func checkRoom(v Volume, length, come int64) error {
	if length < 0 {
		return nil
	}
	if limit := fileLimit(v.Size()); limit > 0 && length > limit {
		return tooLarge("the upload has %d bytes, and the volume only %d", length, v.Size())
	}
	free, err := osfile.AvailableSpace(filepath.Dir(v.Disk()))
	if err != nil {
		return err
	}
	if rest := length - come; rest > free {
		return refusal(http.StatusInsufficientStorage, "%d bytes of the upload are to come, and "+
			"%d are free in the volume's storage: make room, use another one, or compress it",
			rest, free)
	}
	return nil
}

// look answers with the progress of an upload.
func (h *Handler) look(w http.ResponseWriter, r *http.Request, name, id string) {
	t, s, err := h.resume(w, r, name, id)
	if err != nil {
		h.refuse(w, r, err)
		return
	}
	defer h.end(t)
	if err := h.pause(t, s); err != nil {
		h.refuse(w, r, h.giveUp(r.Context(), t, s, err))
		return
	}
	setState(w.Header(), s.offset, s.length, false)
	w.Header().Set(fieldLimit, limits(fileLimit(t.volume.Size())))
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusNoContent)
}

// setState sets the header fields of an upload's state.
func setState(header http.Header, offset, length int64, complete bool) {
	header.Set(fieldOffset, strconv.FormatInt(offset, 10))
	header.Set(fieldComplete, formatBool(complete))
	header.Del(fieldLength)
	if length >= 0 {
		header.Set(fieldLength, strconv.FormatInt(length, 10))
	}
}

// patch appends to an upload.
func (h *Handler) patch(w http.ResponseWriter, r *http.Request, name, id string) {
	q, err := parsePatch(r)
	if err != nil {
		h.refuse(w, r, err)
		return
	}
	t, s, err := h.resume(w, r, name, id)
	if err != nil {
		h.refuse(w, r, err)
		return
	}
	defer h.end(t)
	if err := h.fits(w, t, s, q); err != nil {
		if pauseErr := h.pause(t, s); pauseErr != nil {
			err = h.giveUp(r.Context(), t, s, pauseErr)
		}
		h.refuse(w, r, err)
		return
	}
	h.receive(w, r, t, s, q)
}

// fits checks whether the content begins where the upload is, and fits into it.
func (h *Handler) fits(w http.ResponseWriter, t *turn, s *session, q *request) error {
	if q.offset != s.offset {
		setState(w.Header(), s.offset, s.length, false)
		return refusal(http.StatusConflict, "the upload continues at byte %d, not at %d",
			s.offset, q.offset)
	}
	length := q.length
	if q.content >= 0 && q.last {
		if end := s.offset + q.content; length >= 0 && length != end {
			return wrong("%s is %d, but the data ends at %d bytes", fieldLength, length, end)
		} else {
			length = end
		}
	}
	switch {
	case length >= 0 && s.length >= 0 && length != s.length:
		return wrong("the upload has %d bytes by this request, and had %d by an earlier one",
			length, s.length)
	case s.length >= 0 && q.content >= 0 && s.offset+q.content > s.length:
		return wrong("%d bytes at %d go beyond the %d bytes of the upload", q.content, s.offset,
			s.length)
	}
	if s.length < 0 && length >= 0 {
		if err := checkRoom(t.volume, length, s.offset); err != nil {
			return err
		}
		s.length = length
	}
	return nil
}

// cancel gives up an upload.
func (h *Handler) cancel(w http.ResponseWriter, r *http.Request, name, id string) {
	t, s, err := h.resume(w, r, name, id)
	if err != nil {
		h.refuse(w, r, err)
		return
	}
	defer h.end(t)
	if err := h.giveUp(r.Context(), t, s, nil); err != nil {
		h.refuse(w, r, err)
		return
	}
	h.log.Info("an upload was cancelled", zap.String("volume", name))
	w.WriteHeader(http.StatusNoContent)
}

func mediaType(r *http.Request) string {
	t, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";")
	return strings.ToLower(strings.TrimSpace(t))
}

const (
	// lingerTime is Handler.timeout.
	lingerTime = 5 * time.Second
	// lingerBytes is how much is read: the buffers of a fast connection, and the data that a busy
	// client sends before it looks for an answer.
	lingerBytes = 64 << 20
)

// linger sends the answer, and reads what the client still sends. Closing a connection with unread
// data resets it, and a busy client would never see the reason.
func (h *Handler) linger(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength == 0 || r.ProtoMajor > 1 || h.slots.ended() {
		return // HTTP/2 can end one request alone
	}
	control := http.NewResponseController(w)
	// Flush reads a short rest before it sends the answer. A client that waits may send nothing.
	if control.SetReadDeadline(time.Now().Add(h.timeout)) != nil || control.Flush() != nil {
		return
	}
	_, _ = io.CopyN(io.Discard, r.Body, lingerBytes) // the client has its answer already
}
