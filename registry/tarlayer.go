package registry

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// The owner of files that push writes: QEMU's user where KubeVirt runs VMs.
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

// content is a blob that can be sent from any byte on.
type content interface {
	io.ReaderAt
	Size() int64
}

// diskLayer is a layer of one file, not compressed: a tar header, the file, and zeros up to the
// end.
type diskLayer struct {
	name   string // in the image
	file   *os.File
	size   int64  // of the file
	header []byte // what lies before it
	digest string // set by hash
}

// newDiskLayer lays out the layer of an open file.
func newDiskLayer(name string, file *os.File) (*diskLayer, error) {
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	h := tarHeader(name, tar.TypeReg, 0o444, info.Size())
	if err := tar.NewWriter(&b).WriteHeader(h); err != nil {
		return nil, fmt.Errorf("%q in a tar archive: %w", name, err)
	}
	return &diskLayer{name: name, file: file, size: info.Size(), header: b.Bytes()}, nil
}

const tarBlock = 512

// Size is the length of the layer: the file is padded to blocks, and two empty ones end the
// archive.
func (l *diskLayer) Size() int64 {
	return int64(len(l.header)) + (l.size+tarBlock-1)/tarBlock*tarBlock + 2*tarBlock
}

// ReadAt reads the layer. A file that has become shorter is an error.
func (l *diskLayer) ReadAt(p []byte, off int64) (n int, err error) {
	for n < len(p) {
		at := off + int64(n)
		begin, end := int64(len(l.header)), int64(len(l.header))+l.size
		switch {
		case at >= l.Size():
			return n, io.EOF
		case at < begin:
			n += copy(p[n:], l.header[at:])
		case at < end:
			m, err := l.file.ReadAt(p[n:n+int(min(int64(len(p)-n), end-at))], at-begin)
			if n += m; m == 0 {
				return n, unexpectedEnd(err)
			}
		default:
			rest := min(int64(len(p)-n), l.Size()-at)
			clear(p[n : n+int(rest)])
			n += int(rest)
		}
	}
	return n, nil
}

func unexpectedEnd(err error) error {
	if err == nil || err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// hash reads the layer once. It computes the digest of the layer and the digests of the file's
// chunks.
func (l *diskLayer) hash(ctx context.Context, done *atomic.Int64) ([]byte, error) {
	// Not a named result: a return would set it while goroutines still write to it.
	chunks := make([]byte, (l.size+indexChunk-1)/indexChunk*digestSize)
	whole := sha256.New()
	whole.Write(l.header)
	free := make(chan []byte, 4)
	for range cap(free) {
		free <- make([]byte, hashStep)
	}
	var others sync.WaitGroup
	defer others.Wait()
	for off := int64(0); off < l.size; off += hashStep {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		buf := <-free
		p := buf[:min(hashStep, l.size-off)]
		n, err := l.file.ReadAt(p, off)
		if err == io.EOF && n < len(p) {
			return nil, errors.New("it has become shorter while it was read; push it again when " +
				"nothing writes to it")
		} else if n < len(p) {
			return nil, unexpectedEnd(err)
		}
		hashed := make(chan struct{})
		others.Go(func() {
			for at := 0; at < len(p); at += indexChunk {
				sum := sha256.Sum256(p[at:min(at+indexChunk, len(p))])
				copy(chunks[(off+int64(at))/indexChunk*digestSize:], sum[:])
			}
			<-hashed
			free <- buf
		})
		whole.Write(p)
		close(hashed)
		done.Add(int64(len(p)))
	}
	whole.Write(make([]byte, l.Size()-int64(len(l.header))-l.size))
	l.digest = "sha256:" + hex.EncodeToString(whole.Sum(nil))
	others.Wait()
	return chunks, nil
}

// hashStep is how much is read and hashed at once. Bytes.
const hashStep = 1 << 20
