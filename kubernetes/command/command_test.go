package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
)

func TestWrongUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		says string
	}{
		{args: []string{"--claim-size=much"}, says: `claim-size: "much" is not a size`},
		{args: []string{"--claim-size=-1"}, says: "claim-size: -1 is not above 0"},
		{args: []string{"--log-level=loud"}, says: `log-level: "loud" is not a log level`},
		{args: []string{"--usage-type=fast="}, says: "usage-type: fast=: write it as NAME=CLASS"},
		{args: []string{"--concurrency=0"}, says: "concurrency: 0 is not above 0"},
		{args: []string{"--without=pets,disks"},
			says: `without: "disks" cannot be turned off: use exports, pets, services, snap`},
		{args: []string{"serve"}, says: "unknown command"},
		{args: []string{"--webhook-listen=9443"},
			says: `webhook-listen: "9443" is not an address with a port: write it as :9443`},
		{args: []string{"--webhook-listen=:0"}, says: `":0" is not an address with a port`},
		{says: "webhook-certificate: it is missing"},
		{args: []string{"--webhook-certificate=x", "--server-image="},
			says: "server-image: it is missing"},
		{args: []string{"--webhook-certificate=x", "--kubeconfig=/nonexistent"},
			says: "the configuration of the API server cannot be read: "},
	} {
		var stdout, stderr bytes.Buffer
		require.Equal(t, exitUsage, run(c.args, &stdout, &stderr), c.says)
		require.Contains(t, stderr.String(), c.says)
	}
}

func TestVersion(t *testing.T) {
	var stdout, stderr bytes.Buffer
	require.Equal(t, exitDone, run([]string{"--version"}, &stdout, &stderr))
	require.Contains(t, stdout.String(), "kubevirt-disk-controller dev\n")
	require.Empty(t, stderr.String())
}

// TestArgumentsOfTheChart checks that the command takes the arguments of the chart's Deployments.
func TestArgumentsOfTheChart(t *testing.T) {
	const some = `
namespaces: [vms-1, vms-2]
usageTypes: {fast: ssd}
readWriteOnce: [old]
snapshotClass: snapshots
pullSecret: registry
pullCA: our-ca
followRegistries: [registry.example.com/vm]
signatures: {policies: {default: {default: allow}}, registrySecret: registry, registryCA: our-ca}
persistentVolumes: {create: true}
localDisks: {move: true}
claims: {fill: true}
without: [pets, exports]
`
	for values, namespaces := range map[string][]string{"": nil, some: {"vms-1", "vms-2"}} {
		text := controllertest.Chart(t, "chart-system", values)
		found := false
		for document := range strings.SplitSeq(text, "\n---\n") {
			var d appsv1.Deployment
			if !strings.Contains(document, "kind: Deployment\n") {
				continue
			}
			require.NoError(t, yaml.Unmarshal([]byte(document), &d))
			found = true
			var s settings
			flags := pflag.NewFlagSet("chart", pflag.ContinueOnError)
			s.flags(flags)
			args := d.Spec.Template.Spec.Containers[0].Args
			require.NoError(t, flags.Parse(args), values)
			require.Empty(t, flags.Args(), values)
			require.Equal(t, namespaces, s.namespaces, values)
			var stderr bytes.Buffer
			args = append(args, "--kubeconfig=/nonexistent")
			require.Equal(t, exitUsage, run(args, io.Discard, &stderr), values)
			require.Contains(t, stderr.String(),
				"the configuration of the API server cannot be read", values)
		}
		require.True(t, found, values)
	}
}

// reviews is an API server that knows two tokens.
type reviews struct {
	client.Writer
	fails bool
}

func (r *reviews) Create(_ context.Context, o client.Object, _ ...client.CreateOption) error {
	if r.fails {
		return errors.New("no connection")
	}
	switch o := o.(type) {
	case *authenticationv1.TokenReview:
		o.Status.Authenticated = o.Spec.Token == "prometheus" || o.Spec.Token == "somebody"
		o.Status.User.Username = o.Spec.Token
	case *authorizationv1.SubjectAccessReview:
		o.Status.Allowed = o.Spec.User == "prometheus" &&
			o.Spec.NonResourceAttributes.Verb == "get" &&
			o.Spec.NonResourceAttributes.Path == "/metrics"
	}
	return nil
}

// TestMetricsAreForThoseWhoMay: without a token of the cluster and the right to read them, nobody
// gets metrics, also when the API server does not answer.
func TestMetricsAreForThoseWhoMay(t *testing.T) {
	api := &reviews{}
	handler, err := filter(api)(logr.Discard(), http.HandlerFunc(func(res http.ResponseWriter,
		_ *http.Request) {
		_, _ = res.Write([]byte("metrics"))
	}))
	require.NoError(t, err)
	get := func(method, path, authorization string) int {
		req := httptest.NewRequest(method, path, nil)
		req.Header.Set("Authorization", authorization)
		res := httptest.NewRecorder()
		handler.ServeHTTP(res, req)
		require.Equal(t, res.Code == http.StatusOK, res.Body.String() == "metrics")
		return res.Code
	}
	require.Equal(t, http.StatusOK, get("GET", "/metrics", "Bearer prometheus"))
	for authorization, code := range map[string]int{"": 401, "Bearer ": 401, "prometheus": 401,
		"Basic prometheus": 401, "Bearer wrong": 401, "Bearer somebody": 403} {
		require.Equal(t, code, get("GET", "/metrics", authorization), authorization)
	}
	require.Equal(t, http.StatusForbidden, get("POST", "/metrics", "Bearer prometheus"))
	require.Equal(t, http.StatusForbidden, get("GET", "/other", "Bearer prometheus"))
	api.fails = true
	require.Equal(t, http.StatusInternalServerError, get("GET", "/metrics", "Bearer prometheus"))
}

// TestSendAndReceive moves a disk by the two commands, as the pods of a move do.
func TestSendAndReceive(t *testing.T) {
	from, to, secret := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "secret")
	content := bytes.Repeat([]byte("disk"), 50_000)
	require.NoError(t, os.WriteFile(filepath.Join(from, "disk.img"), content, 0o600))
	require.NoError(t, os.WriteFile(secret, []byte("a random secret\n"), 0o600))
	read, write := io.Pipe()
	sent := make(chan int, 1)
	go func() {
		sent <- run([]string{"send", from, "--listen=127.0.0.1:0", "--secret-file=" + secret},
			io.Discard, write)
		_ = write.Close()
	}()
	said := bufio.NewReader(read)
	line := testtool.Must(said.ReadString('\n'))(t)
	address := strings.TrimSpace(strings.TrimPrefix(line, "waiting for a receiver at "))
	rest := make(chan string, 1)
	go func() {
		all, _ := io.ReadAll(said)
		rest <- string(all)
	}()
	var stdout, stderr bytes.Buffer
	require.Equal(t, exitDone, run([]string{"receive", address, to, "--secret-file=" + secret},
		&stdout, &stderr), stderr.String())
	require.Contains(t, stderr.String(), "the disk is in "+to)
	require.Empty(t, stdout.String())
	require.Equal(t, exitDone, <-sent)
	require.Contains(t, <-rest, "a receiver has the disk: 200000 bytes")
	got := testtool.Must(os.ReadFile(filepath.Join(to, "disk.img")))(t)
	require.True(t, bytes.Equal(content, got))

	stderr.Reset()
	require.Equal(t, exitFailed, run([]string{"receive", address, to, "--secret-file=" + secret},
		&stdout, &stderr))
	require.Contains(t, stderr.String(), "is not empty: it has disk.img")
}

func TestWrongUsageOfSendAndReceive(t *testing.T) {
	short := filepath.Join(t.TempDir(), "short")
	missing := filepath.Join(t.TempDir(), "missing")
	require.NoError(t, os.WriteFile(short, []byte("secret"), 0o600))
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"send"}, "accepts 1 arg(s)"},
		{[]string{"send", "/data"}, "--secret-file is missing"},
		{[]string{"send", "/data", "--secret-file=" + missing},
			"--secret-file: open " + missing},
		{[]string{"send", "/data", "--secret-file=" + short}, "want 12 random ones at least"},
		{[]string{"receive", "node", "/data"}, "ADDRESS: address node: missing port in address"},
	} {
		var stdout, stderr bytes.Buffer
		require.Equal(t, exitUsage, run(c.args, &stdout, &stderr), c.says)
		require.Contains(t, stderr.String(), c.says)
	}
}
