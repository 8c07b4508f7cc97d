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

// Client asks the daemon at a socket. Besides the errors of this package it returns those of the
// connection and of the context: context.DeadlineExceeded if the daemon does not answer in time.
type Client struct {
	Socket string
	// OwnIsInit says that the first process of this container is a daemon. The client then asks
	// only that one. Containers that share a work directory share the default socket, which belongs
	// to the first daemon, and that daemon would hand over its own LUN of the same number.
	OwnIsInit bool
}

// Handover asks for a step of a handover. It returns a sentence for a person that says what was
// done.
func (c Client) Handover(ctx context.Context, req Handover) (done string, err error) {
	var reply handoverAnswer
	err = c.ask(ctx, http.MethodPost, pathHandover, req, &reply)
	return reply.Done, err
}

// Sessions returns the sessions, oldest first.
func (c Client) Sessions(ctx context.Context) ([]target.SessionInfo, error) {
	var reply sessionsAnswer
	err := c.ask(ctx, http.MethodGet, pathSessions, nil, &reply)
	return reply.Sessions, err
}

// Kick ends sessions and returns them.
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
			err = failed.Err // without the URL, which says nothing here
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
		return nil, named(err, c.Socket)
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
