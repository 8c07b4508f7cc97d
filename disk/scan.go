package disk

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
)

// ScanDir opens and validates every image of a directory, in natural order: disk2 comes before disk10.
//
// Every file counts, a hidden one too: whatever lies there unnoticed would otherwise be neither served nor missed.
// Subdirectories are not searched; they may hold backing files (and file systems bring a lost+found). A file that
// another image uses as its backing file is no image of its own, and may have any name.
//
// A *NoImagesError means that there is no file, a *ScanError lists every file that cannot be served. Any other error is
// about the directory itself.
func ScanDir(dir string, opt ImageOptions) (images []*Image, err error) {
	d, err := openDirectory(dir)
	if err != nil {
		return nil, err
	}
	defer d.close()
	names, subdirectories, err := d.list()
	if err != nil {
		return nil, err
	}

	var refused []*ImageError
	backing := make(map[fileID]bool)
	ids := make(map[string]fileID)
	defer func() {
		if err != nil {
			for _, img := range images {
				img.Close()
			}
			images = nil
		}
	}()
	for _, name := range names {
		o := &opener{dir: d, opt: opt}
		img, err := o.openImage(name)
		if len(o.used) > 0 {
			ids[name] = o.used[0]
			for _, id := range o.used[1:] {
				backing[id] = true
			}
		}
		var bad *ImageError
		switch {
		case err == nil:
			images = append(images, img)
		case errors.As(err, &bad):
			refused = append(refused, bad)
		default:
			return images, err
		}
	}

	// A file in a loop is its own backing file; leaving it out would leave out its error.
	refused = slices.DeleteFunc(refused, func(e *ImageError) bool {
		id, known := ids[e.Name]
		return known && backing[id] && e.Format != FormatQcow2
	})
	if len(refused) > 0 {
		return images, &ScanError{Dir: dir, Files: refused}
	}
	images = slices.DeleteFunc(images, func(img *Image) bool {
		if !backing[img.top.id()] {
			return false
		}
		img.Close()
		return true
	})
	if len(images) == 0 {
		return nil, &NoImagesError{Dir: dir, Directories: subdirectories}
	}
	return images, nil
}

// list returns the names in the directory in natural order, subdirectories apart.
func (d *directory) list() (names, subdirectories []string, err error) {
	entries, err := d.file.ReadDir(-1)
	if err != nil {
		return nil, nil, fmt.Errorf("image directory: %w", err)
	}
	for _, e := range entries {
		if e.Type()&fs.ModeDir != 0 {
			subdirectories = append(subdirectories, e.Name())
		} else {
			names = append(names, e.Name())
		}
	}
	slices.SortFunc(names, naturalCompare)
	slices.SortFunc(subdirectories, naturalCompare)
	return names, subdirectories, nil
}

// naturalCompare orders names as people do: runs of digits by their value. Names of equal order are ordered by bytes,
// so that the order is total and every start gives the same LUN numbers.
func naturalCompare(a, b string) int {
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

// digits is the length of the run of digits that s begins with.
func digits(s string) int {
	n := 0
	for n < len(s) && s[n] >= '0' && s[n] <= '9' {
		n++
	}
	return n
}
