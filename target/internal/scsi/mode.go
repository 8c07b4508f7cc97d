package scsi

import (
	"encoding/binary"
	"math"
	"sync/atomic"
)

// modeState holds what MODE SELECT can change about a logical unit. Any number of goroutines may
// use it.
type modeState struct {
	bits atomic.Uint32

	// guarded by Device.mu; counts how often the write cache was turned off: the number of the
	// flush that ends modeUnflushed
	flushes uint64
}

const (
	modeWCE    = 1 << iota // writes may be acknowledged before they are durable
	modeDSense             // sense data in descriptor format
	modeSWP                // software write protect

	// modeUnflushed is in no page. A MODE SELECT has turned WCE off, but writes acknowledged before
	// are not durable yet. Until they are, the caching page still shows WCE, so an initiator that
	// wants to be sure has to flush.
	modeUnflushed

	modeDefault = modeWCE
)

func (m *modeState) writeBack() bool         { return m.bits.Load()&modeWCE != 0 }
func (m *modeState) descriptorSense() bool   { return m.bits.Load()&modeDSense != 0 }
func (m *modeState) softwareProtected() bool { return m.bits.Load()&modeSWP != 0 }

// cached reports whether acknowledged writes may be not durable yet.
func cached(state uint32) bool { return state&(modeWCE|modeUnflushed) != 0 }

// shown returns the state that MODE SENSE shows.
func shown(state uint32) uint32 {
	if state&modeUnflushed != 0 {
		state = state&^modeUnflushed | modeWCE
	}
	return state
}

// enterLocked makes state the current state. If this turns the write cache off, it returns the
// number of the flush that must follow, for cacheFlushed; else 0.
func (m *modeState) enterLocked(state uint32) (flush uint64) {
	if !cached(state) && cached(m.bits.Load()) {
		state |= modeUnflushed
		m.flushes++
		flush = m.flushes
	}
	m.bits.Store(state)
	return flush
}

// cacheFlushed ends modeUnflushed after a flush of the disk. It does nothing if the write cache was
// turned on and off again since: the flush may have begun before the latest writes. by is the nexus
// that asked for the flush.
func (d *Device) cacheFlushed(u *unit, flush uint64, by *Nexus) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if state := u.mode.bits.Load(); state&modeUnflushed != 0 && u.mode.flushes == flush {
		u.mode.bits.Store(state &^ modeUnflushed)
		d.raiseLocked(u, attnModeChanged, by)
	}
}

// The mode pages (SPC-4 7.5, SBC-3 6.5).
const (
	pageCaching       = 0x08
	pageControl       = 0x0a
	pageInformational = 0x1c
	pageAll           = 0x3f
	subpageAll        = 0xff

	modePageHeader = 2 // bytes before a page's own fields
)

// modeField is a changeable bit of a mode page.
type modeField struct {
	offset int
	bit    byte
	state  uint32 // its bit in modeState
}

// modePage is a row of the table of mode pages. None has subpages.
type modePage struct {
	code   byte
	fixed  []byte // the page with every changeable bit zero
	fields []modeField
}

// modePages is in ascending order.
var modePages = [...]modePage{
	{
		code:   pageCaching,
		fixed:  []byte{pageCaching, 18, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		fields: []modeField{{2, 0x04, modeWCE}},
	},
	{
		// QUEUE ALGORITHM MODIFIER 1: concurrent commands may be executed in any order.
		code:   pageControl,
		fixed:  []byte{pageControl, 10, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0},
		fields: []modeField{{2, 0x04, modeDSense}, {4, 0x08, modeSWP}},
	},
	{
		code:  pageInformational,
		fixed: []byte{pageInformational, 10, 0x08, 0, 0, 0, 0, 0, 0, 0, 0, 0}, // DEXCPT
	},
}

// values appends the page with the changeable bits of state set.
func (p *modePage) values(b []byte, state uint32) []byte {
	start := len(b)
	b = append(b, p.fixed...)
	for _, f := range p.fields {
		if state&f.state != 0 {
			b[start+f.offset] |= f.bit
		}
	}
	return b
}

// mask appends the page with a one for each changeable bit.
func (p *modePage) mask(b []byte) []byte {
	start := len(b)
	b = append(b, p.fixed...)
	clear(b[start+modePageHeader:])
	for _, f := range p.fields {
		b[start+f.offset] |= f.bit
	}
	return b
}

// Values of PC, page control.
const (
	modeCurrent    = 0
	modeChangeable = 1
	modeDefaults   = 2
	modeSaved      = 3
)

const (
	bitDBD   = 0x08 // no block descriptor
	bitLLBAA = 0x10 // long block descriptor accepted

	bitWP     = 0x80
	bitDPOFUA = 0x10
	bitLong   = 0x01

	shortDescriptorLen = 8
	longDescriptorLen  = 16
)

// prepareModeSense6 is MODE SENSE(6) (SPC-4 6.13).
func prepareModeSense6(t *Task) error {
	t.data = append(t.data[:0], 0, 0, t.deviceSpecific(), 0)
	if t.CDB[1]&bitDBD == 0 {
		t.data[3] = shortDescriptorLen
		t.data = t.appendShortDescriptor(t.data)
	}
	if err := t.appendModePages(); err != nil {
		return err
	}
	t.data[0] = byte(len(t.data) - 1)
	t.reply(uint32(t.CDB[4]))
	return nil
}

// prepareModeSense10 is MODE SENSE(10) (SPC-4 6.14).
func prepareModeSense10(t *Task) error {
	t.data = append(t.data[:0], 0, 0, 0, t.deviceSpecific(), 0, 0, 0, 0)
	switch {
	case t.CDB[1]&bitDBD != 0:
	case t.CDB[1]&bitLLBAA != 0:
		t.data[4] = bitLong
		t.data[7] = longDescriptorLen
		t.data = binary.BigEndian.AppendUint64(t.data, t.unit.blocks())
		t.data = binary.BigEndian.AppendUint64(t.data, uint64(t.unit.blockSize()))
	default:
		t.data[7] = shortDescriptorLen
		t.data = t.appendShortDescriptor(t.data)
	}
	if err := t.appendModePages(); err != nil {
		return err
	}
	binary.BigEndian.PutUint16(t.data, uint16(len(t.data)-2))
	t.reply(uint32(binary.BigEndian.Uint16(t.CDB[7:])))
	return nil
}

// deviceSpecific is the device-specific parameter of the mode parameter header (SBC-3 6.5.1).
func (t *Task) deviceSpecific() byte {
	if t.unit.writable() != nil {
		return bitWP | bitDPOFUA
	}
	return bitDPOFUA
}

func (t *Task) appendShortDescriptor(b []byte) []byte {
	blocks := min(t.unit.blocks(), math.MaxUint32)
	b = binary.BigEndian.AppendUint32(b, uint32(blocks))
	return binary.BigEndian.AppendUint32(b, uint32(t.unit.blockSize()))
}

// appendModePages appends the pages that byte 2 and 3 of the CDB ask for.
func (t *Task) appendModePages() error {
	control, code, subpage := t.CDB[2]>>6, t.CDB[2]&0x3f, t.CDB[3]
	if control == modeSaved {
		return errSavingPages
	}
	known := false
	for i := range modePages {
		p := &modePages[i]
		if code != pageAll && code != p.code {
			continue
		}
		known = true
		switch control {
		case modeCurrent:
			t.data = p.values(t.data, shown(t.unit.mode.bits.Load()))
		case modeChangeable:
			t.data = p.mask(t.data)
		case modeDefaults:
			t.data = p.values(t.data, modeDefault)
		}
	}
	switch {
	case !known:
		return invalidField(2, 5)
	case subpage != 0 && subpage != subpageAll:
		return invalidField(3, 7)
	}
	return nil
}
