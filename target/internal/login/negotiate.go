package login

import (
	"math"
	"strconv"
	"strings"

	"kubevirt.io/disk/chap"
)

// negotiation answers the operational keys of one login (RFC 7143 6.2 and section 13).
type negotiation struct {
	discovery bool
	params    Params
}

// scope says in which sessions a key has a meaning.
type scope uint8

const (
	normalOnly scope = iota // Irrelevant in a discovery session
	anySession
)

// numericKey is a key whose values are numbers. agree returns the answer to an offer within the
// range. It obeys the key's result function: with Minimum the answer must not exceed the offer,
// with Maximum it must not be below the offer.
type numericKey struct {
	scope    scope
	min, max int
	agree    func(offer int, p *Params) int
}

// numericKeys has all numeric keys but MaxRecvDataSegmentLength, which is declared, not negotiated.
var numericKeys = map[string]numericKey{
	keyMaxConnections: {normalOnly, 1, 65535, always(1)},
	keyMaxBurstLength: {normalOnly, minLength, maxLength, func(offer int, p *Params) int {
		p.MaxBurstLength = min(offer, maxBurst)
		return p.MaxBurstLength
	}},
	// The answer must not exceed MaxBurstLength, if that is known already.
	keyFirstBurstLength: {normalOnly, minLength, maxLength, func(offer int, p *Params) int {
		p.FirstBurstLength = min(offer, MaxDataSegment, p.MaxBurstLength)
		return p.FirstBurstLength
	}},
	keyMaxOutstandingR2T: {normalOnly, 1, 65535, always(1)},
	// At error recovery level 0 nothing is kept for a lost connection. So there is no reason to
	// wait, and nothing to retain.
	keyDefaultTime2Wait:   {anySession, 0, 3600, func(offer int, _ *Params) int { return offer }},
	keyDefaultTime2Retain: {anySession, 0, 3600, always(0)},
	keyErrorRecoveryLevel: {anySession, 0, 2, always(0)},
	// 1 is RFC 7143, 2 adds RFC 7144.
	keyISCSIProtocolLevel: {normalOnly, 0, 31, func(offer int, p *Params) int {
		p.ProtocolLevel = min(offer, LevelRFC7144)
		return p.ProtocolLevel
	}},
}

func always(n int) func(int, *Params) int { return func(int, *Params) int { return n } }

// booleanKeys are Yes or No, and only in a normal session. The function returns the answer. The
// target wants unsolicited and immediate data, and everything in order.
var booleanKeys = map[string]func(offer bool, p *Params) bool{
	keyInitialR2T: func(offer bool, p *Params) bool {
		p.InitialR2T = offer
		return offer
	},
	keyImmediateData: func(offer bool, p *Params) bool {
		p.ImmediateData = offer
		return offer
	},
	keyDataPDUInOrder:      func(bool, *Params) bool { return true },
	keyDataSequenceInOrder: func(bool, *Params) bool { return true },
}

const (
	digestCRC32C         = "CRC32C"
	taskReportingRFC3720 = "RFC3720"
)

// answer handles the operational keys of one step in order, and appends the answers to out.
// FirstBurstLength depends on other keys, so it comes last.
func (n *negotiation) answer(out []byte, pairs []Pair) ([]byte, *refusal) {
	var first *Pair
	for i, p := range pairs {
		if p.Key == keyFirstBurstLength {
			first = &pairs[i]
			continue
		}
		if p.Key == keyMaxRecvDataSegmentLength {
			length, ok := parseNumber(p.Value, minLength, maxLength)
			if !ok {
				// A declaration cannot be rejected (RFC 7143 7.12).
				return nil, refuse(StatusInitiatorError, "bad_value",
					"key %s is not a number from %d to %d", p.Key, minLength, maxLength)
			}
			n.params.SendMaxDataSegment = length
			continue
		}
		out = AppendPair(out, p.Key, n.value(p))
	}
	if first != nil {
		value := valueIrrelevant
		if !n.params.InitialR2T || n.params.ImmediateData || n.discovery {
			value = n.value(*first)
		}
		out = AppendPair(out, first.Key, value)
	}
	return out, nil
}

// value answers one negotiated key. An inadmissible value is answered with Reject and leaves the
// parameter unchanged (RFC 7143 6.2.2).
func (n *negotiation) value(p Pair) string {
	if k, ok := numericKeys[p.Key]; ok {
		return n.numeric(k, p.Value)
	}
	if k, ok := booleanKeys[p.Key]; ok {
		return n.boolean(k, p.Value)
	}
	switch p.Key {
	case keyHeaderDigest:
		return digest(p.Value, &n.params.HeaderDigest)
	case keyDataDigest:
		return digest(p.Value, &n.params.DataDigest)
	case keyTaskReporting:
		if n.discovery {
			return valueIrrelevant
		}
		return firstOf(p.Value, taskReportingRFC3720)
	case keyIFMarker, keyOFMarker:
		// Obsolete. The answer is No rather than Reject, because older initiators expect a boolean
		// (RFC 7143 13.25).
		return valueNo
	}
	return valueReject // IFMarkInt, OFMarkInt
}

func (n *negotiation) numeric(k numericKey, value string) string {
	if k.scope == normalOnly && n.discovery {
		return valueIrrelevant
	}
	offer, ok := parseNumber(value, k.min, k.max)
	if !ok {
		return valueReject
	}
	return strconv.Itoa(k.agree(offer, &n.params))
}

func (n *negotiation) boolean(agree func(bool, *Params) bool, value string) string {
	switch {
	case n.discovery:
		return valueIrrelevant
	case value != valueYes && value != valueNo:
		return valueReject
	case agree(value == valueYes, &n.params):
		return valueYes
	}
	return valueNo
}

func digest(offer string, param *bool) string {
	value := firstOf(offer, digestCRC32C, valueNone)
	if value != valueReject {
		*param = value == digestCRC32C
	}
	return value
}

// firstOf returns the first supported item of a list in the initiator's order (RFC 7143 6.2.1), or
// Reject.
func firstOf(offer string, supported ...string) string {
	for item := range strings.SplitSeq(offer, ",") {
		for _, s := range supported {
			if item == s {
				return s
			}
		}
	}
	return valueReject
}

// parseNumber reads a numerical-value between min and max, which are within int32.
func parseNumber(value string, min, max int) (int, bool) {
	v, err := chap.ParseNumber(value)
	if err != nil || v > math.MaxInt32 || int(v) < min || int(v) > max {
		return 0, false
	}
	return int(v), true
}
