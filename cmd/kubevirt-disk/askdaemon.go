package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"kubevirt.io/disk/internal/control"
)

// daemonAt returns a client of the daemon at a control socket.
func daemonAt(socket string) control.Client {
	return control.Client{Socket: socket, OwnIsInit: daemonIsInit()}
}

// explainControl says what to do when a daemon could not be asked, did not answer or refused. The
// argument pending says what a daemon that did not answer in time may still be doing.
func explainControl(err error, socket, pending string) error {
	var refused *control.RefusedError
	switch {
	case errors.As(err, &refused):
		return errors.New(explainInitiators(refused.Reason))
	case errors.As(err, new(*control.AnswerError)):
		return err
	case errors.Is(err, control.ErrUnknown):
		return fmt.Errorf(
			"the daemon at %q does not know this request: is it another version?", socket)
	case errors.Is(err, control.ErrStranger):
		return fmt.Errorf("%q is the socket of a daemon in another container, which has the same "+
			"work directory, and it serves other LUNs: give the daemon of this container another "+
			"%s", socket, nameOf(keyControlSocket))
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("the daemon at %q has not answered in time, and %s", socket, pending)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("user %d may not use the socket %q: the daemon accepts only its own "+
			"user and root: %w",
			os.Geteuid(), socket, err)
	}
	return fmt.Errorf("no daemon answers at %q: %w: is it running, with the same %s or %s?",
		socket, err, nameOf(keyWorkDir), nameOf(keyControlSocket))
}
