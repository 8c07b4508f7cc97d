package overlay

import (
	"math"
	"sync/atomic"
)

// imageUse counts the users of a disk's image until the image is dropped. Only drop waits for
// users: a read of far content may take long.
type imageUse struct {
	img   Image
	users atomic.Int64  // plus imageDropped when the disk no longer needs the image
	idle  chan struct{} // of one element: the last user has ended
}

const imageDropped = math.MinInt64 / 2

func (u *imageUse) init(img Image) { u.img, u.idle = img, make(chan struct{}, 1) }

// begin returns the image. end must follow. nil: the disk no longer needs the image.
func (u *imageUse) begin() Image {
	if u.users.Add(1) < 0 {
		u.end()
		return nil
	}
	return u.img
}

func (u *imageUse) end() {
	if u.users.Add(-1) == imageDropped {
		select {
		case u.idle <- struct{}{}:
		default:
		}
	}
}

// drop releases the image when every block is in the file, and waits for its users. It is called
// once.
func (u *imageUse) drop() {
	if u.users.Add(imageDropped) != imageDropped {
		<-u.idle
	}
}
