package kubernetes

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// uninstalling are the commands of docs/kubernetes.md, without `kubectl`, and with the manifest as
// `make manifests` writes it.
func uninstalling(t *testing.T) (commands [][]string) {
	t.Helper()
	manifest := controllertest.Manifest(t)
	for _, line := range plane.Commands(t, "kubernetes.md", "### Uninstalling") {
		if command, ok := strings.CutPrefix(strings.ReplaceAll(line, "'", ""), "kubectl "); ok {
			command = strings.ReplaceAll(command, "bin/kubevirt-disk-controller.yaml", manifest)
			commands = append(commands, strings.Fields(command))
		}
	}
	require.Len(t, commands, 7)
	return commands
}

// TestUninstall: deleting all of the manifest, even twice, deletes no disk. When the product is
// installed again, the disks are as before.
func TestUninstall(t *testing.T) {
	w := newWorld(t)
	commands := uninstalling(t)
	w.apply(set("set", ""))
	require.NoError(t, w.machine("a", "disk"))
	w.starts("a")
	before := w.disks()
	require.Equal(t, 3, strings.Count(before, "\n"), before)

	const says = "every VMIdentity of the cluster would be deleted, and every disk with them"
	types := []string{"vmidentities.disk.kubevirt.io", "vmidentitysets.disk.kubevirt.io",
		"vmidentitysnapshots.disk.kubevirt.io", "vmimages.disk.kubevirt.io",
		"vmpets.disk.kubevirt.io"}
	deleteTypes := append([]string{"delete", "--dry-run=server", "crd"}, types...)
	var out string
	testtool.Within(t, timeout, func() bool { // a policy takes effect a moment after it was made
		out, _ = w.p.TryKubectl(nil, deleteTypes...)
		return strings.Contains(out, says)
	}, "it is refused: %s", func() any { return out })
	// Pods on nodes that other tests have deleted would hold up the namespace for a minute.
	w.p.Kubectl(t, "delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false", "-n",
		systemNamespace)
	for range 2 {
		out, err := w.p.TryKubectl(nil, commands[0]...)
		require.Error(t, err)
		require.Contains(t, out, says)
		for _, name := range types {
			require.Contains(t, out, "kubectl annotate crd "+name+
				" disk.kubevirt.io/delete-all-objects=true")
		}
		w.p.Kubectl(t, "wait", "--for=delete", "--timeout=100s", "ns/"+systemNamespace)
	}
	_ = w.c.terminate() // its account has gone, so it may fail
	require.Contains(t, w.kubectl("get", "clusterrole", account), "NotFound")
	require.Equal(t, before, w.disks())

	// Deleting all types at once is refused, too.
	all := &metav1.PartialObjectMetadata{}
	all.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1",
		Kind: "CustomResourceDefinition"})
	require.ErrorContains(t, w.p.Client.DeleteAllOf(t.Context(), all, client.DryRunAll,
		client.MatchingFields{"metadata.name": types[0]}), says)

	// With the annotation for deleting the disks, it is allowed. commands[3] would delete
	// those of other tests.
	require.Equal(t, "disk.kubevirt.io/delete-all-objects=true", commands[4][len(commands[4])-1])
	w.p.Kubectl(t, commands[4]...)
	w.p.Kubectl(t, deleteTypes...)
	w.p.Kubectl(t, append(commands[4][:len(commands[4])-1],
		"disk.kubevirt.io/delete-all-objects-")...)
	require.Equal(t, append(commands[0], "--wait=false"), commands[5])
	require.Equal(t, commands[6], commands[1])
	policies := []string{"get", "validatingadmissionpolicy,validatingadmissionpolicybinding",
		"types.disk.kubevirt.io", "-o", "jsonpath={.items[*].metadata.deletionTimestamp}"}
	require.NotEmpty(t, w.kubectl(policies...), "they are in force while they are being deleted")
	w.p.Kubectl(t, commands[1]...)
	require.Contains(t, w.kubectl("get", "validatingadmissionpolicy", "types.disk.kubevirt.io"),
		"NotFound")
	require.Contains(t, w.kubectl("get", "validatingadmissionpolicybinding",
		"types.disk.kubevirt.io"), "NotFound")

	w.p.Kubectl(t, commands[2]...)
	require.Empty(t, w.p.Kubectl(t, policies...), "they are not being deleted any more")
	// A person has applied it in the other way, and changed something.
	w.p.Kubectl(t, "apply", "-f", controllertest.Manifest(t))
	w.p.Kubectl(t, "scale", "-n", systemNamespace, "deployment/"+account, "--replicas=1")
	w.p.Kubectl(t, commands[2]...)
	require.Equal(t, "2", w.p.Kubectl(t, "get", "-n", systemNamespace, "deployment/"+account,
		"-o", "jsonpath={.spec.replicas}"))
	w.c = w.controller(w.p.ServiceAccount(t, systemNamespace, account))
	w.remove(&corev1.Pod{}, "a")
	require.NoError(t, w.machine("b", "disk"))
	w.starts("b")
	require.Equal(t, before, w.disks())
}
