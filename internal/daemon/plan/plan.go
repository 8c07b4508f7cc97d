package plan

import (
	"context"
	"fmt"
	"slices"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/serving"
)

// Disk is one disk to serve. The package that finds it fills in what it is made of; Make fills in
// the rest.
type Disk struct {
	Name    string       // of its image, for people
	Image   *image.Image // nil: the disk is complete, and is served without one
	Backing []string     // names of the image's backing files
	Far     *Far         // nil: the image is on this machine
	// Source is where far content comes from.
	Source serving.Source
	// From is the image in a registry that the disk is made of, by its digest. "": another image.
	From string
	// Digests returns the digest of the image as it was named, and of this platform's image in it.
	// nil: the image is on this machine.
	Digests func() (digest, platform string)
	// SignedBy is the fingerprint of the key that has signed the image. "": no signature was
	// required.
	SignedBy string
	// Config reads the configuration from the open image of a container. The disk gets it before a
	// guest can read it. nil: the disk is not made from a container image.
	Config func() ([]byte, error)

	// AlreadyOpen is the disk itself, if another server has it, or if it is a snapshot; nil: the
	// disk has files, and is still to be opened.
	AlreadyOpen *instance.Instance

	// Dir is the directory of a persistent disk. "": the disk is ephemeral, in the directory of its
	// usage type, or in the work directory.
	Dir string
	// CopyAfter delays the copying of the image until the channel is closed. nil: no delay.
	CopyAfter <-chan struct{}
	Empty     bool         // a missing persistent disk is made from zeros, without an image
	AtLeast   int64        // bytes; a smaller disk is enlarged; 0: no minimum
	Volume    bool         // it is a volume's disk
	Unserved  bool         // it gets no LUN
	After     func() error // called when the disk and its image are closed; nil: nothing
	// BlockSizeKnown says that the image was written with blocks of BlockSize.
	BlockSizeKnown bool
	options.DiskSettings
}

// Far is an image in a registry.
type Far struct {
	Digests []string // of the disk's content
	// Open opens the image, and returns a channel to wait for before all of it is copied. format
	// "": the image decides.
	Open func(ctx context.Context, format image.Format) (*image.Image, <-chan struct{}, error)
}

func (d *Disk) String() string {
	if d.LUN == 0 {
		return fmt.Sprintf("the disk of %q", d.Name)
	}
	return fmt.Sprintf("LUN %d (%q)", d.LUN, d.Name)
}

// local reports whether the image is a file that a person has put on this machine.
func (d *Disk) local() bool { return d.Far == nil && d.Config == nil && d.AlreadyOpen == nil }

// CloseImages closes the images of disks that are not opened.
func CloseImages(disks []Disk) {
	for _, d := range disks {
		if d.Image != nil {
			_ = d.Image.Close() // it was opened for reading
		}
		if d.AlreadyOpen != nil {
			_ = d.AlreadyOpen.Close() // it was not used
		}
	}
}

// Volumes are the places, numbers and names of volumes, which no image may get.
type Volumes struct {
	Single bool              // a volume lies in the persistent directory itself
	LUNs   map[uint16]string // names of volumes, by their numbers or the number in the name
	Names  []string          // of all volumes
}

// Plan is what is served from the start.
type Plan struct {
	Disks []Disk // in the order for people

	opt     *options.Options
	homes   []home // of the disks
	numbers numbers
}

// Make makes a plan for the found images, and completes them. Images in registries are opened,
// unless their disks are complete. The caller closes all images, also after an error.
func Make(ctx context.Context, opt *options.Options, found []Disk, volumes Volumes) (*Plan, error) {
	p := &Plan{Disks: found, opt: opt}
	if err := p.place(volumes.Single); err != nil {
		return nil, err
	}
	for i := range p.Disks {
		if err := p.openFar(ctx, i); err != nil {
			return nil, err
		}
	}
	var err error
	if p.numbers, err = p.recallNumbers(volumes.LUNs); err != nil {
		return nil, err
	}
	for _, d := range p.Disks {
		if p.numbers.byImage[d.Name] == 0 && slices.Contains(volumes.Names, d.Name) {
			advice := "rename the image"
			if d.AlreadyOpen != nil {
				advice = "name that server's export by its number, as in nbds://HOST/1"
			}
			return nil, fmt.Errorf("a volume has the name of the disk %q already, and exports and "+
				"commands find a disk by its name: %s", d.Name, advice)
		}
	}
	settings, err := p.Settle(opt.Settings)
	if err != nil {
		return nil, err
	}
	for i, s := range settings {
		p.Disks[i].DiskSettings = s
	}
	if err := p.checkHomes(); err != nil {
		return nil, err
	}
	p.logNumbers()
	return p, nil
}

// openFar opens an image in a registry, unless its disk is complete without it.
func (p *Plan) openFar(ctx context.Context, i int) (err error) {
	d := &p.Disks[i]
	if d.Far == nil {
		return nil
	}
	if err := p.homes[i].err; err != nil {
		return err
	}
	settings := p.opt.Settings.Of(d.Name)
	done := instance.Options{Name: d.Name, WorkDir: p.opt.WorkDirOf(settings), PersistentDir: d.Dir}
	if instance.IsComplete(done, d.Far.Digests) {
		p.opt.Log.Info("the disk of an image in a registry is complete, and is served without "+
			"the registry", zap.String("image", d.Name))
		return nil
	}
	d.Image, d.CopyAfter, err = d.Far.Open(ctx, p.opt.Settings.Formats()[d.Name])
	if err == nil && d.Image.Unverified() {
		p.opt.Log.Warn("an image is served before its content is verified: only TLS protects it "+
			"until all of it is fetched", zap.String("image", d.Name))
	}
	return err
}

// Made records the directories of the disks. Call it when they are open, before a guest can use
// them.
func (p *Plan) Made() error {
	homes := p.allHomes()
	for i, d := range p.Disks {
		if d.CopyMode == instance.CopyNone {
			continue // the image's own file
		}
		if err := homes.Made(d.Name, p.homes[i].usual, p.homes[i].dir); err != nil {
			return err
		}
	}
	p.warnWithoutVolume()
	return nil
}
