package kubevirt

import (
	"cmp"
	"encoding/xml"
	"fmt"
	"slices"
	"strings"

	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/libvirt"
)

// Disk is a disk that is served in the machine's pod.
type Disk struct {
	Number uint16 // of its LUN; annotations may use it instead of the export's name
	// Remote: its content is not in the pod, so a machine that moves finds the same disk on the
	// other node.
	Remote bool
	// Export is the disk for libvirt. Its socket has the path in the launcher.
	Export libvirt.Export
	// VhostUser is the same for a machine that requests that transport. Without a socket it is not
	// available.
	VhostUser libvirt.VhostUser
	// MemoryLimit is the memory limit of the container that serves the disk, in bytes.
	MemoryLimit int64
}

// Edit returns the domain of a call with the disks in it, and the rest unchanged, byte for byte.
// Annotations of the VirtualMachineInstance decide how a guest sees the disks; container is the
// name of the hook's container in them. If the domain has the disks already, perhaps with lost
// parts, they keep their places. A machine that is moving to another node may only have Remote
// disks.
func Edit(c Call, disks []Disk, container string) ([]byte, error) {
	m, err := parseMachine(c.VMI)
	if err != nil {
		return nil, err
	}
	if m.migrates() || c.Occasion == OccasionMigrationSource ||
		c.Occasion == OccasionMigrationTarget {
		if err := refuseMigration(disks); err != nil {
			return nil, err
		}
	}
	e, wishes, places, err := locate(c, m, disks, container)
	if err != nil {
		return nil, err
	}
	e.common = e.virtio(m)
	e.number = numberOf(container)
	e.chosen = m.bootsFirst()
	e.bootOrders()
	for i := range disks {
		e.chosen = e.chosen || wishes[i].order() != ""
		if err := e.checkTransport(&disks[i], &wishes[i], places[i], m); err != nil {
			return nil, fmt.Errorf("disk %q: annotation %s: %w", disks[i].Export.Name,
				wishes[i].said[keyTransport], err)
		}
	}
	for i := range disks {
		if places[i] != nil && wishes[i].vhostUser {
			err = e.exchangeVhostUser(places[i], &disks[i], &wishes[i])
		} else if places[i] != nil {
			err = e.exchange(places[i], &disks[i], &wishes[i])
		} else {
			later := 0 // number of later disks with names of the same kind
			for j := i + 1; j < len(disks); j++ {
				if places[j] == nil && prefix(wishes[j].bus) == prefix(wishes[i].bus) {
					later++
				}
			}
			err = e.add(&disks[i], &wishes[i], later)
		}
		if err != nil {
			return nil, fmt.Errorf("disk %q: %w", disks[i].Export.Name, err)
		}
	}
	return e.document(), nil
}

// locate finds the annotations for each disk, and its element; nil: it has none.
func locate(c Call, m *machine, disks []Disk, container string) (e *edit, wishes []wish,
	places []*element, err error) {
	if wishes, err = m.wishes(disks, container); err != nil {
		return nil, nil, nil, err
	}
	if e, err = newEdit(c.Domain); err != nil {
		return nil, nil, nil, fmt.Errorf("the domain is not understood: %w", err)
	}
	places = make([]*element, len(disks))
	for i := range disks {
		wishes[i].alias = fmt.Sprintf("%s%s_%d", aliasPrefix, container, disks[i].Number)
		if places[i], err = e.find(&disks[i], &wishes[i], m); err != nil {
			return nil, nil, nil, fmt.Errorf("disk %q: %w", disks[i].Export.Name, err)
		}
		if places[i] != nil {
			e.own[places[i]] = true
		}
	}
	return e, wishes, places, nil
}

// Fresh reports whether none of the disks is in the domain of a call: KubeVirt is making a new
// domain.
func Fresh(c Call, disks []Disk, container string) bool {
	m, err := parseMachine(c.VMI)
	if err != nil {
		return false
	}
	_, _, places, err := locate(c, m, disks, container)
	if err != nil {
		return false
	}
	return !slices.ContainsFunc(places, func(at *element) bool {
		return at.attribute("type") == typeVhostUser ||
			at.child("source").attribute("protocol") == "nbd"
	})
}

// edit is a domain with its pending changes.
type edit struct {
	before  []byte
	root    *element
	devices *element // nil: there are none
	own     map[*element]bool
	common  libvirt.Virtio // settings of every virtio device
	changes []change
	added   strings.Builder // devices
	memory  string          // a <memoryBacking> element; "": none is added
	shared  bool            // the domain's memory is shared, after the changes
	// of the devices that were added
	names, serials map[string]bool
	orders         map[string]bool
	units          map[string]map[string]bool // by bus
	controller     bool                       // one for SCSI is added
	number         int                        // place of the hook sidecar
	chosen         bool                       // annotations decide what the machine boots from
	boots          bool                       // the machine boots from another device first
	borrowed       *element                   // <boot> of a later sidecar, to be taken over
}

func newEdit(domain []byte) (*edit, error) {
	root, err := parse(domain)
	if err != nil {
		return nil, err
	}
	if root.name != "domain" {
		return nil, fmt.Errorf("it is a <%s>", root.name)
	}
	return &edit{before: domain, root: root, devices: root.child("devices"),
		own: map[*element]bool{}, names: map[string]bool{}, serials: map[string]bool{},
		orders: map[string]bool{}, units: map[string]map[string]bool{}}, nil
}

func (e *edit) disks() []*element { return e.devices.all("disk") }

// find returns the element that is the disk, or will be; nil: there is none.
func (e *edit) find(d *Disk, w *wish, m *machine) (found *element, err error) {
	if w.replace != "" {
		return e.findReplaced(d, w, m)
	}
	serial := d.serial(w)
	for _, disk := range e.disks() {
		switch {
		case d.matches(disk, w) && found != nil:
			return nil, fmt.Errorf("the domain has it twice, as %s and %s",
				found.child("target").attribute("dev"), disk.child("target").attribute("dev"))
		case d.matches(disk, w):
			found = disk
		case disk.child("serial").words() == serial && serial != "":
			return nil, fmt.Errorf("its serial number %q is that of another disk of the machine, "+
				"%s: give one of them another, this one with annotation %s%s.%s", serial,
				disk.child("target").attribute("dev"), annotationPrefix, keySerial,
				d.mention(keySerial))
		}
	}
	return found, nil
}

// matches reports whether an element is the disk. The launcher loses the socket of a source when it
// reads a domain back. With vhost-user the serial number is lost, too, but the alias stays.
func (d *Disk) matches(disk *element, w *wish) bool {
	source, serial := disk.child("source"), d.serial(w)
	if disk.attribute("type") == typeVhostUser {
		return disk.child("alias").attribute("name") == w.alias
	}
	if source.attribute("protocol") != "nbd" || source.attribute("name") != d.Export.Name {
		return false
	}
	host := source.child("host")
	return d.mayBe(host) && (host.attribute("socket") != "" ||
		disk.child("serial").words() == serial)
}

// mayBe reports whether a host element is that of the disk, with or without its socket.
func (d *Disk) mayBe(host *element) bool {
	if socket := host.attribute("socket"); socket != "" {
		return socket == d.Export.Socket
	}
	name := host.attribute("name")
	return name == "" || name == d.Export.Portal.Host
}

// serial is the serial number of the disk in the guest.
func (d *Disk) serial(w *wish) string {
	if w.serial != "" {
		return w.serial
	}
	return d.Export.Serial
}

// findReplaced returns KubeVirt's element for a volume.
func (e *edit) findReplaced(d *Disk, w *wish, m *machine) (*element, error) {
	by := w.said[keyReplace]
	if !m.hasVolume(w.replace) {
		return nil, fmt.Errorf("annotation %s: the machine has no volume %q, only %q", by,
			w.replace, m.volumes())
	}
	for _, disk := range e.disks() {
		if disk.child("alias").attribute("name") != "ua-"+w.replace {
			continue
		}
		source := disk.child("source")
		path := source.attribute("path")
		ours := source.attribute("name") == d.Export.Name && d.mayBe(source.child("host"))
		switch kind := disk.attribute("device"); {
		case source.attribute("protocol") == "nbd" && !ours,
			disk.attribute("type") == typeVhostUser && path != "" && path != d.VhostUser.Socket:
			return nil, fmt.Errorf("annotation %s: another hook has replaced the disk of volume "+
				"%q already", by, w.replace)
		case kind != "disk" && kind != "cdrom" && kind != "":
			return nil, fmt.Errorf("annotation %s: volume %q is a %s: only a disk or a CD-ROM can "+
				"be replaced", by, w.replace, kind)
		}
		return disk, nil
	}
	return nil, fmt.Errorf("annotation %s: volume %q is no disk of the machine when it starts: "+
		"list it under disks, too", by, w.replace)
}

// document is the domain with the changes.
func (e *edit) document() []byte {
	added := e.added.String()
	disks := e.disks()
	if e.memory != "" && e.devices != nil {
		e.changes = append(e.changes, change{e.devices.start, e.devices.start, e.memory})
	}
	switch {
	case added == "":
	case len(disks) > 0:
		last := disks[len(disks)-1].end
		e.changes = append(e.changes, change{last, last, added})
	case e.devices == nil:
		e.fill(e.root, e.memory+"<devices>"+added+"</devices>")
	default:
		e.fill(e.devices, added)
	}
	return changed(e.before, e.changes)
}

// fill puts text at the end of an element.
func (e *edit) fill(parent *element, text string) {
	if parent.closesItself() {
		text = parent.tag() + text + "</" + parent.name + ">"
		e.changes = append(e.changes, change{parent.start, parent.end, text})
		return
	}
	e.changes = append(e.changes, change{parent.close, parent.close, text})
}

// exchange makes an element the disk: its source, its type and its blocks. It keeps everything else
// that the new source allows.
func (e *edit) exchange(at *element, d *Disk, w *wish) error {
	target := at.child("target")
	bus := libvirt.Bus(target.attribute("bus"))
	device := libvirt.Device{Bus: bus, Cache: w.cache, ErrorPolicy: libvirt.ErrorStop}
	export := d.Export
	if w.replace == "" {
		export.Serial = d.serial(w)
	} else {
		// The machine decides both. Its bus may be unknown here, and a CD-ROM is read-only on every
		// bus.
		export.Serial = ""
		if bus != libvirt.BusSATA || at.attribute("device") == "cdrom" {
			device.Bus = ""
		}
	}
	if err := w.protect(&export, w.readOnly); err != nil {
		return err
	}
	common := e.common
	if w.replace != "" {
		common = libvirt.Virtio{} // KubeVirt has set it on its own disk
	}
	made, err := render(export.Disk, device, common)
	if err != nil {
		return err
	}
	missing := []string{"driver", "source", "blockio", "readonly", "shareable", "serial"}
	drive := at.attribute("device") == "cdrom" // its blocks stay
	if drive {
		missing = slices.DeleteFunc(missing, func(name string) bool { return name == "blockio" })
	}
	e.rewrite(at, made, missing, func(c *element) string {
		switch c.name {
		case "source":
			return made.part("source")
		case "driver":
			return e.driver(c, made.child("driver"), w)
		case "blockio":
			if !drive && logical(c) != logical(made.child("blockio")) {
				return made.part("blockio") // the existing one was for another disk
			}
		case "backingStore", "auth", "mirror":
			return ""
		}
		return e.text(c)
	})
	return nil
}

// rewrite makes an element a new disk: its type, the missing parts, and its own parts as changed by
// part.
func (e *edit) rewrite(at *element, made *rendered, missing []string, part func(*element) string) {
	var b strings.Builder
	set := []string{"type", made.attribute("type")}
	if model := made.attribute("model"); model != "" && at.attribute("model") == "" {
		set = append(set, "model", model)
	}
	b.WriteString(at.tag(set...))
	for _, name := range missing {
		if at.child(name) == nil {
			b.WriteString(made.part(name))
		}
	}
	last := at.open
	for _, c := range at.children {
		b.Write(e.before[last:c.start])
		last = c.end
		b.WriteString(part(c))
	}
	if !at.closesItself() {
		b.Write(e.before[last:at.close])
	}
	b.WriteString("</" + at.name + ">")
	e.changes = append(e.changes, change{at.start, at.end, b.String()})
}

// text is the present text of an element of the domain.
func (e *edit) text(c *element) string { return string(e.before[c.start:c.end]) }

// logical is the length of a logical block in a <blockio> element, as text.
func logical(blocks *element) string {
	return cmp.Or(blocks.attribute("logical_block_size"), "512")
}

// driver is a driver element for the new source. It keeps the machine's own settings.
func (e *edit) driver(at, ours *element, w *wish) string {
	set := []string{"name", "qemu", "type", "raw"}
	for _, a := range ours.attributes {
		name := full(a.Name)
		if at.attribute(name) == "" || name == "cache" && w.cache != "" {
			set = append(set, name, a.Value)
		}
	}
	if at.closesItself() {
		return at.tag(set...) + "</driver>"
	}
	return at.tag(set...) + string(e.before[at.open:at.end])
}

// rendered is the element of a new disk, and its text.
type rendered struct {
	*element
	document string
}

// part is the text of one child element, or "".
func (r *rendered) part(name string) string {
	if c := r.child(name); c != nil {
		return r.document[c.start:c.end]
	}
	return ""
}

func render(of func(libvirt.Device) (*libvirtxml.DomainDisk, error), device libvirt.Device,
	common libvirt.Virtio) (*rendered, error) {
	disk, err := of(device)
	if err != nil {
		return nil, err
	}
	common.Disk(disk)
	text, err := xml.Marshal(disk)
	if err != nil {
		return nil, err
	}
	root, err := parse(text)
	return &rendered{root, string(text)}, err
}

// protect makes the guest's disk read-only if an annotation says so.
func (w *wish) protect(export *libvirt.Export, readOnly *bool) error {
	switch {
	case readOnly == nil:
	case *readOnly:
		export.ReadOnly = true
	case export.ReadOnly || export.AccessMode == libvirt.ReadShared:
		return fmt.Errorf("annotation %s: the disk is read-only where it is served",
			w.said[keyReadOnly])
	}
	return nil
}
