package daemon

import (
	"errors"

	"go.uber.org/zap"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/pages"
	"kubevirt.io/disk/target"
)

// Options say what a daemon serves, and how. WorkDir and Portals are required, and Images unless
// there are Volumes; the zero value of every other field works.
type Options struct {
	Images  Images
	Streams Streams // after those of Images
	// Containers are after those of Streams.
	Containers Containers
	Settings   Settings

	WorkDir       string // holds ephemeral disks and their state; made if it is missing
	PersistentDir string // of a volume that holds the disks instead; "": none
	// UsageTypes are further directories for disks, which choose by DiskSettings.UsageType.
	// PersistentDir says whether they are persistent there.
	UsageTypes UsageTypes
	// OnImageChange says what becomes of a persistent disk whose image is another one now.
	OnImageChange instance.ImageChange
	// EphemeralFlush lets a flush of a disk that is not persistent reach storage.
	EphemeralFlush bool
	// Owner tells this daemon from others that use the same work directory, by what stays the same
	// over restarts: only its own disks are removed when their images are gone.
	Owner string

	TargetName string      // iSCSI name; "": target.DefaultTargetName
	Portals    []Address   // where initiators log in
	CHAP       chap.Config // zero: initiators need not authenticate
	Limits     target.Limits

	Volumes *Volumes // nil: none can be made

	Pages *Address // of /metrics, /healthz, /readyz and /status; nil: none
	// PagesOptional says that a port of the pages that is taken is no reason not to serve disks.
	PagesOptional bool
	ReadyFile     string // exists while the LUNs can be used; "": none
	ControlSocket string // path; "": none
	// RecordBoot is a file that receives what guests read of their disks first; "": none.
	RecordBoot string

	Build pages.BuildInfo // which binary this is
	Log   *zap.Logger     // nil: no log
	// Names is how a person sets what messages ask to change. What has no name is called by its
	// key.
	Names map[Setting]Name
}

// Images are what is served from the beginning: the images of a directory, or those that are named.
type Images struct {
	Dir   string   // every image in it, sorted naturally
	Paths []string // instead of those of Dir, in this order
}

// Settings are how disks are served. They may change while the daemon runs, by Reload.
type Settings struct {
	Disk DiskSettings // every disk, unless it is in Disks
	// Disks are single disks, by the names of their images. Each says everything that Disk says,
	// too. Of a backing file, which is not a disk of its own, the format can be set.
	Disks map[string]SingleDisk
}

// SingleDisk is how the disk of one image is served.
type SingleDisk struct {
	DiskSettings
	FormatOnly bool   // nothing but the format was set
	Source     string // the place to change, for messages
}

// DiskSettings is how a disk is served.
type DiskSettings struct {
	LUN        uint16            // 0: its place among the images
	CopyMode   instance.CopyMode // "": instance.CopyClone
	AccessMode target.AccessMode // "": target.AccessWriteExclusive
	Format     image.Format      // of the image; "": what the image says
	Size       int64             // bytes; 0: the image's
	UsageType  string            // of Options.UsageTypes: where the disk lies; "": none
	Identity   disk.Identity     // what is not zero is given to the disk
	ReadOnly   bool
	Removable  bool

	CopyModeSource string // the place to change the copy mode, for messages
}

// resolve fills in defaults and refuses what is missing.
func (o *Options) resolve() error {
	switch {
	case o.Images.Dir == "" && len(o.Images.Paths) == 0 && o.Volumes == nil:
		return errors.New("there is nothing to serve: name images, or their directory")
	case o.WorkDir == "":
		return errors.New("there is no work directory")
	case len(o.Portals) == 0:
		return errors.New("there is no portal")
	}
	if o.TargetName == "" {
		o.TargetName = target.DefaultTargetName
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	return nil
}
