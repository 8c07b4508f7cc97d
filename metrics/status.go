package metrics

import (
	"time"

	"kubevirt.io/disk/target"
)

// State is what the daemon is doing.
type State string

// The states, in their order.
const (
	StateStarting  State = "starting"  // the images are being looked at
	StateExpanding State = "expanding" // at least one disk is being made
	StateReady     State = "ready"     // every LUN can be used
	StateStopping  State = "stopping"  // sessions are being drained
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
	Build          BuildInfo            `json:"build"`
}

// LUNStatus is one LUN of Status.
type LUNStatus struct {
	LUN        uint16           `json:"lun"`
	Image      string           `json:"image"`
	Format     string           `json:"format"`
	SizeBytes  int64            `json:"size_bytes"`
	CopyMode   string           `json:"copy_mode"`
	AccessMode string           `json:"access_mode"`
	ReadOnly   bool             `json:"read_only"`
	Serial     string           `json:"serial,omitempty"` // once the disk is made
	NAA        string           `json:"naa,omitempty"`    // 16 hexadecimal digits
	Ready      bool             `json:"ready"`
	Expansion  *ExpansionStatus `json:"expansion,omitempty"` // in modes that expand
	Failure    string           `json:"failure,omitempty"`   // why the disk has failed until the next restart
}

// ExpansionStatus is how far an image has been expanded, in bytes of its virtual size.
type ExpansionStatus struct {
	DoneBytes  int64 `json:"done_bytes"`
	TotalBytes int64 `json:"total_bytes"`
	Finished   bool  `json:"finished"`
}

// NewExpansionStatus reads progress.
func NewExpansionStatus(p Progress) *ExpansionStatus {
	return &ExpansionStatus{DoneBytes: p.Done(), TotalBytes: p.Total(), Finished: p.Finished()}
}
