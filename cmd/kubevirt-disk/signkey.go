package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/signature"
	"kubevirt.io/disk/registry/transport"
)

const (
	flagSignKey = "sign-key"

	// envSignPassword is the variable that cosign reads, too.
	envSignPassword = "COSIGN_PASSWORD"
)

func addSignKey(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, flagSignKey, "", "PEM `file` with the private key that signs the "+
		"image as cosign does: cosign's own, whose password is in "+envSignPassword+" or in the "+
		"file "+envSignPassword+"_FILE, or a plain one")
}

// readSignKey reads the key for signatures. It returns nil if file is "". No error shows a secret.
func (a *app) readSignKey(file string) (*signature.PrivateKey, error) {
	if file == "" {
		return nil, nil
	}
	text, err := osfile.ReadText(file)
	if err != nil {
		return nil, fmt.Errorf("--%s: %w", flagSignKey, err)
	}
	password := ""
	if signature.Encrypted(text) {
		password, err = a.keyPassword("the password of "+strconv.Quote(file), false)
	}
	var key *signature.PrivateKey
	if err == nil {
		key, err = signature.ParsePrivateKey(text, []byte(password))
	}
	if err != nil {
		return nil, fmt.Errorf("--%s: %q: %w", flagSignKey, file, err)
	}
	return key, nil
}

// keyPassword is the password of a key, from the environment or from the terminal, which does not
// show it. So a new one is read twice: after a slip, the key would be useless. what names the key
// in messages.
func (a *app) keyPassword(what string, isNew bool) (string, error) {
	password, err := secretOf(envSignPassword)
	_, given := os.LookupEnv(envSignPassword)
	if err != nil || password != "" || given || os.Getenv(envSignPassword+"_FILE") != "" {
		return password, err
	}
	in, ok := a.stdin.(*os.File)
	if !ok || !term.IsTerminal(int(in.Fd())) {
		return "", fmt.Errorf("%s is needed: give it in %s, or in a file that %s_FILE names", what,
			envSignPassword, envSignPassword)
	}
	before, err := term.GetState(int(in.Fd()))
	if err != nil {
		return "", err
	}
	ctx, stop := a.interruptible(context.Background(), nil, nil)
	defer stop()
	read := make(chan struct{})
	defer close(read)
	go func() {
		<-ctx.Done()
		select {
		case <-read:
		default: // nothing else ends a read of a terminal
			_ = term.Restore(int(in.Fd()), before)
			a.exit(exitFailed)
		}
	}()
	ask := func(what string) (string, error) {
		fmt.Fprintf(a.stderr, "%s: ", what)
		text, err := term.ReadPassword(int(in.Fd()))
		fmt.Fprintln(a.stderr)
		return string(text), err
	}
	password, err = ask(what)
	if err != nil || !isNew {
		return password, err
	}
	again, err := ask("the same again")
	if err == nil && again != password {
		err = errors.New("the two passwords differ: no key was made")
	}
	return password, err
}

func (a *app) signCommand() *cobra.Command {
	var file, digestFile string
	cmd := &cobra.Command{
		Use:   "sign REF --sign-key FILE",
		Short: "Sign an image in a registry",
		Long: `Signs what a reference names, as "cosign sign --recursive" and push --sign-key do: of
an image for several platforms, the list and each image in it. The signature lies beside the image,
and the image stays as it is. A tag may name another image a moment later, so a digest is the better
reference. The digest that was signed is printed.

Exit status: 0 done, 1 failed while running, 2 wrong usage.

` + registryHelp,
		Args: usageArgs(cobra.ExactArgs(1)),
	}
	addSignKey(cmd, &file)
	addDigestFile(cmd, &digestFile)
	settings.AddFlags(cmd.Flags(), new(reach).settings())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ref, err := transport.ParseReference(args[0])
		if err != nil {
			return err
		}
		if file == "" {
			return fmt.Errorf("name the key with --%s; kubevirt-disk key generate makes one",
				flagSignKey)
		}
		key, err := a.readSignKey(file)
		if err != nil {
			return err
		}
		return a.withRegistry(cmd, ref, func(ctx context.Context, c *registry.Client) error {
			digest, err := signature.SignNamed(ctx, c.Client, ref, key)
			if err != nil {
				return err
			}
			fmt.Fprintf(a.stderr, "%s: signed by %s\n", console.OneLine(ref.String()),
				key.Fingerprint)
			if _, err := fmt.Fprintln(a.stdout, digest); err != nil {
				return err
			}
			return writeDigest(digestFile, digest)
		})
	}
	return cmd
}

func (a *app) verifyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "verify REF (--verify-key FILE... | --signature-policy FILE)",
		Short: "Check by whom an image in a registry is signed",
		Long: `Checks whether the keys or the policy admit an image, as pull, serve and the others do with
the same settings. The digest that was checked is printed: pull that one, because a tag may name
another image a moment later. The command inspect lists all signatures.

Exit status: 0 it is admitted, 1 it is not, or that is unknown, 2 wrong usage.

` + registryHelp,
		Args: usageArgs(cobra.ExactArgs(1)),
	}
	settings.AddFlags(cmd.Flags(), new(reach).settings())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ref, err := transport.ParseReference(args[0])
		if err != nil {
			return err
		}
		var opt reach
		l := load(cmd.Flags(), opt.settings())
		if !opt.Signatures.Enabled() && l.Problems.Err() == nil {
			l.Problems.Add("verify", "say whose signature counts, with --%s or --%s", keyVerifyKey,
				keySignaturePolicy)
		}
		return a.withRegistryOf(cmd, l, opt, ref, func(ctx context.Context,
			c *registry.Client) error {
			src, err := c.Source(ref, "")
			if err != nil {
				return err
			}
			defer src.Close()
			content, _, admitted, err := transport.Named(ctx, src, ref)
			if err != nil {
				return err
			}
			how := "signed by " + admitted.Key
			if admitted.Key == "" {
				how = "admitted by the policy, which asks for no signature"
			}
			fmt.Fprintf(a.stderr, "%s: %s\n", console.OneLine(ref.String()), how)
			_, err = fmt.Fprintln(a.stdout, transport.DigestOf(content))
			return err
		})
	}
	return cmd
}

func (a *app) keyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "key",
		Short: "Make keys that sign images",
		Long:  `Makes keys for push --sign-key, sign and verify, as cosign does.`,
		Args:  usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return fmt.Errorf("say what to do with a key: see %s --help", cmd.CommandPath())
		},
	}
	var prefix string
	generate := &cobra.Command{
		Use:   "generate",
		Short: "Make a key pair",
		Long: `Makes a key pair: PREFIX.key, which signs and must stay secret, and PREFIX.pub, which
verifies. Cosign reads them, too. The password of PREFIX.key is in ` + envSignPassword + `, or in
the file that ` + envSignPassword + `_FILE names, or is asked for twice at the terminal. It may be
empty. Existing files are not replaced.`,
		Args: usageArgs(noArgs),
	}
	generate.Flags().StringVar(&prefix, "output", "cosign", "`prefix` of the two files")
	generate.RunE = running(func(*cobra.Command, []string) error { return a.generateKey(prefix) })
	cmd.AddCommand(generate)
	return cmd
}

// generateKey makes two files, or none.
func (a *app) generateKey(prefix string) error {
	files := []string{prefix + ".key", prefix + ".pub"}
	// Check before asking for a password.
	if dir := filepath.Dir(prefix); !isDirectory(dir) {
		return fmt.Errorf("--output: there is no directory %q: make it first", dir)
	}
	for _, file := range files {
		if _, err := os.Lstat(file); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%q is there already: choose another --output", file)
		}
	}
	password, err := a.keyPassword("a password for the new key", true)
	if err != nil {
		return err
	}
	private, public, err := signature.GenerateKey([]byte(password))
	if err != nil {
		return err
	}
	if err := writeNew(files[0], private, 0o600); err != nil {
		return err
	}
	if err := writeNew(files[1], public, 0o644); err != nil {
		return errors.Join(err, os.Remove(files[0]))
	}
	_, err = fmt.Fprintf(a.stdout, "%s signs, and must stay secret; %s verifies\n", files[0],
		files[1])
	return err
}

// writeNew writes a file that does not exist yet. It never leaves an incomplete file with that
// name, which would have to be removed before the command works again.
func writeNew(file string, text []byte, mode fs.FileMode) error {
	out, err := durable.CreateNew(file, mode)
	if err != nil {
		return err
	}
	_, err = out.File.Write(text)
	return out.FinishSynced(err)
}
