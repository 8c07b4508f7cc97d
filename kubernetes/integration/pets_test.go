package kubernetes

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

const digest = "registry.example.com/fedora@sha256:" +
	"a8dd75ecffd4cdd96072d60c2237b448e0c8b2bc94d57f10fdbc8c481d9005b8"

// TestPets: a pet gets its machine, is turned off, and leaves its disk behind.
func TestPets(t *testing.T) {
	grant(t, plane.Get(t), controllertest.Settings{Pets: true})
	w := newWorld(t, "--without=")
	w.apply(`
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMPet
metadata: {name: fedora}
spec:
  disk: {image: "` + digest + `"}
  template:
    spec:
      securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
      containers:
      - name: vm
        image: registry.example.com/qemu
        securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
`)
	w.until(digest, "get", "vmidset", "fedora", "-o", "jsonpath={.spec.image}")
	w.until("fedora fedora", "get", "pod", "fedora-0", "-o", `jsonpath={.metadata.annotations.`+
		`disk\.kubevirt\.io/identity-set} {.metadata.annotations.disk\.kubevirt\.io/identity-name}`)
	w.until("Starting", "get", "vmpet", "fedora", "-o", "jsonpath={.status.conditions[*].reason}")
	// The disk that admission and the other controllers make from it.
	w.apply(`
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMIdentity
metadata: {name: fedora}
spec: {image: "` + digest + `", setName: fedora}
`)
	w.kubectl("patch", "vmpet", "fedora", "--type=merge", "-p", `{"spec":{"running":false}}`)
	w.until("Stopped", "get", "vmpet", "fedora", "-o", "jsonpath={.status.conditions[*].reason}")
	w.until("NotFound", "get", "pod", "fedora-0")
	w.kubectl("delete", "vmpet", "fedora")
	w.until("NotFound", "get", "vmidset", "fedora")
	w.until("NotFound", "get", "statefulset", "fedora")
	w.until("fedora", "get", "vmid", "fedora", "-o", "name")
	require.NotContains(t, w.c.logs(), "forbidden")
}

// TestServices: the binder of Kubernetes binds the volume of a disk with attachment Service if the
// controller may make volumes, and all objects go with the identity.
func TestServices(t *testing.T) {
	w := newWorld(t)
	make := func() {
		w.apply(`
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMIdentity
metadata:
  name: vm1
  annotations: {disk.kubevirt.io/volume-claim: vm1-root}
spec: {image: "` + digest + `", attachment: Service}
`)
		// Set the fields that controller identity writes.
		w.p.Kubectl(t, "-n", w.ns, "patch", "vmid", "vm1", "--subresource=status",
			"--type=merge", "-p",
			`{"status":{"claimName":"vmid-vm1","secretName":"vmid-vm1"}}`)
		w.until("vmid-vm1."+w.ns+".svc:3260", "get", "vmid", "vm1", "-o",
			"jsonpath={.status.portal}")
		w.until("Recreate", "get", "deployment", "vmid-vm1", "-o", "jsonpath={.spec.strategy.type}")
	}
	make()
	volume := []string{"get", "vmid", "vm1", "-o",
		`jsonpath={.status.conditions[?(@.type=="VolumeReady")].message}`}
	w.until("persistentVolumes.create", volume...)
	// In the default installation, it can be deleted.
	w.kubectl("delete", "vmid", "vm1", "--wait=false", "--cascade=foreground")
	w.until("NotFound", "get", "vmid", "vm1")
	require.NotContains(t, w.c.logs(), "forbidden")
	require.Zero(t, w.c.terminate())
	grant(t, w.p, controllertest.Settings{Volumes: true})
	w.c = w.controller(w.p.ServiceAccount(t, systemNamespace, account), "--persistent-volumes")
	make()
	w.until("vm1-root has the LUN", volume...)
	name := w.kubectl("get", "pvc", "vm1-root", "-o", "jsonpath={.spec.volumeName}")
	address := w.kubectl("get", "service", "vmid-vm1", "-o", "jsonpath={.spec.clusterIP}")
	require.Equal(t, address+":3260 Bound", w.kubectl("get", "pv", name, "-o",
		"jsonpath={.spec.iscsi.targetPortal} {.status.phase}"))
	w.kubectl("delete", "vmid", "vm1", "--wait=false")
	for _, gone := range [][]string{{"deployment", "vmid-vm1"}, {"service", "vmid-vm1"},
		{"pvc", "vm1-root"}, {"pv", name}} {
		w.until("NotFound", append([]string{"get"}, gone...)...)
	}
}
