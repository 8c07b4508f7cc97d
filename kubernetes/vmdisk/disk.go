package vmdisk

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"kubevirt.io/disk/libvirt"
)

// The types of container disks in a VM specification. They mean the same.
const (
	TypeContainerRegistryDisk = "ContainerRegistryDisk:v1alpha"
	TypeRegistryDisk          = "RegistryDisk:v1alpha"
)

// Disk is a container disk of a VM specification.
type Disk struct {
	Image  string      // reference of the container image; a disk that is Filled needs none
	Device string      // target device: sda, vda and so on
	Bus    libvirt.Bus // "": by Device

	AccessMode libvirt.AccessMode // "": libvirt.WriteExclusive
	ReadOnly   bool

	CopyMode libvirt.CopyMode // "": that of the image
	// Size of the disk in bytes, a multiple of its blocks and at least that of the image. 0: that
	// of the image.
	Size int64
	// BlockSize is the length of a logical block in bytes, 512 or 4096. 0: that of the existing
	// disk, or 512. AddToDomain cannot know that of the disk, and takes 0 for 512.
	BlockSize int
	// Filled says that the disk's claim holds the whole disk already. With Pod.Server, the pod then
	// has no volume with the image.
	Filled bool
	// UsageType is the type of the storage for the guest's writes, see Pod.UsageTypes. "": the
	// pod's own.
	UsageType string
}

// Parse returns the container disks of a VM specification, in order. It leaves out other types. The
// argument is decoded YAML or JSON: the object with spec.domain.devices.disks, or the map with
// "disks".
func Parse(document map[string]any) ([]Disk, error) {
	path := ""
	for _, key := range []string{"spec", "domain", "devices"} {
		inner, ok := document[key].(map[string]any)
		if !ok {
			break
		}
		document, path = inner, join(path, key)
	}
	path = join(path, "disks")
	list, ok := document["disks"].([]any)
	if !ok && document["disks"] != nil {
		return nil, &libvirt.FieldError{Field: path, Problem: "want a list of disks"}
	}
	var p problems
	var disks []Disk
	for i, one := range list {
		at := fmt.Sprintf("%s[%d]", path, i)
		entry, ok := one.(map[string]any)
		if !ok {
			p.add(at, "want a disk with type, source and target")
			continue
		}
		kind, _ := entry["type"].(string)
		name, _, _ := strings.Cut(kind, ":")
		switch {
		case kind == TypeContainerRegistryDisk || kind == TypeRegistryDisk:
			disks = append(disks, parseDisk(entry, at, &p))
		case name == "ContainerRegistryDisk" || name == "RegistryDisk":
			p.add(join(at, "type"), "%q is a version that is not known: want %s or %s", kind,
				TypeContainerRegistryDisk, TypeRegistryDisk)
		}
	}
	if err := p.err(); err != nil {
		return nil, err
	}
	return disks, check(disks, path)
}

func parseDisk(entry map[string]any, path string, p *problems) Disk {
	p.known(entry, path, "type", "source", "target", "access-mode", "copy")
	source := p.inner(entry, path, "source")
	target := p.inner(entry, path, "target")
	p.known(source, join(path, "source"), "name")
	p.known(target, join(path, "target"), "device", "bus")
	d := Disk{
		Image:  p.text(source, join(path, "source"), "name"),
		Device: p.text(target, join(path, "target"), "device"),
		Bus:    libvirt.Bus(p.text(target, join(path, "target"), "bus")),
	}
	switch mode := p.text(entry, path, "access-mode"); mode {
	case "read-only":
		d.ReadOnly = true
	default:
		d.AccessMode = libvirt.AccessMode(mode)
	}
	if entry["copy"] != nil {
		how := p.inner(entry, path, "copy")
		p.known(how, join(path, "copy"), "mode", "usage-type")
		d.CopyMode = libvirt.CopyMode(p.text(how, join(path, "copy"), "mode"))
		d.UsageType = p.text(how, join(path, "copy"), "usage-type")
	}
	return d
}

var copyModes = []libvirt.CopyMode{
	"", libvirt.CopyClone, libvirt.CopyOnRead, libvirt.CopyOnWrite, libvirt.CopyNone,
}

// maxDisks keeps the ports of the disks below those of the pages.
const maxDisks = 64

// sector is the unit of a size, in bytes.
const sector = 512

// check finds mistakes in disks from any source. path is the place of the list.
func check(disks []Disk, path string) error {
	var p problems
	if len(disks) > maxDisks {
		p.add(path, "it has %d container disks, more than %d", len(disks), maxDisks)
	}
	devices := make(map[string]int)
	for i, d := range disks {
		at := fmt.Sprintf("%s[%d]", path, i)
		if d.Image == "" && !d.Filled || strings.ContainsFunc(d.Image, notInReference) {
			p.add(join(at, "source.name"), "%q is not a container image: want REGISTRY/NAME:TAG "+
				"or REGISTRY/NAME@DIGEST", d.Image)
		}
		if d.Device == "" { // its container and its target are called after it
			p.add(join(at, "target.device"), "it is missing: want vda, sda and so on")
		} else if other, twice := devices[d.Device]; twice {
			p.add(join(at, "target.device"), "%q is also the device of %s[%d]: want another one",
				d.Device, path, other)
		}
		devices[d.Device] = i
		if d.Size < 0 || d.Size%sector != 0 {
			p.add(join(at, "size"), "%d is not a size: want a multiple of %d bytes", d.Size, sector)
		}
		if !slices.Contains(copyModes, d.CopyMode) {
			p.add(join(at, "copy.mode"), "%q is unknown: want %s, %s, %s, %s", d.CopyMode,
				copyModes[1], copyModes[2], copyModes[3], copyModes[4])
		}
		_, err := libvirt.Disk(d.lun("localhost", 0, libvirt.Credential{}), d.device(""))
		p.addOf(err, at)
	}
	return p.err()
}

// notInReference reports whether a character cannot be in an image reference.
func notInReference(r rune) bool { return r <= ' ' || r > '~' }

// problems collects all errors in a document.
type problems struct{ list []error }

func (p *problems) add(field, format string, args ...any) {
	p.list = append(p.list,
		&libvirt.FieldError{Field: field, Problem: fmt.Sprintf(format, args...)})
}

// addOf adds libvirt's errors about the LUN and the device of the disk at a place.
func (p *problems) addOf(err error, at string) {
	fields := map[string]string{
		"Device.Dev": "target.device", "Device.Bus": "target.bus", "LUN.AccessMode": "access-mode",
		"LUN.BlockSize": "block-size",
	}
	var field *libvirt.FieldError
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, one := range joined.Unwrap() {
			p.addOf(one, at)
		}
		return
	}
	if errors.As(err, &field) {
		name, ok := fields[field.Field]
		if !ok {
			name = field.Field
		}
		p.add(join(at, name), "%s", field.Problem)
	}
}

// known refuses other keys: they would have no effect, and are most likely misspelt.
func (p *problems) known(m map[string]any, path string, keys ...string) {
	for _, key := range slices.Sorted(maps.Keys(m)) {
		if !slices.Contains(keys, key) {
			p.add(join(path, key), "the key is unknown: want %s", strings.Join(keys, ", "))
		}
	}
}

func (p *problems) inner(m map[string]any, path, key string) map[string]any {
	inner, ok := m[key].(map[string]any)
	if !ok {
		p.add(join(path, key), "it is missing, or is not a map")
	}
	return inner
}

func (p *problems) text(m map[string]any, path, key string) string {
	text, ok := m[key].(string)
	if !ok && m[key] != nil {
		p.add(join(path, key), "want a string")
	}
	return text
}

func (p *problems) err() error { return errors.Join(p.list...) }

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}
