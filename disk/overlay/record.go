package overlay

import (
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"kubevirt.io/disk/disk"
)

// recordVersion is the format of the record. No other version is read.
const recordVersion = 1

// Record says which layers a disk has above its bottom, and which snapshots use them. It is a file
// next to the disk, JSON in the same form as the disk's state. A disk without a record has only its
// bottom.
//
//	{"version": 1,
//	 "content": "0123...",     identifier of the content at the bottom, as in the disk's state
//	 "durable": true,          a flush of the layers reaches storage
//	 "top": "89ab...",         the layer that the guest changes; "": the bottom
//	 "layers": [               parents come first
//	  {"id": "89ab...",        32 hexadecimal digits, which are also that of the layer's map
//	   "parent": "",           the layer below; "": the bottom
//	   "floor": 1073741824}],  how much of the one below it is over, bytes
//	 "snapshots": [
//	  {"name": "before",
//	   "id": "4567...",        no other snapshot ever has it; absent: an earlier version took it
//	   "layer": "", "created": "2026-11-26T06:00:00Z", "size": 1073741824,
//	   "clones": ["k/vm2"],    disks that were begun from it, and may still read it; absent: none
//	   "taken": true,          false: a crash came first, and there is no such snapshot
//	   "image": "sha256:..."}]} of an image with this content; absent: none is known
//
// Files of layers that are not in the record are of no use: they were about to be added, or were
// removed. At any moment, even after a kill, the record describes the disk: an empty top is
// recorded before the guest may write to it, and a layer is taken out only when its content is on
// storage in the layer below.
type Record struct {
	Version   int              `json:"version"`
	Content   string           `json:"content"`
	Durable   bool             `json:"durable"`
	Top       string           `json:"top"`
	Layers    []LayerRecord    `json:"layers"`
	Snapshots []SnapshotRecord `json:"snapshots"`
}

// LayerRecord is a layer above the bottom.
type LayerRecord struct {
	ID     string `json:"id"`
	Parent string `json:"parent"`
	Floor  int64  `json:"floor"`
}

// SnapshotRecord is a point in time with a name.
type SnapshotRecord struct {
	Name    string    `json:"name"`
	ID      string    `json:"id,omitempty"`
	Layer   string    `json:"layer"`
	Created time.Time `json:"created"`
	Size    int64     `json:"size"` // of the disk then, bytes
	Taken   bool      `json:"taken"`
	Image   string    `json:"image,omitempty"`
	Clones  []string  `json:"clones,omitempty"`
}

// olderID identifies a snapshot of a version of this program that gave snapshots no identifiers.
func olderID(s SnapshotRecord) string { return s.Name + s.Created.UTC().String() }

// NewRecord is the record of a disk without layers.
func NewRecord(content string, durable bool) *Record {
	return &Record{Version: recordVersion, Content: content, Durable: durable,
		Layers: []LayerRecord{}, Snapshots: []SnapshotRecord{}}
}

// Check says whether a record contradicts itself.
func (r *Record) Check() error {
	if r.Version != recordVersion {
		return fmt.Errorf("has version %d, and this program knows %d", r.Version, recordVersion)
	}
	known := map[string]bool{"": true}
	parents, names, ids := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, l := range r.Layers {
		id, err := hex.DecodeString(l.ID)
		if err != nil || len(id) != 16 || known[l.ID] || !known[l.Parent] || l.Floor <= 0 ||
			l.Floor%disk.SectorSize != 0 {
			return errContradiction
		}
		known[l.ID], parents[l.Parent] = true, true
	}
	if !known[r.Top] || parents[r.Top] {
		return errContradiction
	}
	for _, s := range r.Snapshots {
		if CheckSnapshotName(s.Name) != nil || names[s.Name] ||
			s.ID != "" && ids[s.ID] || !known[s.Layer] ||
			s.Layer == r.Top || s.Size <= 0 || s.Size%disk.SectorSize != 0 {
			return errContradiction
		}
		names[s.Name], ids[s.ID] = true, true
	}
	return nil
}

var errContradiction = errors.New("contradicts itself")

// maxName is the length of the longest name of a snapshot, in characters.
const maxName = 63

// CheckSnapshotName says what is wrong with the name of a snapshot.
func CheckSnapshotName(name string) error {
	letter := func(c byte) bool {
		return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
	}
	good := name != "" && len(name) <= maxName && letter(name[0])
	for i := range len(name) {
		good = good && (letter(name[i]) || slices.Contains([]byte("-_."), name[i]))
	}
	if good {
		return nil
	}
	return errors.New("the name is not valid: use 1 to 63 letters, digits, '-', '_' and '.', " +
		"beginning with a letter or a digit")
}

// Why a snapshot is not made or found.
var (
	ErrSnapshotExists  = errors.New("the disk already has a snapshot of that name")
	ErrSnapshotMissing = errors.New("the disk has no snapshot of that name")
	ErrSnapshotInUse   = errors.New("somebody uses the snapshot")
)

// SnapshotError says why something cannot be done with a snapshot. It may be one of the errors
// above, or disk.ErrNoSpace.
type SnapshotError struct {
	Disk, Name string
	Reason     string
	Err        error // nil: there is no other than the reason
}

func (e *SnapshotError) Error() string {
	return fmt.Sprintf("snapshot %q of the disk %q: %s", e.Name, e.Disk, e.Reason)
}

func (e *SnapshotError) Unwrap() error { return e.Err }
