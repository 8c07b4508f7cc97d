package kubernetes

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// somebody has objects of other people, and some that look like the controller's.
const somebody = `
apiVersion: v1
kind: Pod
metadata: {name: agent}
spec:
  containers: [{name: c, image: example.com/agent, securityContext: {privileged: true}}]
---
apiVersion: v1
kind: Pod
metadata: {name: machine, labels: {disk.kubevirt.io/identity: machine}}
spec:
  schedulingGates: [{name: disk.kubevirt.io/identity}, {name: disk.kubevirt.io/identity.1},
    {name: example.com/wait}]
  containers: [{name: c, image: example.com/vm}]
---
apiVersion: v1
kind: Secret
metadata: {name: root-password}
---
apiVersion: v1
kind: Secret
metadata: {name: vmid-shop}
---
apiVersion: v1
kind: Secret
metadata: {name: vmid-machine, labels: {disk.kubevirt.io/identity: machine}}
type: kubernetes.io/iscsi-chap
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: db}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: vmid-machine, labels: {disk.kubevirt.io/identity: machine}}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: vmid-restored, annotations: {disk.kubevirt.io/content: Overlay}}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: limits-volume}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  claimRef: {namespace: shop, name: db, uid: 1b4d298f-6151-40b0-a1d4-269fc41d48f0}
  csi: {driver: example.com, volumeHandle: "1"}
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: limits-filled}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  claimRef: {namespace: shop, name: vmfill-` + fillUID + `, uid: 5ad7f1ba-3f0c-4c6c-9d0c-0f5e4ac8e6a3}
  csi: {driver: example.com, volumeHandle: "2"}
`

// fillUID is the UID of a claim that was filled.
const fillUID = "1b4d298f-6151-40b0-a1d4-269fc41d48f0"

// certificates is a secret as that for NBD, with an owner.
const certificates = `{apiVersion: v1, kind: Secret, type: kubernetes.io/tls,
	data: {tls.crt: "", tls.key: ""}, metadata: {name: vmnbd-x,
	labels: {disk.kubevirt.io/identity: OWNER}}}`

// volumeSnapshot is a VolumeSnapshot of a claim, for a VMIdentitySnapshot.
func volumeSnapshot(name, claim, owner string) string {
	return `{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshot,
		metadata: {name: ` + name + `, ownerReferences: [{kind: VMIdentitySnapshot,
		apiVersion: disk.kubevirt.io/v1alpha1, name: ` + owner + `,
		uid: 1b4d298f-6151-40b0-a1d4-269fc41d48f0}]},
		spec: {source: {persistentVolumeClaimName: ` + claim + `}}}`
}

// TestLimitsOfTheController uses the controller's own account as somebody would who has stolen its
// token. Its rights reach what the controller makes, and nothing else.
func TestLimitsOfTheController(t *testing.T) {
	p := plane.Get(t)
	install(t, p)
	installSnapshots(t, p)
	ctx := t.Context()
	c := testtool.Must(clientOf(p.ServiceAccount(t, systemNamespace, account)))(t)
	// The right over volumes is from the chart's localDisks.move.
	p.Grant(t, "limits", systemNamespace, account, rbacv1.PolicyRule{APIGroups: []string{""},
		Resources: []string{"persistentvolumes"}, Verbs: []string{"create", "get", "patch",
			"delete"}})
	const ns = "kube-system"
	for _, o := range testtool.Must(plane.Decode(strings.NewReader(somebody)))(t) {
		var err error
		testtool.Within(t, timeout, func() bool { err = p.Apply(ctx, ns, o); return err == nil },
			"%s is made: %v", o.GetName(), func() any { return err })
		t.Cleanup(func() {
			_ = p.Client.Delete(context.Background(), o, client.GracePeriodSeconds(0))
		})
	}
	object := func(kind, name string) *unstructured.Unstructured {
		u := &unstructured.Unstructured{}
		u.SetAPIVersion("v1")
		u.SetKind(kind)
		if u.SetName(name); kind != "PersistentVolume" {
			u.SetNamespace(ns)
		}
		return u
	}
	patch := func(kind, name, text string) func() error {
		return func() error {
			return c.Patch(ctx, object(kind, name), client.RawPatch(types.StrategicMergePatchType,
				[]byte(text)), client.DryRunAll)
		}
	}
	remove := func(kind, name string) func() error {
		return func() error { return c.Delete(ctx, object(kind, name), client.DryRunAll) }
	}
	create := func(text string) func() error {
		all := testtool.Must(plane.Decode(strings.NewReader(text)))(t)
		return func() error {
			all[0].SetNamespace(ns)
			return c.Create(ctx, all[0].DeepCopy(), client.DryRunAll)
		}
	}
	image := `{"spec": {"containers": [{"name": "c", "image": "example.com/evil"}]}}`
	const gate = `{"spec": {"schedulingGates": [{"name": "disk.kubevirt.io/identity.1"},
		{"name": "example.com/wait"}, {"$patch": "delete", "name": "disk.kubevirt.io/identity"}]}}`
	// A policy takes effect a moment after it was made. This one is the last.
	testtool.Within(t, timeout, func() bool {
		return remove("PersistentVolume", "limits-volume")() != nil
	}, "it is refused")
	adopt := `{"metadata": {"labels": {"disk.kubevirt.io/identity": "x"}}}`
	for what, c := range map[string]struct {
		do   func() error
		says string
	}{
		"the image of a pod":     {patch("Pod", "agent", image), "not one of kubevirt-disk"},
		"the image of a machine": {patch("Pod", "machine", image), "removes its gate"},
		"another gate": {patch("Pod", "machine", `{"spec": {"schedulingGates": [
			{"$patch": "delete", "name": "example.com/wait"}]}}`), "removes its gate"},
		"a label": {patch("Pod", "machine",
			`{"metadata": {"labels": {"app": "db"}}}`), "removes its gate"},
		"a label that makes it ours": {patch("Pod", "agent",
			`{"metadata": {"labels": {"disk.kubevirt.io/identity": "x"}}}`), "not one of"},
		"an annotation": {patch("Pod", "machine",
			`{"metadata": {"annotations": {"a": "b"}}}`), "removes its gate"},
		"the gate": {patch("Pod", "machine", gate), ""},
		"the gate of a further disk": {patch("Pod", "machine", `{"spec": {"schedulingGates": [
			{"$patch": "delete", "name": "disk.kubevirt.io/identity.1"}]}}`), ""},
		"the UUID": {patch("Pod", "machine",
			`{"metadata": {"annotations": {"disk.kubevirt.io/firmware-uuid": "x"}}}`), ""},
		"a secret":             {remove("Secret", "root-password"), "not one of kubevirt-disk"},
		"a secret with a name": {remove("Secret", "vmid-shop"), "not one of kubevirt-disk"},
		"the credential":       {remove("Secret", "vmid-machine"), ""},
		"certificates":         {create(strings.Replace(certificates, "OWNER", "x", 1)), ""},
		"certificates of another": {create(strings.Replace(certificates, "OWNER", "other", 1)),
			"not one of kubevirt-disk"},
		"certificates of nobody": {create(strings.Replace(certificates, "tls", "example", 1)),
			"not one of kubevirt-disk"},
		"a token": {create(`{apiVersion: v1, kind: Secret,
			type: kubernetes.io/service-account-token, metadata: {name: vmid-x,
			labels: {disk.kubevirt.io/identity: x},
			annotations: {kubernetes.io/service-account.name: default}}}`), "not one of kubevirt-disk"},
		"a claim":   {remove("PersistentVolumeClaim", "db"), "not one of kubevirt-disk"},
		"the claim": {remove("PersistentVolumeClaim", "vmid-machine"), ""},
		"the volume of a claim": {patch("PersistentVolumeClaim", "vmid-machine",
			`{"spec": {"volumeName": "limits-volume"}}`), "not its volume"},
		"a restored claim":    {patch("PersistentVolumeClaim", "vmid-restored", adopt), ""},
		"a claim for a label": {patch("PersistentVolumeClaim", "db", adopt), "not one of"},
		"the size of a pod": {patch("Pod", "machine",
			`{"metadata": {"annotations": {"disk.kubevirt.io/size": "1"}}}`), ""},
		"a volume": {patch("PersistentVolume", "limits-volume",
			`{"spec": {"claimRef": {"namespace": "kube-system", "name": "vmid-x",
			"uid": null}}}`), "kubevirt-disk"},
		"the policy of a volume": {patch("PersistentVolume", "limits-volume",
			`{"spec": {"persistentVolumeReclaimPolicy": "Delete"}}`), "kubevirt-disk"},
		"deleting a volume": {remove("PersistentVolume", "limits-volume"), "kubevirt-disk"},
		"a directory of nodes": {create(`{apiVersion: v1, kind: PersistentVolume,
			metadata: {name: vmid-x, labels: {disk.kubevirt.io/identity: x}}, spec: {
			capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce], hostPath: {path: /}}}`),
			"kubevirt-disk"},
		"a volume that was filled": {patch("PersistentVolume", "limits-filled",
			`{"spec": {"claimRef": {"name": "web", "uid": "`+fillUID+`"}}}`), ""},
		"a volume that was filled for another": {patch("PersistentVolume", "limits-filled",
			`{"spec": {"claimRef": {"name": "web", "uid": "other"}}}`), "kubevirt-disk"},
		"a volume that was filled elsewhere": {patch("PersistentVolume", "limits-filled",
			`{"spec": {"claimRef": {"namespace": "kube-system", "name": "web",
			"uid": "`+fillUID+`"}}}`), "kubevirt-disk"},
		"a snapshot of a claim": {create(volumeSnapshot("vmsnap-x", "db", "x")),
			"not one of kubevirt-disk"},
		"a snapshot of a disk": {create(volumeSnapshot("vmsnap-x", "vmid-machine", "x")), ""},
		"a snapshot of nobody": {create(volumeSnapshot("vmsnap-x", "vmid-machine", "other")),
			"not one of kubevirt-disk"},
		"a Service": {create(`{apiVersion: v1, kind: Service, metadata: {name: dns},
			spec: {externalIPs: [192.0.2.1], ports: [{port: 53}]}}`), "not one of kubevirt-disk"},
	} {
		t.Run(what, func(t *testing.T) {
			err := c.do()
			if c.says == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, c.says)
			require.ErrorContains(t, err, "controller.disk.kubevirt.io")
		})
	}
}
