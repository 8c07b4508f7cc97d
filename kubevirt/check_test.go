package kubevirt

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// machineWith is a VirtualMachine with annotations of its template.
func machineWith(t *testing.T, annotations map[string]string, spec string) []byte {
	t.Helper()
	text, err := json.Marshal(annotations)
	require.NoError(t, err)
	return []byte(`{"kind": "VirtualMachine", "spec": {"template": {"metadata": {"annotations": ` +
		string(text) + `}, "spec": ` + spec + `}}}`)
}

// TestCheck: what a machine would get is what Edit makes of it.
func TestCheck(t *testing.T) {
	const spec = `{"evictionStrategy": "None", "domain": {"devices": {"disks": [
		{"name": "root", "bootOrder": 1, "disk": {"bus": "scsi"}}]}}, "volumes": [{"name": "root"}]}`
	all, err := Check(machineWith(t, map[string]string{
		sidecarsAnnotation: `[{"image": "a", "pvc": {"name": "c", "volumePath": "/data"}},
			{"image": "b", "args": ["serve", "--disk", "x"]}, {"image": "d", "command": ["e"]}]`,
		"disk.kubevirt.io/replace.hook-sidecar-0": "root",
		"disk.kubevirt.io/cache.hook-sidecar-1":   "unsafe",
		"disk.kubevirt.io/identity-set":           "set",
		"kubevirt.io/other":                       "x",
	}, spec), nil)
	require.NoError(t, err)
	require.Equal(t, []Promise{
		{Container: "hook-sidecar-0", Image: "a", Claim: "c", ClaimPath: "/data", Set: "set",
			Drained: true, Guest: []string{"on the bus scsi, by NBD, in the place of volume " +
				"root, boot order 1, cache none"}},
		{Container: "hook-sidecar-1", Image: "b", Args: []string{"serve", "--disk", "x"},
			Drained: true, Guest: []string{"on the bus virtio, by NBD, not to boot from, " +
				"cache unsafe"}},
		{Container: "hook-sidecar-2", Image: "d", Other: true, Drained: true},
	}, all)

	all, err = Check(machineWith(t, map[string]string{
		sidecarsAnnotation:                `[{"image": "a"}]`,
		"disk.kubevirt.io/serial.a.qcow2": "s",
		"disk.kubevirt.io/bus.a.qcow2":    "scsi",
		"disk.kubevirt.io/transport.2":    "vhost-user",
		"disk.kubevirt.io/boot-order.2":   "0",
		"disk.kubevirt.io/cache.b":        "unsafe",
		"disk.kubevirt.io/boot-order.b":   "2",
		"disk.kubevirt.io/bus":            "sata",
		"disk.kubevirt.io/bus.2":          "virtio",
	}, `{}`), nil)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{
		"a.qcow2: on the bus scsi, by NBD, not to boot from, cache none, serial number s",
		"LUN 2: on the bus virtio, by vhost-user, not to boot from",
		"b: on the bus sata, by NBD, boot order 2, cache unsafe",
	}, all[0].Guest)
}

// TestCheckRefuses: each mistake is named, and several at once.
func TestCheckRefuses(t *testing.T) {
	const one = `[{"image": "a"}]`
	for want, annotations := range map[string]map[string]string{
		`json: unknown field "volume"`: {sidecarsAnnotation: `[{"image": "a", "volume": "x"}]`},
		"is not understood":            {sidecarsAnnotation: `{"image": "a"}`},
		"entry 1 has no image":         {sidecarsAnnotation: `[{"image": "a"}, {}]`},
		"an absolute path as volumePath": {
			sidecarsAnnotation: `[{"image": "a", "pvc": {"name": "b", "volumePath": "c"}}]`},
		"hookSidecar is unknown: want":  {"hooks.kubevirt.io/hookSidecar": one},
		"so nobody serves a disk":       {"disk.kubevirt.io/bus": "virtio"},
		`"ide" is unknown`:              {sidecarsAnnotation: one, "disk.kubevirt.io/bus": "ide"},
		"annotation disk.kubevirt.io/b": {sidecarsAnnotation: one, "disk.kubevirt.io/b": "ide"},
		`no volume "x"`:                 {sidecarsAnnotation: one, "disk.kubevirt.io/replace": "x"},
		"no hook sidecar hook-sidecar-1": {sidecarsAnnotation: one,
			"disk.kubevirt.io/identity-set": "a", "disk.kubevirt.io/identity-set.1": "b"},
		"the disk without a number": {sidecarsAnnotation: `[{"image": "a"}, {"image": "a"}]`,
			"disk.kubevirt.io/identity-set.1": "b"},
		"identity-setx is unknown": {sidecarsAnnotation: one,
			"disk.kubevirt.io/identity-setx": "a"},
		"boot order 1 already": {sidecarsAnnotation: `[{"image": "a"}, {"image": "a"}]`,
			"disk.kubevirt.io/boot-order": "1"},
		"the bus of a vhost-user disk": {sidecarsAnnotation: one,
			"disk.kubevirt.io/transport": "vhost-user", "disk.kubevirt.io/bus": "scsi"},
		"args: no": {sidecarsAnnotation: `[{"image": "a", "args": ["x"]}]`},
	} {
		_, err := Check(machineWith(t, annotations, `{}`),
			func([]string) error { return errors.New("no") })
		require.ErrorContains(t, err, want)
	}
	_, err := Check([]byte(`{"kind": "VirtualMachine", "metadata": {"annotations": {"`+
		sidecarsAnnotation+`": "[]", "disk.kubevirt.io/bus": "sata"}}, "spec": {"template": {}}}`), nil)
	require.ErrorContains(t, err, sidecarsAnnotation+" is on the object itself")
	require.ErrorContains(t, err, "disk.kubevirt.io/bus is on the object itself")
	_, err = Check([]byte(`{"kind": "VirtualMachine", "spec": {}}`), nil)
	require.ErrorContains(t, err, "no machine in spec.template")
}
