package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/status"
)

// askedBySocket ends the help of each command about snapshots.
const askedBySocket = `

DISK is a name as the command ps shows it, or a LUN. The command asks the daemon through its control
socket. The daemon obeys only its own user and root.

Exit status 0: done. 1: refused, with the reason, or nobody answers, or not to this user.`

func (a *app) snapshotCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "snapshot",
		Short: "Keep what a disk holds, and go back to it",
		Long: `Keeps what a disk holds at a point in time, while its guest runs. A snapshot takes the
storage of what is overwritten later. It survives a restart of the daemon and of the machine, if the
disk does.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return fmt.Errorf("say what to do with a snapshot: see %s --help", cmd.CommandPath())
		},
	}
	cmd.AddCommand(a.snapshotCreateCommand(), a.snapshotListCommand(),
		a.snapshotChangeCommand(status.SnapshotDelete, "Forget a snapshot",
			`Forgets a snapshot. The storage that only it needs is freed in the background. A
snapshot that is a LUN is refused: end that first (unserve).`),
		a.snapshotChangeCommand(status.SnapshotRevert, "Give a disk the content of a snapshot",
			`Gives a disk the content of a snapshot. What was written since is lost, unless a later
snapshot has it; all snapshots stay. A disk that somebody uses is refused: stop its machine first.
The disk keeps its size; what it grew by since is zeros.`),
		a.snapshotChangeCommand(status.SnapshotServe, "Make a snapshot a LUN",
			`Makes a snapshot a read-only LUN, or an export of NBD with the name DISK@NAME, until
unserve or the end of the daemon. It prints the number of the LUN.`),
		a.snapshotChangeCommand(status.SnapshotUnserve, "Stop serving a snapshot",
			`Ends what serve has begun. Commands that are under way end with an error.`))
	return cmd
}

func (a *app) snapshotCreateCommand() *cobra.Command {
	var also []string
	commands := around{out: a.stderr}
	cmd := &cobra.Command{
		Use:   "create DISK [NAME]",
		Short: "Keep what a disk holds now",
		Long: `Keeps what a disk holds now: everything that was acknowledged to the guest. Writes wait
for a moment, reads do not. With --also, several disks of a machine are kept at the same point in
time.

The content is what a sudden loss of power would leave. For more, freeze the file systems of the
guest with --before, and thaw them with --after. This command runs these commands, not the daemon.
They get no input and no terminal, and what they print goes to standard error. Without a success of
--before there is no snapshot. --after is run whatever has happened, even if this command is
interrupted or killed. If it fails, the exit status is 1, and the snapshot stays.

Without NAME, the snapshot is named by the time in UTC.` + askedBySocket,
		Args: usageArgs(cobra.RangeArgs(1, 2)),
	}
	ask := a.asker(cmd)
	cmd.Flags().StringArrayVar(&also, "also", nil, "another `disk` of the same machine; repeatable")
	commands.flags(cmd)
	cmd.ValidArgsFunction = ask.completeDisk(false)
	_ = cmd.RegisterFlagCompletionFunc("also", ask.completeFrom(disksOf))
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if commands.limit <= 0 {
			return fmt.Errorf("--%s: %s is too short: give more than 0", flagTimeLimit,
				commands.limit)
		}
		if cmd.Flags().Changed(flagTimeLimit) && !commands.given() {
			return fmt.Errorf("--%s is for --%s and --%s: give one of them", flagTimeLimit,
				flagBefore, flagAfter)
		}
		req := status.SnapshotRequest{Action: status.SnapshotCreate,
			Disks: append([]string{args[0]}, also...),
			Name:  time.Now().UTC().Format("20060102T150405Z")}
		if len(args) > 1 {
			req.Name = args[1]
		}
		return running(func(cmd *cobra.Command, _ []string) error {
			if !commands.given() {
				return ask.change(req, pendingChange)
			}
			return a.createAround(cmd, ask, req, &commands)
		})(cmd, args)
	}
	return cmd
}

// createAround takes a snapshot between two commands.
func (a *app) createAround(cmd *cobra.Command, ask *asker, req status.SnapshotRequest,
	commands *around) error {
	ctx, stop := a.interruptible(cmd.Context(), nil, nil)
	defer stop()
	for _, disk := range req.Disks { // do not freeze a guest for a snapshot that is impossible
		all, err := ask.snapshots(disk)
		if err != nil {
			return err
		}
		for _, s := range all {
			if s.Name == req.Name {
				return fmt.Errorf("the disk %q already has a snapshot %q", s.Disk, s.Name)
			}
		}
	}
	return commands.do(ctx, func() error {
		// The daemon does not stop a request that it has begun, so this waits for the answer.
		return ask.change(req, "may still take the snapshot, without what --"+flagBefore+
			" has done: see snapshot list, and delete it")
	})
}

func (a *app) snapshotChangeCommand(action status.SnapshotAction, short, long string,
) *cobra.Command {
	cmd := &cobra.Command{
		Use:   string(action) + " DISK NAME",
		Short: short,
		Long:  long + askedBySocket,
		Args:  usageArgs(cobra.ExactArgs(2)),
	}
	ask := a.asker(cmd)
	cmd.ValidArgsFunction = ask.completeDisk(true)
	cmd.RunE = running(func(cmd *cobra.Command, args []string) error {
		return ask.change(status.SnapshotRequest{Action: action, Disks: args[:1],
			Name: args[1]}, pendingChange)
	})
	return cmd
}

// pendingChange describes what a daemon that has not answered may be doing.
const pendingChange = "may still be at it: see snapshot list"

// change carries out a request, and prints the result. pending: see explainControl.
func (q *asker) change(req status.SnapshotRequest, pending string) error {
	return q.ask(nil, pending, func(daemon control.Client) error {
		done, err := daemon.Snapshot(q.cmd.Context(), req)
		if err == nil {
			fmt.Fprintln(q.a.stdout, done)
		}
		return err
	})
}

// snapshots returns the snapshots of a disk, or of all for "".
func (q *asker) snapshots(disk string) (all []status.Snapshot, err error) {
	err = q.ask(nil, stillBusy, func(daemon control.Client) (err error) {
		all, err = daemon.Snapshots(q.cmd.Context(), disk)
		return err
	})
	return all, err
}

func (a *app) snapshotListCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list [DISK]",
		Short: "List the snapshots of a disk, or of all",
		Long: `Lists snapshots, oldest first: the disk, the name, when it was taken, the size of the
disk then, how much storage only the snapshot needs, and its LUN if it is served.` + askedBySocket,
		Args: usageArgs(cobra.MaximumNArgs(1)),
	}
	ask := a.asker(cmd)
	cmd.ValidArgsFunction = ask.completeDisk(false)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.RunE = running(func(cmd *cobra.Command, args []string) error {
		all, err := ask.snapshots(append(args, "")[0])
		if err != nil {
			return err
		}
		if asJSON {
			return console.WriteJSON(a.stdout, append([]status.Snapshot{}, all...))
		}
		return printSnapshots(a.stdout, all)
	})
	return cmd
}

func printSnapshots(w io.Writer, all []status.Snapshot) error {
	if len(all) == 0 {
		_, err := fmt.Fprintln(w, "there is no snapshot")
		return err
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "DISK\tNAME\tCREATED\tSIZE\tUSED\tLUN")
	for _, s := range all {
		lun := "-"
		if s.Served != 0 {
			lun = strconv.Itoa(int(s.Served))
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\n", console.OneLine(s.Disk), s.Name,
			s.Created.UTC().Format(time.RFC3339), console.ShortSize(s.Size),
			console.ShortSize(s.Used), lun)
	}
	return table.Flush()
}

const (
	flagBefore    = "before"
	flagAfter     = "after"
	flagTimeLimit = "time-limit"

	// timeLimit is longer than libvirt waits for access to a guest agent.
	timeLimit = time.Minute
	// stopGrace is how long a command that is being stopped may take to end by itself.
	stopGrace = 2 * time.Second
)

// around runs commands before and after a snapshot, such as those that freeze and thaw the file
// systems of a guest.
type around struct {
	before, after string        // what the shell runs; "": nothing
	limit         time.Duration // of each command
	out           io.Writer     // gets the output of the commands
}

func (r *around) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&r.before, flagBefore, "", "`command` of the shell that is run first, "+
		"such as one that freezes the guest; if it fails, there is no snapshot")
	cmd.Flags().StringVar(&r.after, flagAfter, "", "`command` of the shell that is run at the "+
		"end, whatever has happened")
	cmd.Flags().DurationVar(&r.limit, flagTimeLimit, timeLimit,
		"how long each of these commands may take: a `duration` such as 30s")
}

// given reports whether there is a command to run.
func (r *around) given() bool { return r.before != "" || r.after != "" }

// do runs the first command, then take if that command has succeeded, and always the last command.
// An error of take means that there is no snapshot.
func (r *around) do(ctx context.Context, take func() error) (err error) {
	if r.after == "" {
		return r.takeAfterFirst(ctx, take)
	}
	last, cannot := r.waiting()
	if cannot != nil {
		return fmt.Errorf("--%s %w: nothing was done", flagAfter, cannot)
	}
	defer func() { err = r.finish(ctx, last, err) }()
	return r.takeAfterFirst(ctx, take)
}

func (r *around) takeAfterFirst(ctx context.Context, take func() error) error {
	const none = "no snapshot was taken"
	if r.before != "" {
		first, err := r.start("eval \"$1\"", r.before, nil)
		if err == nil {
			err = first.wait(ctx, r.limit)
		}
		if err != nil {
			return fmt.Errorf("--%s %w: %s", flagBefore, err, none)
		}
	}
	if ctx.Err() != nil {
		return errors.New("interrupted: " + none)
	}
	return take()
}

// finish runs the last command, and adds its error.
func (r *around) finish(ctx context.Context, last *shell, err error) error {
	last.stdin.Close()
	failed := last.wait(context.WithoutCancel(ctx), r.limit)
	const now = "undo what --" + flagBefore + " has done, for example thaw frozen file systems"
	switch {
	case failed == nil:
		return err
	case err == nil:
		return fmt.Errorf("the snapshot was taken, but --%s %w: %s", flagAfter, failed, now)
	}
	return fmt.Errorf("%w; and --%s %w: %s", err, flagAfter, failed, now)
}

// shell is a command that runs.
type shell struct {
	cmd   *exec.Cmd
	stdin *os.File // the command starts its work when this is closed; nil: at once
}

// waiting starts the last command early, in a shell that waits for the end of its input. That comes
// even when this process is killed, so that the guest is not left frozen.
func (r *around) waiting() (*shell, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	s, err := r.start(`read -r _; exec </dev/null; eval "$1"`, r.after, read)
	read.Close()
	if err != nil {
		return nil, errors.Join(err, write.Close())
	}
	s.stdin = write
	return s, nil
}

// start starts a shell in a session of its own, so that a signal from the terminal to this process
// does not end the shell. The shell cannot ask questions at the terminal.
func (r *around) start(script, command string, stdin *os.File) (*shell, error) {
	cmd := exec.Command("sh", "-c", script, "sh", command)
	if stdin != nil {
		cmd.Stdin = stdin
	}
	cmd.Stdout, cmd.Stderr = r.out, r.out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.WaitDelay = stopGrace
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("cannot be run: %w", err)
	}
	return &shell{cmd: cmd}, nil
}

// wait waits for the end of a shell, and stops it at the limit or when the context ends. The error
// completes the sentence "the command ...".
func (s *shell) wait(ctx context.Context, limit time.Duration) error {
	limited, stop := context.WithTimeout(ctx, limit)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- s.cmd.Wait() }()
	select {
	case err := <-ended:
		var exit *exec.ExitError
		switch {
		case err == nil || errors.Is(err, exec.ErrWaitDelay): // its children go on
			return nil
		case errors.As(err, &exit):
			return fmt.Errorf("has failed: %s", exit.ProcessState)
		}
		return err
	case <-limited.Done():
	}
	_ = unix.Kill(-s.cmd.Process.Pid, unix.SIGTERM)
	select {
	case <-ended:
	case <-time.After(stopGrace):
		_ = unix.Kill(-s.cmd.Process.Pid, unix.SIGKILL)
		<-ended
	}
	if ctx.Err() != nil {
		return errors.New("was interrupted")
	}
	return fmt.Errorf("has not ended within %s and was stopped", limit)
}
