package libvirt

import (
	"cmp"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Device describes how a virtual machine sees a LUN. Every field may be empty.
type Device struct {
	Dev  string // target device: vda with BusVirtio, sda with the others. "": the bus's first
	Bus  Bus    // "": by Dev, BusSCSI for sd names and BusVirtio for vd names
	Kind Kind   // "": KindDisk

	BootOrder uint // 1: first; 0: the element has no boot order

	// Initiator is the iSCSI name with which QEMU logs in; InitiatorName makes one. A
	// write-exclusive LUN belongs to one initiator name at a time. "": QEMU derives a name from the
	// domain's UUID. Both machines of a live migration have that UUID, so the target cannot fence
	// either of them.
	Initiator string

	Cache        Cache   // "": CacheNone
	IO           IO      // "": QEMU's default
	Discard      Discard // "": DiscardUnmap
	DetectZeroes Zeroes  // "": QEMU's default, ZeroesOff
	// The action on an error. "": QEMU's default, which stops on full storage and reports the rest.
	ErrorPolicy ErrorPolicy
	// The policy for reads, if it differs. "": as ErrorPolicy. ErrorNoSpace is not allowed.
	ReadErrorPolicy ErrorPolicy
}

// Bus is the kind of controller that a disk is attached to.
type Bus string

// The buses.
const (
	BusVirtio Bus = "virtio" // virtio-blk
	BusSCSI   Bus = "scsi"   // on a controller of the domain, best of model virtio-scsi
	BusSATA   Bus = "sata"   // cannot be hot-plugged, and has no read-only disks
	BusUSB    Bus = "usb"    // slow; for guests that have no other driver
)

// Kind decides whether QEMU or the target answers the guest's SCSI commands.
type Kind string

// The kinds.
const (
	KindDisk Kind = "disk" // QEMU emulates a disk
	// KindLUN passes the guest's commands on to the target, so that reservations and the target's
	// own identity reach the guest. It needs BusSCSI. LUN.Serial and LUN.WWN must be empty, because
	// the guest sees the target's own.
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

// IO is QEMU's kind of I/O. An iSCSI disk uses the network whatever the value.
type IO string

// The modes of I/O.
const (
	IOThreads IO = "threads"
	IONative  IO = "native" // with CacheNone or CacheDirectsync
	IOUring   IO = "io_uring"
)

// Discard decides whether the guest's discards reach the target, which then frees the space.
type Discard string

// The values of Discard.
const (
	DiscardUnmap  Discard = "unmap"
	DiscardIgnore Discard = "ignore"
)

// Zeroes decides whether QEMU looks for zeros in the guest's writes.
type Zeroes string

// The values of Zeroes.
const (
	ZeroesOff   Zeroes = "off"
	ZeroesOn    Zeroes = "on"
	ZeroesUnmap Zeroes = "unmap" // look for zeros and discard them; needs DiscardUnmap
)

// ErrorPolicy decides what happens to the guest when a command fails.
type ErrorPolicy string

// The policies.
const (
	ErrorStop    ErrorPolicy = "stop" // the domain pauses
	ErrorReport  ErrorPolicy = "report"
	ErrorIgnore  ErrorPolicy = "ignore"
	ErrorNoSpace ErrorPolicy = "enospace" // pause on full storage, report the rest
)

func buses() []Bus         { return []Bus{BusVirtio, BusSCSI, BusSATA, BusUSB} }
func kinds() []Kind        { return []Kind{KindDisk, KindLUN} }
func ios() []IO            { return []IO{IOThreads, IONative, IOUring} }
func zeroes() []Zeroes     { return []Zeroes{ZeroesOff, ZeroesOn, ZeroesUnmap} }
func dis() []Discard       { return []Discard{DiscardUnmap, DiscardIgnore} }
func reads() []ErrorPolicy { return []ErrorPolicy{ErrorStop, ErrorReport, ErrorIgnore} }
func caches() []Cache {
	return []Cache{CacheDefault, CacheNone, CacheWriteback, CacheWritethrough, CacheDirectsync,
		CacheUnsafe}
}

// prefix is the prefix of a bus's device names.
func (b Bus) prefix() string {
	if b == BusVirtio {
		return "vd"
	}
	return "sd"
}

// maxSerial is how many characters of a serial number the guest sees: 20 with virtio (virtio 1.2
// 5.2.6.1) and ATA, 36 with QEMU's SCSI disks.
func (b Bus) maxSerial() int {
	if b == BusSCSI {
		return 36
	}
	return 20
}

// withDefaults replaces empty fields with their defaults.
func (d Device) withDefaults() Device {
	if d.Bus == "" {
		d.Bus = BusVirtio
		if strings.HasPrefix(d.Dev, BusSCSI.prefix()) {
			d.Bus = BusSCSI
		}
	}
	d.Dev = cmp.Or(d.Dev, d.Bus.prefix()+"a")
	d.Kind = cmp.Or(d.Kind, KindDisk)
	d.Cache = cmp.Or(d.Cache, CacheNone)
	d.Discard = cmp.Or(d.Discard, DiscardUnmap)
	return d
}

// devPattern allows no digits, because those name partitions.
var devPattern = regexp.MustCompile(`^(vd|sd)[a-z]{1,3}$`)

// check validates a device whose defaults are filled in.
func (d Device) check(p *problems) {
	known(p, "Device.Bus", d.Bus, buses())
	if !devPattern.MatchString(d.Dev) {
		p.add("Device.Dev", "%q is not a device name: want vda, sda and so on", d.Dev)
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
		p.add("Device.IO", "native needs the cache mode none or directsync; the mode is %s",
			d.Cache)
	}
	if d.DetectZeroes == ZeroesUnmap && d.Discard != DiscardUnmap {
		p.add("Device.DetectZeroes", "unmap needs the discard mode unmap; the mode is %s",
			d.Discard)
	}
	if d.Kind == KindLUN && d.Bus != BusSCSI {
		p.add("Device.Kind", "lun needs the bus scsi; the bus is %s", d.Bus)
	}
}

// checkTogether finds combinations of a LUN and a device that do not work.
func checkTogether(l LUN, d Device, p *problems) {
	if l.ReadOnly && d.Bus == BusSATA {
		p.add("Device.Bus", "sata has no read-only disks: want scsi or virtio")
	}
	if l.BlockSize > shortBlock && d.Bus == BusSATA {
		p.add("Device.Bus", "sata disks have logical blocks of %d bytes, and the disk has %d: "+
			"want scsi or virtio", shortBlock, l.BlockSize)
	}
	switch {
	case l.Serial == "":
	case d.Kind == KindLUN:
		p.add("LUN.Serial", "the guest of a disk of kind lun sees the target's own: leave it empty")
	case len(l.Serial) > d.Bus.maxSerial():
		p.add("LUN.Serial", "%q has %d characters, but a guest sees only %d on the bus %s: "+
			"shorten it", l.Serial, len(l.Serial), d.Bus.maxSerial(), d.Bus)
	}
	switch {
	case l.WWN == "":
	case d.Kind == KindLUN:
		p.add("LUN.WWN", "the guest of a disk of kind lun sees the target's own: leave it empty")
	case d.Bus != BusSCSI:
		p.add("LUN.WWN", "disks on the bus %s have no WWN: leave it empty, or use scsi", d.Bus)
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

// printable reports whether XML can hold a text and a person can read it.
func printable(text string) bool {
	return utf8.ValidString(text) &&
		!strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) })
}
