package status

import "time"

// The endpoints of the socket.
const (
	// PathStatus answers like the page /status, even while the daemon starts.
	PathStatus   = "/status"
	PathHandover = "/handover"
	PathSessions = "/sessions"
	PathKick     = "/kick"
	// PathSnapshots lists snapshots with GET (of ?disk=, or of all disks), and changes them with
	// POST.
	PathSnapshots = "/snapshots"
	// These answer GET about the content of a snapshot: ?disk= and ?snapshot= name it. PathContent
	// describes it. The others take &identity=, from that description, and &offset=.
	PathContent = "/content"
	// PathContentBytes answers with &length= bytes, at most MaxContentBytes.
	PathContentBytes = "/content/bytes"
	// PathContentRanges answers with ranges: &what=stored for the data, or &what=changed for the
	// ranges that may differ from &since=, an earlier snapshot, or "" for the disk's original
	// image.
	PathContentRanges = "/content/ranges"
)

const (
	// RangesStored and RangesChanged are the kinds of ranges in a request.
	RangesStored  = "stored"
	RangesChanged = "changed"
	// MaxContentBytes limits the bytes of one answer.
	MaxContentBytes = 4 << 20
)

// Action is a step of a handover.
type Action string

const (
	ActionOpen   Action = "open"   // a second initiator may use the LUN too
	ActionFinish Action = "finish" // the second gets the LUN, the first is fenced
	ActionCancel Action = "cancel" // the first keeps the LUN, the second is fenced
)

// Handover requests one step of a handover.
type Handover struct {
	Action  Action  `json:"action"`
	LUN     uint16  `json:"lun"`
	To      string  `json:"to,omitempty"`      // initiator name, for ActionOpen
	Seconds float64 `json:"seconds,omitempty"` // of ActionOpen; 0: until another step
}

// Kick requests the end of sessions, by initiator or by number.
type Kick struct {
	Initiator string `json:"initiator,omitempty"` // every session of this name
	Session   uint16 `json:"session,omitempty"`   // its TSIH
}

// HandoverAnswer describes the result to a person.
type HandoverAnswer struct {
	Done string `json:"done"`
}

// SessionsAnswer lists the sessions, oldest first.
type SessionsAnswer struct {
	Sessions []Session `json:"sessions"`
}

// KickAnswer lists the sessions that were ended.
type KickAnswer struct {
	Ended []Session `json:"ended"`
}

// SnapshotAction is an action on a snapshot.
type SnapshotAction string

const (
	SnapshotCreate  SnapshotAction = "create"
	SnapshotDelete  SnapshotAction = "delete"
	SnapshotRevert  SnapshotAction = "revert"  // the disk gets the snapshot's content
	SnapshotServe   SnapshotAction = "serve"   // the snapshot becomes a read-only LUN
	SnapshotUnserve SnapshotAction = "unserve" // the LUN of the snapshot is removed
	// SnapshotCommitted records that an image has its content.
	SnapshotCommitted SnapshotAction = "committed"
)

// SnapshotRequest requests one action.
type SnapshotRequest struct {
	Action SnapshotAction `json:"action"`
	// Disks are names or LUNs. Only SnapshotCreate takes several, all at the same point in time.
	Disks []string `json:"disks"`
	Name  string   `json:"name"` // of the snapshot
	// Image is for SnapshotCommitted: the digest of the image, and the name of the disk in it.
	Image string `json:"image,omitempty"`
	// Identity is for SnapshotCommitted: the identity in Content of the snapshot that was read.
	Identity string `json:"identity,omitempty"`
}

// SnapshotAnswer describes the result to a person.
type SnapshotAnswer struct {
	Done string `json:"done"`
}

// Snapshot is a disk's content at a point in time.
type Snapshot struct {
	Disk    string    `json:"disk"`
	LUN     uint16    `json:"lun,omitempty"` // of the disk
	Name    string    `json:"name"`
	Created time.Time `json:"created"`
	Size    int64     `json:"size"`             // of the disk then, bytes
	Used    int64     `json:"used"`             // bytes of storage that only the snapshot needs
	Served  uint16    `json:"served,omitempty"` // the snapshot's own LUN; 0: it is not served
}

// SnapshotsAnswer lists snapshots, by disk and then oldest first.
type SnapshotsAnswer struct {
	Snapshots []Snapshot `json:"snapshots"`
}

// Refusal is the answer to a refused request.
type Refusal struct {
	Error string `json:"error"`
}

// Content describes a snapshot, or another disk that does not change.
type Content struct {
	Disk string `json:"disk"` // its name
	// Identity changes if a snapshot is deleted and its name is used again.
	Identity string `json:"identity"`
	Size     int64  `json:"size"` // bytes
	// Image has the formats and digests of the files of the disk's original image, top first, if
	// the disk still reads from it.
	Image []string `json:"image,omitempty"`
	// Reference is the reference, with its digest, of the disk's original image in a registry. "":
	// it has another origin.
	Reference string `json:"reference,omitempty"`
	// Committed are identifiers of this snapshot, or of snapshots that it was made from, by the
	// images with their content, as in SnapshotRequest. A request for ranges uses one of them as
	// &since=.
	Committed map[string]string `json:"committed,omitempty"`
}

// ContentRanges is a page of ranges.
type ContentRanges struct {
	Ranges [][2]int64 `json:"ranges"` // offset and length, bytes; in order, and not adjacent
	// Next is where the next page begins: the size at the end.
	Next int64 `json:"next"`
}
