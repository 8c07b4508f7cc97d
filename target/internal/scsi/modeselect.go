package scsi

import (
	"encoding/binary"
	"math"
)

const (
	bitPF  = 0x10
	bitSPF = 0x40 // subpage format

	modeHeader6Len  = 4
	modeHeader10Len = 8
)

// prepareModeSelect6 is MODE SELECT(6) (SPC-4 6.11).
func prepareModeSelect6(t *Task) error { return t.prepareModeSelect(int64(t.CDB[4])) }

// prepareModeSelect10 is MODE SELECT(10) (SPC-4 6.12).
func prepareModeSelect10(t *Task) error {
	return t.prepareModeSelect(int64(binary.BigEndian.Uint16(t.CDB[7:])))
}

func (t *Task) prepareModeSelect(n int64) error {
	if n > 0 && t.CDB[1]&bitPF == 0 {
		return invalidField(1, 4) // pages in a vendor's format are not supported
	}
	t.expect(n, true)
	return nil
}

func finishModeSelect(t *Task) (Status, error) {
	if t.flushes == 0 {
		return StatusGood, nil
	}
	status, err := t.flush()
	if err == nil {
		t.dev.cacheFlushed(t.unit, t.flushes, t.Nexus)
	}
	return status, err
}

// outModeSelect validates the whole parameter list before it changes anything.
func outModeSelect(t *Task, _ int64, p []byte) error {
	d, u := t.dev, t.unit
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := t.stillAdmitted(); err != nil {
		return err
	}
	if err := t.stillWanted(); err != nil { // the command may have waited for another one
		return err
	}
	after, err := u.parseModeSelect(p, t.cmd.opcode == opModeSelect10,
		u.mode.bits.Load()&^modeUnflushed)
	if err != nil {
		return err
	}
	before := u.mode.bits.Load()
	// If the write cache is turned off, everything acknowledged so far must become durable. Until
	// then the caching page still shows WCE.
	t.flushes = u.mode.enterLocked(after)
	if shown(before) != shown(u.mode.bits.Load()) {
		d.raiseLocked(u, attnModeChanged, t.Nexus)
	}
	return nil
}

// parseModeSelect parses a mode parameter list (SPC-4 7.5.4), applies it to state and returns the
// new state.
func (u *unit) parseModeSelect(p []byte, long bool, state uint32) (uint32, error) {
	at, err := parseModeHeader(p, long, u.blocks(), u.blockSize())
	if err != nil {
		return 0, err
	}
	for at < len(p) {
		if len(p)-at < 2 {
			return 0, errParameterLength
		}
		// PS, the highest bit, is reserved here, but initiators send back the pages of MODE SENSE.
		page, err := findModePage(p, at)
		if err != nil {
			return 0, err
		}
		next, bad := page.parse(p[at:], state)
		if bad >= 0 {
			return 0, invalidParameter(at+bad, noBit)
		}
		state = next
		at += len(page.fixed)
	}
	return state, nil
}

// findModePage finds the page that begins at p[at] and checks that it is complete. p has at least
// two bytes there.
func findModePage(p []byte, at int) (*modePage, error) {
	for i := range modePages {
		page := &modePages[i]
		if page.code != p[at]&0x3f {
			continue
		}
		switch {
		case p[at]&bitSPF != 0:
			return nil, invalidParameter(at, 6)
		case int(p[at+1]) != len(page.fixed)-modePageHeader:
			return nil, invalidParameter(at+1, 7)
		case len(p)-at < len(page.fixed):
			return nil, errParameterLength
		}
		return page, nil
	}
	return nil, invalidParameter(at, 5)
}

// parse copies the changeable bits of a page into state. If any other bit differs from the page,
// bad is the offset of that byte, otherwise it is negative.
func (p *modePage) parse(b []byte, state uint32) (next uint32, bad int) {
	for i := modePageHeader; i < len(p.fixed); i++ {
		value := b[i]
		for _, f := range p.fields {
			if f.offset != i {
				continue
			}
			state &^= f.state
			if value&f.bit != 0 {
				state |= f.state
			}
			value &^= f.bit
		}
		if value != p.fixed[i] {
			return 0, i
		}
	}
	return state, -1
}

// parseModeHeader checks the header and the block descriptor, and returns the offset of the first
// page. The block descriptor must describe the unit as it is. MODE DATA LENGTH, WP and DPOFUA are
// reserved here and ignored.
func parseModeHeader(p []byte, long bool, blocks uint64, blockSize int) (int, error) {
	header, medium := modeHeader6Len, 1
	if long {
		header, medium = modeHeader10Len, 2
	}
	if len(p) < header {
		return 0, errParameterLength
	}
	if p[medium] != 0 {
		return 0, invalidParameter(medium, 7)
	}
	descriptor, lengthAt, longLBA := int(p[3]), 3, false
	if long {
		descriptor, lengthAt = int(binary.BigEndian.Uint16(p[6:])), 6
		longLBA = p[4]&bitLong != 0
	}
	want := shortDescriptorLen
	if longLBA {
		want = longDescriptorLen
	}
	switch {
	case descriptor == 0:
		return header, nil
	case descriptor != want:
		return 0, invalidParameter(lengthAt, 7)
	case len(p) < header+descriptor:
		return 0, errParameterLength
	}
	d := p[header:]
	count, size, sizeAt := uint64(binary.BigEndian.Uint32(d)), binary.BigEndian.Uint32(d[4:]), 4
	same := count == min(blocks, math.MaxUint32)
	if longLBA {
		count, size, sizeAt = binary.BigEndian.Uint64(d), binary.BigEndian.Uint32(d[12:]), 12
		same = count == blocks
	}
	// SBC-3 6.5.2.2: zero keeps the number of blocks.
	if count != 0 && !same {
		return 0, invalidParameter(header, 7)
	}
	if size != uint32(blockSize) {
		return 0, invalidParameter(header+sizeAt, 7)
	}
	return header + descriptor, nil
}
