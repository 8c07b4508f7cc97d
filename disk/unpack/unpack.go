package unpack

import (
	"bufio"
	"errors"
	"io"
	"path"

	"kubevirt.io/disk/disk/image"
)

// MaxNested is how many wrappings may lie in each other: "disk.tar.xz" has two.
const MaxNested = 2

// Unwraps reports whether data of a format is unwrapped that lies in so many wrappings. A
// stream-optimised VMDK image may lie in MaxNested: it is what an appliance has inside. VMDK images
// in each other end there, too.
func Unwraps(f image.Format, within int) bool {
	return within < MaxNested || within == MaxNested && f == VMDK
}

// Content is the disk in wrapped data, or the data itself if nothing wraps it.
type Content struct {
	// Name is what the disk is called: in its archive, or as its file without the extension of what
	// was taken off. It is only a claim.
	Name string
	// Size is how many bytes come; -1: unknown.
	Size int64
	// Formats are what is taken off, the outermost first.
	Formats []image.Format

	root  *source // what Open was given
	in    io.Reader
	close []func() error
}

// Open looks for the disk in data of that name and size; -1: unknown. Nothing of the data is kept:
// Content reads on where Open has stopped. Reading to the end also checks what follows the disk.
//
// If the wrapping is to blame, the error is an *Error. It is an *image.Error if there is an archive
// with an image in it that is not read here.
func Open(name string, r io.Reader, size int64, opt Options) (*Content, error) {
	root := &source{r: r}
	c := &Content{Name: path.Base(name), Size: size, root: root, in: root}
	for {
		in := bufio.NewReaderSize(c.in, image.DetectSize)
		head, err := in.Peek(image.DetectSize)
		if err != nil && err != io.EOF {
			return nil, errors.Join(err, c.Close())
		}
		c.in = in
		f := Wrapped(head)
		if f == "" {
			return c, nil
		}
		if !Unwraps(f, len(c.Formats)) {
			return nil, errors.Join(tooDeep(), c.Close())
		}
		c.Formats = append(c.Formats, f)
		if f == tarFormat {
			if err := c.openTar(opt); err != nil {
				return nil, errors.Join(err, c.Close())
			}
			return c, nil
		}
		d := Decompress(f, in, opt)
		c.in, c.close = d, append(c.close, d.Close)
		c.Name, c.Size = image.UnwrappedName(c.Name), -1
	}
}

func tooDeep() error {
	return refuse("is compressed or archived more than %d times; unwrap it, and name the disk in "+
		"it", MaxNested)
}

func (c *Content) Read(p []byte) (int, error) { return c.in.Read(p) }

// Close frees the memory of decoders. It does not close what Open was given.
func (c *Content) Close() (err error) {
	for _, f := range c.close {
		err = errors.Join(err, f())
	}
	c.close = nil
	return err
}
