package target

import (
	"net"
	"slices"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/target/internal/pdu"
)

// heldPDU is a numbered PDU that arrived ahead of its turn, with its data.
type heldPDU struct {
	hdr  pdu.Header
	data *memory.Buffer
	n    int
	from *memory.Pool // the pool that heldCost is charged to; nil: not charged
}

// heldCost is how many bytes a held PDU counts for in addition to its data.
const heldCost = 192

func (h *heldPDU) release() {
	h.data.Release()
	if h.from != nil {
		h.from.Charge(-heldCost)
	}
}

// hold keeps the current PDU until all PDUs before it have arrived. It never holds more PDUs than
// the command window is wide.
func (c *conn) hold(h *pdu.Header, seg *segment) error {
	sess, cmdSN := c.session(), h.CmdSN()
	if sess.held == nil {
		sess.held = make(map[uint32]*heldPDU)
	}
	if _, dup := sess.held[cmdSN]; dup {
		return c.ignore(seg)
	}
	n := seg.n
	data, err := seg.take(c.share)
	if err != nil {
		return c.badData(h, err)
	}
	c.srv.pool.Charge(heldCost)
	sess.held[cmdSN] = &heldPDU{hdr: *h, data: data, n: n, from: c.srv.pool}
	return nil
}

// replay handles held PDUs whose turn has come.
func (c *conn) replay(run *runner) error {
	sess := c.session()
	for run.Reading && len(sess.held)+len(sess.waiting) > 0 { // only the reader uses both
		exp := sess.window.exp.Load()
		if i := slices.IndexFunc(sess.waiting,
			func(p *pdu.TaskManagementRequest) bool { return !pdu.SNLess(exp, p.CmdSN) }); i >= 0 {
			if c.Cause() != nil {
				return net.ErrClosed
			}
			p := sess.waiting[i]
			sess.waiting = slices.Delete(sess.waiting, i, i+1)
			if err := c.execute(p); err != nil {
				return err
			}
			continue
		}
		h := sess.held[exp]
		if h == nil {
			if !sess.passRejected(exp) {
				return nil
			}
			continue
		}
		delete(sess.held, exp)
		if err := c.replayOne(run, h); err != nil {
			return err
		}
	}
	return nil
}

func (c *conn) replayOne(run *runner, h *heldPDU) error {
	seg := segment{held: h.data, n: h.n, left: h.n, done: true}
	h.data = nil   // the segment owns it now
	defer func() { // even if a bug ends the session
		h.release()
		_ = seg.discard()
	}()
	c.rx.hdr = h.hdr // for a Reject
	return c.dispatch(run, &c.rx.hdr, &seg)
}
