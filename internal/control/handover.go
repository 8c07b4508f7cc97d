package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"sync"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// Disks are the methods of serving.Disks that handovers need.
type Disks interface {
	Admit(lun uint16, initiator string, until time.Time) error
	HandOver(lun uint16) (former string, err error)
	Withdraw(lun uint16) (guest string, err error)
	Openings() []serving.Opening
	Holders(lun uint16) serving.Holders
}

// handovers carries out handovers, one at a time for each LUN, and ends those whose time has
// expired.
type handovers struct {
	disks Disks
	log   *zap.Logger

	mu       sync.Mutex
	turns    map[uint16]chan struct{} // guarded by mu; a semaphore of one for each LUN
	openings map[uint16]*opening      // guarded by mu; LUNs that are open for a limited time
	closed   bool                     // guarded by mu; timers do not expire any more
}

type opening struct{ timer *time.Timer }

func newHandovers(disks Disks, log *zap.Logger) *handovers {
	return &handovers{disks: disks, log: log,
		turns: map[uint16]chan struct{}{}, openings: map[uint16]*opening{}}
}

func (h *handovers) handle(w http.ResponseWriter, r *http.Request, user uint32) {
	var req status.Handover
	if !understand(w, r, &req) {
		return
	}
	done, err := h.do(r.Context(), req)
	if err != nil {
		answer(w, http.StatusConflict, status.Refusal{Error: err.Error()})
		return
	}
	h.log.Info("handover", zap.String("action", string(req.Action)), zap.Uint16("lun", req.LUN),
		zap.String("done", done), zap.Uint32("by_user", user))
	answer(w, http.StatusOK, status.HandoverAnswer{Done: done})
}

// checkPeer says what is wrong with the name of a peer: an initiator, or a client of NBD named by
// its socket or certificate.
func checkPeer(name string) error {
	if !serving.IsInitiator(name) && serving.ValidName(name) {
		return nil
	}
	return chap.CheckInitiatorName(name)
}

func (h *handovers) do(ctx context.Context, req status.Handover) (done string, err error) {
	if req.Action == status.ActionOpen {
		if err := checkPeer(req.To); err != nil {
			return "", fmt.Errorf("the name of the initiator, %q, %w", req.To, err)
		}
		// A time that overflows a Duration would leave the LUN open for ever.
		if req.Seconds < 0 || req.Seconds >= time.Duration(math.MaxInt64).Seconds() {
			return "", fmt.Errorf("a LUN cannot be open for %g seconds", req.Seconds)
		}
	}
	end, err := h.begin(ctx, req.LUN)
	if err != nil {
		return "", err
	}
	defer end()
	switch req.Action {
	case status.ActionOpen:
		return h.open(req)
	case status.ActionFinish:
		err = h.end(req.LUN, func(lun uint16) error {
			former, err := h.disks.HandOver(lun)
			done = handedOver(lun, former)
			return err
		})
		return done, err
	case status.ActionCancel:
		err = h.end(req.LUN, func(lun uint16) error {
			fenced, err := h.disks.Withdraw(lun)
			done = fmt.Sprintf("LUN %d stays with its owner, and %s is fenced", lun, fenced)
			return err
		})
		return done, err
	}
	return "", fmt.Errorf("%q is not an action: use open, finish or cancel", req.Action)
}

func (h *handovers) open(req status.Handover) (done string, err error) {
	open := time.Duration(req.Seconds * float64(time.Second))
	said, until := "until it is finished or cancelled", time.Time{}
	if open > 0 {
		said, until = fmt.Sprintf("for %v", open), time.Now().Add(open)
	}
	if err := h.disks.Admit(req.LUN, req.To, until); err != nil {
		return "", err
	}
	h.arm(req.LUN, open)
	return fmt.Sprintf("LUN %d is open to %s too, %s", req.LUN, req.To, said), nil
}

// handedOver tells a person how a handover ended. former is the former owner, if there was one.
func handedOver(lun uint16, former string) string {
	if former == "" {
		return fmt.Sprintf("LUN %d has a new owner, and nobody is fenced, as nobody is known to "+
			"have used it before: to fence a machine that may still have the guest, open the LUN "+
			"to its name with --to and close it again with --cancel", lun)
	}
	return fmt.Sprintf("LUN %d has a new owner, and the former one, %s, is fenced", lun, former)
}

// turnWait limits how long a request waits for the previous one. It is shorter than the client's
// timeout, so that the client gets the reason, and shorter than the server's ReadTimeout, at which
// net/http cancels the context of a request.
const turnWait = 3 * time.Second

// begin waits until no other request is changing the LUN; end lets the next one begin. So no answer
// calls a LUN open while it is being handed over. A slow disk delays neither other LUNs nor the
// daemon's stop.
func (h *handovers) begin(ctx context.Context, lun uint16) (end func(), err error) {
	ctx, stop := context.WithTimeout(ctx, turnWait)
	defer stop()
	turn := h.turn(lun)
	select {
	case turn <- struct{}{}:
		return func() { <-turn }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("the disk of LUN %d is still running commands of the fenced "+
			"initiator; try again later", lun)
	}
}

func (h *handovers) turn(lun uint16) chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.turns[lun] == nil {
		h.turns[lun] = make(chan struct{}, 1)
	}
	return h.turns[lun]
}

// end ends a handover before its time has expired. If that is refused, nothing changes, and the
// rest of the time still counts.
func (h *handovers) end(lun uint16, how func(lun uint16) error) error {
	err := how(lun)
	if err == nil {
		h.arm(lun, 0)
	}
	return err
}

// ParseHandover parses a step of a handover in the form of the control socket: a JSON object.
func ParseHandover(text string) (req status.Handover, err error) {
	decoder := json.NewDecoder(bytes.NewReader([]byte(text)))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&req); err != nil {
		return req, fmt.Errorf("want {\"action\":\"open\",\"lun\":1,\"to\":\"INITIATOR\"}: %w", err)
	}
	return req, nil
}

// Want carries out a step of a handover that a lasting place asks for, such as a file. So it is
// called again and again, also after a restart. It does not repeat a step that was done. Every step
// names the initiator of the handover, so that an old request does not end a newer handover.
func (s *Server) Want(ctx context.Context, req status.Handover) (done string, err error) {
	to := serving.NormalName(req.To)
	have := s.handovers.disks.Holders(req.LUN)
	switch {
	case to == "":
		return "", errors.New("the initiator is missing (to): every step names it")
	case req.Action == status.ActionOpen && have.Guest == to:
		return fmt.Sprintf("LUN %d is open to %s too", req.LUN, to), nil
	case req.Action == status.ActionFinish && have.Guest == "" && have.Owner == to:
		return fmt.Sprintf("LUN %d belongs to %s", req.LUN, to), nil
	case req.Action == status.ActionFinish && have.Guest != to:
		return "", fmt.Errorf("LUN %d is not open to %s: open it to that initiator first", req.LUN,
			to)
	case req.Action == status.ActionCancel && have.Owner == to:
		return "", fmt.Errorf("LUN %d belongs to %s already, so there is nothing to cancel: open "+
			"it to the initiator that should have it", req.LUN, to)
	case req.Action == status.ActionCancel && have.Guest != to:
		return fmt.Sprintf("LUN %d is not open to %s", req.LUN, to), nil
	}
	if done, err = s.handovers.do(ctx, req); err == nil {
		s.log.Info("handover", zap.String("action", string(req.Action)), zap.Uint16("lun", req.LUN),
			zap.String("done", done))
	}
	return done, err
}
