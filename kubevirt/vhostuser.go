package kubevirt

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"kubevirt.io/disk/libvirt"
)

// typeVhostUser is the type of a <disk>.
const typeVhostUser = "vhostuser"

// checkTransport returns why a disk cannot use vhost-user, which annotations request, and lets the
// domain's memory be shared.
func (e *edit) checkTransport(d *Disk, w *wish, at *element, m *machine) error {
	if !w.vhostUser {
		return nil
	}
	readOnly := d.Export.ReadOnly || d.Export.AccessMode == libvirt.ReadShared
	switch {
	case d.VhostUser.Socket == "":
		return errors.New("its server has no socket for vhost-user in the directory of the hook")
	case w.bus != "" && w.bus != libvirt.BusVirtio:
		return notWith(w.said[keyBus], "the bus of a vhost-user disk is virtio")
	case w.cache != "":
		return notWith(w.said[keyCache], "QEMU has no cache for a vhost-user disk")
	case w.serial != "":
		return notWith(w.said[keySerial], "a vhost-user disk has the serial number of its server")
	case w.readOnly != nil && *w.readOnly && !readOnly:
		return notWith(w.said[keyReadOnly], "libvirt cannot make a vhost-user disk read-only: "+
			"serve it with --access-mode read-shared")
	case m.Spec.Domain.LaunchSecurity != nil || e.root.child("launchSecurity") != nil ||
		e.common.IOMMU:
		return errors.New("the machine's memory is encrypted, and its disks cannot share it: use " +
			transportNBD)
	}
	if w.replace != "" {
		if err := w.checkReplaced(at); err != nil {
			return err
		}
	}
	return e.shareMemory(d)
}

func notWith(annotation, why string) error {
	return fmt.Errorf("%s: leave out annotation %s, or use %s", why, annotation, transportNBD)
}

// checkReplaced reports settings of KubeVirt's disk that a vhost-user disk cannot have.
func (w *wish) checkReplaced(at *element) error {
	bus, kind := at.child("target").attribute("bus"), at.attribute("device")
	switch {
	case bus != string(libvirt.BusVirtio) || kind != "disk" && kind != "":
		return fmt.Errorf("volume %q is a %s on the bus %q, and a vhost-user disk is a disk on "+
			"the bus virtio: change it in the VirtualMachineInstance, or use %s", w.replace, kind,
			bus, transportNBD)
	case at.child("serial").words() != "":
		return fmt.Errorf("the VirtualMachineInstance gives the disk of volume %q a serial "+
			"number, and a vhost-user disk has that of its server: leave it out, or use %s",
			w.replace, transportNBD)
	}
	return nil
}

// shareMemory completes <memoryBacking> so that QEMU can give the guest's memory to the server of a
// disk. The launcher loses the element when it reads a domain back.
func (e *edit) shareMemory(d *Disk) error {
	backing := e.root.child("memoryBacking")
	source, access := backing.child("source"), backing.child("access")
	huge := backing.child("hugepages") != nil
	of, mode := source.attribute("type"), access.attribute("mode")
	private := slices.ContainsFunc(e.root.child("cpu").child("numa").all("cell"),
		func(cell *element) bool { return cell.attribute("memAccess") == "private" })
	switch guest := e.guestMemory(); {
	case private || mode != "" && mode != "shared":
		return fmt.Errorf("the domain says that its memory is private, so that nobody can share "+
			"it: use %s", transportNBD)
	case of != "" && of != "memfd":
		return fmt.Errorf("the domain says that its memory is of the kind %s, and it must be a "+
			"memfd or in huge pages: use %s", of, transportNBD)
	case !huge && d.MemoryLimit > 0 && guest > d.MemoryLimit:
		return fmt.Errorf("the container that serves the disk may use %d MiB of memory, and the "+
			"guest has %d MiB: Linux charges pages of the guest's memory to the container that "+
			"fills them first, so it would be killed. Give the hook sidecar a limit above that, "+
			"or none, give the machine huge pages, or use %s", d.MemoryLimit>>20, guest>>20,
			transportNBD)
	}
	var missing strings.Builder
	if of == "" && !huge {
		missing.WriteString(`<source type="memfd"></source>`)
	}
	if mode == "" {
		missing.WriteString(`<access mode="shared"></access>`)
	}
	switch {
	case missing.Len() == 0 || e.shared:
	case backing == nil:
		e.memory = "<memoryBacking>" + missing.String() + "</memoryBacking>"
	default:
		e.fill(backing, missing.String())
	}
	e.shared = true
	return nil
}

// guestMemory is how much memory the guest may have, in bytes; 0: unknown.
func (e *edit) guestMemory() (most int64) {
	shifts := map[string]int{"b": 0, "bytes": 0, "": 10, "k": 10, "KiB": 10, "M": 20, "MiB": 20,
		"G": 30, "GiB": 30, "T": 40, "TiB": 40}
	for _, name := range []string{"memory", "maxMemory"} {
		m := e.root.child(name)
		n, err := strconv.ParseInt(m.words(), 10, 64)
		shift, known := shifts[m.attribute("unit")]
		if err == nil && known && n<<shift>>shift == n {
			most = max(most, n<<shift)
		}
	}
	return most
}

// vhostUser is the disk with the number of queues of its <driver>, or of the machine, but not more
// than its server has. QEMU's own choice is one for each vCPU.
func (e *edit) vhostUser(d *Disk, driver *element) libvirt.VhostUser {
	v := d.VhostUser
	number := func(text string) uint {
		n, _ := strconv.ParseUint(text, 10, 16)
		return uint(n)
	}
	v.Queues = cmp.Or(number(driver.attribute("queues")), e.common.Queues)
	if v.Queues == 0 && number(e.root.child("vcpu").words()) > libvirt.MaxQueues {
		v.Queues = libvirt.MaxQueues
	}
	v.Queues = min(v.Queues, libvirt.MaxQueues)
	return v
}

// exchangeVhostUser makes an element the vhost-user disk. It keeps what libvirt accepts for such a
// disk: the place where the guest sees it, and its queues.
func (e *edit) exchangeVhostUser(at *element, d *Disk, w *wish) error {
	v, common := e.vhostUser(d, at.child("driver")), e.common
	if w.replace != "" {
		common = libvirt.Virtio{} // KubeVirt has set it on its own disk
	}
	made, err := render(v.Disk, libvirt.Device{Dev: at.child("target").attribute("dev"),
		Bus: libvirt.BusVirtio}, common)
	if err != nil {
		return err
	}
	e.rewrite(at, made, []string{"driver", "source"}, func(c *element) string {
		switch c.name {
		case "driver", "source":
			return made.part(c.name)
		case "target", "alias", "boot", "address":
			return e.text(c)
		}
		return ""
	})
	return nil
}
