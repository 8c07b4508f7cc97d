package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/internal/control"
)

func (a *app) handoverCommand() *cobra.Command {
	var req control.Handover
	var finish, cancel bool
	var open time.Duration
	cmd := &cobra.Command{
		Use:   "handover --lun N (--to IQN [--for DURATION] | --finish | --cancel)",
		Short: "Let a second initiator take over a write-exclusive LUN, for a live migration",
		Long: `Lets a second initiator take over a LUN that only one may use, as a live migration needs it:

  1. handover --lun 1 --to IQN --for 5m    the machine that the guest goes to can log in, read and write
  2. the migration: the guest stops on the first machine and goes on on the second
  3. handover --lun 1 --finish             the first initiator is fenced: its commands end with RESERVATION CONFLICT
     or, where the migration failed, handover --lun 1 --cancel, and the second one is

When the time of --for is over, the LUN is handed over if the second initiator is logged in, and stays where it was otherwise.
Who is fenced stays so, also after a restart of the daemon or of the machine, until --to opens the LUN to that name again: for the
migration back, or before a guest that was shut down elsewhere is started there (--to, start it, --finish).
A restart in between leaves the LUN open, for the rest of the time and a minute at least.

An owner named iqn.2008-11.org.linux-kvm:UUID (or with a machine's name) is a QEMU that was given no name. Source and destination of a
migration have the same one then, are one initiator to the daemon, and cannot be handed over to each other: give each its own name.

The daemon is asked through its control socket, and obeys its own user and root only.

Exit status 0: done. 1: refused, with the reason, and nothing has changed; or the daemon has not answered in time, as its disk hangs, and
goes on with what was asked. The page /status tells who has a LUN, and who is fenced.`,
		Args: usageArgs(cobra.NoArgs),
	}
	keys := []string{keyControlSocket, keyWorkDir}
	addFlags(cmd.Flags(), keys...)
	cmd.Flags().Uint16Var(&req.LUN, "lun", 0, "`number` of the LUN")
	cmd.Flags().StringVar(&req.To, "to", "", "open the LUN to this `initiator` name too")
	cmd.Flags().DurationVar(&open, "for", 0, "how long it stays open, as 90s or 5m (default "+
		"until --finish or --cancel)")
	cmd.Flags().BoolVar(&finish, "finish", false,
		"make the second initiator the owner and fence the first")
	cmd.Flags().BoolVar(&cancel, "cancel", false, "close the LUN to the second initiator again")
	cmd.RunE = running(func(cmd *cobra.Command, _ []string) error {
		l := load(cmd.Flags(), keys...)
		socket := l.controlSocket()
		chosen := 0
		for action, on := range map[control.Action]bool{
			control.ActionOpen: req.To != "", control.ActionFinish: finish,
			control.ActionCancel: cancel,
		} {
			if on {
				req.Action = action
				chosen++
			}
		}
		switch {
		case req.LUN == 0:
			l.problems.Add("--lun", "is missing: name the LUN")
		case chosen != 1:
			l.problems.Add("handover", "give one of --to, --finish and --cancel")
		case open < 0 || open > 0 && req.Action != control.ActionOpen:
			l.problems.Add("--for", "goes with --to, and is not negative")
		case socket == "":
			l.problems.Add("--"+keyControlSocket, "is empty, so there is no daemon to ask")
		}
		if err := l.problems.Err(); err != nil {
			return err
		}
		req.Seconds = open.Seconds()
		done, err := daemonAt(socket).Handover(cmd.Context(), req)
		if err != nil {
			return explainControl(err, socket, handoverPending(req.LUN))
		}
		fmt.Fprintln(a.stdout, explainInitiators(done))
		return nil
	})
	return cmd
}

// handoverPending is what the daemon does that has not answered in time.
func handoverPending(lun uint16) string {
	return fmt.Sprintf("goes on with what was asked, as when its disk hangs: "+
		"see in /status who has LUN %d, or ask again", lun)
}
