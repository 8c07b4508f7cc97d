package kubernetes

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

const testImage = "registry.example.com/vmdisks/fedora@sha256:" +
	"a8dd75ecffd4cdd96072d60c2237b448e0c8b2bc94d57f10fdbc8c481d9005b8"

// set is a VMIdentitySet with an image and the fields of spec.
func set(name, spec string) string {
	return `{"apiVersion": "disk.kubevirt.io/v1alpha1", "kind": "VMIdentitySet",
		"metadata": {"name": "` + name + `"}, "spec": {"image": "` + testImage + `"` + spec + `}}`
}

// bare is a VMIdentitySet without an image.
func bare(name, spec string) string {
	return strings.Replace(strings.Replace(set(name, ""), `"image": "`+testImage+`"`, spec, 1),
		", }", "}", 1)
}

// identity is a VMIdentity with an export.
func identity(name, export string) string {
	return strings.Replace(set(name, `, "export": `+export), "VMIdentitySet", "VMIdentity", 1)
}

// vmImage is a VMImage.
func vmImage(spec string) string {
	return `{apiVersion: disk.kubevirt.io/v1alpha1, kind: VMImage, metadata: {name: a}, spec: ` +
		spec + `}`
}

// fromAddress is a VMIdentitySet whose disks are a file on a web server.
func fromAddress(name, rest string) string {
	return strings.Replace(set(name, rest), testImage, "https://example.com/fedora.qcow2"+
		testImage[strings.Index(testImage, "@"):], 1)
}

// TestRules checks that the API server refuses wrong objects, with messages for people.
func TestRules(t *testing.T) {
	p := plane.Get(t)
	ns := p.Namespace(t)
	for _, c := range []struct{ object, says string }{
		{object: set("plain", "")},
		{object: set("all", `, "type": "PersistentVolume", "size": "20Gi",
			"storageClassName": "fast",
			"firmwareUUID": "1b4d298f-6151-40b0-a1d4-269fc41d48f0", "firmwareUUIDPolicy": "PerPod",
			"population": "Snapshot"`)},
		{object: set("local", `, "type": "Local", "size": 1073741824`)},
		{object: strings.Replace(set("a", ""), testImage, "registry.example.com/a:1", 1),
			says: "must name an image by its digest, as registry/name@sha256:..."},
		{object: strings.Replace(set("a", ""), "registry.example", "registry example", 1),
			says: "must name an image by its digest"},
		{object: set("a", `, "type": "Cloud"`),
			says: `supported values: "Local", "PersistentVolume"`},
		{object: set("a", `, "size": "0"`), says: "must be a quantity above 0, as 20Gi"},
		{object: set("a", `, "size": "-1Gi"`), says: "must be a quantity above 0, as 20Gi"},
		{object: set("a", `, "size": "much"`), says: "spec.size"},
		{object: set("a", `, "size": "100m"`), says: "must be at least 512 bytes: 100m is a tenth"},
		{object: set("a", `, "size": 20`), says: "must be at least 512 bytes"},
		{object: set("a", `, "size": "1e30"`), says: "must be at most 4Ei: no disk is larger"},
		{object: set("a", `, "size": "8Ei"`), says: "must be at most 4Ei: no disk is larger"},
		{object: set("largest", `, "size": "4Ei"`)},
		{object: set("blocks", `, "blockSize": 4096`)},
		{object: set("a", `, "blockSize": 1024`), says: `supported values: "512", "4096"`},
		{object: `{"apiVersion": "disk.kubevirt.io/v1alpha1", "kind": "VMPet",
			"metadata": {"name": "a.b"},
			"spec": {"disk": {"image": "` + testImage + `"}, "template": {}}}`,
			says: "the name may have no dots"},
		{object: set("a", `, "type": "Local", "population": "Snapshot"`),
			says: "Local disks have no snapshots: population must be Overlay"},
		{object: set("clone", `, "source": {"identity": "a"}`)},
		{object: set("a", `, "source": {"identity": "a", "snapshot": "a"}`),
			says: "name one of claim, identity and snapshot"},
		{object: identity("exported", `{"reference": "registry.example.com:5000/a/b:1",
			"secretName": "vmexport-push"}`)},
		{object: identity("a", `{"reference": "registry.example.com/a"}`),
			says: "must be an image in a registry with a tag"},
		{object: identity("a", `{"reference": "registry.example.com/a:1", "secretName": "root"}`),
			says: "must begin with vmexport-"},
		{object: identity("trusting", `{"reference": "registry.example.com/a:1",
			"registryCA": {"name": "trust"}}`)},
		{object: identity("a", `{"reference": "registry.example.com/a:1",
			"registryCA": {"name": "trust", "key": "../key"}}`),
			says: "must be a key of a ConfigMap"},
		{object: set("follows", `, "population": "Snapshot", "follow": {"tag": "stable"}`)},
		{object: set("served", `, "attachment": "Service", "follow": {"tag": "stable",
			"interval": "10m"}`)},
		{object: set("a", `, "follow": {"tag": "stable"}`),
			says: "follow needs population Snapshot or attachment Service"},
		{object: set("a", `, "population": "Snapshot", "follow": {"tag": "a/b"}`),
			says: "must be a tag"},
		{object: set("a", `, "population": "Snapshot", "follow": {"tag": "a", "interval": "1s"}`),
			says: "must be between 1m and 24h"},
		{object: set("a", `, "population": "Snapshot", "source": {"snapshot": "a"},
			"follow": {"tag": "a"}`), says: "follow needs the image from which it begins"},
		{object: strings.Replace(set("a", `, "population": "Snapshot", "follow": {"tag": "a"}`),
			"VMIdentitySet", "VMIdentity", 1), says: "a disk that exists follows no tag"},
		{object: fromAddress("address", `, "population": "Snapshot"`)},
		{object: fromAddress("a", ``), says: "a disk from a web address needs population Snapshot"},
		{object: fromAddress("a", `, "attachment": "Service"`),
			says: "a disk from a web address needs population Snapshot"},
		{object: fromAddress("a", `, "population": "Snapshot", "follow": {"tag": "a"}`),
			says: "and follows no tag"},
		{object: vmImage(`{image: "oci:/etc"}`), says: "must be in a registry or at an address"},
		{object: vmImage(`{image: "--help"}`),
			says: "must be the reference of an image, or an address"},
		{object: vmImage(`{image: "registry.example.com/x:1", secretName: other}`),
			says: "must begin with vmimage-"},
		{object: set("a", `, "source": {}`), says: "name one of claim, identity and snapshot"},
		{object: set("a", `, "source": {"identity": "other/a"}`),
			says: "must be the name of an object of the same namespace, without the namespace"},
		{object: set("a", `, "source": {"claim": "a"}`), says: "a disk from a claim has no image"},
		{object: set("a", `, "type": "Local", "source": {"snapshot": "a"}`),
			says: "Local disks are not cloned"},
		{object: bare("a", ``), says: "name the image of the disk, or the source"},
		{object: bare("a", `"source": {"claim": "a"}`), says: "population must be Snapshot"},
		{object: bare("bare", `"population": "Snapshot", "source": {"claim": "a"}`)},
		{object: set("a", `, "type": "Local", "attachment": "Service"`),
			says: "Local disks are served in the pod: attachment must be Sidecar"},
		{object: set("a", `, "firmwareUUIDPolicy": "Fixed"`),
			says: "firmwareUUIDPolicy needs firmwareUUID"},
		{object: set("a", `, "firmwareUUID": "1b4d298f"`), says: "spec.firmwareUUID"},
		{object: set("a", `, "usageType": "fast", "storageClassName": "fast"`),
			says: "usageType and storageClassName both name a storage class: set one of them"},
		{object: strings.Replace(set(strings.Repeat("a", 59), ""), "VMIdentitySet", "VMIdentity",
			1),
			says: "the name may have at most 58 characters"},
		{object: `{"apiVersion": "disk.kubevirt.io/v1alpha1", "kind": "VMPet",
			"metadata": {"name": "` + strings.Repeat("a", 53) + `"},
			"spec": {"disk": {"image": "` + testImage + `"}, "template": {}}}`,
			says: "the name may have at most 52 characters"},
	} {
		objects := testtool.Must(plane.Decode(strings.NewReader(c.object)))(t)
		err := p.Apply(context.Background(), ns, objects...)
		if c.says == "" {
			require.NoError(t, err, c.object)
		} else {
			require.ErrorContains(t, err, c.says, c.object)
		}
	}
}

// TestRulesOfChanges checks which changes of an existing set are allowed.
func TestRulesOfChanges(t *testing.T) {
	p := plane.Get(t)
	ns := p.Namespace(t)
	const immutable = "is immutable: make another VMIdentitySet"
	for _, c := range []struct{ from, to, says string }{
		{from: `, "size": "20Gi"`, to: `, "size": "21Gi"`},
		{from: ``, to: `, "size": "21Gi"`},
		{from: `, "size": "20Gi"`, to: `, "size": "20480Mi"`},
		{from: `, "size": "20Gi"`, to: `, "size": "19Gi"`, says: "may only grow"},
		{from: `, "size": "20Gi"`, to: ``, says: "size may only grow: it cannot be removed"},
		{from: `, "type": "Local"`, to: ``, says: immutable},
		{from: `, "blockSize": 512`, to: `, "blockSize": 4096`, says: immutable},
		{from: `, "blockSize": 512`, to: ``, says: "blockSize is immutable"},
		{from: ``, to: `, "blockSize": 512`, says: "blockSize is immutable"},
		{from: `, "population": "Snapshot"`, to: ``, says: immutable},
		{from: `, "attachment": "Service"`, to: ``, says: "attachment is immutable"},
		{from: `, "source": {"identity": "a"}`, to: `, "source": {"identity": "b"}`,
			says: "is immutable"},
		{from: ``, to: `, "source": {"identity": "b"}`,
			says: "image and source are immutable: make another VMIdentitySet"},
		{from: ``, to: `, "attachment": "Service"`, says: "attachment is immutable"},
		{from: `, "storageClassName": "a"`, to: `, "storageClassName": "b"`, says: immutable},
		{from: `, "storageClassName": "a"`, to: ``,
			says: "storageClassName and usageType are immutable: make another VMIdentitySet"},
		{from: ``, to: `, "usageType": "a"`,
			says: "storageClassName and usageType are immutable: make another VMIdentitySet"},
	} {
		name := "changed"
		apply := func(spec string) error {
			objects := testtool.Must(plane.Decode(strings.NewReader(set(name, spec))))(t)
			return p.Apply(context.Background(), ns, objects...)
		}
		require.NoError(t, apply(c.from), c.from)
		if err := apply(c.to); c.says == "" {
			require.NoError(t, err, "%s to %s", c.from, c.to)
		} else {
			require.ErrorContains(t, err, c.says, "%s to %s", c.from, c.to)
		}
		u := &unstructured.Unstructured{Object: map[string]any{}}
		u.SetAPIVersion("disk.kubevirt.io/v1alpha1")
		u.SetKind("VMIdentitySet")
		u.SetNamespace(ns)
		u.SetName(name)
		require.NoError(t, p.Client.Delete(context.Background(), u))
	}
}

// TestIdentitiesKeepTheirSpec: only the size of an identity can change, and only grow.
func TestIdentitiesKeepTheirSpec(t *testing.T) {
	p := plane.Get(t)
	ns := p.Namespace(t)
	identity := func(spec string) error {
		text := strings.Replace(set("kept", spec), "VMIdentitySet", "VMIdentity", 1)
		objects := testtool.Must(plane.Decode(strings.NewReader(text)))(t)
		return p.Apply(context.Background(), ns, objects...)
	}
	const made = `, "size": "20Gi", "setName": "fedora", "firmwareUUID": ` +
		`"1b4d298f-6151-40b0-a1d4-269fc41d48f0"`
	require.NoError(t, identity(made))
	require.NoError(t, identity(strings.Replace(made, "20Gi", "21Gi", 1)))
	larger := strings.Replace(made, "20Gi", "21Gi", 1)
	for spec, says := range map[string]string{
		made: "may only grow",
		strings.Replace(larger, "fedora", "other", 1):           "setName is immutable",
		strings.Replace(larger, `, "setName": "fedora"`, "", 1): "setName is immutable",
		strings.Replace(larger, "1b4d298f", "1b4d298e", 1):      "firmwareUUID is immutable",
		larger + `, "type": "Local"`:                            "is immutable",
		larger + `, "population": "Snapshot"`:                   "is immutable",
		larger + `, "storageClassName": "fast"`:                 "immutable",
		strings.Replace(larger, `"size": "21Gi", `, "", 1):      "size may only grow",
	} {
		require.ErrorContains(t, identity(spec), says, spec)
	}
}

// TestAttachmentWhileInUse: the attachment of a disk can change while no pod uses it. An identity
// that the controller has not seen yet is not ready.
func TestAttachmentWhileInUse(t *testing.T) {
	p := plane.Get(t)
	ns := p.Namespace(t)
	objects := testtool.Must(plane.Decode(strings.NewReader(strings.Replace(set("used", ""),
		"VMIdentitySet", "VMIdentity", 1))))(t)
	require.NoError(t, p.Apply(t.Context(), ns, objects...))
	require.Regexp(t, `(?m)^used +false +`, p.Kubectl(t, "-n", ns, "get", "vmidentity", "used"))
	attach := func(to string) (string, error) {
		return p.TryKubectl(nil, "-n", ns, "patch", "vmidentity", "used", "--type=merge",
			`--patch={"spec":{"attachment":"`+to+`"}}`)
	}
	require.NoError(t, testtool.Err(attach("Service")))
	p.Kubectl(t, "-n", ns, "patch", "vmidentity", "used", "--type=merge", "--subresource=status",
		`--patch={"status":{"usedBy":{"name":"pod"}}}`)
	out, err := attach("Sidecar")
	require.Error(t, err)
	require.Contains(t, out, "a pod uses the disk: attachment can change when that pod has ended")
	p.Kubectl(t, "-n", ns, "patch", "vmidentity", "used", "--type=merge", "--subresource=status",
		`--patch={"status":{"usedBy":null}}`)
	require.NoError(t, testtool.Err(attach("Sidecar")))
}

// TestImageOfAnIdentity: it does not change, and neither does its tag. The images of sets and pets
// do not change.
func TestImageOfAnIdentity(t *testing.T) {
	p := plane.Get(t)
	ns := p.Namespace(t)
	objects, err := plane.Decode(strings.NewReader(set("a", "") + "\n---\n" + strings.Replace(
		set("a", ""), "VMIdentitySet", "VMIdentity", 1) + `
---
{"apiVersion": "disk.kubevirt.io/v1alpha1", "kind": "VMPet", "metadata": {"name": "a"},
"spec": {"disk": {"image": "` + testImage + `"}, "template": {}}}`))
	require.NoError(t, err)
	require.NoError(t, p.Apply(t.Context(), ns, objects...))
	patch := func(kind, text string) string {
		out, err := p.TryKubectl(nil, "-n", ns, "patch", kind, "a", "--type=merge", "--patch", text)
		if err == nil {
			return ""
		}
		return out
	}
	other := strings.Replace(testImage, "@sha256:", "@sha256:0", 1)[:len(testImage)]
	image := func(image string) string { return `{"spec": {"image": "` + image + `"}}` }
	const immutable = "image is immutable: make another "
	require.Contains(t, patch("vmidset", image(other)), immutable+"VMIdentitySet")
	require.Contains(t, patch("vmpet", `{"spec": {"disk": {"image": "`+other+`"}}}`),
		immutable+"VMPet")
	require.Contains(t, patch("vmid", image(other)), immutable+"VMIdentity")
	require.Contains(t, patch("vmid", `{"spec": {"followedTag": "a"}}`), "followedTag is immutable")
}

// TestDefaults checks the defaults, and that the field of a template is kept.
func TestDefaults(t *testing.T) {
	p := plane.Get(t)
	ns := p.Namespace(t)
	objects := testtool.Must(plane.Decode(strings.NewReader(set("plain", "") + `
---
apiVersion: disk.kubevirt.io/v1alpha1
kind: VMPet
metadata: {name: rex}
spec:
  disk: {image: ` + testImage + `}
  template: {spec: {containers: [{name: vm, image: a, anything: {kept: true}}]}}
`)))(t)
	require.NoError(t, p.Apply(context.Background(), ns, objects...))
	for _, kind := range []string{"vmidset", "vmpet"} {
		table := p.Kubectl(t, "-n", ns, "get", kind)
		require.Contains(t, table, "READY")
		require.Contains(t, strings.Fields(table), "false", "no controller has seen it yet")
	}
	require.Equal(t, "PersistentVolume Overlay Sidecar", p.Kubectl(t, "get", "vmidset", "plain",
		"-n", ns, "-o", "jsonpath={.spec.type} {.spec.population} {.spec.attachment}"))
	require.Equal(t, "PersistentVolume true true", p.Kubectl(t, "get", "vmpet", "rex", "-n", ns,
		"-o", "jsonpath={.spec.disk.type} {.spec.running} "+
			"{.spec.template.spec.containers[0].anything.kept}"))
}

// The resource names, short names and categories of Kubernetes 1.37, KubeVirt 1.6, CDI 1.63, the
// snapshot controller and the API of KubeVirt's instance types, exports, clones and pools.
const namesOfOthers = `
	all api-extensions cluster-api
	bindings componentstatuses cs configmaps cm endpoints ep events ev limitranges limits
	namespaces ns nodes no persistentvolumeclaims pvc persistentvolumes pv pods po podtemplates
	replicationcontrollers rc resourcequotas quota secrets serviceaccounts sa services svc
	customresourcedefinitions crd crds apiservices controllerrevisions daemonsets ds deployments
	deploy replicasets rs statefulsets sts horizontalpodautoscalers hpa cronjobs cj jobs
	certificatesigningrequests csr leases endpointslices flowschemas ingresses ing
	ingressclasses networkpolicies netpol poddisruptionbudgets pdb clusterroles roles
	rolebindings clusterrolebindings priorityclasses pc csidrivers csinodes storageclasses sc
	volumeattachments volumeattributesclasses vac resourceclaims resourceslices deviceclasses
	vm vms virtualmachine virtualmachines vmi vmis virtualmachineinstance virtualmachineinstances
	vmirs vmirss virtualmachineinstancereplicaset virtualmachineinstancereplicasets
	vmipreset vmipresets virtualmachineinstancepreset virtualmachineinstancepresets
	vmim vmims virtualmachineinstancemigration virtualmachineinstancemigrations kv kvs kubevirt
	kubevirts vmpool vmpools virtualmachinepool virtualmachinepools vmsnapshot vmsnapshots
	virtualmachinesnapshot virtualmachinesnapshots vmsnapshotcontent vmsnapshotcontents
	virtualmachinesnapshotcontent virtualmachinesnapshotcontents vmrestore vmrestores
	virtualmachinerestore virtualmachinerestores vmexport vmexports virtualmachineexport
	virtualmachineexports vmclone vmclones virtualmachineclone virtualmachineclones
	vminstancetype vminstancetypes vmf vmfs virtualmachineinstancetype
	virtualmachineinstancetypes vmclusterinstancetype vmclusterinstancetypes vmcf vmcfs
	virtualmachineclusterinstancetype virtualmachineclusterinstancetypes vmpref vmprefs vmp vmps
	virtualmachinepreference virtualmachinepreferences vmcp vmcps
	virtualmachineclusterpreference virtualmachineclusterpreferences migrationpolicy
	migrationpolicies vmbackup vmbackups vmbackuptracker virtualmachinebackup
	virtualmachinebackups
	dv dvs datavolume datavolumes cdi cdis cdiconfig cdiconfigs das datasource datasources dic dics
	dataimportcron dataimportcrons ot ots objecttransfer objecttransfers storageprofile
	storageprofiles volumeclonesource volumeclonesources volumeimportsource volumeimportsources
	volumeuploadsource volumeuploadsources ovirtvolumepopulators openstackvolumepopulators
	uploadtokenrequest uploadtokenrequests
	vs volumesnapshot volumesnapshots vsc vscs volumesnapshotcontent volumesnapshotcontents
	vsclass vsclasses volumesnapshotclass volumesnapshotclasses
	vg volumegroupsnapshot vgs net-attach-def`

// TestNamesOfOthers: none of our short names, plurals and categories is somebody else's, so that
// no command that means virtual machines reaches disks. What reads as the plural of one of our
// names is not another kind of ours.
func TestNamesOfOthers(t *testing.T) {
	p := plane.Get(t)
	taken := map[string]string{}
	for name := range strings.FieldsSeq(namesOfOthers) {
		taken[name] = "others"
	}
	text := p.Kubectl(t, "get", "crd", "-o", "jsonpath={range .items[*]}{.spec.group} "+
		"{.metadata.name} {.spec.names.categories} {.spec.names.plural} {.spec.names.singular} "+
		"{.spec.names.shortNames[*]}{\"\\n\"}{end}")
	kinds := 0
	for line := range strings.SplitSeq(strings.TrimSpace(text), "\n") {
		if !strings.HasPrefix(line, "disk.kubevirt.io ") {
			continue
		}
		kinds++
		fields := strings.Fields(strings.Replace(line, "  ", " - ", 1))
		crd, categories := fields[1], fields[2]
		require.Equal(t, "-", categories, "%s: a category reaches the kinds of others, too", crd)
		for _, name := range fields[3:] {
			for _, read := range []string{name, name + "s"} {
				who := taken[read]
				require.True(t, who == "" || who == crd, "%s of %s is the name of %s", read, crd,
					who)
				taken[read] = crd
			}
		}
	}
	require.Equal(t, 5, kinds)
	// As kubectl understands it where KubeVirt is not installed.
	for _, name := range []string{"vm", "vms", "vmi", "vmids"} {
		_, err := p.TryKubectl(nil, "delete", name, "--all", "-n", p.Namespace(t))
		require.Error(t, err, name)
	}
}
