package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/words"
)

const (
	// maxBackingDepth is the largest number of backing files in a chain: the largest number of
	// layers of a container image, and some more.
	maxBackingDepth = 136
	// plainDepth is how many backing files may have clusters of any size. Those below must have
	// small clusters, and get small caches, so that a malicious chain cannot take much memory.
	plainDepth         = 8
	maxDeepClusterSize = 64 << 10 // bytes
)

// fileUse says why a file is opened. The advice in a message depends on it.
type fileUse int

const (
	useFound   fileUse = iota // an image, found in the image directory
	useNamed                  // an image that a person has named, in whatever directory it is
	useBacking                // a backing file of either
)

func (u fileUse) advice(found, named, backing string) string {
	return [...]string{useFound: found, useNamed: named, useBacking: backing}[u]
}

// another is the advice for a file that cannot become an image.
func (u fileUse) another() string {
	return u.advice("remove it from the image directory", "name a disk image instead",
		"put a disk image in its place, or rebase the image that names it")
}

// opener opens one image and its backing files.
type opener struct {
	dir *directory // nil: the files lie elsewhere
	// find opens the image. findBelow opens a backing file by the name in the image's header. The
	// *os.File is nil if the file is not on this machine.
	find, findBelow func(name string) (Source, *os.File, error)

	edges []*edges // of the files that are far away

	opt  Options
	use  fileUse  // of the image itself
	used []fileID // the image and its backing files, even if the image was then refused

	// if set, it is called with a file that was recognised and then refused, before it is closed
	refused func(*layer)
}

// image opens a file of the directory as an image that can be served. A refused file is an *Error.
func (o *opener) image(ctx context.Context, name string) (*layer, error) {
	l, head, err := o.open(ctx, name, o.find, o.use)
	if err != nil {
		return nil, err
	}
	if err := o.checkImage(ctx, l, head); err != nil {
		if o.refused != nil {
			o.refused(l)
		}
		return nil, errors.Join(err, l.close())
	}
	return l, nil
}

// checkImage applies the rules for a file that becomes a LUN, and opens its backing files.
func (o *opener) checkImage(ctx context.Context, l *layer, head []byte) error {
	named := l.source != SourceContent || HasRawExtension(l.name)
	if l.format == FormatRaw && (!named || len(head) == 0) {
		return refuseUnknown(l.name, head, o.use)
	}
	if err := o.complete(ctx, l, 0); err != nil {
		return err
	}
	if l.size%disk.SectorSize != 0 || l.size == 0 {
		e := &Error{Name: l.name, Format: l.format,
			Reason: fmt.Sprintf("has a size of %d bytes, which is not a multiple of %d", l.size,
				disk.SectorSize),
			Action: "fetch it again if it is incomplete, or resize it with \"qemu-img resize\""}
		if l.looks != nil {
			e.Reason = fmt.Sprintf("looks like %s, is taken for a raw disk, as %s, and as such %s",
				l.looks.format, l.source.Reason(), e.Reason)
			e.Action = "if the whole file was overwritten with an image since, copy it to a new " +
				"file"
			if l.source == SourceTold {
				e.Action = "correct the format, or leave it out"
			}
		}
		return e
	}
	return nil
}

// open opens a file with find and recognises its content. It does not open backing files yet. head
// is the beginning of the content.
func (o *opener) open(ctx context.Context, name string,
	find func(name string) (Source, *os.File, error), use fileUse,
) (l *layer, head []byte, err error) {
	source, file, err := find(name)
	if errors.Is(err, disk.ErrNotNow) {
		return nil, nil, refuseUnread(name, FormatUnknown, err)
	}
	if err != nil {
		reason, action := explainOpen(err, use)
		return nil, nil, &Error{Name: name, Format: FormatUnknown, Reason: reason, Action: action,
			Err: err}
	}
	if f, ok := source.(*fileSource); ok {
		if o.opt.Digest != nil {
			f.digest = o.opt.Digest(name)
		}
		// A process that cleans a cache holds the lock for a moment.
		if o.opt.Hold && flock.Taken(f.file, unix.LOCK_SH) {
			return nil, nil, errors.Join(&Error{Name: name, Format: FormatUnknown,
				Reason: "is in use by another process, or by another disk of this one, which " +
					"may write to it",
				Action: "stop that first, or make a copy of the file"}, source.Close())
		}
	}
	unsure, _ := source.(Unsure)
	if err == nil && source.Parallel() > 1 && !o.opt.AtHand {
		e := &edges{Source: source}
		o.edges = append(o.edges, e)
		source, err = e, e.load(ctx)
	}
	l = &layer{name: name, format: FormatRaw, bytes: source, unsure: unsure, local: file,
		size: source.Size()}
	o.used = append(o.used, l.id())
	var tail []byte
	if err == nil {
		head, tail, err = readEnds(disk.ReaderAt(ctx, source), source.Size())
	}
	if err != nil {
		err = refuseUnread(name, FormatUnknown, err)
	} else {
		err = o.recognise(l, detect(head, tail), use)
	}
	if err != nil {
		return nil, nil, errors.Join(err, source.Close())
	}
	return l, head, nil
}

// refuseUnread explains that a file cannot be read, or not now.
func refuseUnread(name string, format Format, err error) error {
	if errors.Is(err, disk.ErrNotNow) {
		return fmt.Errorf("image %s: %w", words.Name(name), err)
	}
	reason := fmt.Sprintf("cannot be read: %v", err)
	return &Error{Name: name, Format: format, Reason: reason, Err: err}
}

// recognise sets the format of a layer whose content looks like m. m is nil if no known format
// matches. If the file was served raw before, a guest wrote the content, so the content proves
// nothing.
func (o *opener) recognise(l *layer, m *magic, use fileUse) error {
	served, device, err := false, false, error(nil)
	if f, ok := l.bytes.(*fileSource); ok {
		device = isDevice(&f.stat)
	}
	if l.local != nil && !device {
		served, err = o.dir.servedRaw(l.local)
	}
	if err != nil {
		return &Error{Name: l.name, Format: FormatUnknown, Err: err,
			Reason: fmt.Sprintf("cannot be asked whether it was served raw: %v", err)}
	}
	isQcow2 := m != nil && m.format == FormatQcow2
	switch told := o.opt.Formats[l.name]; {
	case told == FormatRaw:
		l.source, l.looks = SourceTold, m
	case told != "" && told != FormatQcow2:
		_, err := ParseFormat(string(told))
		return &Error{Name: l.name, Format: FormatUnknown, Err: err,
			Reason: fmt.Sprintf("cannot be served: %v", err)}
	case told == FormatQcow2 && !isQcow2:
		e := &Error{Name: l.name, Format: FormatUnknown,
			Reason: "is said to be qcow2, and does not begin with a qcow2 header",
			Action: "correct the format, or leave it out"}
		if m != nil {
			e.Format, e.Reason = m.format, "is said to be qcow2, and is "+m.title
		}
		return e
	case told == FormatQcow2 && served:
		return &Error{Name: l.name, Format: FormatRaw,
			Reason: "is said to be qcow2, and was served raw before, so that a guest may have " +
				"written " +
				"its qcow2 header",
			Action: "leave the format out; or if the whole file was overwritten with an image " +
				"since, " +
				"copy it to a new file"}
	case told == FormatQcow2:
		l.format, l.source = FormatQcow2, SourceTold
	case served:
		l.source, l.looks = SourceServed, m
	case device:
		l.source, l.looks = SourceDevice, m
	case isQcow2:
		l.format, l.source = FormatQcow2, SourceContent
	case m != nil && m.kind == kindForeign && o.opt.Foreign && use != useBacking:
		l.format, l.source = m.format, SourceContent
	case m != nil:
		return m.refuse(l.name, use)
	default:
		l.source = SourceContent
	}
	return nil
}

// complete validates the layer's content and opens its backing files. depth is the number of layers
// above this one.
func (o *opener) complete(ctx context.Context, l *layer, depth int) error {
	limit := o.opt.maxVirtualSize()
	if l.format == FormatQcow2 {
		c, err := openQcow2(ctx, l, limit, depth > plainDepth)
		if err != nil {
			return refuseQcow2(l.name, err)
		}
		if size := c.header().clusterSize; depth > plainDepth && size > maxDeepClusterSize {
			return &Error{Name: l.name, Format: l.format, Action: "flatten the image above it " +
				"with \"qemu-img convert\"", Reason: fmt.Sprintf("has clusters of %d bytes, and "+
				"more than %d files above it", size, plainDepth)}
		}
		l.content, l.header, l.size = c, c.header(), c.Size()
	}
	if IsForeign(l.format) {
		c, err := openForeign(ctx, l, limit)
		if err != nil {
			return err
		}
		l.content, l.size = c, c.Size()
	}
	if l.size > limit {
		return &Error{Name: l.name, Format: l.format,
			Reason: fmt.Sprintf("has a size of %s, more than the limit of %s", words.Bytes(l.size),
				words.Bytes(limit)),
			Action: "raise the limit if you trust the image"}
	}
	if l.header.backingName == "" {
		return nil
	}
	if depth == 0 && l.source == SourceContent && HasRawExtension(l.name) {
		// The name is that of a raw disk. Probably the file was served raw before, although it has
		// no mark, and a guest has written this header to read other images.
		return &Error{Name: l.name, Format: l.format,
			Reason: fmt.Sprintf("is named as a raw disk, and begins with a qcow2 header that "+
				"names the backing file %q", l.header.backingName),
			Action: "name it .qcow2 if it is such an image, otherwise " +
				sayRaw(o.use, "the header")}
	}
	below, err := o.backing(ctx, l, depth+1)
	if err != nil {
		return err
	}
	l.below = below
	l.content.setBelow(below)
	return nil
}

// backing opens the backing file that a layer names. The name is the image's claim, so everything
// about it is checked.
func (o *opener) backing(ctx context.Context, l *layer, depth int) (*layer, error) {
	refuse := func(action, reason string, args ...any) (*layer, error) {
		return nil, &Error{Name: l.name, Format: l.format, Reason: fmt.Sprintf(reason, args...),
			Action: action}
	}
	name, err := backingName(l.name, l.header.backingName)
	if err != nil {
		return refuse("rebase it with \"qemu-img rebase\" on a file of the image directory, or "+
			"flatten it with \"qemu-img convert\"",
			"names the backing file %q: %v", l.header.backingName, err)
	}
	if depth > maxBackingDepth {
		return refuse("flatten it with \"qemu-img convert\"",
			"has more than %d backing files in a chain", maxBackingDepth)
	}
	declared := Format(l.header.backingFormat)
	if declared == "" {
		return refuse(fmt.Sprintf("name it with \"qemu-img rebase -u -F FORMAT -b %s %s\"",
			words.Shell(name), words.Shell(l.name)),
			"does not name the format of its backing file %q", name)
	}
	if declared != FormatRaw && declared != FormatQcow2 {
		return refuse("convert the backing file to qcow2 and rebase the image on it",
			"names the format %q for its backing file %q, and only raw and qcow2 are supported",
			string(declared), name)
	}
	seen := slices.Clone(o.used)
	below, _, err := o.open(ctx, name, o.findBelow, useBacking)
	var refused *Error
	if errors.As(err, &refused) {
		return refuse(refused.Action, "has the backing file %q, which %s", name, refused.Reason)
	}
	if err != nil {
		return nil, err
	}
	switch {
	case slices.Contains(seen, below.id()):
		_, err = refuse("rebase it so that the chain ends",
			"has a loop in its backing files: %q is already part of the chain", name)
	case below.format != declared:
		action := fmt.Sprintf("correct it with \"qemu-img rebase -u -F %s -b %s %s\"",
			below.format, words.Shell(name), words.Shell(l.name))
		if declared == FormatRaw {
			action = "set \"format: raw\" for the backing file if a guest has written to it, " +
				"otherwise " + action
		}
		_, err = refuse(action,
			"says that its backing file %q is %s, but %s", name, declared, below.known())
	default:
		if err = o.complete(ctx, below, depth); errors.As(err, &refused) {
			_, err = refuse(refused.Action, "has the backing file %q, which %s", name,
				refused.Reason)
		}
	}
	if err != nil {
		return nil, errors.Join(err, below.close())
	}
	return below, nil
}

// backingName turns the name in an image's header into one relative to the image directory. It
// accepts only a relative path below the image's own directory. QEMU would take other names for
// other paths, protocols or JSON descriptions of whole block graphs.
func backingName(overlay, claim string) (string, error) {
	switch {
	case strings.HasPrefix(claim, "json:"):
		return "", errors.New("a json: description is not accepted")
	case path.IsAbs(claim):
		return "", errors.New("an absolute path is not accepted")
	case strings.ContainsRune(claim, 0):
		return "", errors.New("the name contains a zero byte")
	}
	// This is QEMU's rule: a colon before the first slash makes a protocol.
	if i := strings.IndexAny(claim, ":/"); i >= 0 && claim[i] == ':' {
		return "", fmt.Errorf("the protocol %q is not accepted", claim[:i])
	}
	if slices.Contains(strings.Split(claim, "/"), "..") {
		return "", errors.New("a path with .. is not accepted")
	}
	return path.Join(path.Dir(overlay), claim), nil
}

// readEnds reads the beginning and the end of a file, for detection.
func readEnds(r io.ReaderAt, size int64) (head, tail []byte, err error) {
	head = make([]byte, min(size, headSize))
	if err := osfile.ReadFull(r, head, 0); err != nil {
		return nil, nil, err
	}
	tail = make([]byte, min(size, tailSize))
	if err := osfile.ReadFull(r, tail, size-int64(len(tail))); err != nil {
		return nil, nil, err
	}
	return head, tail, nil
}
