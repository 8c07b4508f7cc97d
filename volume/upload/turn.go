package upload

import (
	"context"
	"errors"
	"io/fs"
	"net/http"
	"os"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/volume/api"
)

// turn is a request that holds the slot and the volume.
type turn struct {
	*transfer
	volume Volume
	made   bool        // the volume was made for this request
	paused *session    // the upload that waits in the slot, or will wait there
	stop   func() bool // ends the watch on the volume's context
}

// begin takes the slot of a volume and claims the volume. The caller calls end. id is the upload's;
// "" for a new one.
func (h *Handler) begin(w http.ResponseWriter, r *http.Request, name, id string) (*turn, error) {
	t := newTransfer(name)
	t.id = id
	if r.Method == http.MethodPut || r.Method == http.MethodPatch {
		t.control = http.NewResponseController(w)
	}
	t.total.Store(-1)
	other, ok := h.slots.take(r.Context(), t, id)
	switch {
	case other != nil:
		return nil, refusal(http.StatusConflict, "another upload to the volume %q is under way, "+
			"with %d bytes so far: wait until it has ended", name, other.received.Load())
	case !ok:
		return nil, refusal(http.StatusServiceUnavailable,
			"the server is stopping: try again later")
	}
	return h.claim(r.Context(), t, id == "")
}

// claim claims the volume for the holder of its slot. With mayMake, it makes a missing volume.
func (h *Handler) claim(ctx context.Context, t *transfer, mayMake bool) (*turn, error) {
	paused := h.slots.pausedOf(t)
	v, made, err := h.opt.Fill(ctx, t.name, mayMake)
	if err != nil {
		if paused != nil && api.Is(err, api.CodeNotFound) { // Forget did not find it in the slot
			paused.free()
			paused = nil
		}
		h.slots.release(t, paused)
		return nil, err
	}
	return &turn{transfer: t, volume: v, made: made, paused: paused,
		stop: context.AfterFunc(v.Context(), t.interrupt)}, nil
}

// end releases the slot and the volume.
func (h *Handler) end(t *turn) {
	t.stop()
	t.volume.Release()
	h.slots.release(t.transfer, t.paused)
	h.dropOldest()
}

// dropOldest gives up the oldest uploads that wait in memory, if there are too many.
func (h *Handler) dropOldest() {
	for {
		name, ok := h.slots.crowded()
		if !ok {
			return
		}
		t := newTransfer(name)
		t.brief = true
		if _, ok := h.slots.take(context.Background(), t, ""); !ok {
			return
		}
		if s := h.slots.pausedOf(t); s != nil {
			s.free()
			h.log.Info("an interrupted upload of compressed data is given up, because too many "+
				"uploads wait in memory", zap.String("volume", name), zap.Int64("bytes", s.offset))
		}
		h.slots.release(t, nil)
	}
}

// waiting returns the record of the upload that waits for its next request. Its session may be in
// memory. It returns fs.ErrNotExist if there is none.
func (h *Handler) waiting(t *turn) (record, error) {
	rec, err := loadRecord(t.volume.Disk())
	if t.paused != nil && (err != nil || rec.ID != t.paused.base.ID) {
		t.paused.free() // its volume was deleted meanwhile
		t.paused = nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !durable.IsUnread(err) {
		h.log.Warn("the record of an upload is damaged: the upload is given up",
			zap.String("volume", t.name), zap.Error(err))
	}
	return rec, err
}

// unreadable says that nothing is known about an upload, because its record cannot be read.
func unreadable(err error) error {
	return refusal(http.StatusServiceUnavailable, "the record of an upload %v: try again", err)
}

// vacant makes room for a new upload. It refuses if there is an upload that can be resumed.
func (h *Handler) vacant(w http.ResponseWriter, r *http.Request, t *turn) error {
	rec, err := h.waiting(t)
	switch {
	case t.paused != nil:
		return h.inTheWay(w, r, rec.ID, t.paused.offset)
	case err == nil && rec.goesOn():
		return h.inTheWay(w, r, rec.ID, rec.Offset)
	case durable.IsUnread(err):
		return unreadable(err)
	}
	t.made = t.made || rec.Made
	if err := clearFiles(t.volume, rec.Placed); err != nil {
		return err
	}
	if _, err := os.Lstat(t.volume.Disk()); !errors.Is(err, fs.ErrNotExist) {
		return taken(t.name, t.volume.Disk())
	}
	return nil
}

// taken says that another program has made a file in the place of the volume's disk.
func taken(volume, disk string) error {
	return refusal(http.StatusConflict, "the volume %q awaits data, but there is the file %q "+
		"already, which no upload has made: move it away", volume, disk)
}

func (h *Handler) inTheWay(w http.ResponseWriter, r *http.Request, id string, offset int64) error {
	at := r.URL.Path + "/" + id
	w.Header().Set("Location", at)
	return refusal(http.StatusConflict, "an upload was interrupted when %d bytes had come: it can "+
		"go on at %s, as \"kubevirt-disk upload\" does, or be given up by DELETE of that address",
		offset, at)
}

// resume finds an existing upload. Without an error, the caller calls end.
func (h *Handler) resume(w http.ResponseWriter, r *http.Request, name, id string) (
	*turn, *session, error) {
	t, err := h.begin(w, r, name, id)
	if api.Is(err, api.CodeHasData) {
		err = noUpload(name) // it is complete, or was for an earlier volume of that name
	}
	if err != nil {
		return nil, nil, err
	}
	s, err := h.find(r.Context(), t, id)
	if err != nil {
		h.end(t)
		return nil, nil, err
	}
	return t, s, nil
}

// noUpload says that an upload does not exist.
func noUpload(volume string) error {
	return refusal(http.StatusNotFound, "there is no such upload to the volume %q: begin it "+
		"again, unless the volume has its data", volume)
}

// find returns the upload with that identifier.
func (h *Handler) find(ctx context.Context, t *turn, id string) (*session, error) {
	rec, err := h.waiting(t)
	switch {
	case durable.IsUnread(err):
		return nil, unreadable(err)
	case err != nil || rec.ID != id:
		return nil, noUpload(t.name)
	}
	t.made = rec.Made
	s := t.paused
	t.paused = nil
	switch {
	case s != nil:
		s.volume, s.granted = t.volume, 0 // nothing was reserved meanwhile
		return s, nil
	case rec.goesOn():
		if s, err = restore(t.name, t.volume, rec); err == nil {
			s.memory = h.opt.UnpackMemory
			return s, nil
		}
		if durable.IsUnread(err) && !errors.Is(err, osfile.ErrLinked) &&
			!errors.Is(err, unix.ELOOP) {
			if s != nil {
				s.free()
			}
			return nil, refusal(http.StatusServiceUnavailable, "the upload to the volume %q "+
				"cannot go on now: try again: %v", t.name, err)
		}
		h.log.Warn("an upload cannot go on", zap.String("volume", t.name), zap.Error(err))
	}
	if s == nil {
		s = &session{name: t.name, volume: t.volume, base: rec, placed: rec.Placed}
	}
	return nil, h.giveUp(ctx, t, s, noUpload(t.name))
}

// Expire gives up uploads that were not continued for too long, so that their data does not take
// space for ever. names are the volumes that await content.
func (h *Handler) Expire(ctx context.Context, names []string) error {
	var all []error
	for _, name := range names {
		if err := h.expire(ctx, name); err != nil {
			all = append(all, err)
		}
	}
	return errors.Join(all...)
}

func (h *Handler) expire(ctx context.Context, name string) error {
	slot := newTransfer(name)
	slot.brief = true
	if _, ok := h.slots.take(ctx, slot, ""); !ok {
		return nil // a request is running, or the server stops
	}
	t, err := h.claim(ctx, slot, false)
	if err != nil {
		return nil // it does not await content any more
	}
	defer h.end(t)
	rec, err := h.waiting(t)
	if err != nil {
		return nil // there is no upload
	}
	s := &session{name: name, base: rec, offset: rec.Offset, placed: rec.Placed}
	if t.paused != nil {
		s = t.paused
	}
	s.volume = t.volume
	if !s.base.old() {
		return nil
	}
	t.paused = nil
	h.log.Info("an interrupted upload is given up: nobody resumed it",
		zap.String("volume", name), zap.Int64("bytes", s.offset), zap.Duration("after", maxAge))
	return h.giveUp(ctx, t, s, nil)
}

// Recover removes the data of uploads that the end of an earlier process interrupted and that
// cannot be resumed. names are the volumes that await content. Call it before requests come.
func (h *Handler) Recover(ctx context.Context, names []string) error {
	var all []error
	for _, name := range names {
		v, _, err := h.opt.Fill(ctx, name, false)
		if err != nil {
			all = append(all, err)
			continue
		}
		t := &turn{transfer: &transfer{name: name}, volume: v}
		rec, err := h.waiting(t)
		if durable.IsUnread(err) {
			all = append(all, unreadable(err)) // the upload may be resumed later
		} else if err != nil || !rec.goesOn() {
			s := &session{name: name, volume: v, base: rec, placed: rec.Placed}
			if err := h.giveUp(ctx, t, s, nil); err != nil {
				all = append(all, err)
			}
		}
		t.volume.Release()
	}
	return errors.Join(all...)
}

// pause keeps an upload for its next request.
func (h *Handler) pause(t *turn, s *session) error {
	if err := s.pause(); err != nil {
		return err
	}
	if s.out != nil {
		t.paused = s
	}
	return nil
}

// giveUp gives up an upload, and leaves the volume as it was before: empty, or missing. It returns
// err and its own errors.
func (h *Handler) giveUp(ctx context.Context, t *turn, s *session, err error) error {
	if clearErr := s.discard(); clearErr != nil {
		h.log.Error("the data of an upload cannot be removed", zap.String("volume", t.name),
			zap.Error(clearErr))
		return errors.Join(err, clearErr)
	}
	if t.made || s.base.Made {
		return h.unmake(ctx, t, err)
	}
	return err
}

// unmake deletes a volume that was made for an upload. It returns err and its own errors.
func (h *Handler) unmake(ctx context.Context, t *turn, err error) error {
	t.close() // otherwise the end of the volume interrupts the answer, and its connection
	return errors.Join(err, t.volume.Undo(context.WithoutCancel(ctx)))
}
