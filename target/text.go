package target

import (
	"errors"
	"net"
	"slices"
	"strconv"
	"strings"

	"kubevirt.io/disk/target/internal/login"
	"kubevirt.io/disk/target/internal/pdu"
	"kubevirt.io/disk/target/internal/scsi"
)

// maxTextKeys is how many bytes of text an initiator may send in one negotiation.
const maxTextKeys = 16 << 10

// textExchange is the state of a text negotiation that takes several PDUs (RFC 7143 11.10, 11.11).
type textExchange struct {
	request []byte // keys received so far, while the initiator sets the C bit
	answer  []byte // not sent yet
	tag     uint32 // the target transfer tag for fetching the rest; 0: none

	seen map[string]struct{} // keys of this negotiation
}

// handleText answers a text request: SendTargets and the few keys that may change in full feature
// phase.
func (c *conn) handleText(h *pdu.Header, seg *segment) error {
	var p pdu.TextRequest
	if err := p.Decode(h); err != nil {
		return c.malformed(err)
	}
	if ok, err := c.admit(h, seg); !ok {
		return err
	}
	data, err := seg.take(c.share)
	if err != nil {
		return c.badData(h, err)
	}
	defer data.Release()
	defer c.countText()
	x := &c.text
	switch {
	case p.TransferTag == pdu.ReservedTag:
		*x = textExchange{} // a new negotiation ends the old one (RFC 7143 11.10.4)
	case p.TransferTag != x.tag || x.tag == 0:
		*x = textExchange{}
		c.rejectRequest(pdu.RejectInvalidPDUField, h)
		return nil
	}
	if data != nil {
		if len(x.request)+len(data.B) > maxTextKeys {
			*x = textExchange{}
			c.rejectRequest(pdu.RejectProtocolError, h)
			return nil
		}
		x.request = append(x.request, data.B...)
	}
	if p.Continue {
		c.received(h)
		x.tag = c.nextTag()
		c.tx.send(&pdu.TextResponse{TaskTag: p.TaskTag, TransferTag: x.tag}, snAdvance, nil, nil)
		return nil
	}
	if len(x.answer) == 0 && len(x.request) > 0 {
		if x.answer, err = c.answerText(x.request); err != nil {
			*x = textExchange{}
			c.rejectRequest(pdu.RejectProtocolError, h)
			return nil
		}
		x.request = nil
	}
	c.received(h)
	n := min(len(x.answer), c.session().params.SendMaxDataSegment, chunkSize)
	b := c.srv.pool.Must(n)
	copy(b.B, x.answer)
	x.answer = x.answer[n:]
	resp := pdu.TextResponse{TaskTag: p.TaskTag, TransferTag: pdu.ReservedTag, DataLen: n}
	if len(x.answer) > 0 {
		x.tag = c.nextTag()
		resp.Continue, resp.TransferTag = true, x.tag
	} else {
		seen := x.seen
		*x = textExchange{}
		resp.Final = p.Final
		if !p.Final {
			x.seen, x.tag = seen, c.nextTag()
			resp.TransferTag = x.tag
		}
	}
	c.tx.send(&resp, snAdvance, b.B, b)
	return nil
}

// textKeyCost is how many bytes a remembered key counts for.
const textKeyCost = 128

// countText charges the memory of the negotiation until its next PDU, which may never come.
func (c *conn) countText() {
	x := &c.text
	held := int64(cap(x.request)+cap(x.answer)) + int64(len(x.seen))*textKeyCost
	c.srv.pool.Charge(held - c.textHeld)
	c.textHeld = held
}

// answerText answers the keys of one complete text request.
func (c *conn) answerText(data []byte) ([]byte, error) {
	pairs, err := login.ParsePairs(data)
	if err != nil {
		return nil, err
	}
	sess := c.session()
	asks := func(p login.Pair) bool { return p.Key == login.KeySendTargets }
	if sess.discovery() && !slices.ContainsFunc(pairs, asks) {
		return nil, errors.New("a discovery session may ask for targets and nothing else")
	}
	if c.text.seen == nil {
		c.text.seen = make(map[string]struct{}, len(pairs))
	}
	reply, params, err := sess.params.NegotiateText(pairs, c.text.seen)
	if err != nil {
		return nil, err
	}
	var out []byte
	if i := slices.IndexFunc(pairs, asks); i >= 0 {
		out = c.sendTargets(out, pairs[i].Value)
	}
	// Other parameters cannot change, and goroutines that answer commands read them without the
	// lock.
	sess.mu.Lock()
	sess.params.SendMaxDataSegment = params.SendMaxDataSegment
	sess.mu.Unlock()
	for _, p := range reply {
		out = login.AppendPair(out, p.Key, p.Value)
	}
	return out, nil
}

// sendTargets appends the target and its portals if the request includes the target (RFC 7143 13.3,
// appendix C). There is one target, and the initiator has authenticated, so it may use the target.
// A request that this session may not make is answered with no target: no other key may be in the
// answer, and libiscsi closes a connection that answers with one.
func (c *conn) sendTargets(out []byte, what string) []byte {
	name := c.srv.opt.TargetName
	switch what {
	case "All":
		if !c.session().discovery() {
			return out
		}
	case "":
		if c.session().discovery() { // the session has no target
			return out
		}
	default:
		if !login.SameName(what, name) {
			return out
		}
	}
	out = login.AppendPair(out, "TargetName", name)
	if c.srv.opt.HidePortals {
		return out
	}
	for _, portal := range c.portals() {
		out = login.AppendPair(out, "TargetAddress", portal+","+strconv.Itoa(scsi.PortalGroup))
	}
	return out
}

// portals lists the addresses at which the initiator can reach the target: the address of its
// connection, and listeners with an address of the same kind.
func (c *conn) portals() []string { return portalsBeside(c.local, c.srv.conns.Portals()) }

func portalsBeside(local net.Addr, portals []net.Addr) []string {
	here, ok := local.(*net.TCPAddr)
	if !ok {
		return nil
	}
	list := []string{portalString(here)}
	var more []string
	for _, portal := range portals {
		a, ok := portal.(*net.TCPAddr)
		if !ok || a.IP.IsUnspecified() || a.IP.IsLoopback() != here.IP.IsLoopback() {
			continue
		}
		if s := portalString(a); s != list[0] {
			more = append(more, s)
		}
	}
	slices.Sort(more)
	return append(list, more...)
}

// portalString returns host:port, with IPv6 in brackets. It leaves out the zone, which means
// nothing to the peer.
func portalString(a *net.TCPAddr) string {
	ip := a.IP
	if v4 := ip.To4(); v4 != nil {
		ip = v4
	}
	return net.JoinHostPort(strings.ToLower(ip.String()), strconv.Itoa(a.Port))
}
