package registry

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"

	"kubevirt.io/disk/registry/layer"
)

// BootOrder is the order of a guest's first reads of its disks, recorded during a boot. Push stores
// it with an image. When that image is served from the registry, these blocks are fetched first.
// The order has no names of files of a machine, and no content of the disks.
type BootOrder struct {
	Disks []BootDisk
}

// BootDisk is the order of one disk.
type BootDisk struct {
	Name   string    // of its image, as in the directory of disks
	Size   int64     // of the image as a disk, bytes
	Blocks []BootRun // in the order in which they were first read, each once
}

// BootRun is a run of blocks of BootBlock bytes.
type BootRun struct {
	First, Count int64
}

const (
	// BootBlock is the unit of an order, in bytes.
	BootBlock = 64 << 10
	// MaxBootBlocks is the most blocks in the order of a disk: 2 GiB.
	MaxBootBlocks = 32 << 10

	// bootHead is the first line of the file.
	bootHead = "kubevirt-disk boot order 1"
	// The limits of a file that is accepted.
	maxBootFile  = 16 << 20 // bytes
	maxBootDisks = 1024
	maxBootLine  = 64 << 10 // bytes
)

// ReadBootOrder parses what WriteTo has written: a title line, and for each disk a line with its
// size and its name, and a line for each run of blocks.
//
//	kubevirt-disk boot order 1
//	disk 10737418240 "fedora.qcow2"
//	0
//	160+3
//
// "160+3" is block 160 and the three that follow it. A repeated block is skipped.
func ReadBootOrder(r io.Reader) (*BootOrder, error) {
	limited := &io.LimitedReader{R: r, N: maxBootFile + 1}
	lines := bufio.NewScanner(limited)
	lines.Buffer(nil, maxBootLine)
	if !lines.Scan() || lines.Text() != bootHead {
		return nil, errors.Join(lines.Err(), errors.New("it is not a boot order of a known "+
			"version: serve --record-boot writes one"))
	}
	order, number := new(BootOrder), 1
	var seen map[int64]bool
	for lines.Scan() {
		number++
		if err := order.line(lines.Text(), &seen); err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
	}
	if limited.N == 0 {
		return nil, fmt.Errorf("it has more than %d bytes", maxBootFile)
	}
	return order, lines.Err()
}

// line parses one line. seen are the blocks of the last disk so far.
func (o *BootOrder) line(text string, seen *map[int64]bool) error {
	if rest, ok := strings.CutPrefix(text, "disk "); ok {
		size, name, _ := strings.Cut(rest, " ")
		n, err := strconv.ParseInt(size, 10, 64)
		quoted, err2 := strconv.Unquote(name)
		switch {
		case err != nil || n < 1:
			return fmt.Errorf("%.100q is not the size of a disk", size)
		case err2 != nil || quoted == "" || len(quoted) > layer.MaxName:
			return fmt.Errorf("%.100q is not a quoted name", name)
		case len(o.Disks) == maxBootDisks:
			return fmt.Errorf("there are more than %d disks", maxBootDisks)
		}
		o.Disks = append(o.Disks, BootDisk{Name: quoted, Size: n})
		*seen = make(map[int64]bool)
		return nil
	}
	if len(o.Disks) == 0 {
		return errors.New("blocks come before the line of their disk")
	}
	first, more, several := strings.Cut(text, "+")
	r := BootRun{Count: 1}
	var err, err2 error
	r.First, err = strconv.ParseInt(first, 10, 64)
	if several {
		r.Count, err2 = strconv.ParseInt(more, 10, 32)
		r.Count++
	}
	d := &o.Disks[len(o.Disks)-1]
	switch blocks := (d.Size-1)/BootBlock + 1; {
	case err != nil || err2 != nil || r.First < 0 || r.Count < 1:
		return fmt.Errorf("%.100q is neither a block nor a run of blocks", text)
	case r.First >= blocks || r.Count > blocks-r.First:
		return fmt.Errorf("%.100q does not lie in a disk of %d blocks", text, blocks)
	case r.Count > MaxBootBlocks:
		return fmt.Errorf("%.100q are more than %d blocks", text, MaxBootBlocks)
	}
	for block := r.First; block < r.First+r.Count; block++ {
		if (*seen)[block] {
			continue
		}
		if len(*seen) == MaxBootBlocks {
			return fmt.Errorf("there are more than %d blocks of %q", MaxBootBlocks, d.Name)
		}
		(*seen)[block] = true
		d.Add(block)
	}
	return nil
}

// Add adds a block unless the order has it.
func (d *BootDisk) Add(block int64) {
	if last := len(d.Blocks) - 1; last >= 0 && d.Blocks[last].First+d.Blocks[last].Count == block {
		d.Blocks[last].Count++
		return
	}
	d.Blocks = append(d.Blocks, BootRun{First: block, Count: 1})
}

// WriteTo writes the order as text. It is an error if that is more than ReadBootOrder accepts.
func (o *BootOrder) WriteTo(w io.Writer) (int64, error) {
	var b bytes.Buffer
	fmt.Fprintln(&b, bootHead)
	for _, d := range o.Disks {
		fmt.Fprintf(&b, "disk %d %q\n", d.Size, d.Name)
		for _, r := range d.Blocks {
			if r.Count == 1 {
				fmt.Fprintf(&b, "%d\n", r.First)
			} else {
				fmt.Fprintf(&b, "%d+%d\n", r.First, r.Count-1)
			}
		}
	}
	if len(o.Disks) > maxBootDisks || b.Len() > maxBootFile {
		return 0, fmt.Errorf("the order of %d disks is too long for one file", len(o.Disks))
	}
	return b.WriteTo(w)
}

// matchBoot finds the order of each pushed file: the order of a disk with its name and size. The
// extension may differ, because push stores a raw file as qcow2. For a single file, a single order
// applies whatever its name.
func (p *pusher) matchBoot() error {
	if p.opt.Boot == nil {
		return nil
	}
	stem := func(name string) string { return strings.TrimSuffix(name, path.Ext(name)) }
	matched := false
	for i := range p.planned {
		f := &p.planned[i]
		for _, d := range p.opt.Boot.Disks {
			alone := len(p.planned) == 1 && len(p.opt.Boot.Disks) == 1
			if d.Size == f.size && (stem(d.Name) == stem(f.name) || alone) {
				f.boot, matched = d.Blocks, true
				break
			}
		}
	}
	if matched {
		return nil
	}
	var names []string
	for _, d := range p.opt.Boot.Disks[:min(len(p.opt.Boot.Disks), 10)] {
		names = append(names, fmt.Sprintf("%q (%d bytes)", d.Name, d.Size))
	}
	return fmt.Errorf("the boot order is for %s, not for any of these files; record it again "+
		"with the image that is pushed", strings.Join(names, ", "))
}
