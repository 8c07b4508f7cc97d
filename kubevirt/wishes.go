package kubevirt

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"kubevirt.io/disk/libvirt"
)

// annotationPrefix begins the annotations of a VirtualMachineInstance about its disks.
const annotationPrefix = "disk.kubevirt.io/"

// The keys of annotations.
const (
	keyBus       = "bus"
	keyBootOrder = "boot-order"
	keyReadOnly  = "read-only"
	keyCache     = "cache"
	keySerial    = "serial"
	keyReplace   = "replace"
	keyTransport = "transport"
)

// The values of the annotation about the transport.
const (
	transportNBD       = "nbd"
	transportVhostUser = "vhost-user"
)

func keys() []string {
	return []string{keyBus, keyBootOrder, keyReadOnly, keyCache, keySerial, keyReplace,
		keyTransport}
}

// others reports whether a key with the prefix is not for the hook.
func others(key string) bool {
	return key == "handover" || key == "move-to" || strings.HasPrefix(key, "identity-")
}

// wish has the settings for a disk in annotations.
type wish struct {
	bus       libvirt.Bus // virtio if there is none
	bootOrder *uint       // nil: none; 0: the machine must not boot from it
	readOnly  *bool
	cache     libvirt.Cache
	serial    string
	replace   string            // the volume whose disk is replaced
	vhostUser bool              // by vhost-user instead of NBD
	alias     string            // of the disk if it is added by vhost-user
	said      map[string]string // by key: its annotation
}

func (w *wish) parse(key, value string) (err error) {
	switch key {
	case keyBus:
		w.bus, err = oneOf(value, libvirt.BusVirtio, libvirt.BusSCSI, libvirt.BusSATA,
			libvirt.BusUSB)
	case keyCache:
		w.cache, err = oneOf(value, libvirt.CacheNone, libvirt.CacheWriteback,
			libvirt.CacheWritethrough, libvirt.CacheDirectsync, libvirt.CacheUnsafe,
			libvirt.CacheDefault)
	case keyBootOrder:
		n, convErr := strconv.ParseUint(value, 10, 16)
		if convErr != nil {
			return fmt.Errorf("%q is not a boot order: want a number from 1, or 0 for a disk "+
				"that the machine does not boot from", value)
		}
		w.bootOrder = new(uint(n))
	case keyReadOnly:
		var v string
		v, err = oneOf(value, "true", "false")
		w.readOnly = new(v == "true")
	case keyTransport:
		var v string
		v, err = oneOf(value, transportNBD, transportVhostUser)
		w.vhostUser = v == transportVhostUser
	case keySerial:
		w.serial = value
		if value == "" {
			err = fmt.Errorf("the serial number is empty")
		}
	case keyReplace:
		w.replace = value
		if value == "" {
			err = fmt.Errorf("the name of a volume of the machine is missing")
		}
	}
	return err
}

func oneOf[T ~string](value string, choices ...T) (T, error) {
	if slices.Contains(choices, T(value)) {
		return T(value), nil
	}
	texts := make([]string, len(choices))
	for i, c := range choices {
		texts[i] = string(c)
	}
	return "", fmt.Errorf("%q is unknown: want %s or %s", value,
		strings.Join(texts[:len(texts)-1], ", "), texts[len(texts)-1])
}

// statement is an annotation about one disk or all.
type statement struct {
	annotation, key, about, value string
}

// wishes reads the annotations of a machine: a wish for each disk. An annotation about one disk has
// precedence over one about all disks of a container, and that over one about all disks.
func (m *machine) wishes(disks []Disk, container string) ([]wish, error) {
	annotations, err := m.annotations()
	if err != nil {
		return nil, err
	}
	if m.alone() {
		if err := checkNames(annotations, disks, container); err != nil {
			return nil, err
		}
	}
	all := make([]wish, len(disks))
	for i, d := range disks {
		if all[i], err = d.wish(annotations, container); err != nil {
			return nil, err
		}
	}
	return all, checkOnce(all, disks)
}

// annotations are the annotations for the hook.
func (m *machine) annotations() (all []statement, err error) {
	for _, annotation := range slices.Sorted(maps.Keys(m.Metadata.Annotations)) {
		rest, ok := strings.CutPrefix(annotation, annotationPrefix)
		if !ok || others(rest) {
			continue
		}
		key, about, _ := strings.Cut(rest, ".")
		if !slices.Contains(keys(), key) {
			return nil, fmt.Errorf("annotation %s is unknown: want %s and one of %s", annotation,
				annotationPrefix, strings.Join(keys(), ", "))
		}
		all = append(all, statement{annotation, key, about, m.Metadata.Annotations[annotation]})
	}
	return all, nil
}

// bootsFirst reports whether an annotation gives a disk of any hook sidecar the boot order 1.
func (m *machine) bootsFirst() bool {
	all, _ := m.annotations() // errors were reported earlier
	return slices.ContainsFunc(all, func(a statement) bool {
		var w wish
		return a.key == keyBootOrder && w.parse(a.key, a.value) == nil && *w.bootOrder == 1
	})
}

// checkNames finds annotations about disks that do not exist.
func checkNames(annotations []statement, disks []Disk, container string) error {
	for _, a := range annotations {
		if !slices.ContainsFunc(disks, func(d Disk) bool { return d.rank(a, container) > 0 }) {
			names := make([]string, len(disks))
			for i, d := range disks {
				names[i] = d.mention(a.key)
			}
			return fmt.Errorf("annotation %s: there is no disk %q, only %s", a.annotation, a.about,
				strings.Join(names, ", "))
		}
	}
	return nil
}

// annotationName is what Kubernetes takes behind the slash of an annotation's name.
var annotationName = regexp.MustCompile(`^[A-Za-z0-9_.-]{0,62}[A-Za-z0-9]$`)

// mention is how an annotation with a key can name the disk: by the name of its image, or by its
// number. No annotation can have the name of an image in a registry.
func (d *Disk) mention(key string) string {
	if annotationName.MatchString(key + "." + d.Export.Name) {
		return d.Export.Name
	}
	return strconv.Itoa(int(d.Number))
}

// rank is how specific an annotation is for a disk; 0: it is not about the disk.
func (d *Disk) rank(a statement, container string) int {
	switch a.about {
	case d.Export.Name:
		return 4
	case strconv.Itoa(int(d.Number)):
		return 3
	case container:
		return 2
	case "":
		return 1
	}
	return 0
}

// wish combines the annotations about the disk.
func (d *Disk) wish(annotations []statement, container string) (wish, error) {
	w := wish{said: map[string]string{}}
	slices.SortStableFunc(annotations, func(a, b statement) int {
		return cmp.Compare(d.rank(a, container), d.rank(b, container))
	})
	for _, a := range annotations {
		if d.rank(a, container) == 0 {
			continue
		}
		if err := w.parse(a.key, a.value); err != nil {
			return w, fmt.Errorf("annotation %s: %w", a.annotation, err)
		}
		w.said[a.key] = a.annotation
	}
	if w.replace != "" {
		for _, key := range []string{keyBus, keyBootOrder, keyCache, keySerial} {
			if a := w.said[key]; a != "" {
				return w, fmt.Errorf("annotation %s: disk %q replaces that of volume %q, whose "+
					"settings are in the VirtualMachineInstance: set it there", a, d.Export.Name,
					w.replace)
			}
		}
	}
	return w, nil
}

// checkOnce finds settings that two disks cannot both have.
func checkOnce(all []wish, disks []Disk) error {
	had := map[string]string{}
	for i, w := range all {
		for key, value := range map[string]string{keySerial: w.serial, keyReplace: w.replace,
			keyBootOrder: w.order()} {
			if value == "" {
				continue
			}
			what := key + " " + value
			if other, taken := had[what]; taken {
				return fmt.Errorf("annotation %s: disks %q and %q cannot both have %s %s: name "+
					"one, as in %s%s.NAME", w.said[key], other, disks[i].Export.Name, key, value,
					annotationPrefix, key)
			}
			had[what] = disks[i].Export.Name
		}
	}
	return nil
}

// order is the boot order as text; "": none.
func (w *wish) order() string {
	if w.bootOrder == nil || *w.bootOrder == 0 {
		return ""
	}
	return strconv.Itoa(int(*w.bootOrder))
}
