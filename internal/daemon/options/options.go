package options

import (
	"cmp"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"go.uber.org/zap"

	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/registry/signature"
	"kubevirt.io/disk/registry/transport"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target"
	"kubevirt.io/disk/volume/server"
)

// Options are the options of a daemon. WorkDir, Portals and Table are required, and Images
// unless there are Volumes. Every other field works with its zero value.
type Options struct {
	Images  Images
	Streams Streams // LUNs after those of Images
	// Containers are LUNs after those of Streams.
	Containers Containers
	Remotes    Remotes // LUNs after those of Containers
	Settings   Settings

	WorkDir string // holds ephemeral disks and their state; made if it is missing
	// WorkDirNamed says that a person has named WorkDir: it may outlive a container.
	WorkDirNamed bool
	// Leftovers says what happens to ephemeral disks whose images are gone or have changed. "":
	// they are kept in a directory that a person has named, and removed in a container's own.
	Leftovers     instance.Leftovers
	PersistentDir string // holds the disks instead, on a volume; "": none
	// UsageTypes are more directories for disks; DiskSettings.UsageType chooses one. If there is a
	// PersistentDir, the disks there are persistent, too.
	UsageTypes UsageTypes
	// OnImageChange says what happens to a persistent disk whose image has changed.
	OnImageChange instance.ImageChange
	// EphemeralFlush makes a flush of an ephemeral disk reach storage.
	EphemeralFlush bool
	// Owner identifies this daemon among others with the same work directory. It must not change
	// with a restart: a daemon removes only its own disks when their images are gone.
	Owner string

	TargetName string      // iSCSI name; "": target.DefaultTargetName
	Portals    []Address   // where initiators log in; none: iSCSI is off
	NBD        []NBDPortal // where clients of NBD connect; none: NBD is off
	// VhostUserDir has a socket for vhost-user for each disk; "": vhost-user is off
	VhostUserDir string
	NBDTLS       NBDTLS      // zero: clients of NBD connect by Unix sockets and on loopback only
	Hook         *Hook       // nil: it is no hook of KubeVirt
	BehindNAT    bool        // clients reach the portals at other addresses
	CHAP         chap.Config // zero: initiators need not authenticate
	Limits       target.Limits
	Memory       int64 // bytes that peers may make the daemon keep; 0: see serving.Config

	Volumes *Volumes // nil: none can be made
	// UnpackMemory is how far back compressed data may refer, in an upload or in an image that has
	// to be fetched before it is served: see package unpack. 0: its default. Bytes.
	UnpackMemory int64

	Pages *Address // of /metrics, /healthz, /readyz and /status; nil: none
	// PagesHosts are more names of hosts in requests for the pages.
	PagesHosts []string
	// PagesOptional serves disks even if the port of the pages is taken.
	PagesOptional bool
	ReadyFile     string // exists while the LUNs can be used; "": none
	ControlSocket string // path; "": none
	// OwnSocket is a control socket in a directory of this daemon alone. "": none.
	OwnSocket string
	// RecordBoot is a file for the first reads of guests. "": none.
	RecordBoot string

	Build status.Build // of this binary
	Log   *zap.Logger  // nil: no log
	// Table returns the settings for fields of these or of other options, always in the same order.
	// Messages name settings by it, and Reload compares those of disks.
	Table func(*Options) []Setting
}

// Streams are images in registries that are served without fetching them first.
type Streams struct {
	References []transport.Reference // in the order of their LUNs, without duplicates
	Registry   transport.Options     // Warn and Gate are the daemon's
	Signatures signature.Options     // that images must have, those of Containers, too
	// for fetched chunks; several daemons may share it; made if it is missing
	CacheDir  string
	CacheSize int64 // bytes; 0: no limit
	// WhenComplete serves layers without chunk digests before they are verified. They are verified
	// when they are complete, and a LUN fails if its content was wrong.
	WhenComplete bool
}

// Containers are container images that become bootable disks. Each is a LUN, after the LUNs of the
// streams. The registry options are those of Streams.
type Containers struct {
	References []transport.Reference // in the order of their LUNs, each once
	// Dir keeps the levels of the disks. They count towards the size of the cache. Several daemons
	// may share it. It is made if it is missing.
	Dir string
	// Machine changes how each image is run.
	Machine machine.Options
}

// Remotes are disks of other servers that this daemon relays.
type Remotes struct {
	Disks []Remote // each once
	// Cert, Key and ServerCA are PEM files of TLS, read at each connection. "": the daemon shows no
	// certificate, and trusts the authorities of the system.
	Cert, Key, ServerCA string
}

// Remote is the place of another server's disk, as in nbd.URI.
type Remote struct {
	Address string
	Host    string
	Export  string
	TLS     bool
}

// Remote reports whether the options name images or disks that are not on this machine.
func (o *Options) Remote() bool {
	return len(o.Streams.References)+len(o.Containers.References)+len(o.Remotes.Disks) > 0
}

// mostKept is the most memory of another server's disk for changes that the server may lose.
const mostKept = 16 << 20

// MemoryFor divides the limit of memory, in bytes. Requests of clients have one part of it. Each
// disk of another server has a part of its own for acknowledged writes that are not durable there.
// So a server that is away delays no other disk. All of these have at most half of the limit.
func (o *Options) MemoryFor() (requests int64, eachRemote int) {
	all, n := cmp.Or(o.Memory, serving.DefaultMemory), int64(len(o.Remotes.Disks))
	if n == 0 {
		return all, 0
	}
	each := min(mostKept, all/2/n)
	return all - n*each, int(each)
}

// Volumes are the options for volumes on demand. Listen is required.
type Volumes struct {
	Listen Address
	Access server.Access // who may send requests
	// Dir keeps the volumes; it is made if it is missing. "": volumesName in the persistent
	// directory, or in the work directory if there is none.
	Dir string
	// Portal is the address of the LUNs, as HOST:PORT. "": the portal's own, or the address at
	// which a client has connected to the daemon.
	Portal   string
	Max      int               // volumes at once; 0: no limit
	MaxBytes int64             // of all of them; 0: no limit
	Claims   map[string]string // directories of claims, by their names
	// URLs are prefixes of addresses from which disks may be fetched. None: no address.
	URLs []transport.Prefix
}

// NBDPortal is a portal for clients of NBD: a Unix socket, or an address.
type NBDPortal struct {
	Socket  string // path; "": Address
	Address Address
}

func (p NBDPortal) String() string {
	if p.Socket != "" {
		return serving.SocketPrefix + p.Socket
	}
	return p.Address.String()
}

// Answer is the file next to a hook's Unix socket with the hook's answer to KubeVirt's launcher:
// that the machine has the disks, or why they are refused for as long as the pod lives.
func (p NBDPortal) Answer() string { return resolved(p.Socket) + ".answer" }

// NBDTLS are the TLS files (PEM) for the portals of NBD that are addresses. They are read again
// when they change.
type NBDTLS struct {
	Cert, Key string // of the server
	ClientCA  string // the authorities for the certificates of clients
}

// Images are the images that are served from the start: those of a directory, or named ones.
type Images struct {
	Dir   string   // every image in it, sorted naturally
	Named bool     // a person has named Dir, so it must exist
	Paths []string // instead of those of Dir, in this order
}

// Resolve fills in defaults and refuses missing options.
func (o *Options) Resolve() error {
	switch {
	case o.Images.Dir == "" && len(o.Images.Paths) == 0 && o.Volumes == nil &&
		len(o.Remotes.Disks) == 0:
		return errors.New("there is nothing to serve: name images, or their directory")
	case o.WorkDir == "":
		return errors.New("there is no work directory")
	case len(o.Portals)+len(o.NBD) == 0 && o.VhostUserDir == "":
		return errors.New("there is no portal")
	case o.Table == nil:
		return errors.New("there is no table of settings")
	}
	references := len(o.Streams.References) + len(o.Containers.References)
	switch {
	case len(o.Containers.References) > 0 && o.Containers.Dir == "":
		return errors.New("there is no directory for the levels of container images")
	case (references > 0 || o.Volumes != nil) && o.Streams.CacheDir == "":
		return errors.New("there is no directory for what is fetched from registries")
	}
	o.TargetName = cmp.Or(o.TargetName, target.DefaultTargetName)
	o.Log = cmp.Or(o.Log, zap.NewNop())
	return nil
}

// Address is an address to listen on.
type Address struct {
	Addr netip.Addr // zero: every address of the machine
	Port uint16     // 0: a free one
}

func (a Address) String() string {
	host := ""
	if a.Addr.IsValid() {
		host = a.Addr.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(int(a.Port)))
}

// Loopback says that only this machine (or this pod) can reach the address.
func (a Address) Loopback() bool { return a.Addr.IsValid() && a.Addr.IsLoopback() }

// Network returns the network for net.Listen, given all addresses to listen on. 0.0.0.0 and [::]
// side by side are each bound for their own family. [::] alone takes IPv4 too, as is usual on
// Linux.
func (a Address) Network(all []Address) string {
	other4 := func(o Address) bool { return o.Addr.Is4() && o.Port == a.Port }
	switch {
	case !a.Addr.IsValid():
		return "tcp"
	case a.Addr.Is4():
		return "tcp4"
	case a.Addr.IsUnspecified() && !slices.ContainsFunc(all, other4):
		return "tcp"
	}
	return "tcp6"
}

// Reachable replaces the wildcard address by one that a client on this machine can use.
func Reachable(address string) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	switch host {
	case "0.0.0.0", "":
		host = "127.0.0.1"
	case "::":
		host = "::1"
	}
	return net.JoinHostPort(host, port)
}
