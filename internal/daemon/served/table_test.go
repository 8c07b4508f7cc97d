package served

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/internal/testtool"
)

// TestNumberOfADiskThatGoes: a number is free when the target is rid of its disk, and not before.
func TestNumberOfADiskThatGoes(t *testing.T) {
	var all table
	first := testtool.Must(all.add(plan.Disk{Name: "a"}))(t)
	first[0].set(true)
	first[0].set(false)
	second := testtool.Must(all.add(plan.Disk{Name: "b"}))(t)
	require.EqualValues(t, 2, second[0].LUN)
	all.drop(first[0])
	third := testtool.Must(all.add(plan.Disk{Name: "c"}))(t)
	require.EqualValues(t, 1, third[0].LUN)
}

// TestNamesAndNumbers: names and numbers of disks are one space. Whoever is there first keeps what
// he has.
func TestNamesAndNumbers(t *testing.T) {
	all := table{volumes: map[string]*Volume{"failed": {Name: "failed", LUN: 4}}}
	named := func(name string, lun uint16, volume bool) plan.Disk {
		d := plan.Disk{Name: name, Volume: volume}
		d.LUN = lun
		return d
	}
	require.NoError(t, testtool.Err(all.add(named("a.raw", 0, false), named("3", 2, false))))
	for _, one := range []plan.Disk{named("a.raw", 70, true), named("1", 70, true),
		named("2", 70, true), named("x", 3, true), named("failed", 0, false),
		named("x", 4, false)} {
		_, err := all.add(one)
		require.ErrorAs(t, err, new(*NameTakenError), one.Name)
		advice := "so use another one"
		if one.Volume { // an earlier version has made it
			advice = "so give that one another name, or another number (lun under disks)"
		}
		require.ErrorContains(t, err, advice)
	}
	snapshot := testtool.Must(all.add(plan.Disk{Name: "a.raw@s"}))(t)
	require.EqualValues(t, 5, snapshot[0].LUN, "3 is a name, and 4 is another volume's")
	require.NoError(t, testtool.Err(all.add(named("failed", 4, true))), "the volume itself")
}

// TestVolumesOfEarlierVersions: a volume may be called like another one's number since before names
// and numbers were one space. Both are served, whichever is opened first.
func TestVolumesOfEarlierVersions(t *testing.T) {
	named := func(name string, lun uint16) plan.Disk {
		d := plan.Disk{Name: name, Volume: true}
		d.LUN = lun
		return d
	}
	for _, disks := range [][]plan.Disk{{named("1", 2), named("a", 1)},
		{named("a", 1), named("1", 2)}, {named("2", 1), named("1", 2)}} {
		var all table
		for _, one := range disks {
			require.NoError(t, testtool.Err(all.add(one)), one.Name)
		}
		_, err := all.add(plan.Disk{Name: "1"})
		require.ErrorAs(t, err, new(*NameTakenError), "an image comes later")
		require.ErrorContains(t, testtool.Err(all.add(named("b", 1))), "LUN 1 is already used by")
	}
}

// TestNamesOfVolumes: a volume takes neither the name of another disk or volume, nor the number of
// a LUN. Whoever is there first keeps it, whether its disk is open or not.
func TestNamesOfVolumes(t *testing.T) {
	var d Disks
	image := plan.Disk{Name: "vm.raw"}
	image.LUN = 65
	require.NoError(t, testtool.Err(d.table.add(image)))
	number := func(name string) (lun uint16) {
		for lun = 64; !d.TakeNumber(name, lun); lun++ {
		}
		return lun
	}
	for _, v := range []struct {
		name string
		lun  uint16
		why  string
	}{{"vm1", 64, ""}, {"66", 66, "its own name takes nothing from it"}, {"67", 0, "on a claim"},
		{"vm2", 68, "67 is a name"}, {"069", 69, "no number"}} {
		require.NoError(t, d.AddVolume(Volume{Name: v.name}, false), v.name)
		if v.lun != 0 {
			require.Equal(t, v.lun, number(v.name), v.why)
		}
	}
	for name, want := range map[string]string{"vm.raw": "taken by LUN 65", "65": "taken by LUN 65",
		"64": `taken by the volume "vm1"`, "68": `taken by the volume "vm2"`} {
		err := d.AddVolume(Volume{Name: name}, false)
		require.ErrorAs(t, err, new(*NameTakenError))
		require.ErrorContains(t, err, want)
	}
	for name, lun := range map[string]uint16{"vm1": 0, "67": 0, "68": 0, "x": 68, "y": 67} {
		other := plan.Disk{Name: name}
		other.LUN = lun
		require.ErrorAs(t, testtool.Err(d.table.add(other)), new(*NameTakenError), name)
	}
	d.DropVolume("vm1")
	require.NoError(t, d.AddVolume(Volume{Name: "64"}, false))
}
