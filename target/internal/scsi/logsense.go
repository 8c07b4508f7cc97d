package scsi

import (
	"encoding/binary"
	"math"
)

// The log pages (SPC-4 7.3, SBC-3 6.4).
const (
	logSupported    = 0x00
	logProvisioning = 0x0c

	bitLogSPF     = 0x40 // subpage format
	logCumulative = 1    // PC: cumulative values
	logHeaderLen  = 4
)

// Resources are counted in threshold sets of 1 MiB.
const (
	thresholdShift = 20
	thresholdSize  = 1 << thresholdShift // bytes
)

// Parameters of the Logical Block Provisioning log page (SBC-3 6.4.4).
const (
	resourceAvailable = 0x0001
	resourceUsed      = 0x0002

	resourceLen    = 12   // bytes of one parameter
	resourceFormat = 0x03 // a list in binary
	scopeUnit      = 0x01 // of this logical unit only
	scopeShared    = 0x02 // this logical unit may share it with others
)

// counts reports whether the unit knows how much space its blocks use.
func (u *unit) counts() bool { return u.Accounts != nil && u.Discards != nil }

// prepareLogSense is LOG SENSE (SPC-4 6.9). Only cumulative values exist: there are no thresholds,
// and nothing is saved.
func prepareLogSense(t *Task) error {
	control, page, subpage := t.CDB[2]>>6, t.CDB[2]&0x3f, t.CDB[3]
	from := binary.BigEndian.Uint16(t.CDB[5:])
	switch {
	case page == logSupported && (subpage == 0 || subpage == subpageAll):
		if from != 0 {
			return invalidField(5, 7)
		}
		t.supportedLogPages(subpage)
	case page == logProvisioning && subpage == 0 && t.unit.counts():
		if control != logCumulative {
			return invalidField(2, 7)
		}
		if from > resourceUsed {
			return invalidField(5, 7)
		}
		t.data = append(t.data[:0], logProvisioning, 0, 0, 0)
		for code := max(from, resourceAvailable); code <= resourceUsed; code++ {
			t.data = append(t.data, 0, byte(code), resourceFormat, resourceLen-4, 0, 0, 0, 0, 0, 0,
				0, 0)
			t.data[3] += resourceLen
		}
	case page == logSupported || page == logProvisioning && t.unit.counts():
		return invalidField(3, 7)
	default:
		return invalidField(2, 5)
	}
	t.reply(uint32(binary.BigEndian.Uint16(t.CDB[7:])))
	return nil
}

// supportedLogPages makes page 00h (SPC-4 7.3.18), or with its subpage FFh the list of pages and
// subpages (SPC-4 7.3.19).
func (t *Task) supportedLogPages(subpage byte) {
	if subpage == 0 {
		t.data = append(t.data[:0], logSupported, 0, 0, 1, logSupported)
	} else {
		t.data = append(t.data[:0], bitLogSPF|logSupported, subpageAll, 0, 4, logSupported, 0,
			logSupported, subpageAll)
	}
	if !t.unit.counts() {
		return
	}
	t.data = append(t.data, logProvisioning)
	if subpage != 0 {
		t.data = append(t.data, 0)
	}
	t.data[3] = byte(len(t.data) - logHeaderLen)
}

func inLogSense(t *Task, off int64, p []byte) error {
	if off == 0 && t.CDB[2]&0x3f == logProvisioning {
		if err := t.fillProvisioning(); err != nil {
			return err
		}
	}
	copy(p, t.data[off:])
	return nil
}

// fillProvisioning asks the disk how much space it uses. A short allocation length may cut off a
// parameter.
func (t *Task) fillProvisioning() error {
	if len(t.data) <= logHeaderLen {
		return nil
	}
	usage, err := t.unit.Accounts.Usage()
	if err != nil {
		return err
	}
	page := t.data[:logHeaderLen+int(t.data[3])]
	for at := logHeaderLen; at < len(page); at += resourceLen {
		// Round used space up and available space down.
		sets, scope := (usage.Used+thresholdSize-1)/thresholdSize, byte(scopeUnit)
		if binary.BigEndian.Uint16(page[at:]) == resourceAvailable {
			sets, scope = usage.Available/thresholdSize, scopeShared
		}
		binary.BigEndian.PutUint32(page[at+4:], uint32(min(sets, math.MaxUint32)))
		page[at+8] = scope
	}
	return nil
}
