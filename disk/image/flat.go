package image

import (
	"context"
	"io"
	"sort"
)

// flat says where each part of a chain's disk is. A read then goes to that place at once, and does
// not ask one file after the other from the top: of 128 files, that takes longer than the reading.
type flat struct {
	size int64
	runs []flatRun // in order; the first begins at 0
}

// flatRun is a part of the disk that one file has.
type flatRun struct {
	start int64
	file  *layer // nil: zeros
	host  int64  // where it is in the file, as it is; -1: only the file's format knows
}

// maxFlatRuns bounds the memory of a flat: 6 MiB. Chains with more runs are read file by file.
const maxFlatRuns = 1 << 18

// note appends n bytes at off, which a file has. It returns false if there are too many runs.
func (f *flat) note(ctx context.Context, file *layer, off, n int64, kind extentKind) bool {
	for end := off + n; off < end; {
		run, length := flatRun{off, file, -1}, end-off
		if file != nil && file.content != nil && kind == extentPlain {
			at, m, ok := file.content.stored(ctx, off, end-off)
			if ok && at+m <= file.bytes.Size() {
				run.host = at
			}
			if m > 0 {
				length = m
			}
		}
		if !f.add(run) {
			return false
		}
		off += length
	}
	return true
}

// add appends a run, which may continue the last one.
func (f *flat) add(run flatRun) bool {
	if n := len(f.runs); n > 0 {
		last := &f.runs[n-1]
		follows := run.host < 0 && last.host < 0 ||
			last.host >= 0 && run.host == last.host+run.start-last.start
		if last.file == run.file && follows {
			return true
		}
	}
	if len(f.runs) == maxFlatRuns {
		return false
	}
	f.runs = append(f.runs, run)
	return true
}

// at returns the run that has the byte at off, and where it ends.
func (f *flat) at(off int64) (run flatRun, end int64) {
	next := sort.Search(len(f.runs), func(i int) bool { return f.runs[i].start > off })
	if end = f.size; next < len(f.runs) {
		end = f.runs[next].start
	}
	return f.runs[next-1], end
}

// read reads the disk. It is layer.ReadAt for the whole chain.
func (m *Image) read(ctx context.Context, p []byte, off int64) (int, error) {
	if m.flat == nil {
		return m.top.ReadAt(ctx, p, off)
	}
	for done := 0; done < len(p); {
		at := off + int64(done)
		run, end := m.flat.at(at)
		part := p[done:][:min(int64(len(p)-done), end-at)]
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

// read reads bytes of the run.
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
	run, end := m.flat.at(off)
	length = min(length, end-off)
	switch {
	case run.file == nil:
		return length, extentHole, nil
	case run.host >= 0:
		return length, extentPlain, nil
	}
	return run.file.extent(ctx, off, length)
}

// slow is Slow for the whole chain.
func (f *flat) slow(off int64) bool {
	run, _ := f.at(off)
	if run.file == nil || run.file.content == nil || run.host >= 0 {
		return false
	}
	slow, _ := run.file.content.slow(off)
	return slow
}
