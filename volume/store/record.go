package store

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"time"

	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/volume/api"
)

// State is the state of a volume.
type State string

const (
	// StateMaking: the volume is being made, and hidden. The next start removes it.
	StateMaking State = "making"
	// StateReady: it can be used.
	StateReady State = "ready"
	// StateAwaiting: it awaits its data.
	StateAwaiting State = "awaiting"
	// StateFilling: its image is being fetched, or its disk on a claim is being copied. Until that
	// ends, it must not be used.
	StateFilling State = "filling"
	// StateDeleting: it is being deleted. The next start removes the rest.
	StateDeleting State = "deleting"
)

// Record is what the store has about a volume.
type Record struct {
	Name  string `json:"name"`
	State State  `json:"state"`
	LUN   uint16 `json:"lun,omitempty"` // 0: it has none
	Size  int64  `json:"size"`          // of its disk, bytes; 0: not known yet
	// BlockSize is the length of the disk's logical blocks in bytes. 0: not known yet, or the disk
	// was last opened by an earlier version.
	BlockSize int      `json:"block_size,omitempty"`
	Spec      api.Spec `json:"spec"` // the resolved request that made it
	Place     Place    `json:"place"`
	// Unmade says that the place has nothing yet that was made for the volume.
	Unmade  bool      `json:"unmade,omitempty"`
	Created time.Time `json:"created"`
	// File is an image in the volume's directory, the source of its disk. "": none.
	File string `json:"file,omitempty"`
	// Marked says that a file was made in the place before the disk. If neither that file nor the
	// disk is there, the place is an empty mount point: its storage is missing.
	Marked bool `json:"marked,omitempty"`
}

// saved is a record in its file.
type saved struct {
	Version int `json:"version"`
	Record
}

// Place is where the disk of a volume lies.
type Place struct {
	Kind PlaceKind `json:"kind,omitempty"`
	Name string    `json:"name,omitempty"` // of the usage type or the claim
}

// PlaceKind is a kind of place.
type PlaceKind string

const (
	PlaceOwn       PlaceKind = ""           // the volume's directory in the store
	PlaceRoot      PlaceKind = "root"       // the directory that the server has for one disk
	PlaceClaim     PlaceKind = "claim"      // a claim
	PlaceUsageType PlaceKind = "usage-type" // a directory for the volume on another storage
)

const (
	recordName    = "volume.json"
	recordVersion = 1
)

// DamagedError says that the record of a volume cannot be used. Its files stay.
type DamagedError struct {
	Path string // of the record
	Err  error
}

func (e *DamagedError) Error() string {
	return fmt.Sprintf("the record %q of a volume cannot be used: it %v; %s", e.Path, e.Err,
		remedy(e.Err, "restore it from a backup, or move its directory away"))
}

// remedy returns what to do about a file that is damaged, or that the system did not let us read.
func remedy(err error, damaged string) string {
	if durable.IsUnread(err) {
		return "the file may be intact: repair what keeps it from being read"
	}
	return damaged
}

func (e *DamagedError) Unwrap() error { return e.Err }

// check refuses a record that cannot be that of the named volume.
func (r *Record) check(name string) error {
	switch {
	case r.Name != name:
		return fmt.Errorf("is of a volume %q", r.Name)
	case r.Size < 0 || r.Size%api.SectorSize != 0:
		return fmt.Errorf("has a size of %d bytes, and no disk has that", r.Size)
	case r.LUN > lastLUN:
		return fmt.Errorf("has the LUN %d, which is none", r.LUN)
	case r.File != "" && (!fs.ValidPath(r.File) || path.Base(r.File) != r.File):
		return errors.New("names a file elsewhere")
	}
	switch r.State {
	case StateMaking, StateReady, StateAwaiting, StateFilling, StateDeleting:
		return nil
	}
	return fmt.Errorf("has the unknown state %q", string(r.State))
}
