package api

import "time"

// Volume is an answer about a volume. Its first part describes the source of a virtual machine's
// disk in the form of a specification: iscsi or pvc, and access-mode. libvirt.ParseSources reads
// it. It is missing until the disk can be used.
type Volume struct {
	ISCSI      *ISCSI `json:"iscsi,omitempty" yaml:"iscsi,omitempty"`
	PVC        *Claim `json:"pvc,omitempty" yaml:"pvc,omitempty"`
	AccessMode string `json:"access-mode,omitempty" yaml:"access-mode,omitempty"`
	Info       Info   `json:"volume" yaml:"volume"`
}

// ISCSI is the address of a LUN.
type ISCSI struct {
	Host   Host   `json:"host" yaml:"host"`
	Portal string `json:"portal" yaml:"portal"` // the name of the target
	LUN    uint16 `json:"lun" yaml:"lun"`
}

// Host is the address of a portal.
type Host struct {
	Name string `json:"name" yaml:"name"`
	Port string `json:"port" yaml:"port"`
}

// Info has everything else about a volume.
type Info struct {
	Name  string `json:"name" yaml:"name"`
	State State  `json:"state" yaml:"state"`
	// Size is the size of the disk in bytes; 0 while it is unknown.
	Size Size `json:"size" yaml:"size"`
	// BlockSize is the length of a logical block in bytes; 0 while it is unknown.
	BlockSize int       `json:"block-size,omitempty" yaml:"block-size,omitempty"`
	From      *Source   `json:"from,omitempty" yaml:"from,omitempty"`
	Copy      *Copy     `json:"copy,omitempty" yaml:"copy,omitempty"`
	Serial    string    `json:"serial,omitempty" yaml:"serial,omitempty"`
	NAA       string    `json:"naa,omitempty" yaml:"naa,omitempty"` // 16 hexadecimal digits
	Created   time.Time `json:"created" yaml:"created"`
	// Upload is the progress of the upload while a volume awaits its data.
	Upload *Progress `json:"upload,omitempty" yaml:"upload,omitempty"`
	// Failure says why the volume is not served.
	Failure string `json:"failure,omitempty" yaml:"failure,omitempty"`
	// Waits says what the volume waits for while its image is fetched.
	Waits string `json:"waits,omitempty" yaml:"waits,omitempty"`
}

// State is the state of a volume.
type State string

const (
	StateReady    State = "ready"    // it can be used
	StateAwaiting State = "awaiting" // it awaits its data
	StateFilling  State = "filling"  // it gets its image, and cannot be used yet
	StateFailed   State = "failed"   // it cannot be served; its data stays
	StateDeleting State = "deleting" // it is being deleted
)

// Progress is how far an upload is, in bytes.
type Progress struct {
	Received int64 `json:"received" yaml:"received"`
	Total    int64 `json:"total,omitempty" yaml:"total,omitempty"` // 0: unknown
}

// Snapshot is a snapshot of a volume.
type Snapshot struct {
	Name string `json:"name" yaml:"name"`
	// ID differs from that of a deleted snapshot with the same name.
	ID      string    `json:"id" yaml:"id"`
	Created time.Time `json:"created" yaml:"created"`
	Size    Size      `json:"size" yaml:"size"` // of the disk then, bytes
	Used    Size      `json:"used" yaml:"used"` // bytes of storage that only the snapshot needs
}

// Snapshots is the answer about all snapshots of a volume, oldest first.
type Snapshots struct {
	Snapshots []Snapshot `json:"snapshots" yaml:"snapshots"`
}

// Changes are the ranges that may differ between a snapshot of a volume, and the volume or a later
// snapshot. A large answer comes in pages.
type Changes struct {
	Since string `json:"since" yaml:"since"`
	Until string `json:"until,omitempty" yaml:"until,omitempty"` // "": the volume as it is now
	// Of identifies the snapshots that have these names. The request for the next page has it, too,
	// because names may be reused.
	Of   string `json:"of" yaml:"of"`
	Size int64  `json:"size" yaml:"size"` // bytes
	// Next is the offset of the next page; if it is Size, this was the last one.
	Next   int64   `json:"next" yaml:"next"`
	Ranges []Range `json:"ranges" yaml:"ranges"` // ascending, apart from each other
}

// Page says which part of Changes is asked for.
type Page struct {
	Until  string // a later snapshot; "": the volume as it is now
	Of     string // as in the page before; "" for the first one
	Offset int64  // bytes
}

// Range is a part of a disk, in bytes.
type Range struct {
	Offset int64 `json:"offset" yaml:"offset"`
	Length int64 `json:"length" yaml:"length"`
}

// List is the answer about all volumes, by name.
type List struct {
	Volumes []Volume `json:"volumes" yaml:"volumes"`
}
