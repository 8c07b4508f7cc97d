package disk

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"syscall"
)

// SectorSize is the granularity of every disk: its size is a multiple of it. Bytes.
const SectorSize = 512

// LongBlock is the longer of the two lengths that a logical block can have. The other is
// SectorSize. Bytes.
const LongBlock = 4096

// Disk is a random-access block device. All offsets and lengths are bytes.
//
// A call that needs far content waits until the content is there. If its context ends before, it
// returns ErrNotNow soon. Nothing else ends with the context: a call that needs only the disk's own
// storage succeeds. So a call whose context has ended returns what is at hand, and a command makes
// such a call first. A call may return ErrNotNow earlier if waiting is useless at the moment. The
// command is then held, and makes the call again a little later.
//
// The caller (the SCSI device server) validates ranges before it calls: off and len(p) lie inside
// [0, Size()). Every method may be called from any number of goroutines at once, except Close,
// which is called once, after every other call has returned.
type Disk interface {
	// ReadAt fills p completely or returns an error. A range that storage cannot return is a
	// *MediumError for that range only.
	ReadAt(ctx context.Context, p []byte, off int64) (int, error)

	// WriteAt stores p completely, or returns an error with the number of bytes that it has stored
	// from the beginning of p. Every later ReadAt sees the stored bytes. They survive a crash only
	// after a later Flush has returned nil. ErrNoSpace: nothing is promised about the rest of the
	// range, the rest of the disk stays usable, and the write may be tried again.
	WriteAt(ctx context.Context, p []byte, off int64) (int, error)

	// Flush makes every write, discard and zeroing that returned before it was called durable, as
	// far as the disk promises durability (an ephemeral disk promises none). A failure is sticky:
	// after it every Flush and write returns ErrFailed, because it is unknown what was lost.
	Flush() error

	// Size is the capacity in bytes, a multiple of SectorSize. It may grow while the disk is
	// served, and never shrinks. The code that enlarges the disk calls serving's Resize, which asks
	// for the size again. Size does not wait for storage.
	Size() int64

	// Close releases the disk. It does not flush.
	Close() error
}

// Discarder is a disk that can give space back.
type Discarder interface {
	// Discard deallocates the range; it reads as zeros afterwards. Same concurrency and durability
	// as WriteAt.
	Discard(ctx context.Context, off, length int64) error
}

// Zeroer is a disk that can zero a range by itself, so that no zeros have to be sent.
type Zeroer interface {
	// Zero makes the range read as zeros; whether space stays allocated is up to the disk. Same
	// concurrency and durability as WriteAt.
	Zero(ctx context.Context, off, length int64) error
}

// Extent is a run of bytes of one allocation state.
type Extent struct {
	Length int64 // bytes, from the offset asked for; never 0
	Data   bool  // false: a hole, which reads as zeros
}

// Extenter is a disk that knows what is allocated.
type Extenter interface {
	// Extent describes the run that begins at off, at most length bytes of it.
	Extent(ctx context.Context, off, length int64) (Extent, error)
}

// How deep in the chain of images the content of a range lies. The disk itself has depth 1.
const (
	DepthNone  = 0 // neither the disk nor its image stores anything
	DepthOwn   = 1 // the disk itself: a peer has written or discarded it, or it was copied
	DepthImage = 2 // the image below
)

// Layered is a disk above an image, and tells which content is the image's. A disk that is not
// Layered has all of its content itself.
type Layered interface {
	// Depth returns one of the constants above for the run that begins at off, and the length of
	// the run in bytes: at most length, and never 0.
	Depth(ctx context.Context, off, length int64) (depth int, n int64, err error)
}

// Historian is a disk that tells what has changed since a snapshot of it.
type Historian interface {
	// Since returns the snapshots to compare with, oldest first.
	Since() []Snapshot
	// Changed reports whether the run that begins at off may differ from the snapshot with the ID
	// since, and the length of the run in bytes: at most length, and never 0. It fails if the
	// snapshot was deleted.
	Changed(ctx context.Context, since string, off, length int64) (changed bool, n int64,
		err error)
}

// Snapshot is a point in time of a disk.
type Snapshot struct {
	Name string // a later snapshot may have the same name
	ID   string // of this snapshot alone, also after it was deleted; records name it by the ID
}

// Changed reports whether the run of d that begins at off may differ from the snapshot with the ID
// since, or from d's image if since is "". n is the length of the run in bytes: at most length, and
// never 0. If d keeps no account of changes, all of it may differ.
func Changed(ctx context.Context, d Disk, since string, off, length int64) (changed bool, n int64,
	err error) {
	if since == "" {
		if layered, ok := d.(Layered); ok {
			depth, n, err := layered.Depth(ctx, off, length)
			return depth == DepthOwn, n, err
		}
		return true, length, nil
	}
	if history, ok := d.(Historian); ok {
		return history.Changed(ctx, since, off, length)
	}
	return true, length, nil
}

// Estimator is a disk that can say which of its reads are slow.
type Estimator interface {
	// Slow reports whether the content at off has to be decompressed, so that reading it is worth
	// another processor. It does not wait for storage. The answer is a hint: it may be outdated at
	// once.
	Slow(off int64) bool
}

// Far reports whether content of a disk may be far away, so that a call may wait for it. A disk
// reports it by a method Far.
func Far(d Disk) bool {
	far, ok := d.(interface{ Far() bool })
	return ok && far.Far()
}

// AtHand is a context that has ended. A call with it does not wait for far content: see Disk.
var AtHand = ended()

// Cached is AtHand for a read that must not wait for local storage either: if the data is not in
// the page cache, the read returns ErrNotNow. It is a hint: a disk may treat it as AtHand.
var Cached = ended()

func ended() context.Context {
	ctx, end := context.WithCancel(context.Background())
	end()
	return ctx
}

// ReaderAt makes an io.ReaderAt of r. Its reads have the context ctx.
func ReaderAt(ctx context.Context, r interface {
	ReadAt(ctx context.Context, p []byte, off int64) (int, error)
},
) io.ReaderAt {
	return atFunc(func(p []byte, off int64) (int, error) { return r.ReadAt(ctx, p, off) })
}

// WriterAt makes an io.WriterAt of a disk. Its writes have the context ctx.
func WriterAt(ctx context.Context, d Disk) io.WriterAt {
	return atFunc(func(p []byte, off int64) (int, error) { return d.WriteAt(ctx, p, off) })
}

type atFunc func(p []byte, off int64) (int, error)

func (f atFunc) ReadAt(p []byte, off int64) (int, error)  { return f(p, off) }
func (f atFunc) WriteAt(p []byte, off int64) (int, error) { return f(p, off) }

// Remote is a disk that another server has. Its methods do not wait for the server; they return
// what the server said last.
type Remote interface {
	// Generation is the server's name for the content of the disk. The disk fails when the name
	// changes.
	Generation() string
	// Shared reports whether others may write the disk at its server. The owners and fences of this
	// daemon do not bind them.
	Shared() bool
	// ReadOnly reports whether the server takes no writes.
	ReadOnly() bool
}

// StoredAtomic names a record that lies with a disk while an atomic write is under way: the content
// that the write replaces. If the write is interrupted, the next start puts that content back.
const StoredAtomic = "atomic-write"

// Identity distinguishes one disk instance from every other one, so that two pods of one image
// never look like two paths to one disk. It is kept with the disk's state.
type Identity struct {
	Serial string  `json:"serial"` // printable ASCII, at most 36 characters: INQUIRY VPD page 80h
	NAA    [8]byte `json:"naa"`    // NAA locally assigned, first nibble 3: VPD page 83h
}

// Or returns the identity. Where it lacks something, other fills it in.
func (id Identity) Or(other Identity) Identity {
	id.Serial = cmp.Or(id.Serial, other.Serial)
	if id.NAA == [8]byte{} {
		id.NAA = other.NAA
	}
	return id
}

// IdentityOf makes an identity of bytes that distinguish a disk. Ten of them make a serial of 20
// characters, as many as virtio-blk shows.
func IdentityOf(b [18]byte) Identity {
	id := Identity{Serial: hex.EncodeToString(b[:10])}
	copy(id.NAA[:], b[10:])
	id.NAA[0] = 0x30 | id.NAA[0]&0x0f // SPC-4 7.8.6.6: NAA 3h, locally assigned
	return id
}

var (
	// ErrNoSpace: the file system that holds the disk is full.
	ErrNoSpace = errors.New("no space left for the disk")
	// ErrReadOnly: the disk cannot be written.
	ErrReadOnly = errors.New("disk is read-only")
	// ErrMoved: the disk is another server's, and another client of that server has taken it over.
	// The disk fails with this error, and has lost nothing.
	ErrMoved = errors.New("another session of this name has taken the disk over")
	// ErrNotNow: the content cannot be had at the moment, and nothing is lost. The call may be made
	// again. A write has changed only the bytes that it reports as stored. A discard or a zeroing
	// may have changed a part of its range.
	ErrNotNow = errors.New("the content cannot be read now")
	// ErrWrongContent: the content that the disk was made from does not match its digest, and some
	// of it was already served. It comes within a *MediumError, for every range.
	ErrWrongContent = errors.New("the disk was made of wrong content")
	// ErrFailed: an earlier flush failed, or the server of the disk has another disk in its place,
	// so acknowledged data may be lost. Only a restart clears it.
	ErrFailed = errors.New("disk has failed: acknowledged data may be lost")
)

// MediumError is a range that storage could not read or write.
type MediumError struct {
	Op     string // "read" or "write"
	Off    int64  // first byte of the range
	Length int64  // bytes
	Err    error
}

func (e *MediumError) Error() string {
	return fmt.Sprintf("%s of %d bytes at %d: %v", e.Op, e.Length, e.Off, e.Err)
}

func (e *MediumError) Unwrap() error { return e.Err }

// Usage is the space that a disk takes on the storage below it. Bytes.
type Usage struct {
	Used      int64 // storage that the disk takes
	Available int64 // storage that it can still take, unless others take it first
}

// Accountant is a disk that knows how much storage it takes.
type Accountant interface {
	// Usage may be out of date as soon as it returns. Same concurrency as ReadAt.
	Usage() (Usage, error)
}

// IsNoSpace reports whether an error is ErrNoSpace, or an error of the system that means the same.
// It is false for a disk that has failed: free space does not mend such a disk.
func IsNoSpace(err error) bool {
	return !errors.Is(err, ErrFailed) && (errors.Is(err, ErrNoSpace) ||
		errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) ||
		errors.Is(err, syscall.EFBIG))
}
