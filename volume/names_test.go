package volume

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/volume/api"
)

// TestNamesOfOthers: a volume takes neither the name of another disk, nor the number of its LUN,
// nor that of a file of the server. Whoever is there first keeps it.
func TestNamesOfOthers(t *testing.T) {
	f := newFake() // an image "vm.raw" is LUN 65
	f.claims = map[string]string{"c": t.TempDir()}
	m := start(t, t.TempDir(), f)
	put := func(name string, spec api.Spec) error {
		_, _, err := m.Put(t.Context(), name, spec)
		return err
	}
	empty := api.Spec{Size: 512}
	require.NoError(t, put("vm1", empty)) // LUN 64
	require.NoError(t, put("66", empty))  // LUN 67: its name is a number by now
	v, err := m.Get("66")
	require.NoError(t, err)
	require.EqualValues(t, 66, v.Record.LUN, "its own name takes nothing from it")
	require.NoError(t, put("67", api.Spec{Size: 512, PVC: &api.Claim{Name: "c"}}))
	require.NoError(t, put("vm2", empty))
	v, err = m.Get("vm2")
	require.NoError(t, err)
	require.EqualValues(t, 68, v.Record.LUN, "67 is a name")
	for name, want := range map[string]string{"vm.raw": "taken by LUN 65", "65": "taken by LUN 65",
		"64": `taken by the volume "vm1"`, "68": `taken by the volume "vm2"`} {
		refused(t, api.CodeInUse, put(name, empty))
		refused(t, api.CodeInUse, put(name, api.Spec{From: &api.Source{Upload: true}}))
		require.ErrorContains(t, put(name, empty), want)
		_, made, err := m.Fill(t.Context(), name, true)
		refused(t, api.CodeInUse, err)
		require.False(t, made)
	}
	for _, name := range []string{"lock", "numbers.json", "numbers.json.partial",
		"numbers.json.spare"} {
		refused(t, api.CodeInvalid, put(name, empty))
	}
	require.NoError(t, put("069", empty), "no number")
	for name, lun := range map[string]uint16{"vm1": 0, "67": 0, "68": 0, "x": 68, "y": 67} {
		require.NotEmpty(t, m.Holder(name, lun), name)
	}
	require.Empty(t, m.Holder("x", 1))
	require.Empty(t, m.Holder("1", 0))
}
