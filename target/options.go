package target

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/target/internal/scsi"
)

// DefaultTargetName is the name that the original wrapper served, and callers still log in to.
const DefaultTargetName = "iqn.2017-01.io.kubevirt:wrapper"

// AccessMode says which initiators may use a LUN at the same time.
type AccessMode = scsi.AccessMode

// The access modes.
const (
	AccessWriteExclusive = scsi.AccessWriteExclusive
	AccessWriteShared    = scsi.AccessWriteShared
	AccessReadShared     = scsi.AccessReadShared
)

// ParseAccessMode reads an access mode as the configuration spells it.
func ParseAccessMode(s string) (AccessMode, error) { return scsi.ParseAccessMode(s) }

// Store keeps what a logical unit must remember over a loss of power; that of an instance.Instance is one.
type Store = scsi.Store

// LUN is one disk and how it is served.
type LUN struct {
	Number    uint16        // 1 to 16383; unique within the target
	Name      string        // the image's name, for logs
	Disk      disk.Disk     // closed by the caller after the server has stopped, never by the server
	Identity  disk.Identity // unique per disk instance
	ReadOnly  bool          // writes end in DATA PROTECT
	Removable bool          // reported as a removable medium
	Access    AccessMode    // "" is write-exclusive
	Store     Store         // keeps mode pages and reservations that are to be saved, and the like; nil: nothing is kept, and nothing can be saved
	Volatile  bool          // a loss of power ends the disk, so that initiators cannot reserve it through one
	Grown     bool          // larger than at an earlier start: initiators get a capacity unit attention
}

// Options configure a Server. The zero value of every field but LUNs works.
type Options struct {
	TargetName     string // iSCSI name; default DefaultTargetName
	Alias          string // TargetAlias shown to initiators; default none
	PortalGroupTag uint16 // default 1

	LUNs  []LUN // that are served from the beginning; see Server.AddLUN
	Empty bool  // there need not be any from the beginning

	Auth     *chap.Authenticator // nil: initiators need not authenticate
	Observer Observer            // nil: nobody is told
	Log      *zap.Logger         // nil: no log

	// Vendor, Product and Revision appear in INQUIRY: at most 8, 16 and 4 ASCII characters.
	Vendor, Product, Revision string

	Limits Limits
}

// MostConnections is the most that Limits.MaxConnections can be: each session has a handle of its own, of 16 bits and not 0 (TSIH, RFC 7143 11.13.3).
const MostConnections = 1<<16 - 1

// Limits bound what peers can make the server hold or wait for. Zero fields take the default.
type Limits struct {
	MaxConnections int // sessions at once, each of which has one connection; default 1024, at most MostConnections
	// MaxPerAddress is how many of these come from one IPv4 address, or one 64-bit network of IPv6; default 256.
	MaxPerAddress int
	// MaxPendingLogins is how many connections at once have not logged in, besides those that have; one more pushes
	// another one out. Default 256.
	MaxPendingLogins int
	// LoginDelay is the longest that a login waits whose address has failed to authenticate several times within the
	// last minute; default 2 s.
	LoginDelay time.Duration
	// CommandWindow is how many commands a session may have in flight; fewer, but 8, when there are so
	// many sessions that their open commands would take more than a quarter of Memory. Default 128.
	CommandWindow int
	Memory        int64         // bytes of data and open commands of all sessions together; default 64 MiB
	LoginTimeout  time.Duration // from accept to full feature phase; default 15 s
	PDUTimeout    time.Duration // from the first byte of a PDU to its last; default 30 s
	NOPInterval   time.Duration // silence after which a peer is pinged; default 15 s
	NOPTimeout    time.Duration // silence after a ping that means the peer is dead; default 30 s
	// DistantTimeout is for how long a command is held that needs content of a disk.Distant, while
	// nothing of it comes. Then it ends with BUSY, and the initiator tries again. Default 10 min.
	DistantTimeout time.Duration
	// ImpatientTimeout is the same in a session whose initiator has aborted a command that was held:
	// it has a time limit of its own, and does worse to a disk that exceeds it again and again.
	// Default 25 s, which is below Linux's 30 s; never more than DistantTimeout.
	ImpatientTimeout time.Duration
}

const (
	defaultMaxConnections   = 1024
	defaultMaxPerAddress    = 256
	defaultMaxPendingLogins = 256
	defaultLoginDelay       = 2 * time.Second
	defaultCommandWindow    = 128
	defaultMemory           = 64 << 20
	defaultLoginTimeout     = 15 * time.Second
	defaultPDUTimeout       = 30 * time.Second
	defaultNOPInterval      = 15 * time.Second
	defaultNOPTimeout       = 30 * time.Second
	defaultDistantTimeout   = 10 * time.Minute
	defaultImpatientTimeout = 25 * time.Second

	maxLUNNumber = 16383 // flat space addressing, SAM-5 4.7.7
)

func orDefault[T int | int64 | time.Duration](v *T, def T) error {
	if *v < 0 {
		return fmt.Errorf("is %v, and cannot be negative", *v)
	}
	if *v == 0 {
		*v = def
	}
	return nil
}

// resolve fills in defaults and refuses contradictions, once.
func (o *Options) resolve() error {
	if o.TargetName == "" {
		o.TargetName = DefaultTargetName
	}
	if o.PortalGroupTag == 0 {
		o.PortalGroupTag = 1
	}
	if o.Observer == nil {
		o.Observer = nopObserver{}
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	if o.Vendor == "" {
		o.Vendor = "KUBEVIRT"
	}
	if o.Product == "" {
		o.Product = "DISK"
	}
	if o.Revision == "" {
		o.Revision = "1"
	}
	seen := make(map[uint16]string, len(o.LUNs))
	for i := range o.LUNs {
		l := &o.LUNs[i]
		if err := l.check(); err != nil {
			return err
		}
		if other, dup := seen[l.Number]; dup {
			return fmt.Errorf("LUN %d is given to both %s and %s", l.Number, other, l.Name)
		}
		seen[l.Number] = l.Name
	}
	if len(o.LUNs) == 0 && !o.Empty {
		return errors.New("a target needs at least one LUN")
	}
	return o.Limits.resolve()
}

func (l *LUN) check() error {
	switch {
	case l.Disk == nil:
		return fmt.Errorf("LUN %d (%s) has no disk", l.Number, l.Name)
	case l.Number == 0 || l.Number > maxLUNNumber:
		return fmt.Errorf("LUN %d (%s): a LUN number is 1 to %d", l.Number, l.Name, maxLUNNumber)
	}
	return nil
}

func (l *Limits) resolve() error {
	for _, e := range []struct {
		name string
		err  error
	}{
		{"MaxConnections", orDefault(&l.MaxConnections, defaultMaxConnections)},
		{"MaxPerAddress", orDefault(&l.MaxPerAddress, defaultMaxPerAddress)},
		{"MaxPendingLogins", orDefault(&l.MaxPendingLogins, defaultMaxPendingLogins)},
		{"LoginDelay", orDefault(&l.LoginDelay, defaultLoginDelay)},
		{"CommandWindow", orDefault(&l.CommandWindow, defaultCommandWindow)},
		{"Memory", orDefault(&l.Memory, int64(defaultMemory))},
		{"LoginTimeout", orDefault(&l.LoginTimeout, defaultLoginTimeout)},
		{"PDUTimeout", orDefault(&l.PDUTimeout, defaultPDUTimeout)},
		{"NOPInterval", orDefault(&l.NOPInterval, defaultNOPInterval)},
		{"NOPTimeout", orDefault(&l.NOPTimeout, defaultNOPTimeout)},
		{"DistantTimeout", orDefault(&l.DistantTimeout, defaultDistantTimeout)},
		{"ImpatientTimeout", orDefault(&l.ImpatientTimeout, defaultImpatientTimeout)},
	} {
		if e.err != nil {
			return fmt.Errorf("limit %s %w", e.name, e.err)
		}
	}
	if l.MaxConnections > MostConnections {
		return fmt.Errorf("limit MaxConnections is %d, and there are handles for %d sessions", l.MaxConnections, MostConnections)
	}
	return nil
}
