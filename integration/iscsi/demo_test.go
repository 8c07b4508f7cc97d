package iscsi

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// TestDemoObeysTheEnvironment runs the demo with other ports, as the daemon's message about a taken
// port advises. The demo must use the portals and pages of the variables, and its hints must fit.
func TestDemoObeysTheEnvironment(t *testing.T) {
	t.Parallel()
	rig.Need(t, "bash")
	for _, c := range []struct {
		listen, hint   string // # stands for the port
		pages, address string // # stands for their port
		env            map[string]string
	}{
		{listen: "127.0.0.1:#", hint: "127.0.0.1:#", pages: "127.0.0.1:#", address: "127.0.0.1:#"},
		{listen: "localhost:#,127.0.0.2:0", hint: "127.0.0.1:#", pages: ":#",
			address: "127.0.0.1:#"},
		{listen: ":#", hint: rig.User + "@127.0.0.1:#", pages: "", env: rig.CHAPEnv},
		{listen: "0.0.0.0:#", hint: "127.0.0.1:#", pages: "0.0.0.0:#", address: "127.0.0.1:#",
			env: map[string]string{"INSECURE_NO_AUTH": "true"}},
		{listen: "127.0.0.1", hint: "127.0.0.1:#", pages: "", env: map[string]string{"PORT": "#"}},
		{listen: "", hint: "127.0.0.1:#", pages: "", env: map[string]string{"PORT": "#"}},
		{listen: "[::1]:#", hint: "[::1]:#", pages: "[::1]:#", address: "[::1]:#"},
		{listen: "::1", hint: "[::1]:#", pages: "", env: map[string]string{"PORT": "#"}},
		{listen: "127.0.0.1:0", hint: "127.0.0.1:PORT", pages: ""},
	} {
		t.Run(c.listen, func(t *testing.T) {
			if strings.Contains(c.listen, "::") && !strings.Contains(rig.SecondLoopback(), "::1") {
				t.Skip("this machine has no IPv6")
			}
			_, port, _ := strings.Cut(rig.FreePortal(t), ":")
			_, pagesPort, _ := strings.Cut(rig.FreePortal(t), ":")
			env := map[string]string{"LISTEN": withPort(c.listen, port),
				"METRICS_LISTEN": withPort(c.pages, pagesPort)}
			for name, value := range c.env {
				env[name] = withPort(value, port)
			}
			d := rig.Start(t, rig.Config{Binary: demo(t), Env: env})
			require.Contains(t, d.Output(), "  iscsi-ls -s iscsi://"+withPort(c.hint, port)+"\n")
			if strings.Contains(c.hint, "#") {
				require.Equal(t, port, d.Port())
			}
			if c.pages == "" {
				require.Empty(t, d.Metrics)
				require.Contains(t, d.Output(), "METRICS_LISTEN is empty")
				return
			}
			require.Contains(t, d.Output(), "metrics: http://"+withPort(c.address, pagesPort)+"/\n")
			d.Metrics = withPort(c.address, pagesPort)
			require.Contains(t, d.Get("/status"), "demo.qcow2")
		})
	}
}

// withPort replaces each # in text by a port.
func withPort(text, port string) string { return strings.ReplaceAll(text, "#", port) }

// demo is a program that runs the script of `make run`.
func demo(t *testing.T) string {
	t.Helper()
	built := testtool.Must(rig.Binary())(t)
	script := testtool.Must(filepath.Abs("../../scripts/run-demo.sh"))(t)
	path := filepath.Join(t.TempDir(), "demo")
	require.NoError(t, os.WriteFile(path,
		fmt.Appendf(nil, "#!/bin/sh\nexec '%s' '%s'\n", script, built), 0o755))
	return path
}
