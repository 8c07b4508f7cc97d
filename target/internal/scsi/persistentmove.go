package scsi

import "encoding/binary"

// The parameter list of REGISTER AND MOVE (SPC-4 6.16.4):
//
//	0-7    RESERVATION KEY
//	8-15   SERVICE ACTION RESERVATION KEY
//	16     reserved
//	17     UNREG (bit 1), APTPL (bit 0)
//	18-19  RELATIVE TARGET PORT IDENTIFIER
//	20-23  bytes of the TransportID that follows
//	24-    TransportID
const bitUnreg = 0x02

// parseMoveList reads the parameter list of REGISTER AND MOVE. Its only TransportID names an
// initiator port.
func parseMoveList(p []byte) (l persistList, err error) {
	if len(p) < persistBasicLen ||
		int64(binary.BigEndian.Uint32(p[20:])) != int64(len(p)-persistBasicLen) {
		return l, errParameterLength
	}
	l.key = binary.BigEndian.Uint64(p)
	l.actionKey = binary.BigEndian.Uint64(p[8:])
	l.unregister = p[17]&bitUnreg != 0
	l.aptpl = p[17]&bitAPTPL != 0
	switch {
	case p[16] != 0:
		return l, invalidParameter(16, 7)
	case p[17]&^(bitUnreg|bitAPTPL) != 0:
		return l, invalidParameter(17, 7)
	case binary.BigEndian.Uint16(p[18:]) != relativePort:
		return l, invalidParameter(18, 7) // we have one target port
	}
	id, n, err := parseTransportID(p[persistBasicLen:], persistBasicLen)
	switch {
	case err != nil:
		return l, err
	case persistBasicLen+n != len(p):
		return l, errParameterLength
	case id.node:
		return l, invalidParameter(persistBasicLen, 7) // only a single port can be the holder
	}
	l.ids = []transportID{id}
	return l, nil
}

// move is REGISTER AND MOVE (SPC-4 5.13.8). The holder makes another port the holder in its place.
// That port need not be registered or have a session.
func (e *persistentEdit) move(list *persistList) error {
	to := list.ids[0].port
	switch {
	case !e.holds(e.by) || e.kind.shared():
		return errConflict
	case list.actionKey == 0:
		return invalidParameter(8, 7)
	case to == e.by:
		return invalidParameter(persistBasicLen, noBit)
	}
	if r := e.find(to); r != nil {
		r.key = list.actionKey
	} else if err := e.add(registration{port: to, key: list.actionKey}); err != nil {
		return err
	}
	e.holder = to
	e.aptpl = list.aptpl
	e.generation++
	if list.unregister {
		e.remove(func(r *registration) bool { return r.port == e.by })
	}
	return nil
}
