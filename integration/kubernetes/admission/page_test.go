package admission

import (
	"bytes"
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"kubevirt.io/disk/integration/kubernetes/plane"
	"kubevirt.io/disk/kubernetes/controller"
)

// pageCommands are the commands of a section of docs/kubernetes.md.
func pageCommands(t *testing.T, heading string) (commands []string) {
	t.Helper()
	page, err := os.ReadFile("../../../docs/kubernetes.md")
	require.NoError(t, err)
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

// TestPage runs the five commands of docs/kubernetes.md, word by word, from nothing to a VM with a
// persistent disk. No node runs the controller that the first one installs, so it runs here, with
// the rights that it has there.
func TestPage(t *testing.T) {
	p := plane.Get(t)
	namespace := p.Namespace(t)
	commands := pageCommands(t, "## From nothing to a VM with a persistent disk")
	require.Len(t, commands, 5)
	root, err := plane.Root()
	require.NoError(t, err)
	for i, command := range commands {
		args := strings.Fields(command)
		require.Equal(t, "kubectl", args[0], command)
		for j, arg := range args {
			if j > 0 && args[j-1] == "-f" {
				args[j] = root + "/" + arg
			}
		}
		args = args[1:]
		if i > 0 {
			args = append([]string{"--namespace", namespace}, args...)
		} else {
			text, err := os.ReadFile(args[len(args)-1])
			require.NoError(t, err)
			objects, err := plane.Decode(bytes.NewReader(text))
			require.NoError(t, err)
			t.Cleanup(func() { remove(t, p, objects, metav1.NamespaceDefault) })
		}
		out := p.Kubectl(t, args...)
		switch i {
		case 0:
			controllers(t, p, "kubevirt-disk-system", nil)
			admitted(t, p)
		case 4:
			require.Contains(t, out, "my-vm")
			require.Contains(t, out, "true")
		}
	}
}

// controllers run as the service account that they have in a namespace, without what is turned off.
// They work in some other namespaces, or in all.
func controllers(t *testing.T, p *plane.Plane, system string, without []string,
	namespaces ...string) {
	t.Helper()
	scheme, err := controller.Scheme()
	require.NoError(t, err)
	cache, err := controller.Cache(namespaces...)
	require.NoError(t, err)
	none := time.Duration(0)
	mgr, err := ctrl.NewManager(p.ServiceAccount(t, system, account), ctrl.Options{
		Scheme: scheme, Cache: cache, Logger: logr.Discard(), GracefulShutdownTimeout: &none,
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Controller: config.Controller{SkipNameValidation: new(true)}})
	require.NoError(t, err)
	require.NoError(t, controller.Setup(mgr, controller.Options{Server: server, Without: without,
		ClaimSize: resource.MustParse("20Gi"), Concurrency: 1}))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
}

// TestPageWithoutController: the commands for those who want no controller, under pod security
// `restricted`.
func TestPageWithoutController(t *testing.T) {
	p := plane.Get(t)
	namespace := p.Namespace(t)
	commands := pageCommands(t, "## Without the controller")
	require.NotEmpty(t, commands)
	root, err := plane.Root()
	require.NoError(t, err)
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

// TestTodaysKubeVirt: of the ways of docs/kubernetes.md, the one by a PersistentVolume. The claim
// that a VM names gets the volume with the decoupled disk. A kernel logs in with these fields in
// integration, in a guest with an initiator.
func TestTodaysKubeVirt(t *testing.T) {
	p := plane.Get(t)
	root, err := plane.Root()
	require.NoError(t, err)
	for _, name := range []string{"secret.yaml", "decoupled.yaml", "volume.yaml"} {
		file := root + "/examples/kubernetes/" + name
		t.Cleanup(func() { p.Kubectl(t, "delete", "--wait=false", "-n", "default", "-f", file) })
		p.Kubectl(t, "apply", "-n", "default", "-f", file)
	}
	page, err := os.ReadFile(root + "/docs/kubernetes.md")
	require.NoError(t, err)
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
