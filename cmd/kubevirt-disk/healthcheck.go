package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/readyfile"
	"kubevirt.io/disk/pages"
)

func (a *app) healthcheckCommand() *cobra.Command {
	var live bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "healthcheck",
		Short: "Ask the daemon of this machine whether its LUNs can be used",
		Long: `Asks the daemon on this machine whether its LUNs can be used (/readyz), or with --live
whether it works as it should (/healthz). Give it the settings of serve, so that it finds the
daemon.

If the pages are off, the ready file decides. It also decides in a container if nobody answers at
the default address of the pages, or only the daemon of another container of the pod.

Exit status 0: yes. 1: no, or nobody answers.`,
		Args: usageArgs(noArgs),
	}
	c := newConfig()
	own := settings.Pick(c.settings(), keyMetricsListen, keyReadyFile)
	settings.AddFlags(cmd.Flags(), own)
	cmd.Flags().BoolVar(&live, "live", false, "ask /healthz instead of /readyz")
	cmd.Flags().DurationVar(&timeout, "timeout", 3*time.Second, "how long to wait for the answer")
	cmd.RunE = running(func(cmd *cobra.Command, _ []string) error {
		l := load(cmd.Flags(), own)
		if err := l.Problems.Err(); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
		defer cancel()
		answer, err := checkHealth(ctx, c.Pages, l.Source(keyMetricsListen) != "", c.ReadyFile,
			live)
		if err == nil {
			fmt.Fprintln(a.stdout, answer)
		}
		return err
	})
	return cmd
}

// checkHealth returns the answer of a healthy daemon. chosen: page is not the default.
func checkHealth(ctx context.Context, page *options.Address, chosen bool, readyFile string,
	live bool) (string, error) {
	if page != nil && page.Port != 0 {
		path := "/readyz"
		if live {
			path = "/healthz"
		}
		url := "http://" + options.Reachable(page.String()) + path
		answer, container, err := askPage(ctx, url)
		// The containers of a pod share one network, but not their files. A daemon runs without
		// pages if their port is taken.
		otherContainer := container != "" && container != pages.Container()
		without := errors.Is(err, syscall.ECONNREFUSED) && daemonIsInit()
		if chosen || !otherContainer && !without {
			return answer, err
		}
		if live || readyFile == "" {
			return "", fmt.Errorf("there is no daemon to ask: %s is not a page of the daemon in "+
				"this container: give it pages of its own with %s", url, nameOf(keyMetricsListen))
		}
	}
	switch {
	case live:
		return "", fmt.Errorf("there is no daemon to ask: the pages are off, or on a port that "+
			"only the daemon knows (--%s)", keyMetricsListen)
	case readyFile == "":
		return "", fmt.Errorf("there is no daemon to ask: both the pages and the ready file are "+
			"off (--%s, --%s)", keyMetricsListen, keyReadyFile)
	}
	switch info, err := os.Stat(readyFile); {
	case err != nil:
		return "", fmt.Errorf("not ready: %w", err)
	case !info.Mode().IsRegular():
		return "", fmt.Errorf("not ready: %q is not a regular file: is it the daemon's %s?",
			readyFile, nameOf(keyReadyFile))
	case readyfile.Left(readyFile):
		return "", fmt.Errorf("not ready: the daemon that made %q has ended, and was killed: "+
			"start it again", readyFile)
	}
	return "ok", nil
}

// maxAnswer limits the part of an answer that is read, in bytes.
const maxAnswer = 4 << 10

// askPage returns the answer of a page and the container of its daemon, which a bad answer names,
// too.
func askPage(ctx context.Context, url string) (answer, container string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", "", err
	}
	// The daemon is on this machine, so do not use a proxy from the environment.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	res, err := client.Do(req)
	if err != nil {
		return "", "", fmt.Errorf("nobody answers: %w: is the daemon running, with the same %s?",
			err, nameOf(keyMetricsListen))
	}
	defer res.Body.Close()
	container = res.Header.Get(pages.ContainerHeader)
	body, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer))
	if err != nil {
		return "", container, fmt.Errorf("%s: %w", url, err)
	}
	answer = strings.TrimSpace(string(body))
	if res.StatusCode != http.StatusOK {
		return "", container, fmt.Errorf("%s answers %d: %s", url, res.StatusCode, answer)
	}
	return answer, container, nil
}

// daemonIsInit reports whether the daemon is the first process of this container. Such a daemon
// runs as long as the container, and keeps the ready file up to date.
func daemonIsInit() bool {
	first, err := os.Readlink("/proc/1/exe")
	own, ownErr := os.Readlink("/proc/self/exe")
	return err == nil && ownErr == nil && first == own
}
