package pages

import (
	"time"

	"kubevirt.io/disk/target"
)

// State is what the daemon is doing.
type State string

// The states, in their order.
const (
	StateStarting State = "starting" // the images are being looked at
	StateOpening  State = "opening"  // the disks are being made
	StateReady    State = "ready"    // every LUN can be used
	StateStopping State = "stopping" // sessions are being drained
)

// Status is the page /status. It never holds a secret.
type Status struct {
	State          State                `json:"state"`
	Ready          bool                 `json:"ready"`
	TargetName     string               `json:"target_name"`
	Portals        []string             `json:"portals"`        // address:port as bound
	Authentication string               `json:"authentication"` // "none", "chap" or "mutual-chap"
	LUNs           []LUNStatus          `json:"luns"`
	Sessions       []target.SessionInfo `json:"sessions"`
	StartedAt      time.Time            `json:"started_at"`
	ReadyAt        *time.Time           `json:"ready_at,omitempty"`
	// ReadyAfterSeconds is how long the start took until every LUN could be used.
	ReadyAfterSeconds float64   `json:"ready_after_seconds,omitempty"`
	Build             BuildInfo `json:"build"`
}

// BuildInfo says which binary is running.
type BuildInfo struct {
	Version   string `json:"version"`
	Commit    string `json:"commit"`
	GoVersion string `json:"go_version"`
	Platform  string `json:"platform"`
}

// LUNStatus is one LUN of Status.
type LUNStatus struct {
	LUN        uint16 `json:"lun"`
	Image      string `json:"image"`
	Format     string `json:"format"`
	SizeBytes  int64  `json:"size_bytes"`
	CopyMode   string `json:"copy_mode"`
	AccessMode string `json:"access_mode"`
	// Owner is the initiator that a write-exclusive LUN belongs to at the moment.
	Owner  string `json:"owner,omitempty"`
	OpenTo string `json:"open_to,omitempty"` // who may use it too, by a handover
	// Fenced are those who lost a handover of it. They are kept out until it is opened to them
	// again.
	Fenced     []string    `json:"fenced,omitempty"`
	ReadOnly   bool        `json:"read_only"`
	Serial     string      `json:"serial,omitempty"` // once the disk is made
	NAA        string      `json:"naa,omitempty"`    // 16 hexadecimal digits
	Ready      bool        `json:"ready"`
	Removable  bool        `json:"removable"`
	Persistent bool        `json:"persistent"`        // survives the pod
	Copy       *CopyStatus `json:"copy,omitempty"`    // in modes that copy the image
	Space      *Space      `json:"space,omitempty"`   // as far as the storage tells
	Failure    string      `json:"failure,omitempty"` // why it has failed until the next start
}

// CopyStatus is how much of an image the disk's own file holds. All of the disk is served from the
// start.
type CopyStatus struct {
	CopiedBytes int64 `json:"copied_bytes"` // of the data in the image
	DataBytes   int64 `json:"data_bytes"`   // what the image stores
	TotalBytes  int64 `json:"total_bytes"`  // capacity of the disk
	Complete    bool  `json:"complete"`     // the image is not needed any more
	// WaitsForSpace says that the copying goes on when there is room on the storage; the disk is
	// served meanwhile.
	WaitsForSpace bool `json:"waits_for_space"`
}

// Space is what a disk takes of the storage that it is on, and what that has left. Bytes.
type Space struct {
	Used int64 `json:"used_bytes"`
	Free int64 `json:"free_bytes"` // others may take it first
}
