package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

func (a *app) healthcheckCommand() *cobra.Command {
	var live bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "healthcheck",
		Short: "Ask the daemon of this machine whether its LUNs can be used",
		Long: `Asks the daemon that serves on this machine whether its LUNs can be used (/readyz), or with --live whether it works as it
should (/healthz). It is found by the same settings as serve has. Where the pages are off, the ready file decides.

Exit status 0: yes. 1: no, or nobody answers.`,
		Args: usageArgs(cobra.NoArgs),
	}
	keys := []string{keyMetricsListen, keyReadyFile}
	addFlags(cmd.Flags(), keys...)
	cmd.Flags().BoolVar(&live, "live", false, "ask /healthz instead of /readyz")
	cmd.Flags().DurationVar(&timeout, "timeout", 3*time.Second, "how long to wait for the answer")
	cmd.RunE = running(func(cmd *cobra.Command, _ []string) error {
		l := load(cmd.Flags(), keys...)
		page, readyFile := l.metricsListen(), l.text(keyReadyFile)
		if err := l.problems.err(); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
		defer cancel()
		answer, err := checkHealth(ctx, page, readyFile, live)
		if err == nil {
			fmt.Fprintln(a.stdout, answer)
		}
		return err
	})
	return cmd
}

// checkHealth returns what a healthy daemon answers.
func checkHealth(ctx context.Context, page *portal, readyFile string, live bool) (string, error) {
	switch {
	case page != nil && page.port != 0:
		path := "/readyz"
		if live {
			path = "/healthz"
		}
		return askPage(ctx, "http://"+local(*page).String()+path)
	case live:
		return "", fmt.Errorf("nobody can be asked: the pages are off, or on a port that only the daemon knows (--%s)", keyMetricsListen)
	case readyFile == "":
		return "", fmt.Errorf("nobody can be asked: both the pages and the ready file are off (--%s, --%s)", keyMetricsListen, keyReadyFile)
	}
	if _, err := os.Stat(readyFile); err != nil {
		return "", fmt.Errorf("not ready: %w", err)
	}
	return "ok", nil
}

// local is the address by which this machine reaches a portal that may be bound to every address.
func local(p portal) portal {
	switch {
	case !p.addr.IsValid(), p.addr == netip.IPv4Unspecified():
		p.addr = loopback4()
	case p.addr == netip.IPv6Unspecified():
		p.addr = netip.IPv6Loopback()
	}
	return p
}

// maxAnswer bounds what is read of an answer, bytes.
const maxAnswer = 4 << 10

func askPage(ctx context.Context, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	// The daemon is on this machine: a proxy of the environment has no part in it.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	res, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer))
	if err != nil {
		return "", fmt.Errorf("%s: %w", url, err)
	}
	answer := strings.TrimSpace(string(body))
	if res.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s answers %d: %s", url, res.StatusCode, answer)
	}
	return answer, nil
}
