package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/disk/transfer"
	"kubevirt.io/disk/internal/osfile"
)

// flagSecret is the flag for the file with the secret that both sides of a transfer share.
const flagSecret = "secret-file"

// sendCommand and receiveCommand are the commands of the pods that move a Local disk to another
// node. They are not in kubevirt-disk, because that binary has to stay small.
func sendCommand(stderr io.Writer) *cobra.Command {
	var listen, file string
	cmd := &cobra.Command{
		Use:   "send DIR",
		Short: "Send the disk of a volume to another node",
		Long: `Waits for "receive" of another node, and sends it the persistent disk in DIR, as it is: of a disk
that still needs its image only what it has, with its map. Nothing in DIR is changed, and no daemon
can serve the disk meanwhile. The command ends when a receiver has the disk whole.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return moving(cmd, file, func(ctx context.Context, secret transfer.Secret) error {
				return send(ctx, args[0], listen, secret, stderr)
			})
		},
	}
	cmd.Flags().StringVar(&listen, "listen", ":9259", "`address` to wait on")
	secretFlag(cmd, &file)
	return cmd
}

func send(ctx context.Context, dir, listen string, secret transfer.Secret, stderr io.Writer) error {
	source, err := transfer.OpenSource(dir)
	if err != nil {
		return err
	}
	defer source.Close()
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", listen)
	if err != nil {
		return err
	}
	fmt.Fprintf(stderr, "waiting for a receiver at %s\n", l.Addr())
	p := new(transfer.Progress)
	err = transfer.Serve(ctx, l, secret, source, p, func(err error) {
		fmt.Fprintf(stderr, "%v: waiting for the next receiver\n", err)
	})
	if err == nil {
		fmt.Fprintf(stderr, "a receiver has the disk: %d bytes\n", p.Done())
	}
	return err
}

func receiveCommand(stderr io.Writer) *cobra.Command {
	var file string
	var replace bool
	cmd := &cobra.Command{
		Use:   "receive ADDRESS DIR",
		Short: "Receive the disk that another node sends",
		Long: `Receives a persistent disk into DIR from "send" of another node, which waits at ADDRESS, as HOST:9259.
Holes stay holes. What was written is read again from the storage and compared. The disk gets its
name when it is whole: an interrupted command leaves nothing that could be served.`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, _, err := net.SplitHostPort(args[0]); err != nil {
				return fmt.Errorf("ADDRESS: %w: write it as HOST:9259", err)
			}
			return moving(cmd, file, func(ctx context.Context, secret transfer.Secret) error {
				return receive(ctx, args[0], args[1], secret, replace, stderr)
			})
		},
	}
	cmd.Flags().BoolVar(&replace, "replace", false, "remove what DIR holds")
	secretFlag(cmd, &file)
	return cmd
}

func receive(ctx context.Context, address, dir string, secret transfer.Secret, replace bool,
	stderr io.Writer) error {
	target, err := transfer.OpenTarget(dir, replace)
	if err != nil {
		return err
	}
	defer target.Close()
	p := new(transfer.Progress)
	if err := transfer.Fetch(ctx, address, secret, target, p); err != nil {
		return err
	}
	fmt.Fprintf(stderr, "the disk is in %s: %d bytes\n", dir, p.Done())
	return nil
}

func secretFlag(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, flagSecret, "",
		"`file` with the shared secret that encrypts the connection")
}

// moving runs a command that can be interrupted. An error of the running command is a failure, not
// wrong usage.
func moving(cmd *cobra.Command, file string,
	do func(context.Context, transfer.Secret) error) error {
	if file == "" {
		return errors.New("--" + flagSecret + " is missing: name the file of the secret")
	}
	content, err := osfile.ReadText(file)
	if err != nil {
		return fmt.Errorf("--%s: %w", flagSecret, err)
	}
	secret, err := transfer.NewSecret(bytes.TrimSuffix(content, []byte("\n")))
	if err != nil {
		return fmt.Errorf("--%s: %w", flagSecret, err)
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	err = do(ctx, secret)
	if err != nil && ctx.Err() != nil {
		err = errors.New("interrupted: the disk was not moved")
	}
	if err != nil {
		return &failure{err}
	}
	return nil
}
