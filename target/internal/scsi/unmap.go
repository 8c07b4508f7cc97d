package scsi

import (
	"encoding/binary"

	"kubevirt.io/disk/internal/rangelock"
)

const (
	unmapHeaderLen     = 8
	unmapDescriptorLen = 16
)

// prepareUnmap is UNMAP (SBC-3 5.28). An empty parameter list unmaps nothing.
func prepareUnmap(t *Task) error {
	n := int64(binary.BigEndian.Uint16(t.CDB[7:]))
	if n > 0 && n < unmapHeaderLen {
		return errParameterLength
	}
	t.expect(n, true)
	return nil
}

// outUnmap validates the whole list before it unmaps anything.
func outUnmap(t *Task, _ int64, p []byte) error {
	u := t.unit
	ranges, err := parseUnmap(p)
	if err != nil {
		return err
	}
	spans := make([]rangelock.Span, 0, len(ranges))
	total := uint64(0)
	for i, r := range ranges {
		if r.count == 0 && r.lba <= u.blocks() {
			continue // SBC-3 5.28.2: this unmaps nothing and is no error
		}
		if err := u.checkRange(r.lba, uint64(r.count)); err != nil {
			return err
		}
		if total += uint64(r.count); total > maxUnmap>>u.shift {
			return invalidParameter(unmapHeaderLen+unmapDescriptorLen*i+8, 7)
		}
		spans = append(spans, rangelock.Span{
			Off: int64(r.lba) << u.shift, Length: int64(r.count) << u.shift,
		})
	}
	if len(spans) == 0 {
		return nil
	}
	// Hold all ranges until the end. If the command is aborted while the disk hangs in one of them,
	// it must not unmap others that were written meanwhile.
	t.Hold.SetSpans(rangelock.Write, t.Nexus.Name(), spans)
	if err := t.lockHold(); err != nil {
		return err
	}
	defer u.Ranges.Unlock(&t.Hold)
	for _, s := range spans {
		if err := t.stillWanted(); err != nil {
			return err
		}
		if err := t.Discard(u.served, s.Off, s.Length); err != nil {
			return err
		}
	}
	return nil
}

func finishUnmap(t *Task) (Status, error) { return finishWrite(t) }

// unmapRange is an UNMAP block descriptor.
type unmapRange struct {
	lba   uint64
	count uint32
}

// parseUnmap reads an UNMAP parameter list (SBC-3 5.28.2). p has at least a header.
func parseUnmap(p []byte) ([]unmapRange, error) {
	dataLen := int(binary.BigEndian.Uint16(p[0:])) + 2
	descriptors := int(binary.BigEndian.Uint16(p[2:]))
	switch {
	case unmapHeaderLen+descriptors > len(p):
		return nil, errParameterLength // the initiator sends less than the length that it announces
	case unmapHeaderLen+descriptors > max(dataLen, unmapHeaderLen):
		return nil, invalidParameter(2, 7)
	}
	// The standard says to ignore an incomplete descriptor at the end.
	n := descriptors / unmapDescriptorLen
	if n > maxUnmapRanges {
		return nil, invalidParameter(2, 7)
	}
	ranges := make([]unmapRange, n)
	for i := range ranges {
		d := p[unmapHeaderLen+unmapDescriptorLen*i:]
		ranges[i] = unmapRange{binary.BigEndian.Uint64(d), binary.BigEndian.Uint32(d[8:])}
	}
	return ranges, nil
}
