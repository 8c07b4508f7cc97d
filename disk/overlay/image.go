package overlay

import (
	"math"
	"sync/atomic"
)

// imageUse is the image of a disk, as long as it is needed, and how many use it. A use may take as
// long as content that is far away, so that nobody else waits for it but who lets go of the image.
type imageUse struct {
	img   Image
	users atomic.Int64  // and imageDropped, when the image is not needed any more
	idle  chan struct{} // of one element: the last user has gone
}

const imageDropped = math.MinInt64 / 2

func (u *imageUse) init(img Image) { u.img, u.idle = img, make(chan struct{}, 1) }

// begin returns the image; end must follow. nil: it is not needed any more.
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

// drop lets go of the image, when every block is in the file, and waits until nobody uses it. It is
// called once.
func (u *imageUse) drop() {
	if u.users.Add(imageDropped) != imageDropped {
		<-u.idle
	}
}
