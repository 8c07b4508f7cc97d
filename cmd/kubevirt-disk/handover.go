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

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

func (a *app) handoverCommand() *cobra.Command {
	var req handoverRequest
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
	cmd.Flags().DurationVar(&open, "for", 0, "how long it stays open, as 90s or 5m (default until --finish or --cancel)")
	cmd.Flags().BoolVar(&finish, "finish", false, "make the second initiator the owner and fence the first")
	cmd.Flags().BoolVar(&cancel, "cancel", false, "close the LUN to the second initiator again")
	cmd.RunE = running(func(cmd *cobra.Command, _ []string) error {
		l := load(cmd.Flags(), keys...)
		socket := l.controlSocket()
		chosen := 0
		for action, on := range map[string]bool{"open": req.To != "", "finish": finish, "cancel": cancel} {
			if on {
				req.Action = action
				chosen++
			}
		}
		switch {
		case req.LUN == 0:
			l.problems.add("--lun", "is missing: name the LUN")
		case chosen != 1:
			l.problems.add("handover", "give one of --to, --finish and --cancel")
		case open < 0 || open > 0 && req.Action != "open":
			l.problems.add("--for", "goes with --to, and is not negative")
		case socket == "":
			l.problems.add("--"+keyControlSocket, "is empty, so there is no daemon to ask")
		}
		if err := l.problems.err(); err != nil {
			return err
		}
		req.Seconds = open.Seconds()
		done, err := askControl(cmd.Context(), socket, req)
		if err == nil {
			fmt.Fprintln(a.stdout, explainInitiators(done))
		}
		return err
	})
	return cmd
}

// controlTimeout is longer than the abort of commands on a slow disk should take.
const controlTimeout = 30 * time.Second

// strangerError is a control socket of another daemon than the one of this container.
type strangerError struct{ socket string }

func (e *strangerError) Error() string {
	return fmt.Sprintf("%q is the socket of a daemon in another container, which has the same work directory, and its LUNs are not those of this one: "+
		"give the daemon of this container another %s", e.socket, nameOf(keyControlSocket))
}

// checkDaemon refuses the daemon of another container where this one has its own, as that one's LUN of the same number would be handed over.
// Containers that share a work directory share the default socket, which is that of whoever came first.
func checkDaemon(socket string, peer *unix.Ucred, ownIsInit bool) error {
	if ownIsInit && peer != nil && peer.Pid != 1 {
		return &strangerError{socket}
	}
	return nil
}

// explainAsk says what to do where a daemon could not be asked for a LUN, or has not answered.
func explainAsk(err error, path string, lun uint16) error {
	var stranger *strangerError
	switch {
	case errors.As(err, &stranger):
		return stranger
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("the daemon at %q has not answered in time, and goes on with what was asked, as when its disk hangs: see in /status who has LUN %d, or ask again", path, lun)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("user %d may not ask at %q: a daemon obeys its own user and root: %w", os.Geteuid(), path, withoutURL(err))
	}
	return fmt.Errorf("no daemon answers at %q: %w: is it running, with the same %s or %s?", path, withoutURL(err), nameOf(keyWorkDir), nameOf(keyControlSocket))
}

// askControl sends a request to the daemon's control socket and returns what it did.
func askControl(ctx context.Context, path string, req handoverRequest) (string, error) {
	ctx, stop := context.WithTimeout(ctx, controlTimeout)
	defer stop()
	body, err := json.Marshal(req)
	if err != nil {
		return "", err
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
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
	}}}
	httpReq, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://daemon/handover", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	res, err := client.Do(httpReq)
	if err != nil {
		return "", explainAsk(err, path, req.LUN)
	}
	defer res.Body.Close()
	var reply handoverAnswer
	if err := json.NewDecoder(res.Body).Decode(&reply); err != nil {
		return "", fmt.Errorf("the daemon's answer is not understood: %w", err)
	}
	if reply.Error != "" {
		return "", errors.New(explainInitiators(reply.Error))
	}
	return reply.Done, nil
}
