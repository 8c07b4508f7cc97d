package libvirt

import (
	"cmp"
	"path"
	"slices"
	"strings"

	"libvirt.org/go/libvirtxml"
)

// CopyMode says how much of an image is copied for a virtual machine. The names are those of
// kubevirt-disk.
type CopyMode string

// The copy modes.
const (
	CopyNone    CopyMode = "none"          // the machine writes to the image itself
	CopyOnWrite CopyMode = "copy-on-write" // an overlay takes the machine's writes
	CopyOnRead  CopyMode = "copy-on-read"  // an overlay takes its writes and reads
	CopyClone   CopyMode = "clone"         // all of the image is copied
)

func copyModes() []CopyMode { return []CopyMode{CopyNone, CopyOnWrite, CopyOnRead, CopyClone} }

// Copy has the settings for the copy of a disk.
type Copy struct {
	Mode CopyMode // "": not specified
	// UsageType names the storage for copied and written data, as in the settings of kubevirt-disk.
	// "": not specified.
	UsageType string
}

// FileFormat is the format of an image in a local file.
type FileFormat string

// The formats.
const (
	FormatRaw   FileFormat = "raw"
	FormatQcow2 FileFormat = "qcow2"
)

func fileFormats() []FileFormat { return []FileFormat{FormatRaw, FormatQcow2} }

// File is a disk image in a local file, such as `kubevirt-disk provide` makes.
type File struct {
	Path   string     // of the image; absolute
	Format FileFormat // "": as the extension of Path says, .qcow2 or .raw

	// CopyMode is CopyNone if it is empty. In the other modes, Overlay is a file that exists when
	// the domain starts:
	//
	//	CopyOnWrite, CopyOnRead  qemu-img create -f qcow2 -F FORMAT -b PATH OVERLAY
	//	CopyClone                a copy of the image, in its format
	CopyMode CopyMode
	Overlay  string // absolute

	// FollowBacking lets QEMU open the backing files in the image's header. Set it only for an
	// image of your own: the image of another person may name any file of this machine.
	FollowBacking bool

	AccessMode AccessMode // "": WriteExclusive; WriteShared needs a raw image, without an overlay
	ReadOnly   bool       // as in LUN
	Serial     string     // as in LUN
	WWN        string     // as in LUN
}

// withDefaults replaces empty fields with their defaults.
func (f File) withDefaults() File {
	f.CopyMode = cmp.Or(f.CopyMode, CopyNone)
	f.Format = cmp.Or(f.Format, FileFormat(strings.TrimPrefix(path.Ext(f.Path), ".")))
	shown := f.shown().withDefaults()
	f.AccessMode, f.ReadOnly, f.WWN = shown.AccessMode, shown.ReadOnly, shown.WWN
	return f
}

// shown is the part of the disk that the guest sees.
func (f File) shown() LUN {
	return LUN{AccessMode: f.AccessMode, ReadOnly: f.ReadOnly, Serial: f.Serial, WWN: f.WWN}
}

// check validates a file whose defaults are filled in.
func (f File) check(p *problems) {
	checkPath(p, "File.Path", f.Path)
	if !slices.Contains(fileFormats(), f.Format) {
		p.add("File.Format", "the format %q is unknown: want %s, or a path that ends in it",
			f.Format, oneOf(fileFormats()))
	}
	known(p, "File.CopyMode", f.CopyMode, copyModes())
	switch {
	case f.CopyMode == CopyNone && f.Overlay != "":
		p.add("File.Overlay", "the copy mode none has no overlay: leave it empty, or want "+
			"copy-on-write, copy-on-read or clone")
	case f.CopyMode != CopyNone:
		checkPath(p, "File.Overlay", f.Overlay)
		if f.Overlay == f.Path {
			p.add("File.Overlay", "it is the image itself: want another file")
		}
	}
	switch {
	case f.AccessMode == WriteShared && f.image() != FormatRaw:
		p.add("File.AccessMode", "several machines cannot write to one qcow2 file: want a raw "+
			"image without an overlay")
	case f.AccessMode == WriteShared && f.CopyMode == CopyClone:
		p.add("File.AccessMode", "a clone belongs to one machine: want the copy mode none")
	case f.ReadOnly && f.CopyMode == CopyOnRead:
		p.add("File.CopyMode", "a read-only disk cannot keep what is read: want none, or "+
			"copy-on-write")
	}
}

// image is the format of the file that the machine uses.
func (f File) image() FileFormat {
	if f.hasBacking() {
		return FormatQcow2
	}
	return f.Format
}

// hasBacking reports whether the machine uses an overlay over the image.
func (f File) hasBacking() bool {
	return f.CopyMode == CopyOnWrite || f.CopyMode == CopyOnRead
}

// Disk returns the <disk> element that makes a local image a disk of a domain. The caller may
// change it.
func (f File) Disk(d Device) (*libvirtxml.DomainDisk, error) {
	f, d = f.withDefaults(), d.withDefaults()
	p := problems{name: lunFieldOf("File.")}
	f.check(&p)
	f.shown().checkShown(&p)
	d.check(&p)
	checkTogether(f.shown(), d, &p)
	if d.Kind == KindLUN {
		p.add("Device.Kind", "a file takes no SCSI commands: want disk")
	}
	if d.Initiator != "" {
		p.add("Device.Initiator", "nobody logs in to a file: leave it empty")
	}
	if err := p.err(); err != nil {
		return nil, err
	}
	disk := d.disk(f.shown())
	disk.Driver.Type = string(f.image())
	if f.CopyMode == CopyOnRead {
		disk.Driver.CopyOnRead = "on"
	}
	used := f.Path
	var end *libvirtxml.DomainDiskBackingStore
	if !f.FollowBacking {
		end = &libvirtxml.DomainDiskBackingStore{} // do not follow the names in the image
	}
	disk.BackingStore = end
	if f.CopyMode != CopyNone {
		used = f.Overlay
	}
	if f.hasBacking() {
		disk.BackingStore = &libvirtxml.DomainDiskBackingStore{
			Format:       &libvirtxml.DomainDiskFormat{Type: string(f.Format)},
			Source:       fileSource(f.Path),
			BackingStore: end,
		}
	}
	disk.Source = fileSource(used)
	return disk, nil
}

func fileSource(name string) *libvirtxml.DomainDiskSource {
	return &libvirtxml.DomainDiskSource{File: &libvirtxml.DomainDiskSourceFile{File: name}}
}

// DiskXML returns Disk as indented text without a newline at the end. It is also the document for
// hot-plug.
func (f File) DiskXML(d Device) (string, error) {
	disk, err := f.Disk(d)
	return text("disk", disk, err)
}
