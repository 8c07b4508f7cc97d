package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"kubevirt.io/disk/registry/transport"
)

// The owner of files that push writes: QEMU's user in KubeVirt.
const diskOwner = 107

func tarHeader(name string, kind byte, mode, size int64) *tar.Header {
	return &tar.Header{
		Name:     name,
		Typeflag: kind,
		Mode:     mode,
		Size:     size,
		Uid:      diskOwner,
		Gid:      diskOwner,
		ModTime:  time.Unix(0, 0),
	}
}

// Disk is a layer of one file, not compressed: a tar header, the file, and zeros up to the end.
type Disk struct {
	Name    string // in the image
	File    *os.File
	Length  int64     // of the file
	Changed time.Time // when the file was last changed, as of when the layer was laid out
	Header  []byte    // the tar header before it; nil: the layer is the file, and no archive
	Digest  string    // set by hash
}

// NewFile lays out a layer that is an open file.
func NewFile(name string, file *os.File) (*Disk, error) {
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	return &Disk{Name: name, File: file, Length: info.Size(), Changed: info.ModTime()}, nil
}

// NewDisk lays out the layer of an open file.
func NewDisk(name string, file *os.File) (*Disk, error) {
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	d, err := DiskOf(name, info.Size())
	if err != nil {
		return nil, err
	}
	d.File, d.Changed = file, info.ModTime()
	return d, nil
}

// DiskOf lays out the layer of a file of that size, without the file.
func DiskOf(name string, size int64) (*Disk, error) {
	var b bytes.Buffer
	if err := tar.NewWriter(&b).WriteHeader(tarHeader(name, tar.TypeReg, 0o444, size)); err != nil {
		return nil, fmt.Errorf("%q in a tar archive: %w", name, err)
	}
	return &Disk{Name: name, Length: size, Header: b.Bytes()}, nil
}

const TarBlock = 512

// Size is the length of the layer: the file is padded to blocks, and two empty blocks end the
// archive.
func (l *Disk) Size() int64 {
	if l.Header == nil {
		return l.Length
	}
	return int64(len(l.Header)) + (l.Length+TarBlock-1)/TarBlock*TarBlock + 2*TarBlock
}

// ReadAt reads the layer. A file that has become shorter is an error.
func (l *Disk) ReadAt(p []byte, off int64) (n int, err error) {
	for n < len(p) {
		at := off + int64(n)
		begin, end := int64(len(l.Header)), int64(len(l.Header))+l.Length
		switch {
		case at >= l.Size():
			return n, io.EOF
		case at < begin:
			n += copy(p[n:], l.Header[at:])
		case at < end:
			m, err := l.File.ReadAt(p[n:n+int(min(int64(len(p)-n), end-at))], at-begin)
			if n += m; m == 0 {
				return n, transport.UnexpectedEnd(err)
			}
		default:
			rest := min(int64(len(p)-n), l.Size()-at)
			clear(p[n : n+int(rest)])
			n += int(rest)
		}
	}
	return n, nil
}

// Hash reads the layer once. It computes the digest of the layer and the digests of the file's
// chunks.
func (l *Disk) Hash(ctx context.Context, done *atomic.Int64) ([]byte, error) {
	// Not a named result: a return would set it while goroutines still write to it.
	chunks := make([]byte, (l.Length+IndexChunk-1)/IndexChunk*DigestSize)
	whole := sha256.New()
	whole.Write(l.Header)
	free := make(chan []byte, 4)
	for range cap(free) {
		free <- make([]byte, hashStep)
	}
	var others sync.WaitGroup
	defer others.Wait()
	for off := int64(0); off < l.Length; off += hashStep {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		buf := <-free
		p := buf[:min(hashStep, l.Length-off)]
		n, err := l.File.ReadAt(p, off)
		if err == io.EOF && n < len(p) {
			return nil, errors.New("it has become shorter while it was read; push it again when " +
				"nothing writes to it")
		} else if n < len(p) {
			return nil, transport.UnexpectedEnd(err)
		}
		hashed := make(chan struct{})
		others.Go(func() {
			for at := 0; at < len(p); at += IndexChunk {
				sum := sha256.Sum256(p[at:min(at+IndexChunk, len(p))])
				copy(chunks[(off+int64(at))/IndexChunk*DigestSize:], sum[:])
			}
			<-hashed
			free <- buf
		})
		whole.Write(p)
		close(hashed)
		done.Add(int64(len(p)))
	}
	whole.Write(make([]byte, l.Size()-int64(len(l.Header))-l.Length))
	l.Digest = transport.DigestIn(whole)
	others.Wait()
	return chunks, nil
}

// hashStep is how much is read and hashed at once. Bytes.
const hashStep = 1 << 20
