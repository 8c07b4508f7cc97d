package target

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/serving"
)

// DefaultTargetName is the name that the original wrapper served. Callers still log in to it.
const DefaultTargetName = "iqn.2017-01.io.kubevirt:wrapper"

// Options configure a Server. The zero value of every field but Disks works.
type Options struct {
	TargetName string // iSCSI name; default DefaultTargetName

	// HidePortals says that initiators reach the listeners at other addresses than their own. Then
	// SendTargets names no address, and an initiator logs in at the address that it has asked.
	HidePortals bool

	// Disks are served as LUNs, each under its number, which is not 0. The server must be made
	// before the first disk is added.
	Disks *serving.Disks

	Auth *chap.Authenticator // nil: initiators need not authenticate
	Log  *zap.Logger         // nil: no log

	Limits Limits
}

// MostConnections is the maximum of Limits.MaxConnections: each session has its own TSIH of 16
// bits, which is not 0 (RFC 7143 11.13.3).
const MostConnections = 1<<16 - 1

// Limits bound what peers can cost the server. Zero fields take the default.
type Limits struct {
	// sessions at once, each of which has one connection; default 1024, at most MostConnections
	MaxConnections int
	// MaxPerAddress is how many sessions may come from one IPv4 address or one 64-bit network of
	// IPv6. Default 256.
	MaxPerAddress int
	// MaxPendingLogins is how many connections may exist that have not logged in, in addition to
	// the sessions. One more pushes another one out. Default 256.
	MaxPendingLogins int
	// LoginDelay is the longest delay of a login from an address whose logins or sessions have
	// failed several times within the last minute. Default 2 s.
	LoginDelay time.Duration
	// CommandWindow is how many commands a session may have in flight. If there are so many
	// sessions that their open commands would take more than a quarter of serving.Config.Memory, it
	// is fewer, but at least 8. Default 128.
	CommandWindow int
	LoginTimeout  time.Duration // from accept to full feature phase; default 15 s
	PDUTimeout    time.Duration // from the first byte of a PDU to its last; default 30 s
	NOPInterval   time.Duration // silence after which a peer is pinged; default 15 s
	NOPTimeout    time.Duration // silence after a ping that means the peer is dead; default 30 s
}

const (
	defaultMaxConnections   = 1024
	defaultMaxPerAddress    = 256
	defaultMaxPendingLogins = 256
	defaultLoginDelay       = 2 * time.Second
	defaultCommandWindow    = 128
	defaultLoginTimeout     = 15 * time.Second
	defaultPDUTimeout       = 30 * time.Second
	defaultNOPInterval      = 15 * time.Second
	defaultNOPTimeout       = 30 * time.Second
)

func orDefault[T int | time.Duration](v *T, def T) error {
	if *v < 0 {
		return fmt.Errorf("is %v, and cannot be negative", *v)
	}
	if *v == 0 {
		*v = def
	}
	return nil
}

// resolve fills in defaults and refuses contradictions. New calls it once.
func (o *Options) resolve() error {
	o.TargetName = cmp.Or(o.TargetName, DefaultTargetName)
	o.Log = cmp.Or(o.Log, zap.NewNop())
	if o.Disks == nil {
		return errors.New("a target needs the disks that it serves")
	}
	return o.Limits.resolve()
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
		{"LoginTimeout", orDefault(&l.LoginTimeout, defaultLoginTimeout)},
		{"PDUTimeout", orDefault(&l.PDUTimeout, defaultPDUTimeout)},
		{"NOPInterval", orDefault(&l.NOPInterval, defaultNOPInterval)},
		{"NOPTimeout", orDefault(&l.NOPTimeout, defaultNOPTimeout)},
	} {
		if e.err != nil {
			return fmt.Errorf("limit %s %w", e.name, e.err)
		}
	}
	if l.MaxConnections > MostConnections {
		return fmt.Errorf("limit MaxConnections is %d, but there are handles for %d sessions",
			l.MaxConnections, MostConnections)
	}
	return nil
}
