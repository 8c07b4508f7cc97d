package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/status"
)

func (a *app) handoverCommand() *cobra.Command {
	var req status.Handover
	var finish, cancel bool
	var open time.Duration
	cmd := &cobra.Command{
		Use:   "handover --lun N (--to IQN [--for DURATION] | --finish | --cancel)",
		Short: "Let a second initiator take over a write-exclusive LUN, for a live migration",
		Long: `Lets a second initiator take over a LUN that only one initiator may use. A live
migration needs this:

  1. handover --lun 1 --to IQN --for 5m    the destination machine can log in, read and write
  2. the migration: the guest stops on the source machine and continues on the destination
  3. handover --lun 1 --finish             the first initiator is fenced: its commands end with
                                           RESERVATION CONFLICT
     or, if the migration failed,
     handover --lun 1 --cancel             the second initiator is fenced

When the time of --for is over, the LUN is handed over if the second initiator is logged in.
Otherwise it stays with its owner. A restart in between leaves the LUN open for the rest of the
time, and for at least a minute.

An initiator stays fenced, also after a restart of the daemon or of the machine, until --to opens
the LUN to its name again. Do that for the migration back, or before you start a guest on that
machine again (--to, start the guest, --finish).

An owner named iqn.2008-11.org.linux-kvm:UUID (or with a machine's name) is a QEMU without an
initiator name of its own. The source and the destination of a migration then have the same name and
are one initiator to the daemon, so nothing can be handed over. Give each machine its own name.

The command asks the daemon through its control socket. The daemon obeys only its own user and root.

Exit status 0: done. 1: refused, with the reason, and nothing has changed; or the daemon has not
answered in time, for example because its disk hangs, and the handover may still happen. The page
/status tells who has a LUN, and who is fenced.`,
		Args: usageArgs(noArgs),
	}
	q := a.asker(cmd)
	cmd.Flags().Uint16Var(&req.LUN, "lun", 0, "`number` of the LUN")
	_ = cmd.RegisterFlagCompletionFunc("lun", q.completeFrom(lunsOf))
	cmd.Flags().StringVar(&req.To, "to", "", "open the LUN to this `initiator` name too")
	cmd.Flags().DurationVar(&open, "for", 0, "how long it stays open, as 90s or 5m (default "+
		"until --finish or --cancel)")
	cmd.Flags().BoolVar(&finish, "finish", false,
		"make the second initiator the owner and fence the first")
	cmd.Flags().BoolVar(&cancel, "cancel", false, "close the LUN to the second initiator again")
	cmd.RunE = running(func(cmd *cobra.Command, _ []string) error {
		chosen := 0
		for action, on := range map[status.Action]bool{
			status.ActionOpen: req.To != "", status.ActionFinish: finish,
			status.ActionCancel: cancel,
		} {
			if on {
				req.Action = action
				chosen++
			}
		}
		req.Seconds = open.Seconds()
		check := func(wrong *problems.List) {
			switch {
			case req.LUN == 0:
				wrong.AddMissing("--lun", "name the LUN")
			case chosen != 1:
				wrong.Add("handover", "give one of --to, --finish and --cancel")
			case open < 0 || open > 0 && req.Action != status.ActionOpen:
				wrong.Add("--for", "goes with --to and must not be negative")
			}
		}
		pending := fmt.Sprintf("may still be working on it, for example because its disk hangs: "+
			"/status shows who owns LUN %d; or ask again", req.LUN)
		return q.ask(check, pending, func(daemon control.Client) error {
			done, err := daemon.Handover(cmd.Context(), req)
			if err == nil {
				fmt.Fprintln(a.stdout, explainInitiators(done))
			}
			return err
		})
	})
	return cmd
}
