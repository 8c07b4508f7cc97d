package kubevirt

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/libvirt"
)

// TestWrongAnnotations: the error names the annotation, and what it may say.
func TestWrongAnnotations(t *testing.T) {
	all := strings.Replace(before, `<target bus="virtio" dev="vdb"/>`,
		`<target bus="virtio" dev="vdb"/><serial>taken</serial>`, 1)
	for name, c := range map[string]struct {
		domain      string // "": all
		annotations []string
		disks       []Disk // nil: a and b
		want        []string
	}{
		"a key": {annotations: []string{"buss", "scsi"},
			want: []string{"disk.kubevirt.io/buss", "bus, boot-order"}},
		"a bus": {annotations: []string{"bus.a", "ide"}, want: []string{"disk.kubevirt.io/bus.a",
			`"ide"`, "virtio, scsi, sata or usb"}},
		"a cache": {annotations: []string{"cache", "fast"}, want: []string{`"fast"`, "writeback"}},
		"a boot order": {annotations: []string{"boot-order.a", "first"},
			want: []string{`"first"`}},
		"a truth":   {annotations: []string{"read-only", "yes"}, want: []string{"true or false"}},
		"no serial": {annotations: []string{"serial.a", ""}, want: []string{"is empty"}},
		"a serial for both": {annotations: []string{"serial", "x"},
			want: []string{`"a" and "b"`, "disk.kubevirt.io/serial.NAME"}},
		"a boot order for both": {annotations: []string{"boot-order", "2"},
			want: []string{`"a" and "b"`}},
		"a volume for both": {annotations: []string{"replace", "root"},
			want: []string{`"a" and "b"`}},
		"a disk that is not there": {annotations: []string{"bus.c", "scsi"},
			want: []string{"disk.kubevirt.io/bus.c", `no disk "c"`, "a, b"}},
		"a serial that is taken": {annotations: []string{"serial.b", "taken"},
			want: []string{`"b"`, `"taken"`, "vdb"}},
		"a serial that is too long": {annotations: []string{"serial.b", strings.Repeat("x", 21)},
			want: []string{`"b"`, "20"}},
		"a boot order that is taken": {annotations: []string{"boot-order.a", "1"},
			want: []string{`"a"`, "boot order 1"}},
		"boot by kinds": {annotations: []string{"boot-order.a", "3"},
			domain: `<domain><os><boot dev="hd"/></os></domain>`, want: []string{"<os><boot/>"}},
		"no volume": {annotations: []string{"replace.a", "data"},
			want: []string{`"data"`, `"root" "config"`}},
		"no name of a volume": {annotations: []string{"replace.a", ""}, want: []string{"missing"}},
		"a volume that is no disk": {annotations: []string{"replace.a", "root"},
			domain: `<domain/>`, want: []string{`"root"`, "under disks"}},
		"a volume and a bus": {annotations: []string{"replace.a", "root", "bus", "scsi"},
			want: []string{"disk.kubevirt.io/bus:", "set it there"}},
		"a floppy": {annotations: []string{"replace.a", "root"},
			domain: strings.Replace(before, `device="disk"`, `device="lun"`, 1),
			want:   []string{"lun"}},
		"another hook's": {annotations: []string{"replace.a", "root"},
			domain: strings.Replace(before, `file="/var/run/kubevirt/empty/root.qcow2">`,
				`protocol="nbd" name="a"><host socket="/other"/>`, 1),
			want: []string{"another hook"}},
		"no USB": {annotations: []string{"bus.a", "usb"},
			domain: `<domain><devices><controller type="usb" model="none"/></devices></domain>`,
			want:   []string{"no USB"}},
		"read-only on SATA": {annotations: []string{"bus.a", "sata", "read-only.a", "true"},
			want: []string{"sata has no read-only"}},
		"to write what is read-only": {annotations: []string{"read-only", "false"},
			disks: []Disk{{Number: 1, Export: libvirt.Export{Name: "a", Socket: sidecar0,
				ReadOnly: true}}}, want: []string{"disk.kubevirt.io/read-only", "is served"}},
		"serials of two": {disks: []Disk{
			{Number: 1, Export: libvirt.Export{Name: "a", Socket: sidecar0, Serial: "1"}},
			{Number: 2, Export: libvirt.Export{Name: "b", Socket: sidecar0, Serial: "1"}}},
			want: []string{`"b"`, `"1"`, "serial.b"}},
		"a serial of a disk in a registry": {disks: []Disk{
			{Number: 1, Export: libvirt.Export{Name: "a", Socket: sidecar0, Serial: "1"}},
			{Number: 2, Export: libvirt.Export{Name: "host/b:1", Socket: sidecar0, Serial: "1"}}},
			want: []string{`"host/b:1"`, "disk.kubevirt.io/serial.2"}},
		"a name beside one in a registry": {annotations: []string{"bus.c", "scsi"},
			disks: served("a", "host/b:1", strings.Repeat("n", 60)), want: []string{"a, 2, 3"}},
		"twice": {domain: `<domain><devices>` + strings.Repeat(`<disk><source protocol="nbd" `+
			`name="a"><host socket="`+sidecar0+`"/></source><target dev="vdc"/></disk>`, 2) +
			`</devices></domain>`, want: []string{"twice"}},
		"no XML":      {domain: `<domain>`, want: []string{"not understood", "<domain>"}},
		"bad XML":     {domain: `<domain></x></domain>`, want: []string{"not understood"}},
		"two roots":   {domain: `<domain/><domain/>`, want: []string{"second root"}},
		"no domain":   {domain: `<network/>`, want: []string{"<network>"}},
		"nothing":     {domain: ` `, want: []string{"no element"}},
		"no encoding": {domain: `<?xml version="1.0" encoding="x"?><domain/>`, want: []string{"x"}},
	} {
		t.Run(name, func(t *testing.T) {
			c.domain = cmp.Or(c.domain, all)
			if c.disks == nil {
				c.disks = served("a", "b")
			}
			_, err := Edit(Call{Domain: []byte(c.domain), VMI: vmi(c.annotations...)}, c.disks,
				"hook-sidecar-0")
			require.Error(t, err)
			for _, want := range c.want {
				require.ErrorContains(t, err, want)
			}
		})
	}
	_, err := Edit(Call{Domain: []byte(before), VMI: []byte("{")}, served("a"), "")
	require.ErrorContains(t, err, "VirtualMachineInstance")
}

// TestMigration: a disk that lives in the pod cannot move, and the words say what to do.
func TestMigration(t *testing.T) {
	edit := func(state string, at Occasion) error {
		_, err := Edit(Call{Domain: []byte(before), Occasion: at,
			VMI: []byte(`{"status": {"migrationState": ` + state + `}}`)}, served("a", "b"), "")
		return err
	}
	for _, state := range []string{`{"targetPod": "p"}`, `{"targetNode": "n", "completed": false}`} {
		err := edit(state, OccasionUnknown)
		require.ErrorContains(t, err, `"a", "b" are in the pod`)
		require.ErrorContains(t, err, "stop the machine and start it again")
		require.ErrorContains(t, err, "evictionStrategy")
	}
	require.Error(t, edit("null", OccasionMigrationTarget))
	require.Error(t, edit("null", OccasionMigrationSource))
	for _, state := range []string{"null", "{}", `{"targetPod": "p", "completed": true}`,
		`{"targetPod": "p", "failed": true}`} {
		require.NoError(t, edit(state, OccasionBoot))
		require.NoError(t, edit(state, OccasionUnknown))
	}
}

// TestMigrationOfADiskElsewhere: a machine whose disks are all elsewhere may arrive.
func TestMigrationOfADiskElsewhere(t *testing.T) {
	disks := served("a", "b")
	for _, c := range []struct {
		state   string
		at      Occasion
		arrives bool
	}{
		{`{"targetPod": "p"}`, OccasionUnknown, true},
		{`null`, OccasionMigrationTarget, true},
		{`{"targetPod": "p"}`, OccasionMigrationSource, false},
		{`{"targetPod": "p"}`, OccasionBoot, false},
		{`{"targetPod": "p", "failed": true}`, OccasionUnknown, false},
		{`null`, OccasionUnknown, false},
	} {
		call := Call{Domain: []byte(before), Occasion: c.at,
			VMI: []byte(`{"status": {"migrationState": ` + c.state + `}}`)}
		require.Equal(t, c.arrives, call.Arrives(), c)
		disks[0].Remote, disks[1].Remote = true, true
		out, err := Edit(call, disks, "")
		require.NoError(t, err)
		require.Contains(t, string(out), sidecar0)
		disks[0].Remote = false
		if _, err = Edit(call, disks, ""); c.arrives {
			require.ErrorContains(t, err, `"a" is in the pod`)
			require.NotContains(t, err.Error(), `"b"`)
			require.ErrorContains(t, err, "--disk")
		}
	}
}

// FuzzEdit gives domains and annotations of all kinds. What comes back is a domain that has the
// disks, and has lost nothing else.
func FuzzEdit(f *testing.F) {
	f.Add(before, "bus", "scsi")
	f.Add(before, "replace.a", "root")
	// What a replaced disk had as its source must not decide what the others get.
	f.Add(strings.NewReplacer(`type="file" model`, `type="f le" model`, "vda", "vKa").Replace(before),
		"replace.a", "root")
	f.Add(strings.Replace(before, `<format type="raw"/>`, `<format type="raw"/><source startupPolicy=`+
		`"x" index="y"/>`, 1), "replace.a", "root")
	f.Add(`<domain/>`, "boot-order.a", "2")
	f.Add(`<domain /><!-- behind it -->`, "boot-order.a", "2")
	f.Add("<?xml version='1.0'?><!DOCTYPE x><domain>\r\n<devices/>&amp;<![CDATA[<disk>]]></domain>",
		"serial.a", "x")
	f.Add("<domain>\n<devices/><![CDATA[<devices/>]]></domain>", "serial.a", "x")
	f.Add(`<domain><devices><disk><source protocol="nbd" name="a"/><serial>0123456789abcdef0120`+
		`</serial></disk></devices></domain>`, "cache", "none")
	f.Fuzz(func(t *testing.T, domain, key, value string) {
		disks := served("a", "b")
		c := Call{Domain: []byte(domain), VMI: vmi(key, value)}
		out, err := Edit(c, disks, "hook-sidecar-0")
		if err != nil {
			return
		}
		after := testtool.Must(parse(out))(t)
		was := testtool.Must(parse([]byte(domain)))(t)
		ours := 0
		for _, disk := range after.child("devices").all("disk") {
			if disk.child("source").child("host").attribute("socket") == sidecar0 {
				ours++
			}
		}
		require.GreaterOrEqual(t, ours, 2)
		again := testtool.Must(Edit(Call{Domain: out, VMI: c.VMI}, disks, "hook-sidecar-0"))(t)
		require.Equal(t, string(out), string(again))
		// Whatever is no disk of ours stands there as before, in the same order.
		require.Equal(t, rest(was, domain, disks), rest(after, string(out), disks))
	})
}

// rest is a domain without the disks that an edit may touch, and the elements that it may make.
func rest(root *element, domain string, disks []Disk) string {
	var changes []change
	devices := root.child("devices")
	for _, c := range devices.all("disk") {
		source, alias := c.child("source"), c.child("alias").attribute("name")
		if source.attribute("protocol") == "nbd" || alias == "ua-root" || alias == "ua-config" {
			changes = append(changes, change{c.start, c.end, ""})
		}
	}
	for _, c := range devices.all("controller") {
		if strings.HasPrefix(domain[c.start:c.end], `<controller type="scsi" index="0" model="virtio-`) {
			changes = append(changes, change{c.start, c.end, ""})
		}
	}
	if root.closesItself() { // then it has no devices
		changes = append(changes, change{root.start, root.end, root.tag() + "</domain>"})
	}
	if devices != nil { // if nothing is left in it, it may be ours, too
		left := domain[devices.start:devices.end]
		for _, c := range changes {
			left = strings.Replace(left, domain[c.start:c.end], "", 1)
		}
		if slices.Contains([]string{"<devices></devices>", "<devices/>", "<devices />"}, left) {
			changes = []change{{devices.start, devices.end, ""}}
		}
	}
	return string(changed([]byte(domain), changes))
}

// TestClaim: the machine says where each of its hook sidecars has its claim, by its place.
func TestClaim(t *testing.T) {
	c := func(text string) *Call {
		m := testtool.Must(json.Marshal(map[string]any{"metadata": map[string]any{
			"annotations": map[string]string{sidecarsAnnotation: text}}}))(t)
		return &Call{VMI: m}
	}
	two := c(`[{"image": "a"}, {"image": "b", "pvc": {"name": "x", "volumePath": "/data"}}]`)
	for container, want := range map[string]string{"hook-sidecar-0": " true",
		"hook-sidecar-1": "/data true", "hook-sidecar-2": " false", "hook-sidecar-01": " false",
		"disks": " false", "": " false"} {
		dir, said := testtool.Must2(two.Claim(container))(t)
		require.Equal(t, want, fmt.Sprint(dir, " ", said), container)
	}
	_, said := testtool.Must2((&Call{VMI: []byte(`{}`)}).Claim("hook-sidecar-0"))(t)
	require.False(t, said)
	require.ErrorContains(t, testtool.Err2(c("[").Claim("hook-sidecar-0")), sidecarsAnnotation)
	_, _, err := (&Call{VMI: []byte("{")}).Claim("hook-sidecar-0")
	require.ErrorContains(t, err, "VirtualMachineInstance")
}

// machineWith is a VirtualMachine with annotations of its template.
func machineWith(t *testing.T, annotations map[string]string, spec string) []byte {
	t.Helper()
	text := testtool.Must(json.Marshal(annotations))(t)
	return []byte(`{"kind": "VirtualMachine", "spec": {"template": {"metadata": {"annotations": ` +
		string(text) + `}, "spec": ` + spec + `}}}`)
}

// TestCheck: what a machine would get is what Edit makes of it.
func TestCheck(t *testing.T) {
	const spec = `{"evictionStrategy": "None", "domain": {"devices": {"disks": [
		{"name": "root", "bootOrder": 1, "disk": {"bus": "scsi"}}]}}, "volumes": [{"name": "root"}]}`
	all := testtool.Must(Check(machineWith(t, map[string]string{
		sidecarsAnnotation: `[{"image": "a", "pvc": {"name": "c", "volumePath": "/data"}},
			{"image": "b", "args": ["serve", "--disk", "x"]}, {"image": "d", "command": ["e"]}]`,
		"disk.kubevirt.io/replace.hook-sidecar-0": "root",
		"disk.kubevirt.io/cache.hook-sidecar-1":   "unsafe",
		"disk.kubevirt.io/identity-set":           "set",
		"kubevirt.io/other":                       "x",
	}, spec), nil))(t)
	require.Equal(t, []Promise{
		{Container: "hook-sidecar-0", Image: "a", Claim: "c", ClaimPath: "/data", Set: "set",
			Drained: true, Guest: []string{"on the bus scsi, by NBD, in the place of volume " +
				"root, boot order 1, cache none"}},
		{Container: "hook-sidecar-1", Image: "b", Args: []string{"serve", "--disk", "x"},
			Drained: true, Guest: []string{"on the bus virtio, by NBD, not to boot from, " +
				"cache unsafe"}},
		{Container: "hook-sidecar-2", Image: "d", Other: true, Drained: true},
	}, all)

	for arch, want := range map[string]string{"amd64": "sata", "arm64": "virtio"} {
		all = testtool.Must(Check(machineWith(t, map[string]string{
			sidecarsAnnotation: `[{"image": "a"}]`, "disk.kubevirt.io/replace": "root"},
			`{"architecture": "`+arch+`", "domain": {"devices": {"disks": [{"name": "root"}]}},
			"volumes": [{"name": "root"}]}`), nil))(t)
		require.Contains(t, all[0].Guest[0], "on the bus "+want)
	}

	all = testtool.Must(Check(machineWith(t, map[string]string{
		sidecarsAnnotation:                `[{"image": "a"}]`,
		"disk.kubevirt.io/serial.a.qcow2": "s",
		"disk.kubevirt.io/bus.a.qcow2":    "scsi",
		"disk.kubevirt.io/transport.2":    "vhost-user",
		"disk.kubevirt.io/boot-order.2":   "0",
		"disk.kubevirt.io/cache.b":        "unsafe",
		"disk.kubevirt.io/boot-order.b":   "2",
		"disk.kubevirt.io/bus":            "sata",
		"disk.kubevirt.io/bus.2":          "virtio",
	}, `{}`), nil))(t)
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
		"identity-set1 is unknown": {sidecarsAnnotation: `[{"image": "a"}, {"image": "b"}]`,
			"disk.kubevirt.io/identity-set": "a", "disk.kubevirt.io/identity-set1": "b"},
		"boot order 1 already": {sidecarsAnnotation: `[{"image": "a"}, {"image": "a"}]`,
			"disk.kubevirt.io/boot-order": "1"},
		"the bus of a vhost-user disk": {sidecarsAnnotation: one,
			"disk.kubevirt.io/transport": "vhost-user", "disk.kubevirt.io/bus": "scsi"},
		"args: no": {sidecarsAnnotation: `[{"image": "a", "args": ["x"]}]`},
	} {
		require.ErrorContains(t, testtool.Err(Check(machineWith(t, annotations, `{}`),
			func([]string) error { return errors.New("no") })), want)
	}
	_, err := Check([]byte(`{"kind": "VirtualMachine", "metadata": {"annotations": {"`+
		sidecarsAnnotation+`": "[]", "disk.kubevirt.io/bus": "sata"}}, "spec": {"template": {}}}`), nil)
	require.ErrorContains(t, err, sidecarsAnnotation+" is on the object itself")
	require.ErrorContains(t, err, "disk.kubevirt.io/bus is on the object itself")
	for _, spec := range []string{`{}`, `{"template": null}`} {
		_, err = Check([]byte(`{"kind": "VirtualMachine", "spec": `+spec+`}`), nil)
		require.ErrorContains(t, err, "no machine in spec.template")
	}
}
