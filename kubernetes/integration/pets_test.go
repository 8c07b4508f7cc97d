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
