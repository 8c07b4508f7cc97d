package kubernetes

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// TestWakeUps: each event that a pod waits for lets it start, and a set's status follows its disks,
// even if the controller starts only afterwards.
func TestWakeUps(t *testing.T) {
	w := newWorld(t)
	one := set("set", `, "size": "1Gi", "firmwareUUID": "1b4d298f-6151-40b0-a1d4-269fc41d48f0"`)
	w.apply(one)
	require.NoError(t, w.machine("a", "shared"))
	w.starts("a")
	require.NoError(t, w.machine("b", "shared"))
	require.NoError(t, w.machine("c", "other"))
	w.until("pod b waits", "get", "vmid", "shared", "-o",
		"jsonpath={.status.conditions[*].message}")
	w.reasons("other", "UUIDInUse")
	w.until("2 of 2", "get", "vmidentityset", "set", "-o",
		"jsonpath={.status.readyIdentities} of {.status.identities}")

	w.remove(&v1alpha1.VMIdentitySet{}, "set") // a set is deleted
	w.reasons("other", "SetMissing")
	w.remove(&corev1.Pod{}, "a") // a pod ends
	w.reasons("shared", "SetMissing")
	w.remove(&corev1.Pod{}, "c")
	w.reasons("other", "NotInUse")
	w.apply(one) // a set appears
	w.starts("b")
	require.NoError(t, w.machine("d", "other"))
	w.reasons("other", "UUIDInUse")
	w.remove(&corev1.Pod{}, "b") // the UUID is free
	w.starts("d")
	w.apply(strings.Replace(one, "1Gi", "2Gi", 1)) // a set has another spec
	w.until("2Gi", "get", "vmid", "other", "-o", "jsonpath={.spec.size}")
	w.remove(&v1alpha1.VMIdentity{}, "shared") // a disk goes
	w.until("1 of 1", "get", "vmidentityset", "set", "-o",
		"jsonpath={.status.readyIdentities} of {.status.identities}")

	require.Zero(t, w.c.terminate())
	w.p.ServeWebhook(t, systemNamespace, account, "kubevirt.io:disk", w.ns) // of another replica
	require.NoError(t, w.machine("e", "other"))
	w.remove(&corev1.Pod{}, "d")
	w.apply(strings.Replace(one, "1Gi", "3Gi", 1))
	w.c = w.controller(w.p.ServiceAccount(t, systemNamespace, account))
	w.starts("e")
	w.until("3Gi", "get", "vmid", "other", "-o", "jsonpath={.spec.size}")
}
