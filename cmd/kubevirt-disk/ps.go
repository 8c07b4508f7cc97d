package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/status"
)

// runningDaemon is a daemon of this user, as it describes itself.
type runningDaemon struct {
	PID    int           `json:"pid,omitempty"` // 0: this container does not see the process
	Socket string        `json:"socket"`
	Status status.Status `json:"status"`
	Error  string        `json:"error,omitempty"` // why it does not describe itself
}

// answerTime is how long a daemon may take to describe itself while a person waits for several.
const answerTime = 3 * time.Second

// daemons asks all daemons of this user at once. It leaves out those that have ended meanwhile.
func daemons(ctx context.Context) []runningDaemon {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	sockets := control.Sockets()
	asked := make([]*runningDaemon, len(sockets))
	var all sync.WaitGroup
	for i, socket := range sockets {
		all.Go(func() {
			d := &runningDaemon{Socket: socket}
			var err error
			d.Status, d.PID, err = daemonAt(socket).Status(ctx)
			switch {
			case err == nil:
			case ctx.Err() != nil:
				d.Error = "does not answer"
			default: // it has ended, is about to serve its socket, or is in another container
				return
			}
			asked[i] = d
		})
	}
	all.Wait()
	var found []runningDaemon
	for _, d := range asked {
		if d != nil {
			found = append(found, *d)
		}
	}
	slices.SortFunc(found, func(a, b runningDaemon) int {
		return cmp.Or(a.Status.StartedAt.Compare(b.Status.StartedAt),
			cmp.Compare(a.Socket, b.Socket))
	})
	return found
}

// describe identifies the daemon in one line.
func (d *runningDaemon) describe() string {
	var disks []string
	for _, l := range d.Status.LUNs {
		disks = append(disks, l.Image)
	}
	text := fmt.Sprintf("PID %d", d.PID)
	switch {
	case d.Error != "":
		text += ", " + d.Error
	case len(disks) > 3:
		text += fmt.Sprintf(", %s and %d more", strings.Join(disks[:3], ", "), len(disks)-3)
	case len(disks) > 0:
		text += ", " + strings.Join(disks, ", ")
	}
	return console.OneLine(text)
}

func (a *app) psCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ps",
		Short: "List the daemons of this user, and what their disks are doing",
		Long: `Lists the running daemons (serve) of this user, and the state and the owner of each
of their disks. A daemon is found by the runtime directory: kubevirt-disk in $XDG_RUNTIME_DIR, or
else in /run/user/UID, /run (root) or $TMPDIR. A daemon without a control socket is not listed.

The commands sessions, kick, snapshot, commit and handover find a daemon in the same way, if there
is one. If there are several, name the socket of one, as ps shows it, with --control-socket.

Exit status 0: done, even if there is no daemon.`,
		Args: usageArgs(noArgs),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print all that /status has of each")
	cmd.RunE = running(func(cmd *cobra.Command, _ []string) error {
		all := daemons(cmd.Context())
		if asJSON {
			return console.WriteJSON(a.stdout, append([]runningDaemon{}, all...))
		}
		return a.printDaemons(all)
	})
	return cmd
}

func (a *app) printDaemons(all []runningDaemon) error {
	if len(all) == 0 {
		_, err := fmt.Fprintln(a.stdout, "no daemon of this user is running")
		return err
	}
	table := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "PID\tLUN\tDISK\tSIZE\tSTATE\tOWNER\tSOCKET")
	for _, d := range all {
		row := func(lun, disk, size, state, owner string) {
			fmt.Fprintf(table, "%d\t%s\t%s\t%s\t%s\t%s\t%s\n", d.PID, lun, console.OneLine(disk),
				size, console.OneLine(state), cmp.Or(console.OneLine(owner), "-"), d.Socket)
		}
		if len(d.Status.LUNs) == 0 {
			row("-", "-", "-", cmp.Or(d.Error, string(d.Status.State)), "")
		}
		for _, l := range d.Status.LUNs {
			row(fmt.Sprint(l.LUN), l.Image, console.ShortSize(l.SizeBytes), stateOf(&l), l.Owner)
		}
	}
	return table.Flush()
}

// stateOf is the state of a disk, and its reason.
func stateOf(l *status.LUN) string {
	if l.Reason != "" {
		return l.State.Words() + ": " + l.Reason
	}
	return l.State.Words()
}

// asker asks the daemon that the settings of a command name, or the only one of this user, through
// its control socket.
type asker struct {
	a    *app
	cmd  *cobra.Command
	c    *config
	rows []settings.Setting
}

// asker adds the settings with which a command finds the daemon.
func (a *app) asker(cmd *cobra.Command) *asker {
	c := newConfig()
	q := &asker{a: a, cmd: cmd, c: c,
		rows: settings.Pick(c.settings(), keyControlSocket, keyWorkDir)}
	settings.AddFlags(cmd.Flags(), q.rows)
	return q
}

// socket returns the path of the control socket. If no setting names it, it is that of this user's
// daemon, or else the usual one. check may add other errors of the command line.
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

// found returns the socket of the only daemon of this user, or other if there is none.
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

// stillBusy describes a daemon that has not answered a question.
const stillBusy = "may be busy: ask again"

func daemonAt(socket string) control.Client {
	return control.Client{Socket: socket, OwnIsInit: daemonIsInit()}
}

// explainControl says what to do when a daemon could not be asked, did not answer or refused.
// pending describes what a daemon that did not answer in time may still be doing.
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
	case errors.Is(err, io.EOF), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE),
		strings.Contains(err.Error(), "server closed idle connection"): // of net/http
		return fmt.Errorf("the daemon at %q has ended before it answered: look at its log, and, "+
			"when it runs again, whether it has done what it was asked for", socket)
	}
	return fmt.Errorf("no daemon answers at %q: %w: is it running, with the same %s or %s?",
		socket, err, nameOf(keyWorkDir), nameOf(keyControlSocket))
}

// qemuDefault begins the initiator name that QEMU uses if none is configured. The UUID or the name
// of its machine follows.
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
