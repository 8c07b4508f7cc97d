package control

import (
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/serving"
)

// arm sets the timer that ends the handover of a LUN. 0 means that it does not end by itself.
func (h *handovers) arm(lun uint16, after time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if o := h.openings[lun]; o != nil {
		o.timer.Stop()
		delete(h.openings, lun)
	}
	if after > 0 && !h.closed {
		o := new(opening)
		o.timer = time.AfterFunc(after, func() { h.expire(lun, o) })
		h.openings[lun] = o
	}
}

// resumeGrace is the least time that a LUN stays open after a restart. The guest's host has to log
// in again before the daemon knows which peer to fence. Initiators retry at least every 30 seconds.
const resumeGrace = time.Minute

// resume sets the timers of the LUNs that were open when their disks were last served.
func (h *handovers) resume(wanted func(lun uint16) bool) {
	for _, o := range h.disks.Openings() {
		if !wanted(o.LUN) {
			continue
		}
		log := h.log.With(zap.Uint16("lun", o.LUN), zap.String("to", o.To))
		if o.Until.IsZero() {
			log.Info("the LUN is still open for a handover, until it is finished or cancelled")
			continue
		}
		left := max(time.Until(o.Until), resumeGrace)
		h.arm(o.LUN, left)
		log.Info("the LUN is still open for a handover", zap.Duration("for", left))
	}
}

// expireAgain is the time until the next attempt when storage failed to record the end of a
// handover.
const expireAgain = 10 * time.Second

// expire fences the former owner, unless the new one is not logged in: then the guest has not
// moved. If the handover fails for another reason, such as storage, it is unknown where the guest
// is, and expire tries again. It does nothing if the time was extended or the handover has ended
// meanwhile.
func (h *handovers) expire(lun uint16, o *opening) {
	turn := h.turn(lun)
	turn <- struct{}{}
	defer func() { <-turn }()
	if !h.forgetTimer(lun, o) {
		return
	}
	former, err := h.disks.HandOver(lun)
	if err == nil {
		said := "the time of the handover is over: the former owner is fenced"
		if former == "" {
			said = "the time of the handover is over, and nobody is fenced, as nobody is known " +
				"to have used the LUN before"
		}
		h.log.Info(said, zap.Uint16("lun", lun), zap.String("fenced", former))
		return
	}
	failed, fenced := err, ""
	if errors.Is(err, serving.ErrNotLoggedIn) {
		fenced, failed = h.disks.Withdraw(lun)
	}
	if failed != nil && !h.isOpen(lun) {
		return // the LUN was removed
	}
	if failed != nil {
		h.arm(lun, expireAgain)
		h.log.Error("the time of the handover is over, but the LUN is open to both initiators "+
			"still", zap.Uint16("lun", lun), zap.Error(failed),
			zap.Duration("tried_again_after", expireAgain))
		return
	}
	h.log.Warn("the time of the handover is over, and the LUN stays with its owner",
		zap.Uint16("lun", lun), zap.String("fenced", fenced), zap.Error(err))
}

// forgetTimer removes the timer of a LUN if it is still the expired one.
func (h *handovers) forgetTimer(lun uint16, o *opening) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.openings[lun] != o {
		return false
	}
	delete(h.openings, lun)
	return true
}

// isOpen reports whether a LUN is open to a second initiator.
func (h *handovers) isOpen(lun uint16) bool {
	return slices.ContainsFunc(h.disks.Openings(), func(o serving.Opening) bool {
		return o.LUN == lun
	})
}

func (h *handovers) stopTimers() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for _, o := range h.openings {
		o.timer.Stop()
	}
}
