package kubernetes

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// installSnapshots installs the kind VolumeSnapshot, from the module of its authors.
func installSnapshots(t *testing.T, p *plane.Plane) {
	t.Helper()
	cmd := exec.Command("go", "mod", "download", "-json",
		"github.com/kubernetes-csi/external-snapshotter/client/v8")
	cmd.Dir = "crds"
	out, err := cmd.Output()
	require.NoError(t, err, string(out))
	var module struct{ Dir string }
	require.NoError(t, json.Unmarshal(out, &module))
	crd, err := os.Open(filepath.Join(module.Dir,
		"config/crd/snapshot.storage.k8s.io_volumesnapshots.yaml"))
	require.NoError(t, err)
	defer crd.Close()
	require.NoError(t, p.InstallCRDs(context.Background(), crd))
}

// TestSnapshots: one Job writes the image for two identities. After the second identity, Kubernetes
// collects the objects. The test is the driver: it makes the volume of a claim, and takes the
// snapshot.
func TestSnapshots(t *testing.T) {
	p := plane.Get(t)
	installSnapshots(t, p)
	p.Nodes(t, "snapshots-1")
	w := newWorld(t)
	w.storageClass("snapshots")
	w.apply(`
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMIdentity
metadata: {name: vm1}
spec: {image: "` + digest + `", population: Snapshot, storageClassName: snapshots}
---
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMIdentity
metadata: {name: vm2}
spec: {image: "` + digest + `", population: Snapshot, storageClassName: snapshots}
`)
	const golden = "disk.kubevirt.io/golden"
	w.until("golden-", "get", "pvc", "-l", golden, "-o", "name")
	_, name, _ := strings.Cut(strings.TrimSpace(w.kubectl("get", "pvc", "-l", golden, "-o",
		"name")), "/")
	w.volumeFor(name)
	populated := func(vm string) []string {
		return []string{"get", "vmid", vm, "-o", `jsonpath={.status.conditions[?(@.type==` +
			`"Populated")].status} {.status.conditions[?(@.type=="Populated")].message}`}
	}
	// KWOK's node runs the pod of the Job to its end.
	w.until("is being taken", populated("vm1")...)
	require.Equal(t, name, w.kubectl("get", "volumesnapshot", name, "-o",
		"jsonpath={.spec.source.persistentVolumeClaimName}"))
	status := func(text string) {
		w.kubectl("patch", "volumesnapshot", name, "--subresource=status", "--type=merge", "-p",
			`{"status":`+text+`}`)
	}
	status(`{"readyToUse":false,"error":{"message":"the pool is full"}}`)
	w.until("False the snapshot "+name+" of the image fails: the pool is full",
		populated("vm2")...)
	status(`{"readyToUse":true,"restoreSize":"20Gi","error":null}`)
	w.until("True", populated("vm1")...)
	w.until("True", populated("vm2")...)
	require.Len(t, strings.Fields(w.kubectl("get", "job", "-o", "name")), 1)

	w.kubectl("delete", "vmid", "vm1")
	w.until("vm2", "get", "job", name, "-o", "jsonpath={.metadata.ownerReferences[*].name}")
	// The collector removes the first owner: the second keeps all objects.
	var owners string
	testtool.Within(t, timeout, func() bool {
		owners = w.kubectl("get", "job", name, "-o",
			"jsonpath={.metadata.ownerReferences[*].name}")
		return owners == "vm2"
	}, "vm2 is the only owner: %s", func() any { return owners })
	require.Contains(t, w.kubectl("get", "volumesnapshot", name, "-o", "name"), name)
	w.kubectl("delete", "vmid", "vm2")
	for _, kind := range []string{"job", "pvc", "volumesnapshot"} {
		w.until("NotFound", "get", kind, name)
	}
	require.NotContains(t, w.c.logs(), "forbidden")
}
