package libvirt

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"kubevirt.io/disk/internal/testtool"
)

// decode runs a YAML decoder on a text.
func decode(t *testing.T, text string) map[string]any {
	t.Helper()
	var document map[string]any
	require.NoError(t, yaml.Unmarshal([]byte(text), &document))
	return document
}

// The proposal for disk sources shows two nestings, with the LUN inside and beside "iscsi", and two
// forms around them.
const (
	specDisks = `
disks:
  - source:
      iscsi:
        host:
          name: iscsi-demo-target
          port: "3260"
        portal: iqn.2017-01.io.kubevirt:sn.42
        lun: 2
`
	dynamicAnswer = `
iscsi:
  host:
    name: iscsi-demo-target
    port: "3260"
  portal: iqn.2017-01.io.kubevirt:sn.42
lun: 2
`
	oneDisk = `
source:
  iscsi:
    host: {name: iscsi-demo-target}
    portal: iqn.2017-01.io.kubevirt:sn.42
  lun: 2
copy: {mode: copy-on-write, usage-type: fast}
`
)

func TestSourcesOfTheProposal(t *testing.T) {
	want := []LUN{{
		Portals:    []Portal{{Host: "iscsi-demo-target", Port: 3260}},
		TargetName: "iqn.2017-01.io.kubevirt:sn.42", Number: 2, AccessMode: WriteExclusive,
	}}
	for _, text := range []string{specDisks, dynamicAnswer, oneDisk} {
		want[0].Copy = Copy{}
		if text == oneDisk {
			want[0].Copy = Copy{Mode: CopyOnWrite, UsageType: "fast"}
		}
		document := decode(t, text)
		luns := testtool.Must(ParseSources(document))(t, text)
		require.Equal(t, want, luns)

		// A JSON decoder uses other types for the numbers.
		asJSON := testtool.Must(json.Marshal(document))(t)
		var again map[string]any
		require.NoError(t, json.Unmarshal(asJSON, &again))
		luns = testtool.Must(ParseSources(again))(t, text)
		require.Equal(t, want, luns)
		exact := json.NewDecoder(bytes.NewReader(asJSON))
		exact.UseNumber()
		clear(again)
		require.NoError(t, exact.Decode(&again))
		luns = testtool.Must(ParseSources(again))(t, text)
		require.Equal(t, want, luns)
	}
}

func TestSeveralSources(t *testing.T) {
	luns := testtool.Must(ParseSources(decode(t, `
disks:
  - source: {iscsi: {host: {name: a, port: 3261}, portal: iqn.2017-01.io.kubevirt:a, lun: "1"}}
    access-mode: read-only
  - source: {iscsi: {host: {name: "fd00::5"}, portal: iqn.2017-01.io.kubevirt:b, lun: 2}, lun: 2}
    access-mode: read-shared
`)))(t)
	require.Equal(t, []LUN{
		{Portals: []Portal{{Host: "a", Port: 3261}}, TargetName: "iqn.2017-01.io.kubevirt:a",
			Number: 1, AccessMode: WriteExclusive, ReadOnly: true},
		{Portals: []Portal{{Host: "fd00::5", Port: 3260}}, TargetName: "iqn.2017-01.io.kubevirt:b",
			Number: 2, AccessMode: ReadShared, ReadOnly: true},
	}, luns)
}

func TestSourcesRefuse(t *testing.T) {
	for name, c := range map[string]struct{ text, field string }{
		"nothing": {`{}`, "iscsi"},
		"a claim": {`disks: [{source: {pvc: {claimname: some-pvc-name}}}]`,
			"disks[0].source.iscsi"},
		"no list":      {`disks: {source: 1}`, "disks"},
		"no map":       {`disks: [1]`, "disks[0]"},
		"a bad source": {`source: 1`, "source"},
		"no host": {`iscsi: {portal: iqn.2017-01.io.kubevirt:a, lun: 1}`,
			"iscsi.host"},
		"a host without a name": {`iscsi: {host: {port: 1}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}`, "iscsi.host.name"},
		"a misspelt key":        {`iscsi: {host: {name: a, Port: 1}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}`, "iscsi.host.Port"},
		"another misspelt key":  {`iscsi: {host: {name: a}, target: iqn.2017-01.io.kubevirt:a, portal: iqn.2017-01.io.kubevirt:a, lun: 1}`, "iscsi.target"},
		"port 0":                {`iscsi: {host: {name: a, port: 0}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}`, "iscsi.host.port"},
		"too high a port":       {`iscsi: {host: {name: a, port: 68796}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}`, "iscsi.host.port"},
		"a port of text":        {`iscsi: {host: {name: a, port: http}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}`, "iscsi.host.port"},
		"a fraction of a port":  {`iscsi: {host: {name: a, port: 3260.5}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}`, "iscsi.host.port"},
		"no portal":             {`iscsi: {host: {name: a}, lun: 1}`, "iscsi.portal"},
		"a portal that is not an IQN": {`source: {iscsi: {host: {name: a}, portal: 10.0.0.5, lun: 1}}`,
			"source.iscsi.portal"},
		"no LUN": {`iscsi: {host: {name: a}, portal: iqn.2017-01.io.kubevirt:a}`,
			"iscsi.lun"},
		"LUN 0":                    {`iscsi: {host: {name: a}, portal: iqn.2017-01.io.kubevirt:a, lun: 0}`, "iscsi.lun"},
		"LUN 0 beside":             {`disks: [{source: {iscsi: {host: {name: a}, portal: iqn.2017-01.io.kubevirt:a}, lun: 0}}]`, "disks[0].source.lun"},
		"a LUN of text":            {`iscsi: {host: {name: a}, portal: iqn.2017-01.io.kubevirt:a, lun: one}`, "iscsi.lun"},
		"two LUNs":                 {`iscsi: {host: {name: a}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}` + "\nlun: 2", "iscsi.lun"},
		"a LUN of text beside":     {`iscsi: {host: {name: a}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}` + "\nlun: two", "iscsi.lun"},
		"an access mode":           {`{source: {iscsi: {host: {name: a}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}}, access-mode: rw}`, "access-mode"},
		"a copy that is no map":    {`{source: {iscsi: {host: {name: a}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}}, copy: fast}`, "copy"},
		"a copy mode":              {`{source: {iscsi: {host: {name: a}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}}, copy: {mode: cow}}`, "copy.mode"},
		"an empty usage type":      {`disks: [{source: {iscsi: {host: {name: a}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}}, copy: {usage-type: ""}}]`, "disks[0].copy.usage-type"},
		"a usage type of a number": {`{source: {iscsi: {host: {name: a}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}}, copy: {usage-type: 1}}`, "copy.usage-type"},
		"a misspelt key of copy":   {`{source: {iscsi: {host: {name: a}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}}, copy: {usage_type: fast}}`, "copy.usage_type"},
		"an access mode of a number": {`disks: [{source: {iscsi: {host: {name: a}, portal: iqn.2017-01.io.kubevirt:a, lun: 1}}, access-mode: 1}]`,
			"disks[0].access-mode"},
	} {
		t.Run(name, func(t *testing.T) {
			luns, err := ParseSources(decode(t, c.text))
			require.Nil(t, luns)
			var wrong *FieldError
			require.ErrorAs(t, err, &wrong)
			require.Equal(t, c.field, wrong.Field, "%v", err)
		})
	}
	_, err := ParseSources(decode(t,
		`disks: [{}, {source: {iscsi: {host: {name: a}, portal: x, lun: 1}}}]`))
	require.ErrorContains(t, err, "disks[0].iscsi: ")
	require.ErrorContains(t, err, "disks[1].source.iscsi.portal: ")
}
