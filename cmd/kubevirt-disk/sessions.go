package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"kubevirt.io/disk/target"
)

// kickRequest is what the command kick asks of the daemon: one of the two.
type kickRequest struct {
	Initiator string `json:"initiator,omitempty"` // every session of this name
	Session   uint16 `json:"session,omitempty"`   // its target session identifying handle
}

// kickAnswer is which sessions have ended.
type kickAnswer struct {
	Ended []target.SessionInfo `json:"ended"`
}

// sessionsAnswer is who is logged in, oldest first.
type sessionsAnswer struct {
	Sessions []target.SessionInfo `json:"sessions"`
}

// sessionControl carries out what is asked about sessions through the control socket.
type sessionControl struct {
	srv sessionServer
	log *zap.Logger
}

// sessionServer is what of the server that is for.
type sessionServer interface {
	Sessions() []target.SessionInfo
	EndSessions(which func(target.SessionInfo) bool) []target.SessionInfo
}

func (c *sessionControl) list(w http.ResponseWriter, _ *http.Request, _ uint32) {
	answer(w, http.StatusOK, sessionsAnswer{c.srv.Sessions()})
}

func (c *sessionControl) kick(w http.ResponseWriter, r *http.Request, user uint32) {
	var req kickRequest
	if !understand(w, r, &req) {
		return
	}
	if (req.Initiator == "") == (req.Session == 0) {
		answer(w, http.StatusBadRequest, controlError{"name an initiator or a session"})
		return
	}
	ended := c.srv.EndSessions(func(s target.SessionInfo) bool {
		return s.TSIH == req.Session || strings.EqualFold(s.Initiator, req.Initiator)
	})
	if len(ended) == 0 {
		answer(w, http.StatusConflict, controlError{req.unknown()})
		return
	}
	for _, s := range ended {
		c.log.Info("a session was ended by an operator", zap.String("initiator", s.Initiator),
			zap.String("remote", s.Remote), zap.Uint16("tsih", s.TSIH), zap.Uint32("by_user", user))
	}
	answer(w, http.StatusOK, kickAnswer{ended})
}

func (r kickRequest) unknown() string {
	what := fmt.Sprintf("session %d", r.Session)
	if r.Initiator != "" {
		what = fmt.Sprintf("session of %q", r.Initiator)
	}
	return "there is no " + what + ": the command sessions lists those that there are"
}

func (a *app) sessionsCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "sessions",
		Short: "List the initiators that are logged in",
		Long: `Lists the initiators that are logged in: for each session its number, the
initiator's name and address, the LUNs that it has read or written, since when, and what it has done.

The daemon is asked through its control socket, and obeys its own user and root only.

Exit status 0: done, also where nobody is logged in. 1: nobody answers, or not to this user.`,
		Args: usageArgs(cobra.NoArgs),
	}
	keys := []string{keyControlSocket, keyWorkDir}
	addFlags(cmd.Flags(), keys...)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print all that is known, as /status has it")
	cmd.RunE = running(func(cmd *cobra.Command, _ []string) error {
		l := load(cmd.Flags(), keys...)
		socket := l.socketToAsk()
		if err := l.problems.Err(); err != nil {
			return err
		}
		var reply sessionsAnswer
		client := controlClient{pending: "may be busy: ask again"}
		err := client.ask(cmd.Context(), socket, http.MethodGet, pathSessions, nil, &reply)
		if err != nil {
			return err
		}
		if asJSON {
			encoder := json.NewEncoder(a.stdout)
			encoder.SetIndent("", "  ")
			return encoder.Encode(append([]target.SessionInfo{}, reply.Sessions...))
		}
		return printSessions(a.stdout, reply.Sessions)
	})
	return cmd
}

// socketToAsk is the path of the control socket, which a client cannot do without.
func (l *loader) socketToAsk() string {
	socket := l.controlSocket()
	if socket == "" {
		l.problems.Add("--"+keyControlSocket, "is empty, so there is no daemon to ask")
	}
	return socket
}

func printSessions(w io.Writer, sessions []target.SessionInfo) error {
	if len(sessions) == 0 {
		_, err := fmt.Fprintln(w, "no initiator is logged in")
		return err
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "SESSION\tINITIATOR\tADDRESS\tLUNS\tSINCE\tCOMMANDS\tREAD\tWRITTEN")
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
		fmt.Fprintf(table, "%d\t%s\t%s\t%s\t%s\t%d\t%s\t%s\n", s.TSIH, harmless(s.Initiator),
			s.Remote, used, s.Since.Format(time.RFC3339), s.Commands,
			shortSize(int64(s.BytesRead)), shortSize(int64(s.BytesWritten)))
	}
	return table.Flush()
}

func (a *app) kickCommand() *cobra.Command {
	var req kickRequest
	var session string
	cmd := &cobra.Command{
		Use:   "kick (--initiator IQN | --session NUMBER)",
		Short: "End the sessions of an initiator",
		Long: `Ends the sessions of an initiator, or one session, at once. Commands that were not answered
yet are not answered any more; what was acknowledged stays.

An initiator logs in again by itself, mostly within seconds. It is kept out only if that login is
refused: change its credential before (a changed credential file counts for new logins), or hand its
LUN over to another initiator, which fences it (see handover).

The daemon is asked through its control socket, and obeys its own user and root only. The command
sessions lists the names and numbers.

Exit status 0: done. 1: there is no such session, or nobody answers, or not to this user.`,
		Args: usageArgs(cobra.NoArgs),
	}
	keys := []string{keyControlSocket, keyWorkDir}
	addFlags(cmd.Flags(), keys...)
	cmd.Flags().StringVar(&req.Initiator, "initiator", "", "end all sessions of this `name`")
	cmd.Flags().StringVar(&session, "session", "", "end the session of this `number`")
	cmd.RunE = running(func(cmd *cobra.Command, _ []string) error {
		l := load(cmd.Flags(), keys...)
		socket := l.socketToAsk()
		switch number, err := strconv.ParseUint(session, 10, 16); {
		case (req.Initiator == "") == (session == ""):
			l.problems.Add("kick", "give one of --initiator and --session")
		case session == "":
		case err != nil || number == 0:
			l.problems.Add("--session", "%q is no session: the command sessions lists their numbers",
				session)
		default:
			req.Session = uint16(number)
		}
		if err := l.problems.Err(); err != nil {
			return err
		}
		var reply kickAnswer
		client := controlClient{pending: "may have ended the session: see sessions"}
		err := client.ask(cmd.Context(), socket, http.MethodPost, pathKick, req, &reply)
		if err != nil {
			return err
		}
		for _, s := range reply.Ended {
			fmt.Fprintf(a.stdout, "ended session %d of %s, from %s\n",
				s.TSIH, harmless(s.Initiator), s.Remote)
		}
		fmt.Fprintln(a.stdout, "The initiator logs in again by itself, unless its credential has "+
			"changed. One that a handover has fenced can log in, and not use the LUN.")
		return nil
	})
	return cmd
}
