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

// Unwraps reports whether data of a format is unwrapped that lies within that many wrappings. A
// stream-optimised VMDK image may lie within MaxNested: an appliance has one inside. Such an image
// within another one is not unwrapped there.
func Unwraps(f image.Format, within int) bool {
	return within < MaxNested || within == MaxNested && f == VMDK
}

// Content is the disk in wrapped data, or the data itself if nothing wraps it.
type Content struct {
	// Name is the name of the disk: in its archive, or of its file without the wrapping's
	// extension. It is only a claim.
	Name string
	// Size is the number of bytes of Content; -1: unknown.
	Size int64
	// Formats are the wrappings, the outermost first.
	Formats []image.Format

	root  *source // the reader that Open was called with
	in    io.Reader
	close []func() error
}

// Open looks for the disk in data of that name and size; -1: unknown. Content goes on reading where
// Open has stopped. Reading to the end also checks what follows the disk.
//
// If the wrapping is wrong, the error is an *Error. If the wrapping has an image of a format that
// is not read here, it is an *image.Error.
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

// Close frees the memory of decoders. It does not close the reader that Open was called with.
func (c *Content) Close() (err error) {
	for _, f := range c.close {
		err = errors.Join(err, f())
	}
	c.close = nil
	return err
}
