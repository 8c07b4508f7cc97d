package scsi

import (
	"encoding/binary"
	"fmt"
)

// The vital product data pages (SPC-4 7.8, SBC-3 6.6).
const (
	vpdSupported       = 0x00
	vpdSerial          = 0x80
	vpdIdentification  = 0x83
	vpdExtended        = 0x86
	vpdThirdPartyCopy  = 0x8f
	vpdBlockLimits     = 0xb0
	vpdCharacteristics = 0xb1
	vpdProvisioning    = 0xb2
)

// vpdPage is a row of the table of pages.
type vpdPage struct {
	code   byte
	orphan bool                       // answered without a disk, too
	when   func(*unit) bool           // nil: always
	append func(*Task, []byte) []byte // appends the bytes after the page length
}

func vpdPages() [8]vpdPage {
	return [...]vpdPage{
		{code: vpdSupported, orphan: true, append: (*Task).appendSupportedPages},
		{code: vpdSerial, append: appendSerial},
		{code: vpdIdentification, orphan: true, append: appendIdentification},
		{code: vpdExtended, append: appendExtendedInquiry},
		{code: vpdThirdPartyCopy, append: appendThirdPartyCopy},
		{code: vpdBlockLimits, append: appendBlockLimits},
		{code: vpdCharacteristics, append: appendCharacteristics},
		{code: vpdProvisioning, when: func(u *unit) bool { return u.Discards != nil },
			append: appendProvisioning},
	}
}

func (p *vpdPage) answers(u *unit) bool {
	if u == nil {
		return p.orphan
	}
	return p.when == nil || p.when(u)
}

func (t *Task) vitalProductData(code byte, allocation uint32) error {
	pages := vpdPages()
	for i := range pages {
		if p := &pages[i]; p.code == code && p.answers(t.unit) {
			t.data = append(t.data[:0], t.peripheral(), code, 0, 0)
			t.data = p.append(t, t.data)
			binary.BigEndian.PutUint16(t.data[2:], uint16(len(t.data)-4))
			t.reply(allocation)
			return nil
		}
	}
	return invalidField(2, 7)
}

// appendSupportedPages is page 00h (SPC-4 7.8.14). It lists every page that answers, in ascending
// order.
func (t *Task) appendSupportedPages(b []byte) []byte {
	pages := vpdPages()
	for i := range pages {
		if pages[i].answers(t.unit) {
			b = append(b, pages[i].code)
		}
	}
	return b
}

// appendSerial is page 80h (SPC-4 7.8.15).
func appendSerial(t *Task, b []byte) []byte { return append(b, t.unit.Identity.Serial...) }

// Fields of a designation descriptor (SPC-4 7.8.6.1).
const (
	codeSetBinary = 0x01
	codeSetASCII  = 0x02
	codeSetUTF8   = 0x03

	protocolISCSI = 0x50 // in the upper half of byte 0, valid with PIV

	ofUnit   = 0x00
	ofPort   = 0x80 | 0x10 // PIV, target port
	ofDevice = 0x80 | 0x20 // PIV, target device

	designatorT10Vendor    = 0x01
	designatorNAA          = 0x03
	designatorRelativePort = 0x04
	designatorPortGroup    = 0x05
	designatorSCSIName     = 0x08
)

// relativePort is the number of the only target port.
const relativePort = 1

// appendIdentification is page 83h (SPC-4 7.8.6). The unit is named by its NAA identifier and
// serial, the port and the device by the target's name.
func appendIdentification(t *Task, b []byte) []byte {
	opt := &t.dev.opt
	if t.unit != nil {
		id := &t.unit.Identity
		b = appendDesignator(b, codeSetBinary, ofUnit|designatorNAA, id.NAA[:])
		var maker [24]byte
		putPadded(maker[:8], vendor)
		putPadded(maker[8:], product)
		b = appendDesignator(b, codeSetASCII, ofUnit|designatorT10Vendor,
			append(maker[:], id.Serial...))
		b = appendDesignator(b, codeSetUTF8, ofUnit|designatorSCSIName,
			nameString(fmt.Sprintf("naa.%X", id.NAA)))
	}
	b = appendDesignator(b, protocolISCSI|codeSetBinary, ofPort|designatorRelativePort,
		[]byte{0, 0, 0, relativePort})
	b = appendDesignator(b, protocolISCSI|codeSetBinary, ofPort|designatorPortGroup,
		[]byte{0, 0, 0, PortalGroup})
	if opt.TargetName != "" {
		port := fmt.Sprintf("%s,t,0x%04x", opt.TargetName, PortalGroup)
		b = appendDesignator(b, protocolISCSI|codeSetUTF8, ofPort|designatorSCSIName,
			nameString(port))
		b = appendDesignator(b, protocolISCSI|codeSetUTF8, ofDevice|designatorSCSIName,
			nameString(opt.TargetName))
	}
	return b
}

func appendDesignator(b []byte, codeSet, kind byte, value []byte) []byte {
	return append(append(b, codeSet, kind, 0, byte(len(value))), value...)
}

// nameString ends a SCSI name string in a zero and pads it to a multiple of four (SPC-4 7.8.6.11).
func nameString(s string) []byte {
	b := append([]byte(s), 0)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// appendExtendedInquiry is page 86h (SPC-4 7.8.7): simple task attribute only, no protection
// information.
func appendExtendedInquiry(_ *Task, b []byte) []byte {
	var p [60]byte
	p[1] = 0x01 // SIMPSUP
	return append(b, p[:]...)
}

// Limits that page B0h reports, in bytes, unless said otherwise. It reports logical blocks.
const (
	maxTransfer        = 64 << 20
	optimalTransfer    = 1 << 20
	granularity        = 4096
	maxCompareAndWrite = 64 << 10
	maxWriteSame       = 256 << 20
	maxUnmap           = 512 << 20
	maxUnmapRanges     = 256 // descriptors
)

// appendBlockLimits is page B0h (SBC-4 6.6.4). WSNZ is zero: WRITE SAME of zero blocks covers all
// blocks up to the end.
func appendBlockLimits(t *Task, b []byte) []byte {
	var p [60]byte
	shift := t.unit.shift
	if !t.unit.writtenElsewhere() {
		p[1] = byte(uint32(maxCompareAndWrite) >> shift)
	}
	be := binary.BigEndian
	be.PutUint16(p[2:], granularity>>shift)
	be.PutUint32(p[4:], maxTransfer>>shift)
	be.PutUint32(p[8:], optimalTransfer>>shift)
	if t.unit.Discards != nil {
		be.PutUint32(p[16:], maxUnmap>>shift)
		be.PutUint32(p[20:], maxUnmapRanges)
		be.PutUint32(p[24:], granularity>>shift)
		be.PutUint32(p[28:], 0x80000000) // UGAVALID: aligned to 0
	}
	be.PutUint64(p[32:], maxWriteSame>>shift)
	if t.unit.Store != nil {
		be.PutUint32(p[40:], maxAtomic>>shift)
		be.PutUint32(p[44:], atomicGranularity>>shift) // alignment
		be.PutUint32(p[48:], atomicGranularity>>shift)
	}
	return append(b, p[:]...)
}

// appendCharacteristics is page B1h (SBC-3 6.6.2): a non-rotating medium.
func appendCharacteristics(_ *Task, b []byte) []byte {
	var p [60]byte
	binary.BigEndian.PutUint16(p[0:], 1)
	return append(b, p[:]...)
}

// appendProvisioning is page B2h (SBC-3 6.6.6). Thin provisioning works by UNMAP and WRITE SAME.
// Unmapped blocks read as zeros.
func appendProvisioning(_ *Task, b []byte) []byte {
	const lbpu, lbpws, lbpws10, lbprz = 0x80, 0x40, 0x20, 0x04
	const thin = 0x02
	const thresholds = 0 // there are none
	return append(b, thresholds, lbpu|lbpws|lbpws10|lbprz, thin, 0)
}
