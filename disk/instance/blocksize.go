package instance

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/osfile"
)

// BlockSizeError says that the content of a disk was made for logical blocks of another length. A
// guest would not find its data.
type BlockSizeError struct {
	Image          string
	Asked          int // bytes
	Reason, Advice string
}

func (e *BlockSizeError) Error() string {
	return fmt.Sprintf("%q cannot have logical blocks of %d bytes: %s; %s", e.Image, e.Asked,
		e.Reason, e.Advice)
}

// blockSize is the length of the disk's logical blocks in bytes.
func (s *state) blockSize() int { return max(s.BlockSize, disk.SectorSize) }

// notWhole is the error for a size that is no whole number of blocks. Bytes.
func notWhole(image string, size, block int64) *SizeError {
	return &SizeError{Image: image, Size: size,
		Reason: fmt.Sprintf("is not a multiple of %d bytes", block)}
}

// newBlockSize is the block size in the state of a new disk.
func (o *opening) newBlockSize() int {
	if o.opt.BlockSize == disk.SectorSize {
		return 0 // as in states of earlier versions
	}
	return o.opt.BlockSize
}

// otherBlocks says why an existing disk cannot have the requested logical blocks.
func (o *opening) otherBlocks(s *state) string {
	if o.opt.BlockSize == 0 || o.opt.BlockSize == s.blockSize() {
		return ""
	}
	return fmt.Sprintf("it has logical blocks of %d bytes, and is to have %d", s.blockSize(),
		o.opt.BlockSize)
}

// checkBlocks refuses content that was made for other logical blocks, as far as its first blocks
// show. size is the disk's, in bytes. If no block size was requested, a disk that is not known from
// an earlier start has blocks of 512 bytes.
func (o *opening) checkBlocks(content io.ReaderAt, size int64) error {
	if o.opt.BlockSizeKnown {
		return nil
	}
	asked := max(o.opt.BlockSize, disk.SectorSize)
	wrong := &BlockSizeError{Image: o.name, Asked: asked}
	if size%int64(asked) != 0 {
		wrong.Reason = fmt.Sprintf("its size of %d bytes is no multiple of that", size)
		wrong.Advice = "give it a size that is, or leave the block size out"
		return wrong
	}
	head := make([]byte, min(2*disk.LongBlock, size))
	if _, err := content.ReadAt(head, 0); err != nil && err != io.EOF {
		return err
	}
	if wrong.Reason = madeFor(head, asked); wrong.Reason == "" {
		return nil
	}
	wrong.Advice = "leave the block size out, or use an image that was made with such blocks"
	if asked == disk.SectorSize {
		wrong.Advice = fmt.Sprintf("set the block size to %d", disk.LongBlock)
	}
	return wrong
}

// madeFor returns what in the beginning of a disk shows that it was made for logical blocks of
// another size than blockSize, or "".
func madeFor(head []byte, blockSize int) string {
	signature := []byte("EFI PART") // of a GUID partition table, in the second block (UEFI 5.3.2)
	at := func(off int, want []byte) bool {
		return len(head) >= off+len(want) && bytes.Equal(head[off:off+len(want)], want)
	}
	short, long := at(disk.SectorSize, signature), at(disk.LongBlock, signature)
	boot := at(510, []byte{0x55, 0xaa})
	switch {
	case blockSize == disk.SectorSize && long && !short:
		return fmt.Sprintf("its partition table is for blocks of %d bytes", disk.LongBlock)
	case blockSize == disk.SectorSize || long:
		return ""
	case short:
		return fmt.Sprintf("its partition table is for blocks of %d bytes", disk.SectorSize)
	case boot:
		return fmt.Sprintf("its boot sector is for blocks of %d bytes", disk.SectorSize)
	case at(0, []byte("XFSB")) && len(head) > 104 &&
		int(binary.BigEndian.Uint16(head[102:])) < blockSize:
		return fmt.Sprintf("its file system (XFS) is for blocks of %d bytes",
			binary.BigEndian.Uint16(head[102:]))
	}
	return ""
}

// checkImageBlocks is checkBlocks for a disk that will be made of the image. If no block size was
// requested, it does not wait longer than HeadTimeout for the image.
func (o *opening) checkImageBlocks(ctx context.Context) error {
	limited, cancel := ctx, context.CancelFunc(func() {})
	if o.opt.BlockSize == 0 {
		limited, cancel = context.WithTimeout(ctx, cmp.Or(o.opt.HeadTimeout, headTimeout))
	}
	defer cancel()
	err := o.checkBlocks(disk.ReaderAt(limited, o.img), max(o.img.Size(), o.opt.Size))
	late := limited.Err() != nil && ctx.Err() == nil
	if err == nil || errors.As(err, new(*BlockSizeError)) || !late {
		return err
	}
	o.log.Warn("the beginning of the image does not come: its disk gets blocks of 512 bytes unseen",
		zap.Error(err))
	return nil
}

// headTimeout is the default of Options.HeadTimeout.
const headTimeout = 5 * time.Second

// checkAdopted is checkBlocks for a file that came with the volume.
func (o *opening) checkAdopted(size int64) error {
	f, err := osfile.OpenFile(o.dir.disk(), os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	return errors.Join(o.checkBlocks(f, size), f.Close())
}
