package targettest

import (
	"fmt"
	"slices"
	"strconv"
)

// Params are the operational parameters of a session (RFC 7143 13). Lengths are in bytes.
type Params struct {
	HeaderDigest, DataDigest bool
	MaxSend                  int // the target's MaxRecvDataSegmentLength
	MaxReceive               int // ours
	MaxBurst, FirstBurst     int
	MaxOutstandingR2T        int
	InitialR2T               bool
	ImmediateData            bool
	ProtocolLevel            int // iSCSIProtocolLevel (RFC 7144 7.1.1)
}

// negotiated computes the parameters from the proposals and answers. It checks that every answer is
// a legal outcome of its proposal (RFC 7143 6.2.2 and 13). Keys that were not negotiated have the
// standard's defaults.
func negotiated(sent, got Keys) (Params, error) {
	n := negotiation{sent: sent, got: got}
	p := Params{
		HeaderDigest:      n.list("HeaderDigest", "None") == "CRC32C",
		DataDigest:        n.list("DataDigest", "None") == "CRC32C",
		MaxSend:           n.declared(got, "MaxRecvDataSegmentLength", 8192),
		MaxReceive:        n.declared(sent, "MaxRecvDataSegmentLength", 8192),
		MaxBurst:          n.minimum("MaxBurstLength", 262144),
		FirstBurst:        n.minimum("FirstBurstLength", 65536),
		MaxOutstandingR2T: n.minimum("MaxOutstandingR2T", 1),
		InitialR2T:        n.boolean("InitialR2T", true, func(a, b bool) bool { return a || b }),
		ImmediateData:     n.boolean("ImmediateData", true, func(a, b bool) bool { return a && b }),
		ProtocolLevel:     n.minimum("iSCSIProtocolLevel", 1),
	}
	n.minimum("MaxConnections", 1)
	n.minimum("ErrorRecoveryLevel", 0)
	n.minimum("DefaultTime2Retain", 20)
	n.maximum("DefaultTime2Wait", 2)
	or := func(a, b bool) bool { return a || b }
	n.boolean("DataPDUInOrder", true, or)
	n.boolean("DataSequenceInOrder", true, or)
	if n.err == nil && p.FirstBurst > p.MaxBurst && !(p.InitialR2T && !p.ImmediateData) {
		n.fail("FirstBurstLength is %d and MaxBurstLength %d (RFC 7143 13.14)", p.FirstBurst,
			p.MaxBurst)
	}
	return p, n.err
}

type negotiation struct {
	sent, got Keys
	err       error
}

func (n *negotiation) fail(format string, args ...any) {
	if n.err == nil {
		n.err = fmt.Errorf(format, args...)
	}
}

// pair returns proposal and answer of a key. ok says that both are there.
func (n *negotiation) pair(key string) (proposal, answer string, ok bool) {
	proposal, proposed := n.sent.Lookup(key)
	answer, answered := n.got.Lookup(key)
	if !proposed {
		// A proposal of the target takes effect only if we answer, and we do not.
		return "", "", false
	}
	return proposal, answer, answered && answer != "Irrelevant" && answer != "Reject"
}

func (n *negotiation) number(key, value string) int {
	v, err := strconv.ParseUint(value, 0, 32)
	if err != nil {
		n.fail("%s=%s is not a number", key, value)
	}
	return int(v)
}

func (n *negotiation) declared(in Keys, key string, def int) int {
	if v, ok := in.Lookup(key); ok {
		return n.number(key, v)
	}
	return def
}

func (n *negotiation) minimum(key string, def int) int {
	return n.selected(key, def, func(answer, proposal int) bool { return answer <= proposal })
}

func (n *negotiation) maximum(key string, def int) int {
	return n.selected(key, def, func(answer, proposal int) bool { return answer >= proposal })
}

func (n *negotiation) selected(key string, def int, legal func(answer, proposal int) bool) int {
	proposal, answer, ok := n.pair(key)
	if !ok {
		if _, proposed := n.sent.Lookup(key); proposed {
			if _, answered := n.got.Lookup(key); !answered {
				n.fail("%s has no answer (RFC 7143 6.2.2)", key)
			}
		}
		return def
	}
	a := n.number(key, answer)
	if p := n.number(key, proposal); n.err == nil && !legal(a, p) {
		n.fail("%s=%s is answered with %s", key, proposal, answer)
	}
	return a
}

func (n *negotiation) boolean(key string, def bool, combine func(a, b bool) bool) bool {
	proposal, answer, ok := n.pair(key)
	if !ok {
		// The answer may be left out if the proposal decides (RFC 7143 6.2.2).
		p := proposal == "Yes"
		if proposal != "" && combine(p, true) == combine(p, false) {
			return p
		}
		return def
	}
	if answer != "Yes" && answer != "No" {
		n.fail("%s=%s is answered with %s", key, proposal, answer)
	}
	a, p := answer == "Yes", proposal == "Yes"
	if combine(p, true) != a && combine(p, false) != a {
		n.fail("%s=%s is answered with %s", key, proposal, answer)
	}
	return a
}

// list returns the answer to a list of values. It must be one of them.
func (n *negotiation) list(key, def string) string {
	proposal, answer, ok := n.pair(key)
	if !ok {
		return def
	}
	if slices.Contains(splitList(proposal), answer) {
		return answer
	}
	n.fail("%s=%s is answered with %s (RFC 7143 6.2.1)", key, proposal, answer)
	return def
}
