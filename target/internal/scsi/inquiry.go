package scsi

import "encoding/binary"

// Peripheral qualifier and device type, byte 0 of all INQUIRY data (SPC-4 6.6.2).
const (
	peripheralDisk = 0x00
	// LUN 0 without a disk: a logical unit could be here, but none is. Linux reads this combination
	// as "target present, nothing at this LUN" and goes on to REPORT LUNS.
	peripheralVacant = 0x3f
	// Any other LUN without a disk: no logical unit can be here.
	peripheralNone = 0x7f
)

func (t *Task) peripheral() byte {
	switch {
	case t.unit != nil:
		return peripheralDisk
	case t.LUN == 0:
		return peripheralVacant
	}
	return peripheralNone
}

// versionDescriptors are the standards that we claim (SPC-4 table 146): SAM-5, SPC-4, SBC-3. The
// descriptor of iSCSI follows them.
var versionDescriptors = [...]uint16{0x00a0, 0x0460, 0x04c0}

// versionISCSI is iSCSI without a version; the negotiated protocol level is added to it (RFC 7144
// 4.2).
const versionISCSI = 0x0960

const (
	bitEVPD = 0x01

	inquiryVersion = 0x06 // SPC-4
	inquiryLen     = 96
)

// prepareInquiry is INQUIRY (SPC-4 6.6).
func prepareInquiry(t *Task) error {
	allocation := uint32(binary.BigEndian.Uint16(t.CDB[3:]))
	if t.CDB[1]&bitEVPD != 0 {
		return t.vitalProductData(t.CDB[2], allocation)
	}
	if t.CDB[2] != 0 {
		return invalidField(2, 7) // a page code without EVPD
	}
	t.probed(allocation)
	var b [inquiryLen]byte
	b[0] = t.peripheral()
	if t.unit != nil {
		b[5] = 0x10 // TPGS: implicit asymmetric access, as REPORT TARGET PORT GROUPS tells
	}
	b[2] = inquiryVersion
	b[3] = 0x10 | 0x02 // HISUP, RESPONSE DATA FORMAT
	b[4] = inquiryLen - 5
	if t.unit != nil {
		b[5] |= 0x08 // 3PC: EXTENDED COPY
	}
	b[7] = 0x02 // CMDQUE
	putPadded(b[8:16], vendor)
	putPadded(b[16:32], product)
	putPadded(b[32:36], revision)
	for i, v := range versionDescriptors {
		binary.BigEndian.PutUint16(b[58+2*i:], v)
	}
	binary.BigEndian.PutUint16(b[58+2*len(versionDescriptors):], versionISCSI+t.Nexus.level)
	t.data = append(t.data[:0], b[:]...)
	t.reply(allocation)
	return nil
}

// putPadded fills a left-aligned ASCII field, padded with spaces (SPC-4 4.3.1).
func putPadded(field []byte, s string) {
	for i := copy(field, s); i < len(field); i++ {
		field[i] = ' '
	}
}
