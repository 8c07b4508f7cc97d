package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/target"
)

// timeout is longer than the abort of commands on a slow disk should take.
const timeout = 30 * time.Second

var (
	// ErrStranger is a socket of another container's daemon, where this one has a daemon of its
	// own.
	ErrStranger = errors.New("the daemon is another container's")
	// ErrUnknown is a daemon that does not know what it was asked.
	ErrUnknown = errors.New("the daemon does not know what was asked")
)

// RefusedError is what a daemon was asked and has not done.
type RefusedError struct{ Reason string }

func (e *RefusedError) Error() string { return e.Reason }

// AnswerError is an answer that is none of a daemon.
type AnswerError struct{ Err error }

func (e *AnswerError) Error() string {
	return fmt.Sprintf("the daemon's answer is not understood: %v", e.Err)
}
func (e *AnswerError) Unwrap() error { return e.Err }

// Client asks the daemon at a socket. Its errors are, beside those of this package, the one of the
// context, which is context.DeadlineExceeded where the daemon does not answer in time, and those of
// the connection.
type Client struct {
	Socket string
	// OwnIsInit says that the first process of this container is a daemon. Then no other one is
	// asked, as that one's LUN of the same number would be handed over: containers that share a
	// work directory share the default socket, which is that of whoever came first.
	OwnIsInit bool
}

// Handover asks for a step of a handover, and returns what was done, for a person.
func (c Client) Handover(ctx context.Context, req Handover) (done string, err error) {
	var reply handoverAnswer
	err = c.ask(ctx, http.MethodPost, pathHandover, req, &reply)
	return reply.Done, err
}

// Sessions asks who is logged in, oldest first.
func (c Client) Sessions(ctx context.Context) ([]target.SessionInfo, error) {
	var reply sessionsAnswer
	err := c.ask(ctx, http.MethodGet, pathSessions, nil, &reply)
	return reply.Sessions, err
}

// Kick ends sessions, and returns those that have ended.
func (c Client) Kick(ctx context.Context, req Kick) ([]target.SessionInfo, error) {
	var reply kickAnswer
	err := c.ask(ctx, http.MethodPost, pathKick, req, &reply)
	return reply.Ended, err
}

// ask sends a request and reads the answer into reply.
func (c Client) ask(ctx context.Context, method, endpoint string, req, reply any) error {
	ctx, stop := context.WithTimeout(ctx, timeout)
	defer stop()
	body, err := json.Marshal(req)
	if err != nil {
		return err
	}
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return c.dial(ctx)
		},
	}}
	address := "http://daemon" + endpoint
	httpReq, err := http.NewRequestWithContext(ctx, method, address, bytes.NewReader(body))
	if err != nil {
		return err
	}
	res, err := client.Do(httpReq)
	if err != nil {
		var failed *url.Error
		if errors.As(err, &failed) {
			err = failed.Err // the address says nothing
		}
		return err
	}
	defer res.Body.Close()
	decoder := json.NewDecoder(res.Body)
	switch {
	case res.StatusCode == http.StatusOK:
		err = decoder.Decode(reply)
	case res.StatusCode == http.StatusNotFound:
		return ErrUnknown
	default:
		var refused refusal
		if err = decoder.Decode(&refused); err == nil {
			return &RefusedError{Reason: refused.Error}
		}
	}
	if err != nil {
		return &AnswerError{err}
	}
	return nil
}

func (c Client) dial(ctx context.Context) (net.Conn, error) {
	dir, short, err := shortPath(c.Socket)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", short)
	if err != nil {
		return nil, err
	}
	if err := c.checkDaemon(peerOf(conn)); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

func (c Client) checkDaemon(peer *unix.Ucred) error {
	if c.OwnIsInit && peer != nil && peer.Pid != 1 {
		return ErrStranger
	}
	return nil
}
