package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"kubevirt.io/disk/status"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/transport"
)

const (
	pullRaw      = "raw"
	pullOriginal = "original"
)

type pullOptions struct {
	path     string
	format   string
	force    bool
	size     string
	bytes    int64 // size
	digest   string
	progress string
	unpack   int64 // bytes
}

// The flags that only pull has.
const (
	flagSize     = "size"
	flagProgress = "progress-listen"
)

func (a *app) pullCommand() *cobra.Command {
	var o pullOptions
	cmd := &cobra.Command{
		Use:   "pull REF|ADDRESS DEST",
		Short: "Fetch a disk out of a container image, or from a web server",
		Long: `Fetches the disk out of any container image that has one in /disk, or the disk that is
at https://HOST/PATH[@sha256:DIGEST], and writes it as a sparse raw disk. DEST is one of these:

  a file          it appears under its name when it is complete and its digest is right
  a block device  it is overwritten
  a directory     for all disks of the image
  -               standard output

` + formatsHelp + "\n\n" + registryHelp,
		Args: usageArgs(cobra.ExactArgs(2)),
	}
	cmd.Flags().StringVar(&o.path, "path", "",
		"`file` in the image to fetch: a name in /disk, or a path (default the only disk)")
	cmd.Flags().StringVar(&o.format, keyFormat, pullRaw,
		"`format` to write: raw, or original to keep the file as it is")
	cmd.Flags().BoolVar(&o.force, "force", false, "replace an existing file")
	cmd.Flags().StringVar(&o.size, flagSize, "", "`bytes` of the raw disk in a file, as 20Gi, if "+
		"that is more than the image's")
	addDigestFile(cmd, &o.digest)
	cmd.Flags().StringVar(&o.progress, flagProgress, "", "`address` at which GET /progress "+
		"answers how many bytes were fetched, and of how many")
	unpacking := unpackSetting(&o.unpack, defaultUnpack)
	settings.AddFlags(cmd.Flags(), append(new(reach).withAddresses(), unpacking))
	_ = cmd.RegisterFlagCompletionFunc(keyFormat,
		cobra.FixedCompletions([]string{pullRaw, pullOriginal}, cobra.ShellCompDirectiveNoFileComp))
	cmd.ValidArgsFunction = func(_ *cobra.Command, args []string, _ string) ([]string,
		cobra.ShellCompDirective) {
		if len(args) == 1 {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		info, err := os.Stat(args[0])
		if err == nil && info.Mode().IsRegular() && !isDirectory(filepath.Dir(args[1])) {
			return fmt.Errorf("%q is a file, and the reference of the image comes first: usage is "+
				"%q", args[0], cmd.UseLine())
		}
		ref, err := transport.ParseSource(args[0])
		if err != nil {
			return err
		}
		if o.format != pullRaw && o.format != pullOriginal {
			return fmt.Errorf("--%s: %q is neither %s nor %s", keyFormat, o.format, pullRaw,
				pullOriginal)
		}
		if o.size != "" {
			if o.bytes, err = parseSize(o.size); err != nil {
				return fmt.Errorf("--%s: %w", flagSize, err)
			}
			if args[1] == standardStream || isDirectory(args[1]) || o.format != pullRaw {
				return fmt.Errorf("--%s is for a raw disk in a file, and not for %q", flagSize,
					args[1])
			}
		}
		opt := new(reach)
		l := load(cmd.Flags(), append(opt.withAddresses(), unpacking))
		l.forAddress(ref)
		return a.withRegistryOf(cmd, l, *opt, ref,
			func(ctx context.Context, client *registry.Client) error {
				return a.pull(ctx, client, ref, args[1], o)
			})
	}
	return cmd
}

func (a *app) pull(ctx context.Context, client *registry.Client, ref transport.Reference,
	dest string, o pullOptions) error {
	if err := a.checkPullDestination(dest, o); err != nil {
		return err
	}
	p := new(registry.Progress)
	stop, err := tellProgress(ctx, o.progress, p)
	if err != nil {
		return err
	}
	defer stop()
	var done []registry.Pulled
	var digest string
	report := a.reporter(console.OneLine(ref.String()))
	err = report.While(p, func() (err error) {
		done, digest, err = client.Pull(ctx, ref, dest,
			registry.PullOptions{Path: o.path, Original: o.format == pullOriginal, Image: foreign,
				Replace: o.force, Size: o.bytes, UnpackMemory: o.unpack, Progress: p,
				Stdout: a.stdout})
		return err
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("interrupted: %q is not complete", dest)
	case err != nil:
		return err
	}
	for _, d := range done {
		fmt.Fprintf(a.stderr, "%s: %s (%s) of %s is in %s, %s\n", console.OneLine(ref.String()),
			console.OneLine(d.Name), d.Format, digestsText(digest, d.Platform),
			console.OneLine(d.To), console.ShortSize(d.Size))
	}
	return writeDigest(o.digest, digest)
}

// digestsText shows the digest of the reference, and that of this machine's image in a list.
func digestsText(digest, platform string) string {
	if platform == "" {
		return digest
	}
	return fmt.Sprintf("%s (linux/%s: %s)", digest, runtime.GOARCH, platform)
}

// checkPullDestination refuses output that would garble a terminal, and a file name that names the
// wrong format.
func (a *app) checkPullDestination(dest string, o pullOptions) error {
	if dest == standardStream {
		return a.checkStdout()
	}
	if o.format != pullRaw || isDirectory(dest) {
		return nil
	}
	return checkRawName(dest, fmt.Sprintf("keep the file as it is with --%s=%s", keyFormat,
		pullOriginal))
}

// tellProgress answers GET /progress at an address ("": nowhere) until stop is called. The answer
// is not secret, so anybody may ask.
func tellProgress(ctx context.Context, address string, p *registry.Progress) (stop func(),
	err error) {
	if address == "" {
		return func() {}, nil
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("--%s: %w", flagProgress, err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /progress", func(w http.ResponseWriter, _ *http.Request) {
		done, total := p.Data()
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(status.Progress{Done: done, Total: total})
	})
	server := &http.Server{Handler: http.NewCrossOriginProtection().Handler(mux),
		ReadTimeout: progressTimeout, WriteTimeout: progressTimeout, MaxHeaderBytes: 4 << 10}
	server.SetKeepAlivesEnabled(false)
	go func() { _ = server.Serve(l) }()
	return func() { _ = server.Close() }, nil
}

// progressTimeout is how long a request for the progress may take.
const progressTimeout = 5 * time.Second
