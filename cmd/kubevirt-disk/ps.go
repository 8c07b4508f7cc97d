package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/status"
)

// runningDaemon is a daemon of this user, as it describes itself.
type runningDaemon struct {
	PID    int           `json:"pid,omitempty"` // 0: this container does not see the process
	Socket string        `json:"socket"`
	Status status.Status `json:"status"`
	Error  string        `json:"error,omitempty"` // why it does not say so
}

// answerTime is how long a daemon may take to say what it does, if a person waits for several.
const answerTime = 3 * time.Second

// daemons asks all daemons of this user at once. One that has ended meanwhile is none.
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
			default: // it has ended, begins to serve its socket, or is another container's
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

// describe says in a line which daemon it is.
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
		Long: `Lists the running daemons (serve) of this user, and the state and the owner of each of their
disks. A daemon is found by the runtime directory: kubevirt-disk in $XDG_RUNTIME_DIR, or else in
/run/user/UID, /run (root) or $TMPDIR. One without a control socket is not listed.

The commands sessions, kick, snapshot, commit and handover find a daemon in the same way, if there
is one. If there are several, name its socket, as ps shows it, with --control-socket.

Exit status 0: done, also if there is no daemon.`,
		Args: usageArgs(cobra.NoArgs),
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
			row(fmt.Sprint(l.LUN), l.Image, console.ShortSize(l.SizeBytes),
				stateOf(&l), l.Owner)
		}
	}
	return table.Flush()
}

// stateOf is what a disk is doing, and why.
func stateOf(l *status.LUN) string {
	if l.Reason != "" {
		return l.State.Words() + ": " + l.Reason
	}
	return l.State.Words()
}
