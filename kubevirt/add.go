package kubevirt

import (
	"cmp"
	"encoding/xml"
	"fmt"
	"strconv"
	"strings"

	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/libvirt"
)

// add adds a disk to the domain. later is the number of disks with names of the same kind after it.
func (e *edit) add(d *Disk, w *wish, later int) error {
	device := libvirt.Device{Bus: w.bus, Cache: w.cache, ErrorPolicy: libvirt.ErrorStop}
	device.Bus = cmp.Or(device.Bus, libvirt.BusVirtio)
	if w.vhostUser {
		device = libvirt.Device{Bus: libvirt.BusVirtio} // libvirt has nothing else for it
	}
	export := d.Export
	export.Serial = d.serial(w)
	if e.serials[export.Serial] {
		return fmt.Errorf("its serial number %q is that of another disk that is served here: give "+
			"it another with annotation %s%s.%s", export.Serial, annotationPrefix, keySerial,
			d.mention(keySerial))
	}
	e.serials[export.Serial] = export.Serial != ""
	if err := w.protect(&export, w.readOnly); err != nil {
		return err
	}
	var err error
	if device.BootOrder, err = e.bootOrder(w); err != nil {
		return err
	}
	if device.Dev, err = e.freeName(device.Bus, later); err != nil {
		return err
	}
	render, alias := export.Disk, aliasPrefix+device.Dev
	if w.vhostUser {
		render, alias = e.vhostUser(d, nil).Disk, w.alias
	}
	disk, err := render(device)
	if err != nil {
		return err
	}
	e.common.Disk(disk)
	disk.Alias = &libvirtxml.DomainAlias{Name: alias}
	if disk.Address, err = e.address(device.Bus); err != nil {
		return err
	}
	text, err := xml.Marshal(disk)
	e.added.Write(text)
	return err
}

// aliasPrefix begins the alias of an added disk. KubeVirt does not migrate a machine with a disk
// without an alias. It takes the text after "ua-" for the name of a volume, and no volume can have
// this name.
const aliasPrefix = "ua-hook_"

// prefix begins the names of targets on a bus; "": if no bus was chosen.
func prefix(bus libvirt.Bus) string {
	if bus == libvirt.BusVirtio || bus == "" {
		return "vd"
	}
	return "sd"
}

// freeName is a free name for a target, from the end of the alphabet: KubeVirt gives the first
// letters to disks that are plugged in later, even if a hook has used them. libvirt places disks in
// the order of their names, and a guest must see ours in the order of their LUNs, so later names
// are left for the later disks.
func (e *edit) freeName(bus libvirt.Bus, later int) (string, error) {
	for _, disk := range e.disks() {
		e.names[disk.child("target").attribute("dev")] = true
	}
	prefix := prefix(bus) + block(e.number)
	for c := 'z'; c >= 'a'; c-- {
		name := prefix + string(c)
		switch {
		case e.names[name]:
		case later > 0:
			later--
		default:
			e.names[name] = true
			return name, nil
		}
	}
	return "", fmt.Errorf("the machine has disks %sa to %sz already: choose another bus with "+
		"annotation %s%s", prefix, prefix, annotationPrefix, keyBus)
}

// unitsOfSATA is the number of disks of a SATA controller.
const unitsOfSATA = 6

// addSCSIController adds a controller if the machine has none: libvirt might choose one that the
// launcher's QEMU does not have.
func (e *edit) addSCSIController() error {
	if e.hasController("scsi") || e.controller {
		return nil
	}
	e.controller = true
	c := e.common.SCSIController()
	c.Index = new(uint)
	text, err := xml.Marshal(&c)
	e.added.Write(text)
	return err
}

// targetsOfSCSI is how many targets a virtio-scsi controller has (virtio 1.2, 5.6.4).
const targetsOfSCSI = 256

// address is the place of the disk on its bus; nil: libvirt chooses. libvirt would derive the place
// from the name, and add controllers for a name from the end of the alphabet.
func (e *edit) address(bus libvirt.Bus) (*libvirtxml.DomainAddress, error) {
	switch bus {
	case libvirt.BusSCSI:
		if err := e.addSCSIController(); err != nil {
			return nil, err
		}
		// Use another target than 0, because KubeVirt counts its units.
		const each = 16 // for a hook sidecar, as with names
		target, err := e.free(bus, "target", 1+each*min(uint(e.number), targetsOfSCSI/each-1),
			targetsOfSCSI)
		return drive(target, 0), err
	case libvirt.BusSATA:
		unit, err := e.free(bus, "unit", 0, unitsOfSATA)
		return drive(0, unit), err
	case libvirt.BusUSB:
		if c := e.controllerOf("usb"); c.attribute("model") == "none" {
			return nil, fmt.Errorf("the machine has no USB: give it a USB device, such as a " +
				"tablet under inputs, or choose another bus")
		}
	}
	return nil, nil
}

func drive(target, unit uint) *libvirtxml.DomainAddress {
	zero := uint(0)
	return &libvirtxml.DomainAddress{Drive: &libvirtxml.DomainAddressDrive{Controller: &zero,
		Bus: &zero, Target: &target, Unit: &unit}}
}

func (e *edit) controllerOf(kind string) *element {
	for _, c := range e.devices.all("controller") {
		if c.attribute("type") == kind {
			return c
		}
	}
	return nil
}

func (e *edit) hasController(kind string) bool { return e.controllerOf(kind) != nil }

// free is the highest unit, or the lowest target, without a disk on a bus.
func (e *edit) free(bus libvirt.Bus, what string, from, to uint) (uint, error) {
	taken := e.units[string(bus)]
	if taken == nil {
		taken = map[string]bool{}
		e.units[string(bus)] = taken
	}
	for _, disk := range e.disks() {
		target := disk.child("target")
		if target.attribute("bus") != string(bus) {
			continue
		}
		at := disk.child("address").attribute(what)
		if at == "" && what == "unit" { // libvirt derives it from the name
			letter := strings.TrimPrefix(target.attribute("dev"), "sd")
			if len(letter) == 1 {
				at = strconv.Itoa(int(letter[0] - 'a'))
			}
		}
		taken[at] = true
	}
	for n := from; n < to; n++ {
		if at := strconv.Itoa(int(n)); !taken[at] {
			taken[at] = true
			return n, nil
		}
	}
	return 0, fmt.Errorf("the bus %s has no place left: choose another with annotation %s%s", bus,
		annotationPrefix, keyBus)
}

// bootOrder is the place of the disk in the machine's boot order; 0: the machine does not boot from
// it.
func (e *edit) bootOrder(w *wish) (uint, error) {
	byKind := e.root.child("os").child("boot") != nil
	order := uint(1)
	switch {
	case w.bootOrder == nil && (byKind || e.chosen || e.boots):
		return 0, nil // the machine has its own boot order
	case w.bootOrder == nil:
	case *w.bootOrder == 0:
		return 0, nil
	case byKind:
		return 0, fmt.Errorf("annotation %s: the domain boots by kinds of devices (<os><boot/>), "+
			"so single disks can have no boot order", w.said[keyBootOrder])
	case e.orders[w.order()]:
		return 0, fmt.Errorf("annotation %s: another device of the machine has boot order %s "+
			"already", w.said[keyBootOrder], w.order())
	default:
		order = *w.bootOrder
	}
	if b := e.borrowed; b != nil {
		e.changes = append(e.changes, change{b.start, b.end, ""})
		e.borrowed = nil
	}
	e.orders[strconv.Itoa(int(order))], e.boots = true, true
	return order, nil
}

// bootOrders finds the used boot orders. The launcher asks hook sidecars in the order in which it
// found their sockets. The disk that a machine boots from must not depend on this: without
// annotations, it is one of the first hook sidecar.
func (e *edit) bootOrders() {
	for _, device := range e.deviceElements() {
		boot, later := device.child("boot"), e.later(device)
		switch order := boot.attribute("order"); {
		case order == "":
		case later && order == "1" && !e.chosen:
			e.borrowed = boot
		default:
			e.orders[order] = true
			e.boots = e.boots || !later
		}
	}
}

// later reports whether a device is a disk of a hook sidecar after this one.
func (e *edit) later(device *element) bool {
	dev := device.child("target").attribute("dev")
	return strings.HasPrefix(device.child("alias").attribute("name"), aliasPrefix) &&
		len(dev) == len("vdaz") && dev[2:3] > block(e.number)
}

// block is the text before the last letter in the names of a hook sidecar's disks. With it, a guest
// sees the disks in the order of the hook sidecars, whichever the launcher asks first.
func block(number int) string {
	if number == 0 {
		return ""
	}
	return string(rune('a' + min(number, 26) - 1))
}

// numberOf is the place of a hook sidecar in the machine's list; 0: it is the first, or no hook
// sidecar.
func numberOf(container string) int {
	n, _ := strconv.ParseUint(strings.TrimPrefix(container, sidecarPrefix), 10, 8)
	return int(n)
}
