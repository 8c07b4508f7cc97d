package admission

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/integration/kubernetes/plane"
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
	require.Eventually(t, func() bool {
		require.NoError(t, p.Client.Get(t.Context(),
			client.ObjectKey{Namespace: "default", Name: name}, claim))
		return claim.Status.Phase == corev1.ClaimBound
	}, patience, patience/1000)
	require.Equal(t, "my-fedora-disk", claim.Spec.VolumeName)
	require.Equal(t, corev1.PersistentVolumeBlock, *claim.Spec.VolumeMode)
}
