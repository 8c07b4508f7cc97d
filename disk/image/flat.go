package image

import (
	"context"
	"fmt"
	"io"
	"sort"

	"kubevirt.io/disk/internal/words"
)

// flat says where each part of a chain's disk is stored. A read goes to that place at once, and
// does not ask one file after the other from the top: with 128 files, that takes longer than the
// reading.
type flat struct {
	runs []flatRun // of the whole disk, in order and without gaps
}

// flatRun is a part of the disk that one file has.
type flatRun struct {
	start, n int64
	file     *layer // nil: zeros
	host     int64  // place in the file if stored as it is; -1: only the format's code finds it
	kind     extentKind
}

func (r flatRun) end() int64 { return r.start + r.n }

// skip is the run without its first n bytes.
func (r flatRun) skip(n int64) flatRun {
	r.start, r.n = r.start+n, r.n-n
	if r.host >= 0 {
		r.host += n
	}
	return r
}

// first is the run's first n bytes.
func (r flatRun) first(n int64) flatRun {
	r.n = n
	return r
}

// maxFlatRuns bounds the memory of a flat: 6 MiB. Chains with more runs are read file by file.
const maxFlatRuns = 1 << 17

// flatten makes the flat of a layer and of those below it. It returns nil if there are too many
// runs.
func (l *layer) flatten(ctx context.Context) (*flat, error) {
	var files [][]flatRun // for each file, the content that shows through the files above it
	total, limit := 0, l.size
	for f := l; f != nil; f = f.below {
		limit = min(limit, f.size) // a file hides the files below it past its own end, too
		own, err := f.ownRuns(ctx)
		if total += len(own); err != nil || total > maxFlatRuns {
			return nil, err
		}
		files = append(files, cutOff(own, limit))
	}
	// Merge neighbours, and then the results, so that a run is not copied once for each file.
	for len(files) > 1 {
		pairs := files[:0]
		for i := 0; i < len(files); i += 2 {
			if i+1 < len(files) {
				pairs = append(pairs, lay(files[i+1], files[i]))
			} else {
				pairs = append(pairs, files[i])
			}
		}
		files = pairs
	}
	// Places that no file has read as zeros.
	runs := lay([]flatRun{{n: l.size, host: -1}}, files[0])
	if len(runs) > maxFlatRuns {
		return nil, nil
	}
	return &flat{runs}, nil
}

func cutOff(runs []flatRun, size int64) []flatRun {
	for len(runs) > 0 && runs[len(runs)-1].end() > size {
		last := len(runs) - 1
		if runs[last].start < size {
			runs[last].n = size - runs[last].start
			break
		}
		runs = runs[:last]
	}
	return runs
}

// lay puts the runs of some files above the runs of the files below them. It changes below.
func lay(below, above []flatRun) []flatRun {
	out := make([]flatRun, 0, len(below)+2*len(above))
	for _, a := range above {
		for len(below) > 0 && below[0].end() <= a.start {
			out, below = append(out, below[0]), below[1:]
		}
		if len(below) > 0 && below[0].start < a.start {
			cut := a.start - below[0].start
			out = append(out, below[0].first(cut))
			below[0] = below[0].skip(cut)
		}
		for len(below) > 0 && below[0].end() <= a.end() {
			below = below[1:]
		}
		if len(below) > 0 && below[0].start < a.end() {
			below[0] = below[0].skip(a.end() - below[0].start)
		}
		out = append(out, a)
	}
	return append(out, below...)
}

// ownRuns are the runs that the file itself has. All other content comes from below.
func (l *layer) ownRuns(ctx context.Context) (runs []flatRun, err error) {
	for off := int64(0); off < l.size && len(runs) <= maxFlatRuns; {
		run := flatRun{start: off, file: l, host: -1}
		if l.content == nil {
			run.n, run.kind, err = l.extent(ctx, off, l.size-off)
		} else {
			run.n, run.kind, err = l.content.extent(ctx, off, l.size-off)
		}
		if err != nil {
			return nil, unread(ctx, off, l.size-off,
				fmt.Errorf("image %s: %w", words.Name(l.name), err))
		}
		off += run.n
		switch {
		case run.kind == extentBelow:
		case l.content == nil:
			runs = append(runs, run)
		case run.kind == extentPlain:
			runs = l.places(ctx, runs, run)
		case run.kind == extentHole:
			run.file = nil
			runs = append(runs, run)
		default:
			runs = append(runs, run)
		}
	}
	return runs, nil
}

// places appends a run whose content is stored as it is, cut where it is not contiguous in the
// file.
func (l *layer) places(ctx context.Context, runs []flatRun, run flatRun) []flatRun {
	for run.n > 0 && len(runs) <= maxFlatRuns {
		part := run
		at, n, ok := l.content.stored(ctx, run.start, run.n)
		// The last cluster may reach past the end of the file.
		if ok = ok && n > 0 && at+n <= l.bytes.Size(); ok {
			part.n, part.host = n, at
		}
		run = run.skip(part.n)
		if last := len(runs) - 1; ok && last >= 0 && runs[last].host >= 0 &&
			runs[last].end() == part.start && runs[last].host+runs[last].n == part.host {
			runs[last].n += part.n
			continue
		}
		runs = append(runs, part)
	}
	return runs
}

// usage is the space that the runs take.
func (f *flat) usage() (u usage) {
	if f == nil {
		return u
	}
	for _, r := range f.runs {
		switch {
		case r.kind == extentPlain && r.file != nil:
			u.plain += r.n
		case r.kind == extentCompressed:
			u.compressed += r.n
		}
	}
	return u
}

// index is the index of the run that has the byte at off.
func (f *flat) index(off int64) int {
	return sort.Search(len(f.runs), func(i int) bool { return f.runs[i].start > off }) - 1
}

// at returns the run that has the byte at off.
func (f *flat) at(off int64) flatRun { return f.runs[f.index(off)] }

// slow is Slow for the whole chain.
func (f *flat) slow(off int64) bool {
	run := f.at(off)
	if run.kind != extentCompressed {
		return false
	}
	slow, _ := run.file.content.slow(off)
	return slow
}

// read reads the disk. It is layer.ReadAt for the whole chain.
func (m *Image) read(ctx context.Context, p []byte, off int64) (int, error) {
	if m.flat == nil {
		return m.top.ReadAt(ctx, p, off)
	}
	done := 0
	for i := m.flat.index(off); done < len(p); i++ {
		at, run := off+int64(done), m.flat.runs[i]
		part := p[done:][:min(int64(len(p)-done), run.end()-at)]
		n, err := run.read(ctx, part, at)
		if done += n; n < len(part) {
			if err == nil {
				err = io.ErrUnexpectedEOF
			}
			return done, err
		}
	}
	return len(p), nil
}

func (r flatRun) read(ctx context.Context, p []byte, off int64) (int, error) {
	switch {
	case r.file == nil:
		clear(p)
		return len(p), nil
	case r.host < 0:
		return r.file.ReadAt(ctx, p, off)
	}
	return r.file.bytes.ReadAt(ctx, p, r.host+off-r.start)
}

// extent describes the run at off. It is layer.extent for the whole chain.
func (m *Image) extent(ctx context.Context, off, length int64) (int64, extentKind, error) {
	if m.flat == nil {
		return m.top.extent(ctx, off, length)
	}
	run := m.flat.at(off)
	return min(length, run.end()-off), run.kind, nil
}
