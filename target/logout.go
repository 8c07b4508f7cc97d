package target

import "kubevirt.io/disk/target/internal/pdu"

// handleLogout ends the session. Closing its only connection ends it, too (RFC 7143 11.14).
func (c *conn) handleLogout(h *pdu.Header, seg *segment) error {
	var p pdu.LogoutRequest
	if err := p.Decode(h); err != nil {
		return c.malformed(err)
	}
	if ok, err := c.admit(h, seg); !ok {
		return err
	}
	if err := seg.discard(); err != nil {
		return c.badData(h, err)
	}
	if c.session().discovery() && p.Reason != pdu.LogoutCloseSession {
		c.rejectRequest(pdu.RejectProtocolError, h) // RFC 7143 4.3
		return nil
	}
	resp := pdu.LogoutResponse{TaskTag: p.TaskTag}
	switch p.Reason {
	case pdu.LogoutCloseSession:
	case pdu.LogoutCloseConnection:
		if p.CID != c.session().cid {
			resp.Response = pdu.LogoutCIDNotFound
		}
	case pdu.LogoutRemoveConnection:
		// Recovery of a connection belongs to error recovery level 2.
		resp.Response = pdu.LogoutRecoveryNotSupported
	default:
		return c.refuse(pdu.RejectInvalidPDUField, seg)
	}
	c.received(h)
	if resp.Response == pdu.LogoutSuccess {
		c.session().abortAll()
		c.detach()
	}
	c.tx.send(&resp, snAdvance, nil, nil)
	if resp.Response == pdu.LogoutSuccess {
		return errLoggedOut
	}
	return nil
}

// detach ends the session's nexus before the initiator learns that the session has ended. The
// initiator may log in again at once, and must not be blocked by its own reservations and claims.
func (c *conn) detach() {
	if sess := c.session(); sess.nexus != nil {
		c.srv.device.Detach(sess.nexus)
	}
}
