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

// Options are the options of a daemon. WorkDir and Portals are required, and Images unless there
// are Volumes. Every other field works with its zero value.
type Options struct {
	Images  Images
	Streams Streams // LUNs after those of Images
	// Containers are LUNs after those of Streams.
	Containers Containers
	Settings   Settings

	WorkDir string // holds ephemeral disks and their state; made if it is missing
	// WorkDirNamed says that a person has named WorkDir: it may outlive a container.
	WorkDirNamed bool
	// Leftovers says what happens to ephemeral disks whose images are gone or have changed. "":
	// they are kept in a directory that a person has named, and removed in that of a container.
	Leftovers     instance.Leftovers
	PersistentDir string // holds the disks instead, on a volume; "": none
	// UsageTypes are more directories for disks; DiskSettings.UsageType chooses one. If there is a
	// PersistentDir, the disks there are persistent, too.
	UsageTypes UsageTypes
	// OnImageChange says what happens to a persistent disk if its image is another one now.
	OnImageChange instance.ImageChange
	// EphemeralFlush makes a flush of an ephemeral disk reach storage.
	EphemeralFlush bool
	// Owner tells this daemon from others that use the same work directory. It must not change with
	// a restart: a daemon removes only its own disks when their images are gone.
	Owner string

	TargetName string      // iSCSI name; "": target.DefaultTargetName
	Portals    []Address   // where initiators log in
	BehindNAT  bool        // they reach the portals at other addresses
	CHAP       chap.Config // zero: initiators need not authenticate
	Limits     target.Limits

	Volumes *Volumes // nil: none can be made

	Pages *Address // of /metrics, /healthz, /readyz and /status; nil: none
	// PagesHosts are names that the pages are asked for, beside those that the daemon can know.
	PagesHosts []string
	// PagesOptional serves disks even if the port of the pages is taken.
	PagesOptional bool
	ReadyFile     string // exists while the LUNs can be used; "": none
	ControlSocket string // path; "": none
	// RecordBoot is a file for what guests read first from their disks. "": none.
	RecordBoot string

	Build pages.BuildInfo // of this binary
	Log   *zap.Logger     // nil: no log
	// Names says how a person changes the settings that messages name. A setting without a name is
	// called by its key.
	Names map[Setting]Name
}

// Images are the images that are served from the start: those of a directory, or named ones.
type Images struct {
	Dir   string   // every image in it, sorted naturally
	Paths []string // instead of those of Dir, in this order
}

// Settings are the settings of disks. Reload may change them while the daemon runs.
type Settings struct {
	Disk DiskSettings // for every disk that is not in Disks
	// Disks are settings of single disks, by the names of their images. Each has all values,
	// including those of Disk. For a backing file, which is not a disk of its own, only the format
	// can be set.
	Disks map[string]SingleDisk
}

// SingleDisk has the settings of the disk of one image.
type SingleDisk struct {
	DiskSettings
	FormatOnly bool   // nothing but the format was set
	Source     string // the place to change, for messages
}

// DiskSettings are the settings of a disk.
type DiskSettings struct {
	LUN        uint16            // 0: as at the earlier start, or its position among the images
	CopyMode   instance.CopyMode // "": instance.CopyClone
	AccessMode target.AccessMode // "": target.AccessWriteExclusive
	Format     image.Format      // of the image; "": the image tells
	Size       int64             // bytes; 0: the image's
	UsageType  string            // of Options.UsageTypes: where the disk lies; "": none
	Identity   disk.Identity     // fields that are not zero are given to the disk
	ReadOnly   bool
	Removable  bool

	CopyModeSource string // the place to change the copy mode, for messages
}

// resolve fills in defaults and refuses missing options.
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
