package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/internal/rawfile"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
)

// ScanDir opens and validates every image of a directory, in natural order: disk2 comes before
// disk10.
//
// Every file counts, even a hidden one. Otherwise a file could lie there that is not served, and it
// would not be noticed. The exception is PassOver; ScanDir calls Options.PassedOver for such files.
// Subdirectories are not searched: they may hold backing files, and file systems have a lost+found.
// A backing file of another image is not an image of its own and may have any name.
//
// A *NoImagesError means that there is no image. A *ScanError lists every file that cannot be
// served. Any other error is about the directory itself.
func ScanDir(dir string, opt Options) (images []*Image, err error) {
	found, none, err := scan(dir, opt)
	if err != nil {
		return nil, err
	}
	var refused []*Error
	for _, f := range found {
		if f.refused != nil {
			refused = append(refused, f.refused)
		} else {
			images = append(images, f.image)
		}
	}
	switch {
	case len(refused) > 0:
		closeAll(found)
		return nil, &ScanError{Dir: dir, Files: refused}
	case len(images) == 0:
		return nil, none
	}
	return images, nil
}

// InspectDir describes every image that ScanDir finds in a directory, and every file that it
// refuses, in natural order. Errors are about the directory itself, such as a *NoImagesError.
func InspectDir(dir string, opt Options) ([]Info, error) {
	found, none, err := scan(dir, opt)
	if err != nil {
		return nil, err
	}
	defer closeAll(found)
	if len(found) == 0 {
		return nil, none
	}
	all := make([]Info, len(found))
	for i, f := range found {
		all[i] = f.info
	}
	return all, nil
}

// scanned is a file of an image directory. It is either an image or refused.
type scanned struct {
	image   *Image
	refused *Error
	info    Info
	passed  bool // it is refused, but does not count as an image: see PassOver
}

func closeAll(found []scanned) {
	for _, f := range found {
		if f.image != nil {
			f.image.Close()
		}
	}
}

// scan looks at every file of a directory, except backing files of others. none says what was found
// instead of images.
func scan(dir string, opt Options) (found []scanned, none *NoImagesError, err error) {
	d, err := openDirectory(dir)
	if err != nil {
		return nil, nil, err
	}
	defer d.close()
	none = &NoImagesError{Dir: dir}
	var names []string
	if names, none.Directories, err = d.list(); err != nil {
		return nil, nil, err
	}
	backing := make(map[fileID]bool)
	ids := make(map[string]fileID)
	// An image opens its whole chain. The top of a chain mostly has the last name. So begin there,
	// and leave out files of a chain that was opened: else a chain of n files needs n * n / 2
	// opens.
	reached := make(map[string]bool)
	for _, name := range slices.Backward(names) {
		if reached[name] {
			continue
		}
		o := openerIn(d, opt, useFound)
		f, err := o.scan(name)
		if err != nil {
			closeAll(found)
			return nil, nil, err
		}
		if f.passed {
			none.PassedOver = append(none.PassedOver, f.refused)
			continue
		}
		found = append(found, f)
		if f.image != nil {
			f.image.top.below.chain(func(l *layer) { reached[l.name] = true })
		}
		if len(o.used) > 0 {
			ids[name] = o.used[0]
			for _, id := range o.used[1:] {
				backing[id] = true
			}
		}
	}
	slices.Reverse(none.PassedOver)
	for _, refused := range none.PassedOver {
		if opt.PassedOver != nil {
			opt.PassedOver(refused)
		}
	}
	slices.SortStableFunc(found, func(a, b scanned) int {
		return NaturalCompare(a.info.Name, b.info.Name)
	})
	return slices.DeleteFunc(found, func(f scanned) bool {
		if id, known := ids[f.info.Name]; !known || !backing[id] {
			return false
		}
		if f.image != nil {
			f.image.Close()
			return true
		}
		// A qcow2 file that is its own backing file is in its own chain. Its error must be
		// reported.
		return f.refused.Format != FormatQcow2
	}), none, nil
}

// scan opens an image and describes it, even if it is refused. It returns an error if the file
// could not be read for another reason.
func (o *opener) scan(name string) (f scanned, err error) {
	f.info = Info{Name: name, BackingChain: []BackingInfo{}}
	o.refused = func(l *layer) {
		use, _, err := l.measure(context.Background(), false)
		if err != nil {
			use = usage{} // the file is refused anyway, and only the size is missing
		}
		f.info = l.describe(use)
	}
	if strings.HasSuffix(name, durable.PartialSuffix) {
		// It may look whole: pull gives a file its length first.
		f.refused = &Error{Name: name,
			Reason: "is not complete: a command is writing it, or was killed while it did",
			Action: "wait for that command, or repeat it, or remove the file"}
	} else if f.image, err = o.openFile(name); err == nil {
		f.info = f.image.Info()
		return f, nil
	} else if !errors.As(err, &f.refused) {
		return f, err
	}
	var st unix.Stat_t
	if err := osfile.Retry(func() error {
		return unix.Fstatat(int(o.dir.file.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	}); err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG {
		f.info.FileSize = st.Size
		f.passed = PassOver(name, st.Size, f.refused.Format == FormatQcow2)
	}
	f.info.Format, f.info.Reason = f.refused.Format, f.refused.Explain()
	if f.info.Format != FormatRaw && f.info.Version == 0 {
		// No header was read, so these are the sizes of the file, as for a raw image.
		f.info.VirtualSize, f.info.AllocatedSize = 0, 0
	}
	return f, nil
}

// list returns the names in the directory in natural order, and the subdirectories separately.
func (d *directory) list() (names, subdirectories []string, err error) {
	entries, err := d.file.ReadDir(-1)
	if err != nil {
		return nil, nil, fmt.Errorf("image directory: %w", err)
	}
	for _, e := range entries {
		if e.Type()&fs.ModeDir != 0 {
			if e.Name() != rawfile.MarksDir {
				subdirectories = append(subdirectories, e.Name())
			}
		} else {
			names = append(names, e.Name())
		}
	}
	slices.SortFunc(names, NaturalCompare)
	slices.SortFunc(subdirectories, NaturalCompare)
	return names, subdirectories, nil
}

// NaturalCompare orders names as people do, with runs of digits by value. If two names are equal in
// that order, their bytes decide, so every start gives the same LUN numbers.
func NaturalCompare(a, b string) int {
	x, y := a, b
	for x != "" && y != "" {
		dx, dy := digits(x), digits(y)
		if dx == 0 || dy == 0 {
			if x[0] != y[0] {
				return cmp.Compare(x[0], y[0])
			}
			x, y = x[1:], y[1:]
			continue
		}
		nx, ny := strings.TrimLeft(x[:dx], "0"), strings.TrimLeft(y[:dy], "0")
		if c := cmp.Or(cmp.Compare(len(nx), len(ny)), cmp.Compare(nx, ny)); c != 0 {
			return c
		}
		x, y = x[dx:], y[dy:]
	}
	return cmp.Or(cmp.Compare(len(x), len(y)), cmp.Compare(a, b))
}

// digits returns the length of the run of digits at the beginning of s.
func digits(s string) int {
	n := 0
	for n < len(s) && s[n] >= '0' && s[n] <= '9' {
		n++
	}
	return n
}
