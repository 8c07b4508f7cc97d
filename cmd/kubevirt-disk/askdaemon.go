package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/internal/problems"
)

// asker asks the daemon that the settings of a command name, or the only one of this user, through
// its control socket.
type asker struct {
	a    *app
	cmd  *cobra.Command
	c    *config
	rows []settings.Setting
}

// asker adds the settings by which a command finds the daemon.
func (a *app) asker(cmd *cobra.Command) *asker {
	c := newConfig()
	q := &asker{a: a, cmd: cmd, c: c,
		rows: settings.Pick(c.settings(), keyControlSocket, keyWorkDir)}
	settings.AddFlags(cmd.Flags(), q.rows)
	return q
}

// socket returns the path of the control socket. If no setting names it, that is the one of this
// user's daemon, or else the usual one. check may add what else is wrong with the command line.
func (q *asker) socket(check func(*problems.List)) (string, error) {
	l := load(q.cmd.Flags(), q.rows)
	l.useHookWorkDir(q.c, kubevirtHook())
	socket := q.c.socket()
	if check != nil {
		check(&l.Problems)
	}
	if socket == "" {
		l.Problems.Add("--"+keyControlSocket, "is empty, so there is no daemon to ask")
	}
	if err := l.Problems.Err(); err != nil || l.Source(keyControlSocket) != "" ||
		l.Source(keyWorkDir) != "" {
		return socket, err
	}
	return q.found(socket)
}

// found returns the socket of the only daemon of this user, or another one if there is none.
func (q *asker) found(other string) (string, error) {
	all := daemons(q.cmd.Context())
	switch len(all) {
	case 0:
		return other, nil
	case 1:
		return all[0].Socket, nil
	}
	var b strings.Builder
	for _, d := range all {
		fmt.Fprintf(&b, "\n  --%s=%s  (%s)", keyControlSocket, d.Socket, d.describe())
	}
	return "", fmt.Errorf("%d daemons of this user are running: say which one is meant:%s",
		len(all), b.String())
}

// ask sends a request. pending: see explainControl.
func (q *asker) ask(check func(*problems.List), pending string,
	request func(control.Client) error) error {
	socket, err := q.socket(check)
	if err != nil {
		return err
	}
	return explainControl(request(daemonAt(socket)), socket, pending)
}

// stillBusy is what a daemon that has not answered a question may be.
const stillBusy = "may be busy: ask again"

// daemonAt returns a client of the daemon at a control socket.
func daemonAt(socket string) control.Client {
	return control.Client{Socket: socket, OwnIsInit: daemonIsInit()}
}

// explainControl says what to do when a daemon could not be asked, did not answer or refused. The
// argument pending says what a daemon that did not answer in time may still be doing.
func explainControl(err error, socket, pending string) error {
	var refused *control.RefusedError
	switch {
	case err == nil:
		return nil
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
			"user and root: %w", os.Geteuid(), socket, err)
	}
	return fmt.Errorf("no daemon answers at %q: %w: is it running, with the same %s or %s?",
		socket, err, nameOf(keyWorkDir), nameOf(keyControlSocket))
}

// qemuDefault begins the initiator name that QEMU uses if it gets none. The UUID or the name of its
// machine follows.
const qemuDefault = "iqn.2008-11.org.linux-kvm"

// explainInitiators explains the default initiator names in a message.
func explainInitiators(message string) string {
	if !strings.Contains(message, qemuDefault) {
		return message
	}
	return message + "\n" + qemuDefault + ":... is QEMU's default: the UUID or name of its " +
		"machine follows, which is the same on both sides of a live migration. Give each side a " +
		"name of its own (kubevirt-disk xml --initiator-name, or initiator-name of QEMU's -iscsi)"
}
