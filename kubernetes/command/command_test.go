package main

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/util/yaml"

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
