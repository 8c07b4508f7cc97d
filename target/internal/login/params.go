package login

import (
	"fmt"
	"slices"
)

// Params are the operational parameters of a session and its connection (RFC 7143 section 13).
// Lengths are bytes, times are seconds.
type Params struct {
	HeaderDigest, DataDigest bool // CRC32C; false: none
	// MaxRecvDataSegmentLength of the initiator: the longest segment to send it
	SendMaxDataSegment int
	// MaxRecvDataSegmentLength of the target: the longest segment it may be sent
	RecvMaxDataSegment  int
	MaxBurstLength      int
	FirstBurstLength    int // at most MaxBurstLength
	MaxOutstandingR2T   int
	InitialR2T          bool // unsolicited Data-Out PDUs are not allowed
	ImmediateData       bool
	DataPDUInOrder      bool
	DataSequenceInOrder bool
	DefaultTime2Wait    int
	DefaultTime2Retain  int
	MaxConnections      int // 1
	ErrorRecoveryLevel  int // 0
	ProtocolLevel       int // iSCSIProtocolLevel (RFC 7144 7.1.1)
}

// LevelRFC7144 is the iSCSIProtocolLevel that is required for the features of RFC 7144: its task
// management functions, command priority and status qualifiers. It is the highest that is
// negotiated.
const LevelRFC7144 = 2

// The range of every length key (RFC 7143 13.12 to 13.14), bytes.
const (
	minLength = 512
	maxLength = 1<<24 - 1
)

// defaultParams are those that hold where a key is not negotiated.
func defaultParams() Params {
	return Params{
		SendMaxDataSegment:  8192,
		RecvMaxDataSegment:  8192,
		MaxBurstLength:      262144,
		FirstBurstLength:    65536,
		MaxOutstandingR2T:   1,
		InitialR2T:          true,
		ImmediateData:       true,
		DataPDUInOrder:      true,
		DataSequenceInOrder: true,
		DefaultTime2Wait:    2,
		DefaultTime2Retain:  20,
		MaxConnections:      1,
		ProtocolLevel:       1,
	}
}

// checkBursts enforces that FirstBurstLength does not exceed MaxBurstLength (RFC 7143 13.14), once
// everything is negotiated (6.2). Where there can be no unsolicited data the first length means
// nothing.
func (p *Params) checkBursts() *refusal {
	if p.FirstBurstLength > p.MaxBurstLength {
		if !p.InitialR2T || p.ImmediateData {
			return refuse(StatusInitiatorError, "inconsistent_parameters",
				"FirstBurstLength %d exceeds MaxBurstLength %d", p.FirstBurstLength,
				p.MaxBurstLength)
		}
		p.FirstBurstLength = p.MaxBurstLength
	}
	return nil
}

// resolve returns the limits with defaults in place and within the ranges of the standard.
func (l Limits) resolve() Limits {
	length := func(v, def int) int {
		if v == 0 {
			v = def
		}
		return min(max(v, minLength), maxLength)
	}
	r2t := l.MaxOutstandingR2T
	if r2t == 0 {
		r2t = 1
	}
	return Limits{
		MaxRecvDataSegmentLength: length(l.MaxRecvDataSegmentLength, 262144),
		MaxBurstLength:           length(l.MaxBurstLength, 1048576),
		FirstBurstLength:         length(l.FirstBurstLength, 262144),
		MaxOutstandingR2T:        min(max(r2t, 1), 65535),
	}
}

// NegotiateText answers the pairs of a text negotiation in full feature phase (RFC 7143 6.4) and
// returns the parameters that hold afterwards. SendTargets is not for it. Keys that belong to the
// login are answered with Reject, which leaves them as they are. On an error, which deserves a
// Reject PDU (protocol error), nothing has changed.
func (p Params) NegotiateText(pairs []Pair) (reply []Pair, updated Params, err error) {
	if r := checkPairs(pairs, make(map[string]struct{}, len(pairs))); r != nil {
		return nil, p, r
	}
	updated = p
	for _, pair := range pairs {
		switch roles[pair.Key] {
		case roleUnknown:
			reply = append(reply, Pair{pair.Key, valueNotUnderstood})
		case roleAlias, roleIgnored: // a declaration is not answered
		default:
			if pair.Key != keyMaxRecvDataSegmentLength {
				reply = append(reply, Pair{pair.Key, valueReject})
				continue
			}
			n, ok := parseNumber(pair.Value, minLength, maxLength)
			if !ok {
				return nil, p, fmt.Errorf("key %s is not a number from %d to %d", pair.Key,
					minLength, maxLength)
			}
			updated.SendMaxDataSegment = n
		}
	}
	return slices.Clip(reply), updated, nil
}
