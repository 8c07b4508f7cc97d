package scsi

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/rangelock"
)

// Options describe the target device. The zero value works.
type Options struct {
	Vendor   string // at most 8 characters; default "KUBEVIRT"
	Product  string // at most 16 characters; default "DISK"
	Revision string // at most 4 characters; default "1"

	TargetName     string // SCSI name string of the target device; empty: none is reported
	PortalGroupTag uint16 // number of the target port group
	Log            *zap.Logger
	Panicked       func() // called when background work has panicked; nil: nobody is told

	// Abort ends the commands of these nexuses for which meant returns true, without an answer. It
	// calls Task.Abort for each one that executes and does not wait. Nil: the transport has no
	// other commands.
	Abort func(nexuses []*Nexus, meant func(*Task) bool)
}

// LUN is a disk and how initiators see it.
type LUN struct {
	Number    uint16 // at most MaxLUN
	Disk      disk.Disk
	Identity  disk.Identity
	ReadOnly  bool // write-protected
	Removable bool
	Access    AccessMode // empty: AccessWriteExclusive
	Store     Store      // nil: nothing is kept
	// the disk does not survive a loss of power, so it keeps no reservations through one (APTPL)
	Volatile bool
	Grown    bool // larger than when initiators last saw it, so tell them (2A/09)
	Host     any  // the transport's data for the LUN; see Task.Host
}

// MaxLUN is the highest LUN that flat space addressing can name (SAM-5 4.7.8).
const MaxLUN = 0x3fff

// Device is a SCSI target device with its logical units. Any number of goroutines may call its
// methods at once.
type Device struct {
	opt    Options
	log    *zap.Logger
	faults faultLog
	luns   atomic.Pointer[inventory] // never nil; written under mu
	// orphans has the commands that LUNs without a disk answer.
	orphans    *opcodeTable
	background background

	mu         sync.Mutex
	nexuses    map[*Nexus]struct{}      // guarded by mu
	initiators map[string]*initiator    // guarded by mu
	known      map[InitiatorPort]uint64 // guarded by mu; changes when the port last came or left
	copying    int                      // guarded by mu; EXTENDED COPY commands under way
	changes    uint64                   // guarded by mu; counts changes of inventory and unit sizes

	enrolled uint64        // guarded by mu; how many units there have been
	slots    int           // guarded by mu; how many slots nexuses have for units
	vacated  []int         // guarded by mu; slots without a unit
	leaving  []leavingUnit // guarded by mu; removed units, at least those still in use

	adding map[[8]byte]uint16 // guarded by mu; units that are being made, by NAA; their numbers

	// tenants says which disk a port last used under a LUN. Guarded by mu.
	tenants map[uint16]map[InitiatorPort][8]byte
}

// unit is a logical unit.
type unit struct {
	number    uint16
	slot      int    // index in nexusUnits
	order     uint64 // unique; to lock two units, lock the lower one first
	host      any
	identity  disk.Identity
	sealed    bool // write-protected for good: its disk may be open for reading only
	removable bool
	protected atomic.Bool // write-protected; written under Device.mu
	exclusive atomic.Bool // written under persistent.mu and Device.mu

	disk     disk.Disk
	discards disk.Discarder  // nil: cannot
	zeroes   disk.Zeroer     // nil: cannot
	extents  disk.Extenter   // nil: cannot
	accounts disk.Accountant // nil: cannot
	estimate disk.Estimator  // nil: cannot
	store    Store           // nil: none
	distance

	table  *opcodeTable
	resets atomic.Uint32 // counts resets
	blocks atomic.Uint64 // capacity in logical blocks; written under resizing
	owner  atomic.Pointer[initiator]
	grown  bool // tell every initiator port at its first nexus

	resizing sync.Mutex
	grownAt  uint64             // guarded by Device.mu; Device.changes when it last grew
	ctx      context.Context    // ends when the unit is removed, or the device closed
	cancel   context.CancelFunc // of ctx
	// kept is the owner that keepOwner has handled last; written under persistent.mu.
	kept atomic.Pointer[initiator]
	// handover says who is admitted beside the owner, and who is fenced. Never nil; written under
	// persistent.mu and Device.mu.
	handover atomic.Pointer[handoverState]
	// reserved is the nexus that holds the RESERVE(6) reservation. Written under Device.mu; setting
	// it also needs persistent.mu.
	reserved   atomic.Pointer[Nexus]
	persistent reservations
	ejected    atomic.Bool // written under Device.mu
	uses
	// ranges orders accesses to the medium that must not overtake each other. It counts in bytes. A
	// command can be aborted while its disk call still runs. Every write holds its range until its
	// disk calls have ended, so that its data never lands on top of a newer write. A command such
	// as COMPARE AND WRITE, which reads and changes the medium in one step, holds its range
	// exclusively: reads wait, too.
	ranges     rangelock.Table
	mode       modeState
	faults     faultLog
	refusals   conflictLog
	sameNames  map[string]struct{} // guarded by Device.mu; names that firstUse has warned about
	sanitizing sanitizeState
	atomics    sync.Mutex  // held by a WRITE ATOMIC, because there is only one undo record
	atomicKept atomic.Bool // a stale undo record may be stored; written under atomics
}

// NewDevice checks the options and makes the device. It asks each disk once for its optional
// interfaces.
func NewDevice(opt Options, luns []LUN) (*Device, error) {
	if opt.Vendor == "" {
		opt.Vendor = "KUBEVIRT"
	}
	if opt.Product == "" {
		opt.Product = "DISK"
	}
	if opt.Revision == "" {
		opt.Revision = "1"
	}
	if opt.Log == nil {
		opt.Log = zap.NewNop()
	}
	for _, f := range []struct {
		what, value string
		limit       int
	}{{"vendor", opt.Vendor, 8}, {"product", opt.Product, 16}, {"revision", opt.Revision, 4},
		{"target name", opt.TargetName, 223}} {
		if len(f.value) > f.limit || !printable(f.value) {
			return nil, fmt.Errorf("%s %q must be at most %d printable ASCII characters", f.what,
				f.value, f.limit)
		}
	}
	d := &Device{
		opt:        opt,
		orphans:    newOrphanTable(),
		log:        opt.Log,
		nexuses:    map[*Nexus]struct{}{},
		initiators: map[string]*initiator{},
		known:      map[InitiatorPort]uint64{},
		adding:     map[[8]byte]uint16{},
		tenants:    map[uint16]map[InitiatorPort][8]byte{},
	}
	d.background.init()
	units := make([]*unit, len(luns))
	taken := make(map[uint16]bool, len(luns))
	for i, l := range luns {
		if taken[l.Number] {
			return nil, takenError(l.Number)
		}
		taken[l.Number] = true
		u, err := newUnit(l)
		if err != nil {
			return nil, fmt.Errorf("LUN %d: %w", l.Number, err)
		}
		units[i] = u
	}
	inv := newInventory(units)
	d.luns.Store(inv)
	for _, u := range inv.units {
		d.enrolLocked(u) // nobody else has the device yet
	}
	return d, nil
}

func newUnit(l LUN) (*unit, error) {
	access, err := ParseAccessMode(string(l.Access))
	switch {
	case err != nil:
		return nil, err
	case l.Number > MaxLUN:
		return nil, fmt.Errorf("number is above %d", MaxLUN)
	case l.Disk == nil:
		return nil, errors.New("has no disk")
	case l.Disk.Size() <= 0 || l.Disk.Size()%BlockSize != 0:
		return nil, fmt.Errorf("disk size %d is not a positive multiple of %d", l.Disk.Size(),
			BlockSize)
	case l.Identity.Serial == "" || len(l.Identity.Serial) > 36 || !printable(l.Identity.Serial):
		return nil, fmt.Errorf("serial %q must be 1 to 36 printable ASCII characters",
			l.Identity.Serial)
	case l.Identity.NAA[0]>>4 != 3:
		return nil, fmt.Errorf("NAA identifier %x does not begin with 3 (locally assigned)",
			l.Identity.NAA)
	}
	u := &unit{
		number:    l.Number,
		identity:  l.Identity,
		sealed:    l.ReadOnly || access == AccessReadShared,
		removable: l.Removable,
		grown:     l.Grown,
		disk:      l.Disk,
		host:      l.Host,
	}
	u.protected.Store(u.sealed)
	u.exclusive.Store(access == AccessWriteExclusive)
	u.idle = make(chan struct{})
	u.discards, _ = l.Disk.(disk.Discarder)
	u.zeroes, _ = l.Disk.(disk.Zeroer)
	u.extents, _ = l.Disk.(disk.Extenter)
	u.estimate, _ = l.Disk.(disk.Estimator)
	u.distance = distanceOf(l.Disk)
	u.accounts, _ = l.Disk.(disk.Accountant)
	u.store = l.Store
	if !l.Volatile {
		u.persistent.store = l.Store
	}
	u.blocks.Store(uint64(l.Disk.Size()) >> blockShift)
	u.table = opcodeTableOf(abilities{discards: u.discards != nil, removable: u.removable,
		store: u.store != nil, extents: u.extents != nil})
	if err := u.restore(); err != nil {
		return nil, err
	}
	return u, nil
}

func printable(s string) bool {
	for i := range len(s) {
		if s[i] < 0x20 || s[i] > 0x7e {
			return false
		}
	}
	return true
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
		return first & MaxLUN, true
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
