package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// What the control socket can be asked.
const (
	pathHandover = "/handover"
	pathSessions = "/sessions"
	pathKick     = "/kick"
)

// controlTimeout is longer than the abort of commands on a slow disk should take.
const controlTimeout = 30 * time.Second

// strangerError is a control socket of another daemon than the one of this container.
type strangerError struct{ socket string }

func (e *strangerError) Error() string {
	return fmt.Sprintf("%q is the socket of a daemon in another container, which has the same work directory, "+
		"and its LUNs are not those of this one: "+
		"give the daemon of this container another %s", e.socket, nameOf(keyControlSocket))
}

// checkDaemon refuses the daemon of another container where this one has its own, as that one's LUN
// of the same number would be handed over. Containers that share a work directory share the default
// socket, which is that of whoever came first.
func checkDaemon(socket string, peer *unix.Ucred, ownIsInit bool) error {
	if ownIsInit && peer != nil && peer.Pid != 1 {
		return &strangerError{socket}
	}
	return nil
}

// controlClient asks the daemon through its control socket.
type controlClient struct {
	pending string // what the daemon does that has not answered in time, for people
}

// explain says what to do where a daemon could not be asked, or has not answered.
func (c controlClient) explain(err error, path string) error {
	var stranger *strangerError
	switch {
	case errors.As(err, &stranger):
		return stranger
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("the daemon at %q has not answered in time, and %s", path, c.pending)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("user %d may not ask at %q: a daemon obeys its own user and root: %w",
			os.Geteuid(), path, withoutURL(err))
	}
	return fmt.Errorf("no daemon answers at %q: %w: is it running, with the same %s or %s?",
		path, withoutURL(err), nameOf(keyWorkDir), nameOf(keyControlSocket))
}

// ask sends a request to the control socket at a path, and reads the answer into reply.
func (c controlClient) ask(ctx context.Context, path, method, endpoint string,
	req, reply any) error {
	ctx, stop := context.WithTimeout(ctx, controlTimeout)
	defer stop()
	body, err := json.Marshal(req)
	if err != nil {
		return err
	}
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialControl(ctx, path)
		},
	}}
	url := "http://daemon" + endpoint
	httpReq, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	res, err := client.Do(httpReq)
	if err != nil {
		return c.explain(err, path)
	}
	defer res.Body.Close()
	decoder := json.NewDecoder(res.Body)
	switch {
	case res.StatusCode == http.StatusOK:
		err = decoder.Decode(reply)
	case res.StatusCode == http.StatusNotFound:
		return fmt.Errorf("the daemon at %q does not know what was asked: is it of another version?",
			path)
	default:
		var refused controlError
		if err = decoder.Decode(&refused); err == nil {
			return errors.New(explainInitiators(refused.Error))
		}
	}
	if err != nil {
		return fmt.Errorf("the daemon's answer is not understood: %w", err)
	}
	return nil
}

func dialControl(ctx context.Context, path string) (net.Conn, error) {
	dir, short, err := shortPath(path)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	c, err := new(net.Dialer).DialContext(ctx, "unix", short)
	if err != nil {
		return nil, err
	}
	if err := checkDaemon(path, peerOf(c), daemonIsInit()); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}
