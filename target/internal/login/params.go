package login

import (
	"fmt"
	"slices"
)

// Params are the operational parameters of a session and its connection (RFC 7143 section 13),
// without those that are always the same. Lengths are in bytes.
type Params struct {
	HeaderDigest, DataDigest bool // CRC32C; false: none
	// The initiator's MaxRecvDataSegmentLength: the longest segment that the target may send.
	SendMaxDataSegment int
	// The target's MaxRecvDataSegmentLength: the longest segment that the initiator may send.
	RecvMaxDataSegment int
	MaxBurstLength     int
	FirstBurstLength   int  // at most MaxBurstLength
	InitialR2T         bool // unsolicited Data-Out PDUs are not allowed
	ImmediateData      bool
	ProtocolLevel      int // iSCSIProtocolLevel (RFC 7144 7.1.1)
}

// LevelRFC7144 is the iSCSIProtocolLevel that the features of RFC 7144 need: its task management
// functions, command priority and status qualifiers. It is the highest that the target negotiates.
const LevelRFC7144 = 2

// The range of every length key, in bytes (RFC 7143 13.12 to 13.14).
const (
	minLength = 512
	maxLength = 1<<24 - 1
)

// defaultParams are the values of keys that are not negotiated.
func defaultParams() Params {
	return Params{
		SendMaxDataSegment: 8192,
		RecvMaxDataSegment: 8192,
		MaxBurstLength:     262144,
		FirstBurstLength:   65536,
		InitialR2T:         true,
		ImmediateData:      true,
		ProtocolLevel:      1,
	}
}

// checkBursts checks, after the negotiation (6.2), that FirstBurstLength does not exceed
// MaxBurstLength (RFC 7143 13.14). If there can be no unsolicited data, FirstBurstLength has no
// meaning.
func (p *Params) checkBursts() *refusal {
	if p.FirstBurstLength > p.MaxBurstLength {
		if !p.InitialR2T || p.ImmediateData {
			return refuse(StatusInitiatorError, "inconsistent_parameters", "FirstBurstLength %d "+
				"exceeds MaxBurstLength %d", p.FirstBurstLength, p.MaxBurstLength)
		}
		p.FirstBurstLength = p.MaxBurstLength
	}
	return nil
}

// maxTextPairs is how many keys one negotiation in full feature phase may have.
const maxTextPairs = 1024

// NegotiateText answers the pairs of a text negotiation in full feature phase (RFC 7143 6.4), and
// returns the parameters after it. The caller answers SendTargets. Keys that belong to the login
// are answered with Reject and stay unchanged. seen holds the keys of the negotiation so far, and
// gets the new ones. After an error no parameter has changed; the caller answers with a Reject PDU
// (protocol error).
func (p Params) NegotiateText(pairs []Pair, seen map[string]struct{}) (reply []Pair,
	updated Params, err error) {
	if len(seen)+len(pairs) > maxTextPairs {
		return nil, p, fmt.Errorf("more than %d keys", maxTextPairs)
	}
	if r := checkPairs(pairs, seen); r != nil {
		return nil, p, r
	}
	updated = p
	for _, pair := range pairs {
		switch roles[pair.Key] {
		case roleUnknown:
			reply = append(reply, Pair{pair.Key, valueNotUnderstood})
		case roleAlias, roleIgnored, roleFullFeature: // a declaration is not answered
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
