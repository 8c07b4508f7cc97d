package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"sync/atomic"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/client"
)

// envVolumesToken names the file of the token for the volumes of a server.
const envVolumesToken = "VOLUMES_TOKEN_FILE"

func (a *app) uploadCommand() *cobra.Command {
	var opt client.Options
	cmd := &cobra.Command{
		Use:   "upload FILE URL",
		Short: "Send a disk image to a volume of a running server",
		Long: `Sends a disk image to a volume of a server that runs with --volumes-listen. URL is
that of the volume, as https://HOST:8443/volume/NAME. If there is no such volume, it is made with
the size of the disk.

If the connection breaks, the upload goes on where it was. If the command is interrupted, the same
command goes on where it was. At the end the server compares a digest of everything. Standard output
says how a virtual machine finds the disk.

A token that the server asks for is read from a file, and never from the command line.

` + formatsHelp,
		Args: usageArgs(cobra.ExactArgs(2)),
	}
	flags := cmd.Flags()
	own := []settings.Setting{{Key: "token-file", Env: []string{envVolumesToken}, Empty: true,
		Usage: "`file` with the token that the server asks for", To: settings.Text(&opt.TokenFile)}}
	settings.AddSettings(flags, own)
	flags.StringVar(&opt.CAFile, "ca", "", "`file` with certificates of the authorities that "+
		"signed the server's certificate (default the system's)")
	flags.StringVar(&opt.CertFile, "cert", "", "`file` with the certificate of this client")
	flags.StringVar(&opt.KeyFile, "key", "", "`file` with the key of that certificate")
	cmd.ValidArgsFunction = func(_ *cobra.Command, args []string, _ string) ([]string,
		cobra.ShellCompDirective) {
		if len(args) == 0 {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		server, name, err := parseVolumeURL(args[1])
		if err != nil {
			return err
		}
		if (opt.CertFile == "") != (opt.KeyFile == "") {
			return errors.New("--cert and --key go together: name both files")
		}
		load(cmd.Flags(), own) // no value can be wrong
		opt.Server, opt.UserAgent = server, userAgent()
		c, err := client.New(opt)
		if err != nil {
			return err
		}
		defer c.Close()
		return running(func(cmd *cobra.Command, args []string) error {
			ctx, stop := a.interruptible(cmd.Context(), nil, nil)
			defer stop()
			return a.upload(ctx, c, args[0], name)
		})(cmd, args)
	}
	return cmd
}

// parseVolumeURL splits the address of a volume into the address of its server and its name. Its
// errors do not show the address, because that may contain a password.
func parseVolumeURL(text string) (server, name string, err error) {
	const form = "write it as https://HOST:8443/volume/NAME"
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
		return "", "", fmt.Errorf("URL is not an address of a volume: %s", form)
	}
	if u.User != nil {
		return "", "", errors.New("URL has a user name or password in it, which others can see: " +
			"name the file of a token with --token-file")
	}
	path := strings.TrimSuffix(strings.TrimSuffix(u.Path, "/"), "/data")
	at := strings.LastIndex(path, "/volume/")
	if at < 0 || u.RawQuery != "" || u.Fragment != "" {
		return "", "", fmt.Errorf("URL is not an address of a volume: %s", form)
	}
	name = path[at+len("/volume/"):]
	if err := api.CheckName(name); err != nil {
		return "", "", err
	}
	return u.Scheme + "://" + u.Host + path[:at], name, nil
}

// sending is the progress of an upload.
type sending struct {
	sent  atomic.Int64
	total int64
}

func (s *sending) Done() int64               { return s.sent.Load() }
func (s *sending) Total() int64              { return s.total }
func (s *sending) Data() (done, total int64) { return s.sent.Load(), s.total }

func (a *app) upload(ctx context.Context, c *client.Client, file, name string) error {
	f, err := osfile.OpenRegular(file)
	if errors.As(err, new(*osfile.NotRegularError)) {
		return fmt.Errorf("%w: to send data from a pipe, use \"curl -T - URL/data\"", err)
	} else if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	where, err := filepath.EvalSymlinks(file)
	if err != nil {
		return err
	}
	if part := image.CheckWhole(where); part != nil {
		return part
	}
	if err := durable.HoldFile(f, file, unix.LOCK_SH); err != nil {
		return err
	}
	p := &sending{total: info.Size()}
	label := console.OneLine(name)
	report := a.reporter(label)
	var v api.Volume
	err = report.While(p, func() (err error) {
		v, err = c.Upload(ctx, name, f, info.Size(), client.UploadOptions{
			Sent: p.sent.Store,
			Again: func(err error) {
				report.Line(label + ": trying again: " + console.OneLine(err.Error()))
			},
		})
		return err
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("interrupted: %q is not complete; run the same command again to resume",
			name)
	case err != nil:
		return err
	}
	e := yaml.NewEncoder(a.stdout)
	e.SetIndent(2)
	return errors.Join(e.Encode(v), e.Close())
}
