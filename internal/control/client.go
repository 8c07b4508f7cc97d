package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/status"
)

// timeout is longer than it should take to abort commands on a slow disk.
const timeout = 30 * time.Second

var (
	// ErrStranger says that the socket belongs to the daemon of another container, although this
	// container has a daemon of its own.
	ErrStranger = errors.New("the socket belongs to another container's daemon")
	// ErrUnknown says that the daemon does not know the request.
	ErrUnknown = errors.New("the daemon does not know what was asked")
)

// RefusedError says that the daemon refused a request.
type RefusedError struct{ Reason string }

func (e *RefusedError) Error() string { return e.Reason }

// AnswerError says that the answer did not come from a daemon of this program.
type AnswerError struct{ Err error }

func (e *AnswerError) Error() string {
	return fmt.Sprintf("cannot understand the daemon's answer: %v", e.Err)
}
func (e *AnswerError) Unwrap() error { return e.Err }

// Client makes requests to the daemon at a socket. Its methods return errors of this package, of
// the connection and of the context: context.DeadlineExceeded if the daemon does not answer in
// time.
type Client struct {
	Socket string
	// OwnIsInit says that the first process of this container is a daemon. Then the client uses
	// only that one. Containers that share a work directory share the default socket, which belongs
	// to the first daemon, and that daemon would hand over its own LUN of the same number.
	OwnIsInit bool

	pid *int // set to the process at the other end; nil: not needed
}

// Handover requests a step of a handover. It returns a sentence for a person that says what was
// done.
func (c Client) Handover(ctx context.Context, req status.Handover) (done string, err error) {
	var reply status.HandoverAnswer
	err = c.ask(ctx, http.MethodPost, status.PathHandover, req, &reply)
	return reply.Done, err
}

// Status returns the content of the page /status, also while the daemon starts. pid is the daemon's
// process, or 0 if it is not visible in this container.
func (c Client) Status(ctx context.Context) (now status.Status, pid int, err error) {
	c.pid = &pid
	err = c.ask(ctx, http.MethodGet, status.PathStatus, nil, &now)
	return now, pid, err
}

// Sessions returns the sessions, oldest first.
func (c Client) Sessions(ctx context.Context) ([]status.Session, error) {
	var reply status.SessionsAnswer
	err := c.ask(ctx, http.MethodGet, status.PathSessions, nil, &reply)
	return reply.Sessions, err
}

// Kick ends sessions and returns them.
func (c Client) Kick(ctx context.Context, req status.Kick) ([]status.Session, error) {
	var reply status.KickAnswer
	err := c.ask(ctx, http.MethodPost, status.PathKick, req, &reply)
	return reply.Ended, err
}

// Snapshots returns the snapshots of a disk, or of all disks for "".
func (c Client) Snapshots(ctx context.Context, disk string) ([]status.Snapshot, error) {
	var reply status.SnapshotsAnswer
	path := status.PathSnapshots + "?" + url.Values{"disk": {disk}}.Encode()
	err := c.ask(ctx, http.MethodGet, path, nil, &reply)
	return reply.Snapshots, err
}

// Snapshot changes the snapshots of a disk. It returns a sentence for a person that says what was
// done.
func (c Client) Snapshot(ctx context.Context, req status.SnapshotRequest) (done string, err error) {
	var reply status.SnapshotAnswer
	err = c.ask(ctx, http.MethodPost, status.PathSnapshots, req, &reply)
	return reply.Done, err
}

// OwnSnapshot takes a snapshot that the daemon deletes when this process ends, unless the process
// has deleted it. A daemon that does not see the process, in another container, or an older one,
// keeps it.
func (c Client) OwnSnapshot(ctx context.Context, disk, name string) error {
	return c.ask(ctx, http.MethodPost, status.PathSnapshots+"?"+whileAlive, status.SnapshotRequest{
		Action: status.SnapshotCreate, Disks: []string{disk}, Name: name},
		new(status.SnapshotAnswer))
}

// ask sends a request and decodes the answer into reply.
func (c Client) ask(ctx context.Context, method, endpoint string, req, reply any) error {
	body, err := json.Marshal(req)
	if err != nil {
		return err
	}
	t := c.transport()
	defer t.CloseIdleConnections()
	return askBy(ctx, t, method, endpoint, body, func(body io.Reader) error {
		return json.NewDecoder(body).Decode(reply)
	})
}

// transport connects to the daemon.
func (c Client) transport() *http.Transport {
	return &http.Transport{
		MaxIdleConnsPerHost: readsAtOnce,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return c.dial(ctx)
		},
	}
}

// askBy sends a request, and reads the answer with read.
func askBy(ctx context.Context, by http.RoundTripper, method, endpoint string, body []byte,
	read func(body io.Reader) error) error {
	ctx, stop := context.WithTimeout(ctx, timeout)
	defer stop()
	httpReq, err := http.NewRequestWithContext(ctx, method, "http://daemon"+endpoint,
		bytes.NewReader(body))
	if err != nil {
		return err
	}
	res, err := (&http.Client{Transport: by}).Do(httpReq)
	if err != nil {
		if failed, ok := errors.AsType[*url.Error](err); ok {
			err = failed.Err // without the URL, which is of no use here
		}
		return err
	}
	defer res.Body.Close()
	switch res.StatusCode {
	case http.StatusOK:
		err = read(res.Body)
	case http.StatusNotFound:
		return ErrUnknown
	default:
		var refused status.Refusal
		if err = json.NewDecoder(res.Body).Decode(&refused); err == nil {
			if res.StatusCode == http.StatusServiceUnavailable {
				return fmt.Errorf("%w: %s", disk.ErrNotNow, refused.Error)
			}
			return &RefusedError{Reason: refused.Error}
		}
	}
	if err != nil && ctx.Err() == nil {
		return &AnswerError{err}
	}
	return err
}

func (c Client) dial(ctx context.Context) (net.Conn, error) {
	conn, err := socket.DialUnix(ctx, c.Socket)
	if err != nil {
		return nil, err
	}
	peer := socket.Peer(conn)
	if err := c.checkDaemon(peer); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	if c.pid != nil && peer != nil {
		*c.pid = int(peer.Pid)
	}
	return conn, nil
}

func (c Client) checkDaemon(peer *unix.Ucred) error {
	if c.OwnIsInit && peer != nil && peer.Pid != 1 {
		return ErrStranger
	}
	return nil
}
