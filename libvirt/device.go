package libvirt

import (
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Device says how a virtual machine sees a LUN. Every field may be left empty.
type Device struct {
	Dev  string // target device: vda with BusVirtio, sda with the others. "": the bus's first
	Bus  Bus    // "": by Dev, BusSCSI for sd names and BusVirtio for vd names
	Kind Kind   // "": KindDisk

	BootOrder uint // 1: first; 0: not by this element

	// Initiator is the iSCSI name by which QEMU logs in: what InitiatorName makes. A
	// write-exclusive LUN belongs to one initiator name at a time. "": QEMU makes one of the
	// domain's UUID. Both machines of a live migration have that, so none can be fenced.
	Initiator string

	Cache        Cache   // "": CacheNone
	IO           IO      // "": QEMU's default
	Discard      Discard // "": DiscardUnmap
	DetectZeroes Zeroes  // "": QEMU's default, ZeroesOff
	// what happens on an error; "": QEMU's default, which stops on full storage and reports the
	// rest
	ErrorPolicy ErrorPolicy
	// for reads, where it is to differ; "": as ErrorPolicy. Never ErrorNoSpace
	ReadErrorPolicy ErrorPolicy
}

// Bus is the kind of controller that a disk is attached to.
type Bus string

// The buses.
const (
	BusVirtio Bus = "virtio" // virtio-blk
	BusSCSI   Bus = "scsi"   // a controller of the domain, which should be of model virtio-scsi
	BusSATA   Bus = "sata"   // cannot be hot-plugged, and has no read-only disks
)

// Kind says who answers the guest's SCSI commands.
type Kind string

// The kinds.
const (
	KindDisk Kind = "disk" // QEMU emulates a disk
	// KindLUN passes the guest's commands on to the target, so that reservations and the target's
	// own identity reach the guest. It needs BusSCSI, and has neither LUN.Serial nor LUN.WWN, as
	// the target tells its own.
	KindLUN Kind = "lun"
)

// Cache is QEMU's cache mode.
type Cache string

// The cache modes.
const (
	CacheDefault      Cache = "default"
	CacheNone         Cache = "none"
	CacheWriteback    Cache = "writeback"
	CacheWritethrough Cache = "writethrough"
	CacheDirectsync   Cache = "directsync"
	CacheUnsafe       Cache = "unsafe"
)

// IO is how QEMU does I/O. For an iSCSI disk QEMU uses the network whatever it says.
type IO string

// The modes of I/O.
const (
	IOThreads IO = "threads"
	IONative  IO = "native" // with CacheNone or CacheDirectsync
	IOUring   IO = "io_uring"
)

// Discard says whether the guest's discards reach the target, which then gives the space back.
type Discard string

// The choices.
const (
	DiscardUnmap  Discard = "unmap"
	DiscardIgnore Discard = "ignore"
)

// Zeroes says whether QEMU looks for zeros in what the guest writes.
type Zeroes string

// The choices.
const (
	ZeroesOff   Zeroes = "off"
	ZeroesOn    Zeroes = "on"
	ZeroesUnmap Zeroes = "unmap" // and discards them; with DiscardUnmap
)

// ErrorPolicy says what happens to the guest when a command fails.
type ErrorPolicy string

// The policies.
const (
	ErrorStop    ErrorPolicy = "stop" // the domain pauses
	ErrorReport  ErrorPolicy = "report"
	ErrorIgnore  ErrorPolicy = "ignore"
	ErrorNoSpace ErrorPolicy = "enospace" // pause on full storage, report the rest
)

func buses() []Bus         { return []Bus{BusVirtio, BusSCSI, BusSATA} }
func kinds() []Kind        { return []Kind{KindDisk, KindLUN} }
func ios() []IO            { return []IO{IOThreads, IONative, IOUring} }
func zeroes() []Zeroes     { return []Zeroes{ZeroesOff, ZeroesOn, ZeroesUnmap} }
func dis() []Discard       { return []Discard{DiscardUnmap, DiscardIgnore} }
func reads() []ErrorPolicy { return []ErrorPolicy{ErrorStop, ErrorReport, ErrorIgnore} }
func caches() []Cache {
	return []Cache{CacheDefault, CacheNone, CacheWriteback, CacheWritethrough, CacheDirectsync,
		CacheUnsafe}
}

// prefix begins the device names of a bus.
func (b Bus) prefix() string {
	if b == BusVirtio {
		return "vd"
	}
	return "sd"
}

// maxSerial is how many characters of a serial number the guest gets to see: virtio 1.2 5.2.6.1 and
// ATA have 20, and QEMU's SCSI disks 36.
func (b Bus) maxSerial() int {
	if b == BusSCSI {
		return 36
	}
	return 20
}

// withDefaults fills in what empty fields stand for.
func (d Device) withDefaults() Device {
	if d.Bus == "" {
		d.Bus = BusVirtio
		if strings.HasPrefix(d.Dev, BusSCSI.prefix()) {
			d.Bus = BusSCSI
		}
	}
	if d.Dev == "" {
		d.Dev = d.Bus.prefix() + "a"
	}
	if d.Kind == "" {
		d.Kind = KindDisk
	}
	if d.Cache == "" {
		d.Cache = CacheNone
	}
	if d.Discard == "" {
		d.Discard = DiscardUnmap
	}
	return d
}

// devPattern has no digits: those name partitions.
var devPattern = regexp.MustCompile(`^(vd|sd)[a-z]{1,3}$`)

// check looks at a device with its defaults filled in.
func (d Device) check(p *problems) {
	known(p, "Device.Bus", d.Bus, buses())
	if !devPattern.MatchString(d.Dev) {
		p.add("Device.Dev", "%q is no device name: want vda, sda and so on", d.Dev)
	} else if slices.Contains(buses(), d.Bus) && !strings.HasPrefix(d.Dev, d.Bus.prefix()) {
		p.add("Device.Dev", "%q does not fit the bus %s, whose disks are %sa and so on", d.Dev,
			d.Bus, d.Bus.prefix())
	}
	known(p, "Device.Kind", d.Kind, kinds())
	known(p, "Device.Cache", d.Cache, caches())
	known(p, "Device.Discard", d.Discard, dis())
	knownOrEmpty(p, "Device.IO", d.IO, ios())
	knownOrEmpty(p, "Device.DetectZeroes", d.DetectZeroes, zeroes())
	knownOrEmpty(p, "Device.ErrorPolicy", d.ErrorPolicy, append(reads(), ErrorNoSpace))
	knownOrEmpty(p, "Device.ReadErrorPolicy", d.ReadErrorPolicy, reads())
	if d.Initiator != "" {
		p.addError("Device.Initiator", CheckName(d.Initiator))
	}
	if d.IO == IONative && d.Cache != CacheNone && d.Cache != CacheDirectsync {
		p.add("Device.IO", "native needs the cache mode none or directsync, and it is %s", d.Cache)
	}
	if d.DetectZeroes == ZeroesUnmap && d.Discard != DiscardUnmap {
		p.add("Device.DetectZeroes", "unmap needs the discard mode unmap, and it is %s", d.Discard)
	}
	if d.Kind == KindLUN && d.Bus != BusSCSI {
		p.add("Device.Kind", "lun needs the bus scsi, and it is %s", d.Bus)
	}
}

// checkTogether looks at what a LUN and a device cannot have together.
func checkTogether(l LUN, d Device, p *problems) {
	if l.ReadOnly && d.Bus == BusSATA {
		p.add("Device.Bus", "sata has no read-only disks: want scsi or virtio")
	}
	switch {
	case l.Serial == "":
	case d.Kind == KindLUN:
		p.add("LUN.Serial", "a disk of kind lun has the target's own: leave it empty")
	case len(l.Serial) > d.Bus.maxSerial():
		p.add("LUN.Serial", "%q has %d characters, of which a guest sees %d on the bus %s: "+
			"shorten it", l.Serial, len(l.Serial), d.Bus.maxSerial(), d.Bus)
	}
	switch {
	case l.WWN == "":
	case d.Kind == KindLUN:
		p.add("LUN.WWN", "a disk of kind lun has the target's own: leave it empty")
	case d.Bus != BusSCSI:
		p.add("LUN.WWN", "disks on the bus %s have none: leave it empty, or use scsi", d.Bus)
	}
}

func known[T ~string](p *problems, field string, value T, values []T) {
	if !slices.Contains(values, value) {
		p.add(field, "%q is unknown: want %s", value, oneOf(values))
	}
}

func knownOrEmpty[T ~string](p *problems, field string, value T, values []T) {
	if value != "" {
		known(p, field, value, values)
	}
}

// printable tells whether XML can hold a text and a person can read it.
func printable(text string) bool {
	return utf8.ValidString(text) &&
		!strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) })
}
