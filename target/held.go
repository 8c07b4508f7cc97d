package target

import "kubevirt.io/disk/target/internal/pdu"

// heldPDU is a numbered PDU that arrived before its turn, with its data.
type heldPDU struct {
	hdr  pdu.Header
	ahs  []byte
	data *buffer
	n    int
}

func (h *heldPDU) release() { h.data.release() }

// hold keeps the PDU in hand until the numbers before it have arrived. There are never more of them than
// the command window is wide.
func (c *conn) hold(cmdSN uint32, h *pdu.Header, ahs []byte, seg *segment) error {
	sess := c.session()
	if sess.held == nil {
		sess.held = make(map[uint32]*heldPDU)
	}
	if _, dup := sess.held[cmdSN]; dup {
		return c.badData(h, seg.discard())
	}
	n := seg.n
	data, err := seg.take(&c.srv.pool)
	if err != nil {
		return c.badData(h, err)
	}
	sess.held[cmdSN] = &heldPDU{hdr: *h, ahs: append([]byte(nil), ahs...), data: data, n: n}
	return nil
}

// replay handles held PDUs whose turn has come.
func (c *conn) replay(run *runner) error {
	sess := c.session()
	for run.reading && len(sess.held) > 0 { // held belongs to the reader
		exp := sess.window.exp.Load()
		h := sess.held[exp]
		if h == nil {
			return nil
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
	defer func() { _ = seg.discard() }() // also where a bug ends the session
	c.rx.hdr = h.hdr                     // a Reject carries it
	return c.dispatch(run, &c.rx.hdr, h.ahs, &seg)
}
