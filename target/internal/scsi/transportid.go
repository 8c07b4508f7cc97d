package scsi

import (
	"encoding/binary"
	"encoding/hex"
	"strings"

	"kubevirt.io/disk/serving"
)

// A TransportID of iSCSI names an initiator port (SPC-4 7.6.4.6):
//
//	0      FORMAT CODE (bits 7-6), PROTOCOL IDENTIFIER 5h (bits 3-0)
//	1      reserved
//	2-3    ADDITIONAL LENGTH: of what follows, a multiple of 4, at least 20
//	4-     format 00b: the iSCSI name; format 01b: the name, ",i,0x" and the ISID in hexadecimal
//	       digits. It ends in at least one zero byte.
const (
	transportProtocol  = 0x05
	transportOfNode    = 0x00 // every port of the node
	transportOfPort    = 0x40
	transportSeparator = ",i,0x"
	transportHeader    = 4
	minTransportID     = 20
	maxISCSIName       = 223 // bytes
)

// transportID is the meaning of a TransportID in a parameter list.
type transportID struct {
	port InitiatorPort
	node bool // any port of this name; the ISID means nothing
}

// appendTransportID appends the TransportID of a port.
func appendTransportID(b []byte, p InitiatorPort) []byte {
	name := nameString(p.Name + transportSeparator + hex.EncodeToString(p.ISID[:]))
	for len(name) < minTransportID {
		name = append(name, 0)
	}
	b = append(b, transportOfPort|transportProtocol, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(len(name)))
	return append(b, name...)
}

// parseTransportID reads the TransportID at the start of b, which is at offset at of the parameter
// list, and returns its length.
func parseTransportID(b []byte, at int) (id transportID, n int, err error) {
	if len(b) < transportHeader {
		return id, 0, errParameterLength
	}
	length := int(binary.BigEndian.Uint16(b[2:]))
	n = transportHeader + length
	switch {
	case b[0]&0x0f != transportProtocol:
		return id, 0, invalidParameter(at, 3)
	case b[0]&^0x0f != transportOfNode && b[0]&^0x0f != transportOfPort:
		return id, 0, invalidParameter(at, 7)
	case b[1] != 0:
		return id, 0, invalidParameter(at+1, 7)
	case length < minTransportID || length%4 != 0:
		return id, 0, invalidParameter(at+2, 7)
	case len(b) < n:
		return id, 0, errParameterLength
	}
	text, padding, ended := strings.Cut(string(b[transportHeader:n]), "\x00")
	if !ended || strings.Trim(padding, "\x00") != "" {
		return id, 0, invalidParameter(at+transportHeader, noBit)
	}
	id.node = b[0]&^0x0f == transportOfNode
	if !id.node {
		// A name may contain anything printable, so only the last separator counts.
		i := strings.LastIndex(text, transportSeparator)
		if i < 0 {
			return id, 0, invalidParameter(at+transportHeader, noBit)
		}
		isid, err := hex.DecodeString(text[i+len(transportSeparator):])
		if err != nil || len(isid) != len(id.port.ISID) {
			return id, 0, invalidParameter(at+transportHeader, noBit)
		}
		copy(id.port.ISID[:], isid)
		text = text[:i]
	}
	// RFC 7143 4.2.7.2: names are compared in lower case, and a login converts them.
	id.port.Name = strings.ToLower(text)
	if !serving.ValidName(id.port.Name) {
		return id, 0, invalidParameter(at+transportHeader, noBit)
	}
	return id, n, nil
}
