package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// identityFrom is a VMIdentity that begins from a source.
func identityFrom(name, source string) string {
	return fmt.Sprintf(`
---
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMIdentity
metadata: {name: %s}
spec: {population: Snapshot, storageClassName: clones, source: {%s}}
`, name, source)
}

// storageClass makes a storage class of which the test is the driver.
func (w *world) storageClass(name string) {
	w.t.Helper()
	w.t.Cleanup(func() { w.kubectl("delete", "storageclass", name) })
	w.apply(`{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: ` + name + `},
		provisioner: clones.example.com}`)
}

// volumeFor is a volume for a claim of the namespace, as a driver makes it.
func (w *world) volumeFor(claim string) (volume string) {
	w.t.Helper()
	is := strings.Fields(w.kubectl("get", "pvc", claim, "-o",
		"jsonpath={.metadata.uid} {.spec.storageClassName} {.spec.accessModes[0]}"))
	require.Len(w.t, is, 3)
	name := "pvc-" + is[0]
	w.apply(`
apiVersion: v1
kind: PersistentVolume
metadata: {name: ` + name + `}
spec:
  storageClassName: ` + is[1] + `
  capacity: {storage: 20Gi}
  accessModes: [` + is[2] + `]
  persistentVolumeReclaimPolicy: Retain
  claimRef: {namespace: ` + w.ns + `, name: ` + claim + `}
  csi: {driver: clones.example.com, volumeHandle: ` + name + `}
`)
	w.t.Cleanup(func() { w.kubectl("delete", "pv", name, "--wait=false") })
	w.until("Bound", "get", "pvc", claim, "-o", "jsonpath={.status.phase}")
	return name
}

// TestClones: disks begin from a claim, from another disk, and from a snapshot, with the rights of
// the manifest. The test is the driver: it makes volumes, and says how a snapshot is.
func TestClones(t *testing.T) {
	p := plane.Get(t)
	installSnapshots(t, p)
	w := newWorld(t)
	t.Cleanup(func() { w.kubectl("delete", "csidriver/clones.example.com") })
	w.storageClass("clones")
	w.apply(`
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: fedora}
spec: {accessModes: [ReadWriteOnce], storageClassName: clones,
  resources: {requests: {storage: 20Gi}}}
` + identityFrom("first", "claim: fedora"))
	w.volumeFor("fedora")
	ready := func(vm, says string) {
		t.Helper()
		w.until(says, "get", "vmid", vm, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")]}`)
	}
	made := func(vm, from string) {
		t.Helper()
		w.until(from, "get", "pvc", "vmid-"+vm, "-o",
			"jsonpath={.spec.dataSource.kind} {.spec.dataSource.name}")
	}
	ready("first", "none of those that `kubectl get csidriver` lists")
	w.apply(`{apiVersion: storage.k8s.io/v1, kind: CSIDriver,
		metadata: {name: clones.example.com}, spec: {attachRequired: false}}`)
	made("first", "PersistentVolumeClaim fedora")
	w.volumeFor("vmid-first")
	ready("first", "a pod can use the disk")

	w.apply(identityFrom("second", "identity: first"))
	ready("second", "VMIdentity first does not agree to a clone")
	w.kubectl("patch", "vmid", "first", "--type=merge", "-p",
		`{"spec": {"cloneableBy": ["second"]}}`)
	made("second", "PersistentVolumeClaim vmid-first")
	w.kubectl("delete", "vmid", "first", "--wait=false")
	ready("first", "VMIdentity second begins from this disk and has no volume yet")
	w.volumeFor("vmid-second")

	w.apply(`
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMIdentitySnapshot
metadata: {name: monday}
spec: {identityName: second}
` + identityFrom("third", "snapshot: monday"))
	w.until("vmid-second", "get", "volumesnapshot", "vmsnap-monday", "-o",
		"jsonpath={.spec.source.persistentVolumeClaimName}")
	ready("third", "VMIdentitySnapshot monday is not ready: `kubectl describe vmidsnap monday`")
	w.kubectl("patch", "volumesnapshot", "vmsnap-monday", "--subresource=status", "--type=merge",
		"-p", `{"status": {"readyToUse": true, "restoreSize": "21Gi",
		"creationTime": "2026-11-01T10:00:00Z"}}`)
	w.until("true 21Gi TrueFalseFalse", "get", "vmidsnap", "monday", "-o",
		`jsonpath={.status.readyToUse} {.status.restoreSize} `+
			`{.status.conditions[?(@.type=="Ready")].status}`+
			`{.status.conditions[?(@.type=="Progressing")].status}`+
			`{.status.conditions[?(@.type=="Failure")].status}`)
	made("third", "VolumeSnapshot vmsnap-monday")
	require.Equal(t, "21Gi", w.kubectl("get", "pvc", "vmid-third", "-o",
		"jsonpath={.spec.resources.requests.storage}"))
	w.kubectl("delete", "vmidsnap", "monday", "--wait=false")
	w.until("when VMIdentity third", "get", "vmidsnap", "monday", "-o", "yaml")
	w.kubectl("delete", "vmid", "third")
	w.until("NotFound", "get", "vmidsnap", "monday")
	w.until("NotFound", "get", "volumesnapshot", "vmsnap-monday")
	require.NotContains(t, w.c.logs(), "forbidden")
}

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
	crd := testtool.Must(os.Open(filepath.Join(module.Dir,
		"config/crd/snapshot.storage.k8s.io_volumesnapshots.yaml")))(t)
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
	w.until("False the snapshot "+name+" of the image fails: the pool is full", populated("vm2")...)
	status(`{"readyToUse":true,"restoreSize":"20Gi","error":null}`)
	w.until("True", populated("vm1")...)
	w.until("True", populated("vm2")...)
	require.Len(t, strings.Fields(w.kubectl("get", "job", "-o", "name")), 1)

	w.kubectl("delete", "vmid", "vm1")
	w.until("vm2", "get", "job", name, "-o", "jsonpath={.metadata.ownerReferences[*].name}")
	// The collector removes the first owner: the second keeps all objects.
	var owners string
	testtool.Within(t, timeout, func() bool {
		owners = w.kubectl("get", "job", name, "-o", "jsonpath={.metadata.ownerReferences[*].name}")
		return owners == "vm2"
	}, "vm2 is the only owner: %s", func() any { return owners })
	require.Contains(t, w.kubectl("get", "volumesnapshot", name, "-o", "name"), name)
	w.kubectl("delete", "vmid", "vm2")
	for _, kind := range []string{"job", "pvc", "volumesnapshot"} {
		w.until("NotFound", "get", kind, name)
	}
	require.NotContains(t, w.c.logs(), "forbidden")
}

// TestVolumeGetsAnotherClaim: if somebody deletes the claim of a disk with attachment Service, the
// next one is bound to the same volume.
func TestVolumeGetsAnotherClaim(t *testing.T) {
	p := plane.Get(t)
	grant(t, p, controllertest.Settings{Volumes: true, Services: true})
	w := newWorld(t, "--persistent-volumes")
	w.storageClass("again")
	w.apply(`
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMIdentity
metadata: {name: vm1, annotations: {disk.kubevirt.io/volume-claim: vm1-root}}
spec: {image: "` + digest + `", attachment: Service, storageClassName: again}
`)
	phase := []string{"get", "pvc", "vm1-root", "-o", "jsonpath={.status.phase} {.metadata.uid}"}
	w.until("Bound", phase...)
	former := w.kubectl(phase...)
	w.kubectl("delete", "pvc", "vm1-root")
	w.until("Bound", phase...)
	require.NotEqual(t, former, w.kubectl(phase...))
	w.kubectl("delete", "vmid", "vm1", "--wait=false")
	w.until("NotFound", "get", "vmid", "vm1")
}
