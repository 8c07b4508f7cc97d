package options

import (
	"cmp"
	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/serving"
)

// Settings are the settings of disks. Reload may change them while the daemon runs.
type Settings struct {
	Disk DiskSettings // for every disk that is not in Disks
	// Disks are settings of single disks, by the names of their images. Each has all values, also
	// those of Disk. For a backing file, which is not a disk of its own, only the format can be
	// set.
	Disks map[string]SingleDisk
}

// SingleDisk has the settings of the disk of one image.
type SingleDisk struct {
	DiskSettings
	FormatOnly bool   // only the format was set
	Source     string // the place to change, for messages
}

// DiskSettings are the settings of a disk.
type DiskSettings struct {
	LUN        uint16             // 0: as at the earlier start, or the position among the images
	CopyMode   instance.CopyMode  // "": instance.CopyClone
	AccessMode serving.AccessMode // "": serving.AccessWriteExclusive
	Format     image.Format       // of the image; "": the image tells
	Size       int64              // bytes; 0: the image's
	BlockSize  int                // of a logical block, bytes; 0: unchanged, or 512
	UsageType  string             // one of Options.UsageTypes; "": none
	Identity   disk.Identity      // fields that are not zero replace the disk's
	ReadOnly   bool

	CopyModeSource string // the place to change the copy mode, for messages
}

// Resolved fills in defaults, and values that follow from other settings.
func (s DiskSettings) Resolved() DiskSettings {
	s.CopyMode = cmp.Or(s.CopyMode, instance.CopyClone)
	s.AccessMode = cmp.Or(s.AccessMode, serving.AccessWriteExclusive)
	s.ReadOnly = s.ReadOnly || s.AccessMode == serving.AccessReadShared
	return s
}

// Formats are the formats in the settings, by the names of images and backing files. Opening an
// image needs its format first.
func (s Settings) Formats() map[string]image.Format {
	all := map[string]image.Format{}
	for name, d := range s.Disks {
		if d.Format != "" {
			all[name] = d.Format
		}
	}
	return all
}

// Of returns the settings for the disk of an image, before its position among the others is known.
func (s Settings) Of(name string) DiskSettings {
	if single, ok := s.Disks[name]; ok {
		return single.DiskSettings.Resolved()
	}
	return s.Disk.Resolved()
}
