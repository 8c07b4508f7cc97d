package scsi

import "encoding/binary"

const (
	parameterFormatMask = 0xe0 // PARAMETER DATA FORMAT, byte 1
	formatExtended      = 1

	accessOptimized = 0x00 // asymmetric access state active/optimized
	supportsActive  = 0x01 // AO_SUP: the only state that we have
)

// prepareReportPortGroups is REPORT TARGET PORT GROUPS (SPC-4 6.37). It reports one group with one
// port, which is always active. All portals belong to that port: in RFC 7143 4.4.3 the portal group
// is the target port.
func prepareReportPortGroups(t *Task) error {
	t.data = append(t.data[:0], 0, 0, 0, 0)
	switch t.CDB[1] >> 5 {
	case 0:
	case formatExtended:
		t.data = append(t.data, formatExtended<<4, 0, 0, 0) // implicit transitions take no time
	default:
		return invalidField(1, 7)
	}
	t.data = append(t.data, accessOptimized, supportsActive, 0, PortalGroup, 0, 0, 0, 1)
	t.data = append(t.data, 0, 0, 0, relativePort)
	binary.BigEndian.PutUint32(t.data, uint32(len(t.data)-4))
	t.reply(binary.BigEndian.Uint32(t.CDB[6:]))
	return nil
}
