package image

import (
	"cmp"
	"errors"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Info describes an image to people and programs. Sizes are bytes.
type Info struct {
	Name   string `json:"name"`
	Format Format `json:"format"`
	// FormatSource says how the format was found; "" if the file is not served.
	FormatSource FormatSource `json:"format_source,omitempty"`
	// LooksLike is what the content looks like, if something else decided the format.
	LooksLike   Format `json:"looks_like,omitempty"`
	Version     int    `json:"version,omitempty"` // of qcow2
	VirtualSize int64  `json:"virtual_size"`      // what a guest sees
	// the stored part of the virtual size; a clone takes at most that
	AllocatedSize int64 `json:"allocated_size"`
	FileSize      int64 `json:"file_size"`              // length of the file itself
	ClusterSize   int64 `json:"cluster_size,omitempty"` // of qcow2
	// "zlib" or "zstd" if a file of the chain has compressed clusters
	Compression string `json:"compression,omitempty"`
	// in order, from the image's own backing file down; empty if there is none
	BackingChain []BackingInfo `json:"backing_chain"`
	Servable     bool          `json:"servable"`
	Reason       string        `json:"reason,omitempty"` // why it is not servable, and what to do
}

// BackingInfo is one backing file of an image.
type BackingInfo struct {
	Name         string       `json:"name"` // relative to the image directory
	Format       Format       `json:"format"`
	FormatSource FormatSource `json:"format_source"`
	Version      int          `json:"version,omitempty"`
	VirtualSize  int64        `json:"virtual_size"`
	FileSize     int64        `json:"file_size"`
	ClusterSize  int64        `json:"cluster_size,omitempty"`
	Compression  string       `json:"compression,omitempty"`
}

// Info describes the image. It may be called after Close.
func (m *Image) Info() Info {
	info := m.info
	info.BackingChain = append([]BackingInfo{}, info.BackingChain...)
	return info
}

// describe makes the Info of an image.
func (l *layer) describe(use usage) Info {
	info := Info{Name: l.name, VirtualSize: l.size, AllocatedSize: use.total(),
		BackingChain: []BackingInfo{}}
	top := l
	top.chain(func(l *layer) {
		b := BackingInfo{Name: l.name, Format: l.format, FormatSource: l.source,
			Version: l.header.version, VirtualSize: l.size, FileSize: l.bytes.Size(),
			ClusterSize: l.header.clusterSize, Compression: l.header.compression}
		info.Compression = cmp.Or(info.Compression, b.Compression)
		if l == top {
			info.Format, info.Version, info.FileSize, info.ClusterSize = b.Format, b.Version,
				b.FileSize, b.ClusterSize
			if info.FormatSource = b.FormatSource; l.looks != nil && l.looks.format != l.format {
				info.LooksLike = l.looks.format
			}
		} else {
			info.BackingChain = append(info.BackingChain, b)
		}
	})
	return info
}

// Inspect describes a file, even one that cannot be served: then Reason says why. It returns an
// error only if the file cannot be read at all.
func Inspect(path string, opt Options) (Info, error) {
	o, file, err := openerOf(path, opt)
	if err != nil {
		return Info{}, err
	}
	defer o.dir.close()
	f, err := o.scan(file)
	f.info.Name = filepath.Base(path)
	switch {
	case err != nil:
		return Info{}, err
	case f.image != nil:
		return f.info, f.image.Close()
	case f.refused.unreadable():
		return Info{}, f.refused
	}
	return f.info, nil
}

// unreadable reports whether the file itself could not be read. If not, it was refused.
func (e *Error) unreadable() bool {
	var errno unix.Errno
	return errors.As(e.Err, &errno) && errno != unix.ELOOP
}
