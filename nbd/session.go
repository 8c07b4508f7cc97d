package nbd

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/serving"
)

// A client that connects again after its connection broke does not know which requests the server
// still executes. If it repeated a write, and then wrote something else there, the former write
// could come late and undo the latter. A session prevents that, as iSCSI's do (RFC 7143 6.3.5):
// when a connection of a session begins, the former one ends first, with all its requests. The
// protocol has no sessions, but it lets vendors define metadata contexts. So a client asks for a
// context whose name begins with sessionContext. The answer is a context whose name says which disk
// the export is, and in which state. GO is refused if that is no longer true.
//
// Sessions of one name, such as those of relays with the same certificate, are incarnations of it:
// see serving.Client.TakeOver. A client that also asks for migrationTargetContext is the target of
// a live migration, and gets the same name as the answer. A superseded session is refused with
// NBD_REP_ERR_POLICY.

const (
	// The rest of the query is the session's name, which the client draws.
	sessionContext = "x-kubevirt-disk:session="
	// The rest of the answer is a diskInfo.
	diskContext = "x-kubevirt-disk:disk="
	// The name on the wire is that of earlier versions.
	migrationTargetContext = "x-kubevirt-disk:heir"
	// maxSession is the longest name of a session, in bytes.
	maxSession = 64
)

// diskInfo is the description of a disk for a session.
type diskInfo struct {
	identity   disk.Identity
	boot       string // names the server's use of the disk: see serving.Disk.Generation
	generation string // names its content; "": the disk cannot be written
	shared     bool   // others may write the disk at the same time
	last       bool   // nobody has used the disk since the session did
}

// diskInfoOf returns the description of a disk for a session. name is the name of its client.
func diskInfoOf(d *serving.Disk, name, session string) (t diskInfo, err error) {
	t = diskInfo{identity: d.Identity, boot: d.Boot, shared: d.WrittenByMany(),
		last: d.LastUsedBy(name, session)}
	t.generation, err = d.Generation()
	return t, err
}

func (t diskInfo) encode() string {
	flags := ""
	if t.shared {
		flags += "s"
	}
	if t.last {
		flags += "l"
	}
	return diskContext + strings.Join([]string{hex.EncodeToString(t.identity.NAA[:]), t.boot,
		t.generation, flags, t.identity.Serial}, ",")
}

func decodeDiskInfo(s string) (t diskInfo, err error) {
	rest, ok := strings.CutPrefix(s, diskContext)
	parts := strings.SplitN(rest, ",", 5)
	if !ok || len(parts) != 5 {
		return t, fmt.Errorf("the server does not say which disk the export is: %q", s)
	}
	b, err := hex.DecodeString(parts[0])
	if err != nil || len(b) != len(t.identity.NAA) || parts[1] == "" {
		return t, fmt.Errorf("the server does not say which disk the export is: %q", s)
	}
	copy(t.identity.NAA[:], b)
	t.boot, t.generation, t.identity.Serial = parts[1], parts[2], parts[4]
	t.shared, t.last = strings.Contains(parts[3], "s"), strings.Contains(parts[3], "l")
	return t, nil
}

// sessionIn returns the name of the session that a client asks for; "": none.
func sessionIn(queries []string) (string, error) {
	for _, q := range queries {
		name, ok := strings.CutPrefix(q, sessionContext)
		if !ok {
			continue
		}
		other := func(r rune) bool {
			return (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
		}
		if name == "" || len(name) > maxSession || strings.ContainsFunc(name, other) {
			return "", fmt.Errorf("the name of a session has 1 to %d letters and digits",
				maxSession)
		}
		return name, nil
	}
	return "", nil
}

// errSuperseded ends the connections of a superseded session, and refuses more of them.
var errSuperseded = disk.ErrMoved

// errChanged ends a connection because the description that its client got is no longer true.
var errChanged = errors.New("who may write the disk has changed, and the client is told when it " +
	"connects again")

// peer is the name under which the connections of one client are counted. Nobody can make up many.
func (c *conn) peer() string {
	if c.certified {
		return c.name
	}
	return c.name + " " + c.Source
}

// tlsCost is how many bytes a connection with TLS counts for in the limit of memory: buffers of
// crypto/tls for records in both directions.
const tlsCost = 32 << 10

// cost is how many bytes a connection counts for as long as it lasts.
func (c *conn) cost() int64 {
	if c.certified {
		return tlsCost
	}
	return 0
}
