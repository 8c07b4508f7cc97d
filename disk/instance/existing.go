package instance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/internal/smallfile"
	"kubevirt.io/disk/disk/internal/words"
)

// ImageChange says what becomes of a persistent disk whose image is another one now.
type ImageChange string

const (
	// ImageChangeFail refuses to serve the disk. The default.
	ImageChangeFail ImageChange = "fail"
	// ImageChangeKeep serves the disk as it is, if it is complete without its image.
	ImageChangeKeep ImageChange = "keep"
)

// ParseImageChange reads a setting. An empty one is the default.
func ParseImageChange(s string) (ImageChange, error) {
	switch c := ImageChange(s); c {
	case "":
		return ImageChangeFail, nil
	case ImageChangeFail, ImageChangeKeep:
		return c, nil
	}
	return "", fmt.Errorf("%q is unknown: use %s or %s", s, ImageChangeFail, ImageChangeKeep)
}

// existing returns the state of the disk that is there, if it can be used with this image. Otherwise reason says why
// not; it is empty where there is none. A persistent disk is never given up: then err says why not and what to do.
func (o *opening) existing(ctx context.Context) (s *state, reason string, err error) {
	st, err := os.Lstat(o.dir.disk())
	if errors.Is(err, fs.ErrNotExist) {
		if s, err := loadState(o.dir.state()); err == nil && s.Mode != CopyNone {
			return nil, "its file is missing", nil
		}
		return nil, "", nil
	}
	if err != nil {
		return nil, "", err
	}
	if !st.Mode().IsRegular() {
		return nil, "its file is not a regular file", o.refuse("is not a regular file", "remove it")
	}
	s, err = loadState(o.dir.state())
	if errors.Is(err, fs.ErrNotExist) && o.dir.persistent {
		s, err = o.adopt(st)
		return s, "", err
	}
	if smallfile.IsUnread(err) {
		return nil, "", o.unread(err)
	}
	if err != nil {
		reason := stateReason(err)
		return nil, reason, o.refuse("cannot be used: "+reason, "restore the volume from a backup, or remove "+PersistentName+"* in that directory to begin anew with the image")
	}
	if reason := o.unsuitable(s, st.Size()); reason != "" {
		return nil, reason, o.refuse("cannot be used: "+reason, "use another volume for this image, or remove "+PersistentName+"* in that directory to begin anew")
	}
	reason, err = o.checkImage(ctx, s)
	unsure := errors.Is(err, image.ErrNotIdentified)
	if unsure {
		reason, err = err.Error(), nil
	}
	switch {
	case err != nil:
		return nil, "", err
	case reason == "":
		return s, "", nil
	case o.opt.OnImageChange == ImageChangeKeep && o.dir.persistent && (s.Complete || unsure):
		o.log.Warn("the disk is kept although its image is or may be another one now", zap.String("reason", reason), zap.String("disk", o.dir.disk()))
		return s, "", nil
	case o.dir.persistent && unsure && !s.Complete:
		err = o.refuse("may have been made of another image, which it still needs: "+reason, "set --on-image-change=keep once if the image is certainly the same one, or use another volume")
	case o.dir.persistent && s.Complete:
		err = o.refuse("was made of another image: "+reason, "set --on-image-change=keep to serve the disk as it is, or use another volume for the new image")
	case o.dir.persistent:
		err = o.refuse("still needs the image that it was made of: "+reason, "start it with the old image, in copy mode clone until it is complete, or use another volume for the new image")
	}
	return nil, reason, err
}

// unsuitable is why a state cannot be that of this disk, apart from the content of the image.
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

// checkImage is why the image is not the one that the disk was made of; "" if it is, or if the disk came without one.
func (o *opening) checkImage(ctx context.Context, s *state) (reason string, err error) {
	switch {
	case len(s.Chain) == 0:
		return "", nil
	case o.img == nil && s.Complete:
		return "", nil
	case o.img == nil:
		return "there is no image in the container", nil
	case s.ImageSize != o.img.Size():
		return fmt.Sprintf("the image has changed: its virtual size is %d now, and was %d", o.img.Size(), s.ImageSize), nil
	}
	if s.Complete && o.opt.OnImageChange == ImageChangeKeep {
		return "", nil // it is served whatever is in the image, so that nobody need wait for it to be read
	}
	if o.img.Touched(s.Chain) {
		o.log.Info("checking whether the image is still the one of the existing disk", zap.String("disk", o.dir.disk()))
	}
	reason, now, err := o.img.Compare(ctx, s.Chain)
	if err != nil || reason != "" {
		return reason, err
	}
	s.stale = s.stale || !slices.Equal(now, s.Chain)
	s.Chain = now
	return "", nil
}

// adopt takes a file that came with the volume for a complete disk.
func (o *opening) adopt(st fs.FileInfo) (*state, error) {
	for _, name := range []string{o.dir.liveMap(), o.dir.durableMap()} {
		if _, err := os.Lstat(name); err == nil {
			return nil, o.refuse("has lost its state file, and is not complete without it", "restore the volume from a backup, or remove "+PersistentName+"* in that directory to begin anew with the image")
		}
	}
	if st.Size() == 0 || st.Size()%disk.SectorSize != 0 {
		return nil, o.refuse(fmt.Sprintf("has a size of %d bytes, which is no positive multiple of %d", st.Size(), disk.SectorSize), "make it a raw disk")
	}
	o.log.Info("the volume has a disk already: it is served as it is, without the image", zap.String("disk", o.dir.disk()))
	return &state{Version: stateVersion, Image: o.name, Mode: o.opt.Mode, Size: st.Size(), Identity: newIdentity(), Created: time.Now().UTC(),
		Durable: true, Complete: true, Map: newMapID(), Boot: bootID(), stale: true}, nil
}

// unread is the error for a disk of which the system does not let be read what it is. It is neither made again, which would end what the guest
// has written, nor is that advised: the next start may find it intact.
func (o *opening) unread(err error) error {
	return fmt.Errorf("the disk %q cannot be used now, and is left as it is: %w", o.dir.disk(), err)
}

// refuse is the error for a persistent disk; nil for an ephemeral one, which is made again instead.
func (o *opening) refuse(reason, action string) error {
	if !o.dir.persistent {
		return nil
	}
	return &PersistentError{Path: o.dir.disk(), Reason: reason, Action: action}
}
