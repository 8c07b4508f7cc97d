package node

import (
	"path/filepath"
	"strings"
	"testing"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// fill lets a claim begin with the disk that a machine was exported as, and compares its content.
// The test makes the volume, as a driver does.
func (n *Node) fill(t *testing.T, image Image, end int) {
	t.Helper()
	n.Apply(t, plane.FillRights(system, "kubevirt-disk-controller"))
	n.Kubectl(t, "patch", "deployment", "kubevirt-disk-controller", "-n", system, "--type=json",
		"--patch", `[{"op": "add", "path": "/spec/template/spec/containers/0/args/-",
		"value": "--fill-claims"}]`)
	n.Apply(t, `
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: driver}
provisioner: driver.example.com
---
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMImage
metadata: {name: golden}
spec: {image: "`+exported+`", registryCA: {name: kube-root-ca.crt}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: begins}
spec:
  accessModes: [ReadWriteOnce]
  storageClassName: driver
  resources: {requests: {storage: 20Gi}}
  dataSourceRef: {apiGroup: disk.kubevirt.io, kind: VMImage, name: golden}
`)
	claim := "vmfill-" + n.Kubectl(t, "get", "pvc", "begins", "-o", "jsonpath={.metadata.uid}")
	n.until(t, "the claim that is filled is there", func() bool {
		_, err := n.TryKubectl("", "get", "pvc", claim)
		return err == nil
	})
	volume := volume(t, n, "filled", "ReadWriteOnce")
	_, volume, _ = strings.Cut(volume, "---\n")
	n.Apply(t, strings.Replace(volume, "storageClassName: local", "storageClassName: driver\n"+
		"  claimRef: {namespace: default, name: "+claim+"}", 1))
	out, err := n.TryKubectl("", "wait", "pvc", "begins", "--for=jsonpath={.status.phase}=Bound",
		"--timeout=5m")
	if err != nil {
		state, _ := n.TryKubectl("", "describe", "vmimage,pvc,job")
		logs, _ := n.TryKubectl("", "logs", "-l", v1alpha1.Group+"/fill", "--tail=-1")
		t.Fatalf("%s\n%s\n%s", out, state, logs)
	}
	n.until(t, "what has filled it is gone", func() bool {
		_, err := n.TryKubectl("", "get", "pvc", claim)
		return err != nil
	})
	compareWithMachine(t, filepath.Join(n.Dir, "filled", "disk.img"),
		filepath.Join(image.Files["/disk"], "disk.raw"), end)
}
