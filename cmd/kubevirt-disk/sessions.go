package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/status"
)

func (a *app) sessionsCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "sessions",
		Short: "List the sessions",
		Long: `Lists the sessions: their numbers, the names and addresses of the initiators, the LUNs
that they have read or written, since when, and what they have done.

The command asks the daemon through its control socket. The daemon obeys only its own user and root.

Exit status 0: done, also if there is no session. 1: nobody answers, or not to this user.`,
		Args: usageArgs(noArgs),
	}
	q := a.asker(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print all fields, as on /status")
	cmd.RunE = running(func(cmd *cobra.Command, _ []string) error {
		var sessions []status.Session
		err := q.ask(nil, stillBusy, func(daemon control.Client) (err error) {
			sessions, err = daemon.Sessions(cmd.Context())
			return err
		})
		if err != nil {
			return err
		}
		if asJSON {
			return console.WriteJSON(a.stdout, append([]status.Session{}, sessions...))
		}
		return printSessions(a.stdout, sessions)
	})
	return cmd
}

func printSessions(w io.Writer, sessions []status.Session) error {
	if len(sessions) == 0 {
		_, err := fmt.Fprintln(w, "no initiator is logged in")
		return err
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "SESSION\tINITIATOR\tADDRESS\tLUNS\tSINCE\tCOMMANDS\tREAD\tWRITTEN\t"+
		"WAITING")
	for _, s := range sessions {
		luns := make([]string, len(s.LUNs))
		for i, lun := range s.LUNs {
			luns[i] = strconv.Itoa(int(lun))
		}
		used := strings.Join(luns, ",")
		switch {
		case s.Discovery:
			used = "(discovery)"
		case used == "":
			used = "none"
		}
		waiting := "-"
		if s.Waiting > 0 {
			waiting = strconv.Itoa(s.Waiting)
			if s.WaitingSince != nil {
				waiting += " for " + console.OneLine(s.WaitsFor) + " since " +
					s.WaitingSince.Format(time.RFC3339)
			}
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\n", numberOf(s),
			console.OneLine(s.Initiator), s.Remote, used, s.Since.Format(time.RFC3339), s.Commands,
			console.ShortSize(int64(s.BytesRead)), console.ShortSize(int64(s.BytesWritten)),
			waiting)
	}
	return table.Flush()
}

// numberOf is the number of a session; one of another protocol than iSCSI has none.
func numberOf(s status.Session) string {
	if s.Protocol != "" {
		return s.Protocol
	}
	return strconv.Itoa(int(s.TSIH))
}

func (a *app) kickCommand() *cobra.Command {
	var req status.Kick
	var session string
	cmd := &cobra.Command{
		Use:   "kick (--initiator NAME | --session NUMBER)",
		Short: "End the sessions of an initiator",
		Long: `Ends the sessions of an initiator, or one session, at once. Unanswered commands get no
answer any more. Acknowledged data stays.

An initiator logs in again by itself, mostly within seconds. To keep it out, change its credential
before (a changed credential file counts for new logins), or hand its LUN over to another initiator,
which fences it (see handover).

The command asks the daemon through its control socket. The daemon obeys only its own user and root.
The command sessions lists the names and numbers.

Exit status 0: done. 1: there is no such session, or nobody answers, or not to this user.`,
		Args: usageArgs(noArgs),
	}
	q := a.asker(cmd)
	cmd.Flags().StringVar(&req.Initiator, "initiator", "", "end all sessions of this `name`")
	cmd.Flags().StringVar(&session, "session", "", "end the session of this `number`")
	_ = cmd.RegisterFlagCompletionFunc("initiator", q.completeFrom(initiatorsOf))
	_ = cmd.RegisterFlagCompletionFunc("session", q.completeFrom(sessionsOf))
	cmd.RunE = running(func(cmd *cobra.Command, _ []string) error {
		check := func(wrong *problems.List) {
			switch number, err := strconv.ParseUint(session, 10, 16); {
			case (req.Initiator == "") == (session == ""):
				wrong.Add("kick", "give one of --initiator and --session")
			case session == "":
			case err != nil || number == 0:
				wrong.Add("--session", "%q is not a session: the command sessions lists their "+
					"numbers", session)
			default:
				req.Session = uint16(number)
			}
		}
		var ended []status.Session
		err := q.ask(check, "may have ended the session: see sessions",
			func(daemon control.Client) (err error) {
				ended, err = daemon.Kick(cmd.Context(), req)
				return err
			})
		if err != nil {
			return err
		}
		for _, s := range ended {
			fmt.Fprintf(a.stdout, "ended session %s of %s, from %s\n",
				numberOf(s), console.OneLine(s.Initiator), s.Remote)
		}
		fmt.Fprintln(a.stdout, "The initiator logs in again by itself, unless its credential has "+
			"changed. If a handover has fenced it, it can log in but not use the LUN.")
		return nil
	})
	return cmd
}
