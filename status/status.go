package status

import "time"

// State is the state of the daemon.
type State string

// The states, in the order that a daemon goes through them.
const (
	StateStarting State = "starting" // looking at the images
	StateOpening  State = "opening"  // making the disks
	StateReady    State = "ready"    // the start is over; LUN.State says how each disk is
	StateStopping State = "stopping" // draining the sessions
)

// How initiators log in.
const (
	AuthNone       = "none"
	AuthCHAP       = "chap"
	AuthMutualCHAP = "mutual-chap" // the target proves itself, too
)

// Status is the page /status. It never holds a secret.
type Status struct {
	State      State    `json:"state"`
	Ready      bool     `json:"ready"`
	TargetName string   `json:"target_name"`
	Portals    []string `json:"portals"` // address:port as bound
	// NBDPortals are where clients of NBD connect: unix:PATH, or address:port as bound.
	NBDPortals []string `json:"nbd_portals,omitempty"`
	// NBDTLS says that clients of NBD at an address must use TLS, with a certificate.
	NBDTLS         bool      `json:"nbd_tls,omitempty"`
	Authentication string    `json:"authentication"` // one of Auth...
	LUNs           []LUN     `json:"luns"`
	Volumes        *Volumes  `json:"volumes,omitempty"` // if any can be made
	Sessions       []Session `json:"sessions"`
	// RefusedLogins are those of the last day, the last one first. There is a bound: see
	// docs/page.md.
	RefusedLogins []RefusedLogin `json:"refused_logins,omitempty"`
	// Handover is the one that an annotation of the pod asks for.
	Handover *HandoverOutcome `json:"handover,omitempty"`
	// UsageTypes are the storages that disks can choose.
	UsageTypes []UsageType `json:"usage_types,omitempty"`
	// WorkDir is the work directory, if a person has named it: what is written to disks that are
	// not persistent stays there.
	WorkDir string `json:"work_dir,omitempty"`
	// Starting is what the start waits for; nil: the daemon is ready, or stops.
	Starting  *Condition `json:"starting,omitempty"`
	StartedAt time.Time  `json:"started_at"`
	ReadyAt   *time.Time `json:"ready_at,omitempty"`
	// ReadyAfterSeconds is the time from the start until every LUN could be used.
	ReadyAfterSeconds float64 `json:"ready_after_seconds,omitempty"`
	Build             Build   `json:"build"`
}

// Build says which binary is running.
type Build struct {
	Version   string `json:"version"`
	Commit    string `json:"commit"`
	GoVersion string `json:"go_version"`
	Platform  string `json:"platform"`
}

// HandoverOutcome is the result of a handover that an annotation of the pod asks for: one of Done
// and Error.
type HandoverOutcome struct {
	Asked string `json:"asked"` // the annotation
	Done  string `json:"done,omitempty"`
	// Error is why it is not done. It is tried again while it is asked for.
	Error string `json:"error,omitempty"`
}

// Volumes sums up the volumes that were made on demand.
type Volumes struct {
	Address  string         `json:"address"` // the address for requests
	States   map[string]int `json:"states"`  // how many there are in each state
	Bytes    int64          `json:"size_bytes"`
	Max      int            `json:"max,omitempty"`       // how many there may be; 0: no limit
	MaxBytes int64          `json:"max_bytes,omitempty"` // of all together; 0: no limit
	Uploads  []Upload       `json:"uploads,omitempty"`   // under way, by the volumes' names
	Failed   []FailedVolume `json:"failed,omitempty"`    // by name
}

// FailedVolume is a volume that cannot be served until somebody has put something right.
type FailedVolume struct {
	Name    string `json:"name"`
	Failure string `json:"failure"`
}

// Upload is an upload that is under way.
type Upload struct {
	Volume        string    `json:"volume"`
	ReceivedBytes int64     `json:"received_bytes"`
	TotalBytes    int64     `json:"total_bytes,omitempty"` // 0: nobody has said
	StartedAt     time.Time `json:"started_at"`            // of its connection
	// StartedBytes had come when its connection began: more than 0 for an upload that goes on.
	StartedBytes int64 `json:"started_bytes,omitempty"`
}

// LUN describes one LUN on the page.
type LUN struct {
	LUN        uint16 `json:"lun"`
	Image      string `json:"image"`
	Volume     string `json:"volume,omitempty"` // its name, if it was made on demand
	Format     string `json:"format"`
	SizeBytes  int64  `json:"size_bytes"`
	BlockSize  int    `json:"block_size,omitempty"` // of a logical block, bytes; once it is made
	CopyMode   string `json:"copy_mode"`
	AccessMode string `json:"access_mode"`
	// Owner is the initiator that currently owns a write-exclusive LUN.
	Owner  string `json:"owner,omitempty"`
	OpenTo string `json:"open_to,omitempty"` // the second initiator of a handover
	// Fenced are the initiators that lost a handover of this LUN. They stay fenced until the LUN is
	// opened to them again.
	Fenced   []string `json:"fenced,omitempty"`
	ReadOnly bool     `json:"read_only"`
	// Digest is that of the image as it was named: of a list of images, if one was. It is "" for
	// files of this machine, and as long as nobody knows that of a file behind an address.
	// PlatformDigest is that of this machine's image in the list.
	Digest         string `json:"digest,omitempty"`
	PlatformDigest string `json:"platform_digest,omitempty"`
	// SignedBy is the fingerprint of the key by which the image was admitted: sha256:HEX, of its
	// SPKI. It is "" if no signature was asked for.
	SignedBy   string `json:"signed_by,omitempty"`
	Serial     string `json:"serial,omitempty"` // once the disk is made
	NAA        string `json:"naa,omitempty"`    // 16 hexadecimal digits
	Ready      bool   `json:"ready"`
	UsageType  string `json:"usage_type,omitempty"` // the storage that the disk has chosen
	Persistent bool   `json:"persistent"`           // survives the pod
	VhostUser  string `json:"vhost_user,omitempty"` // path of its socket, if it has one
	Copy       *Copy  `json:"copy,omitempty"`       // in modes that copy the image
	Space      *Space `json:"space,omitempty"`      // if the storage can tell
	Failure    string `json:"failure,omitempty"`    // why it has failed, until the next start
	Condition
	// Troubles are why requests of guests wait or fail now. They go when such requests succeed
	// again.
	Troubles []Trouble `json:"troubles,omitempty"`
}

// RefusedLogin are logins that were refused for the same reason.
type RefusedLogin struct {
	From      string    `json:"from"`                // the peer's address
	Initiator string    `json:"initiator,omitempty"` // as the peer called itself
	User      string    `json:"user,omitempty"`      // the CHAP name that was tried
	Target    string    `json:"target,omitempty"`    // the target that was asked for
	Reason    string    `json:"reason"`              // as in the metrics
	Error     string    `json:"error,omitempty"`     // the last one
	Since     time.Time `json:"since"`
	Last      time.Time `json:"last"`
	Count     int64     `json:"count"`
}

// Copy says how much of an image the disk's own file holds. The guest can use the whole disk
// from the start.
type Copy struct {
	CopiedBytes int64 `json:"copied_bytes"` // of the image's data
	DataBytes   int64 `json:"data_bytes"`   // data in the image
	TotalBytes  int64 `json:"total_bytes"`  // capacity of the disk
	Complete    bool  `json:"complete"`     // the disk no longer needs the image
	// WaitsForSpace says that copying waits for room on the storage. The disk is served meanwhile.
	WaitsForSpace bool `json:"waits_for_space"`
}

// UsageType describes a storage that disks can choose for their writes.
type UsageType struct {
	Name      string   `json:"name"`
	Directory string   `json:"directory"`
	LUNs      []uint16 `json:"luns"` // whose disks lie there
	// Space is the space that these disks use together, and the free space. It is nil if the
	// storage does not know.
	Space *Space `json:"space,omitempty"`
}

// Space says how many bytes a disk uses on its storage, and how many are free there.
type Space struct {
	Used int64 `json:"used_bytes"`
	Free int64 `json:"free_bytes"` // shared with other users of the storage
}

// The protocols of sessions that do not speak iSCSI. They have no ISID and no TSIH.
const (
	ProtocolNBD       = "nbd"
	ProtocolVhostUser = "vhost-user"
)

// Session describes a session in full feature phase (RFC 7143).
type Session struct {
	// Protocol is that of the session, as above; "" is iSCSI.
	Protocol  string    `json:"protocol,omitempty"`
	Initiator string    `json:"initiator"` // or what a client of NBD is called
	Alias     string    `json:"alias,omitempty"`
	Remote    string    `json:"remote"`
	Local     string    `json:"local"`
	User      string    `json:"user,omitempty"` // the CHAP name
	ISID      string    `json:"isid"`           // 12 hexadecimal digits
	TSIH      uint16    `json:"tsih"`
	Discovery bool      `json:"discovery"`
	Since     time.Time `json:"since"`
	InFlight  int       `json:"in_flight"` // commands
	// Waiting are those that wait, for content that lies far away or for storage.
	Waiting      int        `json:"waiting,omitempty"`
	WaitingSince *time.Time `json:"waiting_since,omitempty"` // the oldest of them
	WaitsFor     string     `json:"waits_for,omitempty"`     // in words
	HeaderDigest bool       `json:"header_digest"`
	DataDigest   bool       `json:"data_digest"`
	LUNs         []uint16   `json:"luns"`     // read or written so far
	Commands     uint64     `json:"commands"` // ended so far
	BytesRead    uint64     `json:"bytes_read"`
	BytesWritten uint64     `json:"bytes_written"`
}

// Progress is what a command that fetches something says of itself, at its address.
type Progress struct {
	Done  int64 `json:"done"`  // bytes
	Total int64 `json:"total"` // bytes; 0: not known yet
}
