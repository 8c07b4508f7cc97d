package nbd

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"kubevirt.io/disk/disk"
)

// A client that connects again after its connection broke does not know which requests the server
// still executes. If it repeated a write, and then wrote something else there, the former write
// could come late and undo that. A session prevents it, as iSCSI's do (RFC 7143 6.3.5): when a
// connection of a session begins, the former one ends first, with all its requests. The protocol
// has nothing of the kind, but metadata contexts of a vendor: a client asks for one whose name
// begins with sessionContext, and gets one whose name tells which disk the export is.
//
// Sessions of one name, such as those of relays with the same certificate, are incarnations of it:
// see serving.Disks.AttachIncarnation. Whoever also asks for heirContext is an heir, and gets the
// same name as the answer. A session that is over is refused with NBD_REP_ERR_POLICY.

const (
	// The rest of the query is the session's name, which the client has drawn.
	sessionContext = "x-kubevirt-disk:session="
	// The rest of the answer is what identifies the disk.
	identityContext = "x-kubevirt-disk:disk="
	heirContext     = "x-kubevirt-disk:heir"
	// maxSession is the longest name of a session, in bytes.
	maxSession = 64
	// reinstateTime is how long a client waits for the requests of the former connection. It may
	// try again.
	reinstateTime = 20 * time.Second
)

func encodeIdentity(id disk.Identity) string {
	return identityContext + hex.EncodeToString(id.NAA[:]) + "," + id.Serial
}

func decodeIdentity(s string) (id disk.Identity, err error) {
	rest, ok := strings.CutPrefix(s, identityContext)
	naa, serial, both := strings.Cut(rest, ",")
	b, err := hex.DecodeString(naa)
	if !ok || !both || err != nil || len(b) != len(id.NAA) {
		return id, fmt.Errorf("the server does not say which disk the export is: %q", s)
	}
	copy(id.NAA[:], b)
	id.Serial = serial
	return id, nil
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

// errOver ends the connections of a session, and refuses more of them.
var errOver = errors.New("another session of this name has taken the disk over")

// errReinstated ends a connection in favour of a newer one of its session.
var errReinstated = errors.New("a newer connection of its session has replaced it")

// reinstate ends the other connections of the session, and waits for their requests.
func (c *conn) reinstate() error {
	s := c.srv
	s.mu.Lock()
	var former []*conn
	if c.sessionName != "" {
		former = s.allLocked(func(o *conn) bool {
			return o != c && o.sessionName == c.sessionName && o.disk == c.disk &&
				o.name == c.name
		})
	}
	s.mu.Unlock()
	if len(former) == 0 {
		return nil
	}
	for _, o := range former {
		o.fail(errReinstated)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, o := range former {
			o.loops.Wait()
		}
	}()
	select {
	case <-done:
		return nil
	case <-s.ctx.Done():
		return ErrServerClosed
	case <-time.After(reinstateTime):
		return errors.New("requests of the session's former connection have not ended yet: the " +
			"storage of the disk does not answer")
	}
}
