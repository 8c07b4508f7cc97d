package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

const (
	flagBefore    = "before"
	flagAfter     = "after"
	flagTimeLimit = "time-limit"

	// timeLimit is longer than libvirt waits for its turn to talk to a guest agent.
	timeLimit = time.Minute
	// stopGrace is how long a command that is being stopped may take to end by itself.
	stopGrace = 2 * time.Second
)

// around runs commands before and after a snapshot, such as those that freeze and thaw the file
// systems of a guest.
type around struct {
	before, after string        // what the shell runs; "": nothing
	limit         time.Duration // of each command
	out           io.Writer     // gets what the commands print
}

// flags adds the flags to a command.
func (r *around) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&r.before, flagBefore, "", "`command` of the shell that is run first, "+
		"such as one that freezes the guest; if it fails, there is no snapshot")
	cmd.Flags().StringVar(&r.after, flagAfter, "", "`command` of the shell that is run at the "+
		"end, whatever has happened")
	cmd.Flags().DurationVar(&r.limit, flagTimeLimit, timeLimit,
		"how long each of these commands may take: a `duration` such as 30s")
}

// given reports whether there is something to run.
func (r *around) given() bool { return r.before != "" || r.after != "" }

// do runs the first command, then take, if that one has succeeded, and then always the last one. An
// error of take says that there is no snapshot.
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
	const now = "see to it that nothing stays as --" + flagBefore + " has left it, such as file " +
		"systems that are frozen"
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
	stdin *os.File // the command waits until this is closed; nil: it does not
}

// waiting starts the last command already, in a shell that waits for the end of its input. That
// comes when this process ends, too, however it does: a guest is not left frozen.
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

// start starts a shell in a session of its own: what ends this process by its terminal does not end
// the shell. Its terminal would not answer questions either.
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
		case err == nil || errors.Is(err, exec.ErrWaitDelay): // what it has started goes on
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
