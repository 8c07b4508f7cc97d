package kubernetes

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/kubernetes/integration/plane"
)

// TestFillsAClaim: a claim that names a VMImage gets a volume that a Job has filled. The API
// server, its controllers of volumes and Jobs and the limits of the controller's account are real.
// The test is the driver, and the kubelet.
func TestFillsAClaim(t *testing.T) {
	p := plane.Get(t)
	install(t, p)
	w := &world{t: t, p: p, ns: p.Namespace(t)}
	t.Cleanup(func() {
		w.kubectl("delete", "clusterrole/fill", "clusterrolebinding/fill")
	})
	w.storageClass("clones")
	w.apply(plane.FillRights(systemNamespace, account) + `
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: web}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: clones
  resources: {requests: {storage: 20Gi}}
  dataSourceRef: {apiGroup: disk.kubevirt.io, kind: VMImage, name: fedora}
`)
	w.c = runController(t, controllerBinary(t), p.ServiceAccount(t, systemNamespace, account),
		"--leader-elect=false", "--namespace="+w.ns, "--fill-claims")
	w.c.ready()
	w.until("there is no VMImage fedora", "get", "events", "-o", "jsonpath={.items[*].message}")
	for spec, says := range map[string]string{
		`{image: "oci:/etc"}`: "must be in a registry or at an address",
		`{image: "--help"}`:   "must be the reference of an image, or an address",
		`{image: "registry.example.com/x:1", secretName: other}`: "must begin with vmimage-",
	} {
		objects, err := plane.Decode(strings.NewReader(`{apiVersion: disk.kubevirt.io/v1alpha1,
			kind: VMImage, metadata: {name: wrong}, spec: ` + spec + `}`))
		require.NoError(t, err)
		require.ErrorContains(t, p.Apply(context.Background(), w.ns, objects[0]), says)
	}
	w.apply(`
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMImage
metadata: {name: fedora}
spec: {image: "registry.example.com/vm/fedora:42", secretName: vmimage-pull,
  registryCA: {name: kube-root-ca.crt}, keys: [key]}
`)
	const fills = "disk.kubevirt.io/fill"
	w.until("vmfill-", "get", "pvc", "-l", fills, "-o", "name")
	claim := "vmfill-" + w.kubectl("get", "pvc", "web", "-o", "jsonpath={.metadata.uid}")
	volume := w.volumeFor(claim)
	w.until("pod/vmfill-", "get", "pod", "-l", fills, "-o", "name")
	w.until("no node can run the pod", "get", "vmimage", "fedora", "-o",
		"jsonpath={.status.claims[0].message}")
	require.Equal(t, "Pending", w.kubectl("get", "pvc", "web", "-o", "jsonpath={.status.phase}"))
	pulled := "sha256:" + strings.Repeat("c", 64)
	w.ends(strings.TrimSpace(w.kubectl("get", "pod", "-l", fills, "-o", "name")), "pull", pulled)

	w.until("Bound "+volume, "get", "pvc", "web", "-o",
		"jsonpath={.status.phase} {.spec.volumeName}")
	w.until("No resources found", "get", "pvc,job", "-l", fills)
	w.until("web Bound", "get", "pv", volume, "-o",
		"jsonpath={.spec.claimRef.name} {.status.phase}")
	w.until("the claim has the disk of VMImage fedora, "+pulled, "get", "events", "-o",
		"jsonpath={.items[*].message}")
	w.until("{}", "get", "vmimage", "fedora", "-o", "jsonpath={.status}")
	require.NotContains(t, w.c.logs(), "forbidden")
}
