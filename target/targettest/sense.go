package targettest

import "fmt"

// SCSI status codes (SAM-5 5.3.1).
const (
	StatusGood                uint8 = 0x00
	StatusCheckCondition      uint8 = 0x02
	StatusConditionMet        uint8 = 0x04
	StatusBusy                uint8 = 0x08
	StatusReservationConflict uint8 = 0x18
	StatusTaskSetFull         uint8 = 0x28
	StatusTaskAborted         uint8 = 0x40
)

// Sense is sense data of either format (SPC-4 4.5). The zero value is no sense data.
type Sense struct {
	Key, ASC, ASCQ uint8
	Descriptor     bool
	Deferred       bool
	Raw            []byte
}

func (s Sense) String() string { return fmt.Sprintf("%02X/%02X/%02X", s.Key, s.ASC, s.ASCQ) }

// ParseSense decodes sense data.
func ParseSense(b []byte) (Sense, error) {
	if len(b) == 0 {
		return Sense{}, nil
	}
	s := Sense{Raw: b}
	switch code := b[0] & 0x7f; code {
	case 0x70, 0x71:
		if len(b) < 14 || int(b[7]) != len(b)-8 {
			return s, fmt.Errorf("fixed format sense data of %d bytes with a wrong additional "+
				"length: %x", len(b), b)
		}
		s.Key, s.ASC, s.ASCQ, s.Deferred = b[2]&0x0f, b[12], b[13], code == 0x71
	case 0x72, 0x73:
		if len(b) < 8 || int(b[7]) != len(b)-8 {
			return s, fmt.Errorf("descriptor format sense data of %d bytes with a wrong "+
				"additional length: %x", len(b), b)
		}
		s.Key, s.ASC, s.ASCQ, s.Deferred, s.Descriptor = b[1]&0x0f, b[2], b[3], code == 0x73, true
	default:
		return s, fmt.Errorf("sense data with response code %#x", code)
	}
	return s, nil
}

// Failed returns the sense data of a command that ended in CHECK CONDITION, as "key/asc/ascq", and
// otherwise its status.
func (r *Result) Failed() string {
	if r.Response != 0 {
		return fmt.Sprintf("response %#x", r.Response)
	}
	if r.Status == StatusCheckCondition {
		return r.Sense.String()
	}
	return fmt.Sprintf("status %#x", r.Status)
}

// Good reports whether a command ended with GOOD.
func (r *Result) Good() bool { return r.Response == 0 && r.Status == StatusGood }
