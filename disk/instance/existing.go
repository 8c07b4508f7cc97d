package instance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/words"
)

// ImageChange says what to do with a persistent disk whose image has changed.
type ImageChange string

const (
	// ImageChangeFail refuses to serve the disk. The default.
	ImageChangeFail ImageChange = "fail"
	// ImageChangeKeep serves the disk as it is if it is complete.
	ImageChangeKeep ImageChange = "keep"
)

// ParseImageChange parses a setting. "" is the default.
func ParseImageChange(s string) (ImageChange, error) {
	switch c := ImageChange(s); c {
	case "":
		return ImageChangeFail, nil
	case ImageChangeFail, ImageChangeKeep:
		return c, nil
	}
	return "", fmt.Errorf("%q is unknown: use %s or %s", s, ImageChangeFail, ImageChangeKeep)
}

// verdict says what to do with the disk of an earlier start.
type verdict struct {
	what   outcome
	state  *state // keep: the state of the disk
	reason string // remake: why the disk is not kept; "" if there was none
	err    error  // refuse: why, and what to do about it
}

type outcome int

const (
	keep   outcome = iota // serve it again
	remake                // make it of the image
	refuse                // leave it alone and do not serve it
)

// Advice about a persistent disk that is refused.
const (
	beginAnew     = "remove " + PersistentName + "* in that directory to begin anew"
	restoreVolume = "restore the volume from a backup, or " + beginAnew + " with the image"
)

// judge decides what to do with the existing disk.
func (o *opening) judge(ctx context.Context) verdict {
	st, err := os.Lstat(o.dir.disk())
	if errors.Is(err, fs.ErrNotExist) {
		return o.judgeMissing()
	}
	if err != nil {
		return verdict{what: refuse, err: err}
	}
	if !st.Mode().IsRegular() {
		return o.unfit("its file is not a regular file", "is not a regular file", "remove it")
	}
	s, err := loadState(o.dir.state())
	switch {
	case errors.Is(err, fs.ErrNotExist) && o.dir.persistent:
		return o.adopt(st)
	case durable.IsUnread(err):
		return verdict{what: refuse, err: o.unread(err)}
	case err != nil:
		reason := stateReason(err)
		return o.unfit(reason, "cannot be used: "+reason, restoreVolume)
	}
	if reason := o.unsuitable(s, st.Size()); reason != "" {
		return o.unfit(reason, "cannot be used: "+reason,
			"use another volume for this image, or "+beginAnew)
	}
	if v, bad := o.judgeLayers(s); bad {
		return v
	}
	if reason := o.otherBlocks(s); reason != "" {
		return o.unfit(reason, "cannot be used: "+reason, fmt.Sprintf("set the block size to %d "+
			"again: a guest finds nothing with blocks of another length", s.blockSize()))
	}
	return o.judgeImage(ctx, s)
}

// judgeMissing decides what to do if the file of a disk is missing.
func (o *opening) judgeMissing() verdict {
	there, err := o.dir.remains()
	switch {
	case err != nil:
		return verdict{what: refuse, err: o.unread(err)}
	case there && (o.dir.persistent || o.opt.Leftovers == LeftoversKeep):
		return verdict{what: refuse, err: o.missing()}
	}
	if s, err := loadState(o.dir.state()); err == nil && s.Mode != CopyNone {
		return verdict{what: remake, reason: "its file is missing"}
	}
	return verdict{what: remake}
}

// judgeImage decides what to do with an intact disk, by its image.
func (o *opening) judgeImage(ctx context.Context, s *state) verdict {
	reason, err := o.checkImage(ctx, s)
	unsure := errors.Is(err, image.ErrNotIdentified)
	if unsure {
		reason, err = err.Error(), nil
	}
	switch {
	case err != nil:
		return verdict{what: refuse, err: err}
	case reason == "":
		return verdict{what: keep, state: s}
	case o.opt.OnImageChange == ImageChangeKeep && o.dir.persistent && (s.Complete || unsure):
		o.log.Warn("keeping the disk although its image has or may have changed",
			zap.String("reason", reason), zap.String("disk", o.dir.disk()))
		return verdict{what: keep, state: s}
	case s.Complete:
		return o.unfit(reason, "was made of another image: "+reason,
			"set --on-image-change=keep to serve the disk as it is, "+
				"or use another volume for the new image")
	case unsure:
		return o.unfit(reason, "may have been made of another image, which it still needs: "+reason,
			"set --on-image-change=keep once if the image is certainly the same one, "+
				"or use another volume")
	}
	return o.unfit(reason, "still needs the image that it was made of: "+reason,
		"start it with the old image, in copy mode clone until it is complete, "+
			"or use another volume for the new image")
}

// unfit is the verdict for a disk that cannot be kept. An ephemeral one is made again, a persistent
// one is refused.
func (o *opening) unfit(reason, refusal, action string) verdict {
	if o.dir.persistent {
		return verdict{what: refuse, err: o.refusal(refusal, action)}
	}
	return verdict{what: remake, reason: reason}
}

// unsuitable says why a state cannot belong to this disk. It does not look at the image's content.
func (o *opening) unsuitable(s *state, fileSize int64) string {
	switch {
	case s.Image != storedName(o.name) && o.img != nil && !o.dir.persistent:
		return fmt.Sprintf("it belongs to the image %s", words.Name(s.Image))
	case s.Mode == CopyNone:
		return fmt.Sprintf("it was made in copy mode %q", string(s.Mode))
	case fileSize < s.Size:
		return fmt.Sprintf("its file has %d bytes and should have %d", fileSize, s.Size)
	case !s.survivesBoot(bootID()):
		return "the machine was restarted since, and an ephemeral disk is not flushed to storage"
	}
	return ""
}

// checkImage says why the image is not the one that the disk was made of. "" means that it is, or
// that the disk came without an image.
func (o *opening) checkImage(ctx context.Context, s *state) (reason string, err error) {
	switch {
	case len(s.Chain) == 0:
		return "", nil
	case o.img == nil && s.Complete:
		return "", nil
	case o.img == nil:
		return "there is no image in the container", nil
	case s.ImageSize != o.img.Size():
		return fmt.Sprintf("the image has changed: its virtual size is %d now, and was %d",
			o.img.Size(), s.ImageSize), nil
	}
	if s.Complete && o.opt.OnImageChange == ImageChangeKeep && o.dir.persistent {
		// the disk is served with any image, so do not wait until the image is read
		return "", nil
	}
	if o.img.Touched(s.Chain) {
		o.log.Info("checking whether the image is still the one of the existing disk",
			zap.String("disk", o.dir.disk()))
	}
	reason, now, err := o.img.Compare(ctx, s.Chain)
	if err != nil || reason != "" {
		return reason, err
	}
	s.stale = s.stale || !slices.Equal(now, s.Chain)
	s.Chain = now
	return "", nil
}

// adopt accepts a file that came with the volume as a complete disk.
func (o *opening) adopt(st fs.FileInfo) verdict {
	if left, err := o.dir.leftover(false); err != nil {
		return verdict{what: refuse, err: o.unread(err)}
	} else if left != "" {
		return verdict{what: refuse, err: o.refusal(fmt.Sprintf("has lost its state file, and is "+
			"not complete without it: there is %q", left), "put "+o.dir.state()+" back, or "+
			restoreVolume)}
	}
	if st.Size() == 0 || st.Size()%disk.SectorSize != 0 {
		reason := fmt.Sprintf("has a size of %d bytes, which is not a positive multiple of %d",
			st.Size(), disk.SectorSize)
		return verdict{what: refuse, err: o.refusal(reason, "make it a raw disk")}
	}
	if err := o.checkAdopted(st.Size()); err != nil {
		return verdict{what: refuse, err: err}
	}
	o.log.Info("the volume already has a disk: serving it as it is, without the image",
		zap.String("disk", o.dir.disk()))
	s := o.newState(st.Size())
	s.Complete, s.stale = true, true
	return verdict{what: keep, state: s}
}

// unread is the error for a disk that cannot be read now. The disk must not be made again, nor may
// the message advise that: the guest's writes would be lost, and the next start may find the disk
// intact.
func (o *opening) unread(err error) error {
	return fmt.Errorf("the disk %q cannot be used now and is left as it is: %w", o.dir.disk(), err)
}

// missing is the error for a disk that was made once, and is missing.
func (o *opening) missing() error {
	const reason = "is missing, and was there at an earlier start"
	action := "put it back, or mount its storage; or "
	if o.dir.persistent {
		return o.refusal(reason, action+beginAnew)
	}
	action += "remove the directory " + o.dir.path + " to begin anew"
	return fmt.Errorf("the disk %q %s; %s", o.dir.disk(), reason, action)
}

// refusal is the error for a persistent disk that cannot be used.
func (o *opening) refusal(reason, action string) error {
	return &PersistentError{Path: o.dir.disk(), Reason: reason, Action: action}
}
