package status

import "time"

// State is the state of the daemon.
type State string

// The states, in the order that a daemon goes through them.
const (
	StateStarting State = "starting" // looking at the images
	StateOpening  State = "opening"  // making the disks
	StateReady    State = "ready"    // the start is complete; LUN.State is the state of each disk
	StateStopping State = "stopping" // draining the sessions
)

// The ways in which initiators log in.
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
	// NBDPortals are the portals of NBD: unix:PATH, or address:port as bound.
	NBDPortals []string `json:"nbd_portals,omitempty"`
	// NBDTLS: clients of NBD at an address must use TLS, with a certificate.
	NBDTLS         bool      `json:"nbd_tls,omitempty"`
	Authentication string    `json:"authentication"` // one of Auth...
	LUNs           []LUN     `json:"luns"`
	Volumes        *Volumes  `json:"volumes,omitempty"` // if any can be made
	Sessions       []Session `json:"sessions"`
	// RefusedLogins are those of the last day, the last one first. Their number is limited: see
	// docs/page.md.
	RefusedLogins []RefusedLogin `json:"refused_logins,omitempty"`
	// Handover is the result of the handover in an annotation of the pod.
	Handover *HandoverOutcome `json:"handover,omitempty"`
	// UsageTypes are the storages that disks can choose.
	UsageTypes []UsageType `json:"usage_types,omitempty"`
	// WorkDir is the work directory, if a setting names it: it keeps the writes to disks that are
	// not persistent.
	WorkDir string `json:"work_dir,omitempty"`
	// Starting is the reason why the start is not complete; nil: the daemon is ready, or stops.
	Starting  *Condition `json:"starting,omitempty"`
	StartedAt time.Time  `json:"started_at"`
	ReadyAt   *time.Time `json:"ready_at,omitempty"`
	// ReadyAfterSeconds is the time from the start until every LUN could be used.
	ReadyAfterSeconds float64 `json:"ready_after_seconds,omitempty"`
	Build             Build   `json:"build"`
}

// Build describes the running binary.
type Build struct {
	Version   string `json:"version"`
	Commit    string `json:"commit"`
	GoVersion string `json:"go_version"`
	Platform  string `json:"platform"`
}

// HandoverOutcome is the result of the handover in an annotation of the pod: one of Done and Error.
type HandoverOutcome struct {
	Asked string `json:"asked"` // the annotation
	Done  string `json:"done,omitempty"`
	// Error is the reason why it is not done. The daemon tries again while the annotation exists.
	Error string `json:"error,omitempty"`
}

// Volumes sums up the volumes on demand.
type Volumes struct {
	Address  string         `json:"address"` // the address for requests
	States   map[string]int `json:"states"`  // number of volumes in each state
	Bytes    int64          `json:"size_bytes"`
	Max      int            `json:"max,omitempty"`       // how many there may be; 0: no limit
	MaxBytes int64          `json:"max_bytes,omitempty"` // of all together; 0: no limit
	Uploads  []Upload       `json:"uploads,omitempty"`   // under way, by the volumes' names
	Failed   []FailedVolume `json:"failed,omitempty"`    // by name
}

// FailedVolume is a volume that cannot be served until a person solves a problem.
type FailedVolume struct {
	Name    string `json:"name"`
	Failure string `json:"failure"`
}

// Upload is an upload that is under way.
type Upload struct {
	Volume        string    `json:"volume"`
	ReceivedBytes int64     `json:"received_bytes"`
	TotalBytes    int64     `json:"total_bytes,omitempty"` // 0: unknown
	StartedAt     time.Time `json:"started_at"`            // of its connection
	// StartedBytes had arrived when its connection began: more than 0 for an upload that was
	// resumed.
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
	// Digest is the digest of the image's reference: of a list of images, if it names one. It is ""
	// for files of this machine, and for a file behind an address until it is known. PlatformDigest
	// is that of this machine's image in the list.
	Digest         string `json:"digest,omitempty"`
	PlatformDigest string `json:"platform_digest,omitempty"`
	// SignedBy is the fingerprint of the key that has signed the image: sha256:HEX, of its SPKI. It
	// is "" if no signature was required.
	SignedBy   string `json:"signed_by,omitempty"`
	Serial     string `json:"serial,omitempty"` // once the disk is made
	NAA        string `json:"naa,omitempty"`    // 16 hexadecimal digits
	Ready      bool   `json:"ready"`
	UsageType  string `json:"usage_type,omitempty"` // the storage that the disk has chosen
	Persistent bool   `json:"persistent"`           // survives the pod
	VhostUser  string `json:"vhost_user,omitempty"` // path of its socket, if it has one
	Copy       *Copy  `json:"copy,omitempty"`       // in modes that copy the image
	Space      *Space `json:"space,omitempty"`      // if the storage reports it
	Failure    string `json:"failure,omitempty"`    // why it has failed, until the next start
	Condition
	// Troubles are the reasons why requests of guests wait or fail now. They are removed when such
	// requests succeed again.
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

// Copy is the progress of copying the image into the disk's own file. The guest can use the whole
// disk from the start.
type Copy struct {
	CopiedBytes int64 `json:"copied_bytes"` // of the image's data
	DataBytes   int64 `json:"data_bytes"`   // data in the image
	TotalBytes  int64 `json:"total_bytes"`  // capacity of the disk
	Complete    bool  `json:"complete"`     // the disk no longer needs the image
	// WaitsForSpace: copying waits for room on the storage. The disk is served meanwhile.
	WaitsForSpace bool `json:"waits_for_space"`
}

// UsageType describes a storage that disks can choose for their writes.
type UsageType struct {
	Name      string   `json:"name"`
	Directory string   `json:"directory"`
	LUNs      []uint16 `json:"luns"` // whose disks lie there
	// Space is the space that these disks use together, and the free space. It is nil if the
	// storage does not report it.
	Space *Space `json:"space,omitempty"`
}

// Space is the number of bytes that a disk uses on its storage, and of those that are free there.
type Space struct {
	Used int64 `json:"used_bytes"`
	Free int64 `json:"free_bytes"` // shared with other users of the storage
}

// The protocols of sessions other than iSCSI. They have no ISID and no TSIH.
const (
	ProtocolNBD       = "nbd"
	ProtocolVhostUser = "vhost-user"
)

// Session describes a session in full feature phase (RFC 7143).
type Session struct {
	// Protocol is the protocol of the session, as above; "" is iSCSI.
	Protocol  string    `json:"protocol,omitempty"`
	Initiator string    `json:"initiator"` // or the name of a client of NBD
	Alias     string    `json:"alias,omitempty"`
	Remote    string    `json:"remote"`
	Local     string    `json:"local"`
	User      string    `json:"user,omitempty"` // the CHAP name
	ISID      string    `json:"isid"`           // 12 hexadecimal digits
	TSIH      uint16    `json:"tsih"`
	Discovery bool      `json:"discovery"`
	Since     time.Time `json:"since"`
	InFlight  int       `json:"in_flight"` // commands
	// Waiting are the commands that wait for remote content or for storage.
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

// Progress is the progress of a command that fetches data, at its address.
type Progress struct {
	Done  int64 `json:"done"`  // bytes
	Total int64 `json:"total"` // bytes; 0: not known yet
}
