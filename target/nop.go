package target

import (
	"sync/atomic"
	"time"

	"kubevirt.io/disk/target/internal/pdu"
)

// pinger is the state of this target's NOP-In pings (RFC 7143 11.19).
type pinger struct {
	sentAt atomic.Int64 // coarse clock; 0: no ping is outstanding
}

// handleNOPOut answers an initiator's ping with its own data, or takes the answer to a ping of this
// target (RFC 7143 11.18).
func (c *conn) handleNOPOut(h *pdu.Header, seg *segment) error {
	var p pdu.NOPOut
	if err := p.Decode(h); err != nil {
		return c.malformed(err)
	}
	if p.TaskTag == pdu.ReservedTag {
		// This is an answer to our ping, or a sign of life; nothing else is to be done. It must be
		// immediate. If it is not, its number counts as used, so that the session can go on.
		if ok, err := c.admit(h, seg); !ok {
			return err
		}
		if err := seg.discard(); err != nil {
			return c.badData(h, err)
		}
		c.received(h)
		return nil
	}
	if ok, err := c.admit(h, seg); !ok {
		return err
	}
	if p.TransferTag != pdu.ReservedTag {
		// our pings never have a task tag of the initiator
		return c.refuse(pdu.RejectInvalidPDUField, seg)
	}
	limit := min(c.session().params.SendMaxDataSegment, seg.n)
	data, err := seg.take(c.share)
	if err != nil {
		return c.badData(h, err)
	}
	c.received(h)
	var echo []byte
	if data != nil {
		echo = data.B[:limit]
	}
	c.tx.send(&pdu.NOPIn{LUN: p.LUN, TaskTag: p.TaskTag, TransferTag: pdu.ReservedTag,
		DataLen: len(echo)}, snAdvance, echo, data)
	return nil
}

// janitorTick is the interval between two checks of timeouts, and the resolution of the coarse
// clock.
const janitorTick = 250 * time.Millisecond

// tick advances the coarse clock.
func (s *Server) tick(now time.Time) { s.clock.Store(int64(now.Sub(s.start)) + 1) }

// Look implements serving.Connection. It ends a connection whose peer does not finish a PDU, does
// not read, or gives no sign of life.
func (c *conn) Look(_ time.Time, scarce bool) {
	sess, now := c.session(), c.srv.clock.Load()
	if sess == nil || !sess.open.Load() || c.Cause() != nil {
		return // the login has its own deadline
	}
	c.checkTimeouts(sess, now)
	if scarce && now-c.tx.Wrote.Load() > int64(2*janitorTick) {
		sess.trim() // idle sessions must not keep memory from busy ones
	}
}

func (c *conn) checkTimeouts(sess *session, now int64) {
	defer c.recoverPanic()
	lim := &c.srv.opt.Limits
	if since := c.tx.WriteSince.Load(); since != 0 {
		if now-since > int64(lim.PDUTimeout) {
			c.fail(errWriteTimeout)
		}
		return // the reader may be writing, and then it receives nothing
	}
	wrote := c.tx.Wrote.Load()
	since := c.rx.Since.Load()
	if since != 0 && now-max(since, wrote) > int64(lim.PDUTimeout) {
		c.fail(errPDUTimeout)
		return
	}
	heard := c.rx.Heard.Load()
	asked := c.ping.sentAt.Load()
	switch {
	case asked != 0 && heard >= asked: // the peer has sent something since the ping
		c.ping.sentAt.Store(0)
	case asked != 0 && now-max(asked, wrote) > int64(lim.NOPTimeout):
		c.fail(errPeerDead)
	case sess.discovery(): // gets no pings (RFC 7143 7.4.3)
		if now-max(heard, wrote) > int64(lim.NOPInterval+lim.NOPTimeout) {
			c.fail(errPeerDead)
		}
	case since != 0: // the PDU has its own time limit, and a ping would restart it
	case asked == 0 && now-heard > int64(lim.NOPInterval) && !c.role.Busy():
		c.ping.sentAt.Store(now)
		c.sendSoon(&pdu.NOPIn{TaskTag: pdu.ReservedTag, TransferTag: c.nextTag()}, snPeek)
	}
}

// sendSoon sends a PDU for a goroutine that must not wait for the network. The session has not
// ended.
func (c *conn) sendSoon(p encoder, sn snKind) {
	c.tx.send(p, sn, nil, nil)
	c.flushSoon()
}

// flushSoon writes everything queued, for such a goroutine.
func (c *conn) flushSoon() {
	c.spawn(func() {
		if err := c.tx.Flush(); err != nil {
			c.fail(err)
		}
	})
}
