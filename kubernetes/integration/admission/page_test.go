package admission

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/controller"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/controller/objects"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// pageCommands are the commands of a section of docs/kubernetes.md.
func pageCommands(t *testing.T, heading string) (commands []string) {
	t.Helper()
	page := testtool.Must(os.ReadFile("../../../docs/kubernetes.md"))(t)
	_, section, found := strings.Cut(string(page), "\n"+heading+"\n")
	require.True(t, found, heading)
	section, _, _ = strings.Cut(section, "\n## ")
	section, _, _ = strings.Cut(section, "\n### ")
	for line := range strings.Lines(section) {
		if command, ok := strings.CutPrefix(line, "    "); ok {
			commands = append(commands, strings.TrimSpace(command))
		}
	}
	return commands
}

// TestPage runs the commands of docs/kubernetes.md, word for word, from nothing to a VM with a
// persistent disk. There is no node to run the controller that they install, so it runs here, with
// the rights that it would have there, and nobody waits for its Deployment.
func TestPage(t *testing.T) {
	p := plane.Get(t)
	namespace := p.Namespace(t)
	commands := pageCommands(t, "## From nothing to a VM with a persistent disk")
	require.Len(t, commands, 8)
	root := testtool.Must(plane.Root())(t)
	require.Equal(t, "make manifests", commands[0])
	const made = "bin/kubevirt-disk-controller.yaml" // by that
	for i, command := range commands[1:] {
		args := strings.Fields(command)
		require.Equal(t, "kubectl", args[0], command)
		for j, arg := range args {
			switch {
			case arg == made:
				args[j] = controllertest.Manifest(t)
			case j > 0 && args[j-1] == "-f":
				args[j] = root + "/" + arg
			}
		}
		args = args[1:]
		if args[0] == "rollout" {
			require.Equal(t, 1, i)
			p.Kubectl(t, "get", "-n", system, args[len(args)-2])
			p.ServeWebhook(t, system, account, server)
			controllers(t, p, system, []string{"pets"}) // as the manifest says
			continue
		}
		if i > 1 {
			args = append([]string{"--namespace", namespace}, args...)
		}
		out := p.Kubectl(t, args...)
		if i == len(commands)-2 {
			require.Contains(t, out, "my-vm")
			require.Contains(t, out, "true")
		}
	}
}

// controllers run as the controller's service account in a namespace, without the features that are
// turned off. They work in some other namespaces, or in all.
func controllers(t *testing.T, p *plane.Plane, system string, without []string,
	namespaces ...string) {
	t.Helper()
	scheme := testtool.Must(controller.Scheme())(t)
	cache := testtool.Must(controller.Cache(namespaces...))(t)
	none := time.Duration(0)
	mgr := testtool.Must(ctrl.NewManager(p.ServiceAccount(t, system, account), ctrl.Options{
		Scheme: scheme, Cache: cache, Logger: logr.Discard(), GracefulShutdownTimeout: &none,
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Controller: config.Controller{SkipNameValidation: new(true)}}))(t)
	require.NoError(t, controller.Setup(mgr, controller.Options{Options: objects.Options{
		Server: server, Without: without, ClaimSize: resource.MustParse("20Gi"), Concurrency: 1}}))
	ctx, cancel := context.WithCancel(context.Background())
	ended := testtool.Go(func() error { return mgr.Start(ctx) })
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
}

// TestPageWithoutController runs the commands for users who want no controller, under pod security
// `restricted`.
func TestPageWithoutController(t *testing.T) {
	p := plane.Get(t)
	namespace := p.Namespace(t)
	commands := pageCommands(t, "## Without the controller")
	require.NotEmpty(t, commands)
	root := testtool.Must(plane.Root())(t)
	for _, command := range commands {
		args := strings.Fields(command)
		require.Equal(t, "kubectl", args[0], command)
		for j := range args {
			if strings.HasSuffix(args[j], ".yaml") {
				args[j] = root + "/examples/kubernetes/" + args[j]
			}
		}
		p.Kubectl(t, append([]string{"--namespace", namespace}, args[1:]...)...)
	}
}

// TestTodaysKubeVirt follows the way with a PersistentVolume in docs/kubernetes.md. The claim of a
// VM gets the volume with the decoupled disk. In package integration, the kernel of a guest logs in
// with these fields.
func TestTodaysKubeVirt(t *testing.T) {
	p := plane.Get(t)
	root := testtool.Must(plane.Root())(t)
	for _, name := range []string{"secret.yaml", "decoupled.yaml", "volume.yaml"} {
		file := root + "/examples/kubernetes/" + name
		t.Cleanup(func() { p.Kubectl(t, "delete", "--wait=false", "-n", "default", "-f", file) })
		p.Kubectl(t, "apply", "-n", "default", "-f", file)
	}
	page := testtool.Must(os.ReadFile(root + "/docs/kubernetes.md"))(t)
	const name = "my-fedora-root"
	require.Contains(t, string(page), "persistentVolumeClaim: {claimName: "+name+"}")
	claim := &corev1.PersistentVolumeClaim{}
	eventually(t, "the claim is bound", func() bool {
		require.NoError(t, p.Client.Get(t.Context(),
			client.ObjectKey{Namespace: "default", Name: name}, claim))
		return claim.Status.Phase == corev1.ClaimBound
	})
	require.Equal(t, "my-fedora-disk", claim.Spec.VolumeName)
	require.Equal(t, corev1.PersistentVolumeBlock, *claim.Spec.VolumeMode)
}
