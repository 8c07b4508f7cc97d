package scsi

import (
	"cmp"
	"fmt"
	"math/bits"
	"strings"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"kubevirt.io/disk/serving"
)

// The texts of the device in INQUIRY data: at most 8, 16 and 4 characters.
const (
	vendor   = "KUBEVIRT"
	product  = "DISK"
	revision = "1"
)

// PortalGroup is the number of our only target port group.
const PortalGroup = 1

// Options describe the target device. The zero value works.
type Options struct {
	TargetName string // SCSI name string of the target device; empty: none is reported
	Log        *zap.Logger

	// Abort ends the commands of these nexuses for which meant returns true, without an answer. It
	// calls Task.Abort for each command that executes and does not wait for the end. nil: the
	// transport has no other commands.
	Abort func(nexuses []*Nexus, meant func(*Task) bool)
}

// Device is a SCSI target device with its logical units. Any number of goroutines may call its
// methods at once.
type Device struct {
	opt    Options
	log    *zap.Logger
	disks  *serving.Disks
	faults *serving.Seldom[fault]
	missed *serving.Seldom[missedLUN]
	luns   atomic.Pointer[inventory] // never nil; written under mu
	// orphans has the commands of LUNs without a disk.
	orphans *opcodeTable

	mu      sync.Mutex
	nexuses map[*Nexus]struct{}      // guarded by mu
	known   map[InitiatorPort]uint64 // guarded by mu; value of changes at the port's last notice
	copying int                      // guarded by mu; EXTENDED COPY commands under way
	changes uint64                   // guarded by mu; counts changes of inventory and unit sizes

	enrolled uint64 // guarded by mu; number of units so far
	slots    int    // guarded by mu; number of slots that a nexus has for units
	vacated  []int  // guarded by mu; slots without a unit

	// tenants says which disk a port last used under a LUN. Guarded by mu.
	tenants map[uint16]map[InitiatorPort][8]byte
}

// served is the unit's disk, which other protocols may use, too.
type served = serving.Disk

// unit is a logical unit.
type unit struct {
	*served
	shift uint   // a logical block has 2^shift bytes
	slot  int    // index in nexusUnits
	order uint64 // unique; of two units, the lower one is locked first

	tables  [2]*opcodeTable // without, and with, users of the disk at another server
	resets  atomic.Uint32   // counts resets
	grownAt uint64          // guarded by Device.mu; Device.changes when the unit last grew
	// reserved is the nexus that holds the RESERVE(6) reservation. Written under Device.mu; setting
	// it also needs persistent.mu.
	reserved   atomic.Pointer[Nexus]
	persistent reservations
	mode       modeState
	faults     *serving.Seldom[fault]
	refusals   *serving.Seldom[conflictNote]
	atomics    sync.Mutex  // held by a WRITE ATOMIC, because there is only one undo record
	atomicKept atomic.Bool // a stale undo record may be stored; written under atomics
}

// New checks the options and makes the device, without a unit. Its units are the disks that Take is
// called with.
func New(opt Options, disks *serving.Disks) (*Device, error) {
	opt.Log = cmp.Or(opt.Log, zap.NewNop())
	if len(opt.TargetName) > 223 || !printable(opt.TargetName) {
		return nil, fmt.Errorf("target name %q must be at most 223 printable ASCII characters",
			opt.TargetName)
	}
	d := &Device{
		opt:     opt,
		orphans: newOrphanTable(),
		log:     opt.Log,
		faults:  serving.NewSeldom[fault](faultInterval),
		missed:  serving.NewSeldom[missedLUN](conflictInterval),
		disks:   disks,
		nexuses: map[*Nexus]struct{}{},
		known:   map[InitiatorPort]uint64{},
		tenants: map[uint16]map[InitiatorPort][8]byte{},
	}
	d.luns.Store(newInventory(nil))
	return d, nil
}

func newUnit(d *serving.Disk) (*unit, error) {
	switch {
	case d.Identity.Serial == "" || len(d.Identity.Serial) > 36 || !printable(d.Identity.Serial):
		return nil, fmt.Errorf("serial %q must be 1 to 36 printable ASCII characters",
			d.Identity.Serial)
	case d.Identity.NAA[0]>>4 != 3:
		return nil, fmt.Errorf("NAA identifier %x does not begin with 3 (locally assigned)",
			d.Identity.NAA)
	}
	u := &unit{served: d, shift: uint(bits.TrailingZeros64(uint64(d.BlockSize))),
		faults:   serving.NewSeldom[fault](faultInterval),
		refusals: serving.NewSeldom[conflictNote](conflictInterval)}
	if !d.Volatile {
		u.persistent.store = d.Store
	}
	a := abilities{discards: u.Discards != nil, store: u.Store != nil, extents: u.Extents != nil}
	u.tables[0] = opcodeTableOf(a)
	if a.writtenElsewhere = true; u.Remote != nil {
		u.tables[1] = opcodeTableOf(a)
	}
	if err := u.restore(); err != nil {
		return nil, err
	}
	return u, nil
}

// writtenElsewhere reports whether another server has the disk and lets others write it.
// Reservations and the like of this device do not bind those others.
func (u *unit) writtenElsewhere() bool { return u.Remote != nil && u.Remote.Shared() }

// table has the commands that the unit supports now.
func (u *unit) table() *opcodeTable {
	if u.writtenElsewhere() {
		return u.tables[1]
	}
	return u.tables[0]
}

// blocks is the capacity in logical blocks.
func (u *unit) blocks() uint64 { return uint64(u.Size()) >> u.shift }

// blockSize is the logical block length in bytes.
func (u *unit) blockSize() int { return 1 << u.shift }

func printable(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r > 0x7e })
}

// decodeLUN reads the 8-byte LUN structure of a single-level logical unit number. It knows
// peripheral device addressing of bus 0 and flat space addressing (SAM-5 4.7).
func decodeLUN(lun uint64) (uint16, bool) {
	if lun<<16 != 0 {
		return 0, false
	}
	first := uint16(lun >> 48)
	switch first >> 14 {
	case 0:
		return first, first <= 0xff
	case 1:
		return first & serving.MaxNumber, true
	}
	return 0, false
}

// EncodeLUN returns the 8-byte LUN structure of a number, by the shorter addressing method that can
// express it.
func EncodeLUN(number uint16) uint64 {
	if number <= 0xff {
		return uint64(number) << 48
	}
	return uint64(0x4000|number) << 48
}

// unitOf finds the logical unit of a disk; nil if there is none.
func (d *Device) unitOf(served *serving.Disk) *unit {
	if u := d.luns.Load().at(served.Number); u != nil && u.served == served {
		return u
	}
	return nil
}

// unit finds a logical unit by the 8-byte LUN; nil if there is none.
func (d *Device) unit(lun uint64) *unit {
	number, ok := decodeLUN(lun)
	if !ok {
		return nil
	}
	return d.luns.Load().at(number)
}

// SameUnit reports whether two 8-byte LUNs address the same logical unit: both peripheral device
// and flat space addressing can express it (SAM-5 4.7).
func (d *Device) SameUnit(a, b uint64) bool {
	if a == b {
		return true
	}
	u := d.unit(a)
	return u != nil && u == d.unit(b)
}

// LUNExists reports whether a disk is served as this LUN.
func (d *Device) LUNExists(lun uint64) bool { return d.unit(lun) != nil }
