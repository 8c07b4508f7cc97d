package kubernetes

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// A pod as the controller makes it, and the objects that it is made by.
const (
	ownPod = `
      automountServiceAccountToken: false
      enableServiceLinks: false
      securityContext: {runAsNonRoot: true, fsGroup: 107, fsGroupChangePolicy: OnRootMismatch}
      containers:
      - name: c
        image: "kubevirt.io:disk"
        args: [commit, "registry.example.com/out:1", --persistent-dir=/data]
        securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true,
          runAsNonRoot: true, capabilities: {drop: [ALL]}, seccompProfile: {type: RuntimeDefault}}
        volumeMounts: [{name: data, mountPath: /data}, {name: tmp, mountPath: /tmp}]
      volumes:
      - {name: data, persistentVolumeClaim: {claimName: vmid-x}}
      - {name: tmp, emptyDir: {}}
`
	ownJob = `
apiVersion: batch/v1
kind: Job
metadata:
  name: vmexport-x
  labels: {disk.kubevirt.io/identity: x, disk.kubevirt.io/export: vmexport-x}
  ownerReferences: [{apiVersion: disk.kubevirt.io/v1alpha1, kind: VMIdentity, name: x,
    uid: 1b4d298f-6151-40b0-a1d4-269fc41d48f0}]
spec:
  template:
    spec:
      restartPolicy: Never` + ownPod
	ownDeployment = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: vmid-x, labels: {disk.kubevirt.io/identity: x}}
spec:
  selector: {matchLabels: {disk.kubevirt.io/server: x}}
  template:
    metadata: {labels: {disk.kubevirt.io/server: x, disk.kubevirt.io/identity: x}}
    spec:` + ownPod
	ownPet = `
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: x
  ownerReferences: [{apiVersion: disk.kubevirt.io/v1alpha1, kind: VMPet, name: x,
    uid: 1b4d298f-6151-40b0-a1d4-269fc41d48f0}]
spec:
  selector: {matchLabels: {a: b}}
  template:
    metadata: {labels: {a: b}}
    spec:
      containers: [{name: vm, image: example.com/vm}]
`
)

// TestPodsOfTheController: the account makes exactly the pods that the controller makes. Each case
// replaces a part of one.
func TestPodsOfTheController(t *testing.T) {
	p := plane.Get(t)
	install(t, p)
	// What a policy would not refuse, a missing right must not hide.
	grant(t, p, controllertest.Settings{Pets: true})
	c := testtool.Must(clientOf(p.ServiceAccount(t, systemNamespace, account)))(t)
	ns := p.Namespace(t)
	id := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "x"}}
	id.Spec.Image = digest
	id.Spec.Export = &v1alpha1.ExportSpec{Reference: "registry.example.com/out:1"}
	require.NoError(t, p.Client.Create(t.Context(), id))
	create := func(text string, replace ...string) error {
		for i := 0; i < len(replace); i += 2 {
			require.Contains(t, text, replace[i])
		}
		all, err := plane.Decode(strings.NewReader(strings.NewReplacer(replace...).Replace(text)))
		require.NoError(t, err)
		all[0].SetNamespace(ns)
		return c.Create(t.Context(), all[0], client.DryRunAll)
	}
	before := func(what string) func(string) []string {
		return func(line string) []string {
			indent := what[:len(what)-len(strings.TrimLeft(what, " "))]
			return []string{what, indent + line + "\n" + what}
		}
	}
	pod, container := before("      enableServiceLinks"), before("        image:")
	vm := before("      containers:")
	volume := func(source string) []string {
		return []string{"{name: tmp, emptyDir: {}}", "{name: tmp, " + source + "}"}
	}
	const args = `[commit, "registry.example.com/out:1", --persistent-dir=/data]`
	server := []string{"        args: " + args + "\n", ""}
	// A policy knows a VMIdentity, and is in force, a moment after they were made.
	testtool.Within(t, timeout, func() bool {
		return create(ownJob) == nil && create(ownJob, "vmid-x}", "database}") != nil &&
			create(ownPet, "b}}\n    spec:", "b}}\n    spec:\n      hostPID: true") != nil
	}, "the policies are in force: %v", func() any { return create(ownJob) })
	require.NoError(t, create(ownDeployment, server...))
	require.NoError(t, create(ownPet))
	require.NoError(t, create(ownJob, "      volumes:\n", `      volumes:
      - {name: registry, secret: {secretName: vmexport-push, defaultMode: 288,
        items: [{key: .dockerconfigjson, path: .dockerconfigjson}]}}
      - {name: ca, configMap: {name: trust, items: [{key: ca.pem, path: ca.crt}]}}
`))
	for what, c := range map[string][]string{
		"any image":          {`"kubevirt.io:disk"`, "evil"},
		"another program":    container("command: [/data/evil]"),
		"root":               {"runAsNonRoot: true, capabilities", "runAsUser: 0, capabilities"},
		"privileged":         {"allowPrivilegeEscalation: false", "privileged: true"},
		"capabilities":       {"drop: [ALL]", "drop: [ALL], add: [SYS_MODULE]"},
		"some capabilities":  {"{drop: [ALL]}", "{drop: [NET_RAW]}"},
		"unconfined":         {"{type: RuntimeDefault}", "{type: Unconfined}"},
		"a port of the node": container("ports: [{containerPort: 1, hostPort: 1}]"),
		"a node":             pod("nodeName: node-1"),
		"the node's network": pod("hostNetwork: true"),
		"all nodes":          pod("tolerations: [{operator: Exists}]"),
		"an account":         pod("serviceAccountName: admin"),
		"a token":            {"ServiceAccountToken: false", "ServiceAccountToken: true"},
		"another container":  pod("initContainers: [{name: i, image: \"kubevirt.io:disk\"}]"),
		"a claim of others":  {"claimName: vmid-x", "claimName: database"},
		"another disk":       {"claimName: vmid-x", "claimName: vmid-y"},
		"a directory":        volume("hostPath: {path: /}"),
		"a secret of others": volume("secret: {secretName: root}"),
		"a whole secret":     volume("secret: {secretName: vmexport-push}"),
		"executables": volume("secret: {secretName: vmexport-push, " +
			"defaultMode: 0755, items: [{key: .dockerconfigjson, path: .dockerconfigjson}]}"),
		"a projected token": volume("projected: {sources: [{serviceAccountToken: {path: t}}]}"),
		"a ConfigMap":       volume("configMap: {name: trust}"),
		"over the program":  {"mountPath: /tmp", "mountPath: /usr/bin"},
		"secret variables":  container("envFrom: [{secretRef: {name: root}}]"),
		"a variable":        container("env: [{name: LD_PRELOAD, value: x}]"),
	} {
		require.ErrorContains(t, create(ownJob, c...), "have one form", what)
		if !strings.Contains(c[0], "args") {
			require.ErrorContains(t, create(ownDeployment, append(c, server...)...),
				"have one form", what)
		}
	}
	for what, c := range map[string][]string{
		"another command": {args,
			"[pull, --force, \"https://evil.example\", /data/disk.img]"},
		"another flag":    {"--persistent-dir=/data", "--persistent-dir=/other"},
		"of another name": {"vmexport-x", "vmrecv-x"},
		"a golden Job for a disk": {"vmexport-x", "golden-x", args,
			"[pull, --force, a, /data/disk.img]"},
	} {
		require.ErrorContains(t, create(ownJob, c...), "controller.disk.kubevirt.io", what)
	}
	require.ErrorContains(t, create(ownJob, ", disk.kubevirt.io/export: vmexport-x", ""),
		"have one form", "it hides that it is an export")
	require.ErrorContains(t, create(ownJob, "out:1", "elsewhere:1"), "does not ask for this export")
	require.ErrorContains(t, create(ownJob, "kind: VMIdentity", "kind: VM"), "not one of")
	require.ErrorContains(t, create(ownDeployment, append([]string{"name: vmid-x, labels",
		"name: coredns, labels"}, server...)...), "not one of")
	require.ErrorContains(t, create(ownDeployment), "have one form", "a server has no arguments")
	for what, c := range map[string][]string{
		"of nobody":          {"kind: VMPet", "kind: VM"},
		"of another":         {"kind: VMPet, name: x", "kind: VMPet, name: other"},
		"the node's network": vm("hostNetwork: true"),
		"a directory":        vm("volumes: [{name: v, hostPath: {path: /}}]"),
		"an account":         vm("serviceAccountName: admin"),
		"privileged": {"example.com/vm",
			"example.com/vm, securityContext: {privileged: true}"},
	} {
		require.ErrorContains(t, create(ownPet, c...), "statefulsets.controller.disk", what)
	}
	// Nobody asks for an export with the account, and so for the disk.
	thief := &v1alpha1.VMIdentity{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "thief"},
		Spec: *id.Spec.DeepCopy()}
	require.ErrorContains(t, c.Create(t.Context(), thief), "makes a VMIdentity as its set says")
	changed := id.DeepCopy()
	changed.Spec.Export.Reference = "evil.example.com/out:1"
	require.ErrorContains(t, c.Patch(t.Context(), changed, client.MergeFrom(id)),
		"makes a VMIdentity as its set says")
}
