package served

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/daemon/plan"
)

// TestNumberOfADiskThatGoes: a number is free when the target is rid of its disk, and not before.
func TestNumberOfADiskThatGoes(t *testing.T) {
	var all table
	first, err := all.add(plan.Disk{Name: "a"})
	require.NoError(t, err)
	first[0].set(true)
	require.True(t, first[0].set(false))
	second, err := all.add(plan.Disk{Name: "b"})
	require.NoError(t, err)
	require.EqualValues(t, 2, second[0].LUN)
	all.drop(first[0])
	third, err := all.add(plan.Disk{Name: "c"})
	require.NoError(t, err)
	require.EqualValues(t, 1, third[0].LUN)
}

// TestNamesAndNumbers: names and numbers of disks are one space. Whoever is there first keeps what
// he has.
func TestNamesAndNumbers(t *testing.T) {
	var all table
	all.reserved = func(name string, lun uint16) string {
		if name == "failed" || lun == 4 {
			return "failed"
		}
		return ""
	}
	named := func(name string, lun uint16, volume bool) plan.Disk {
		d := plan.Disk{Name: name, Volume: volume}
		d.LUN = lun
		return d
	}
	_, err := all.add(named("a.raw", 0, false), named("3", 2, false))
	require.NoError(t, err)
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
	require.NotEmpty(t, all.holder("a.raw"))
	require.NotEmpty(t, all.holder("1"))
	require.Empty(t, all.holder("01"))
	snapshot, err := all.add(plan.Disk{Name: "a.raw@s"})
	require.NoError(t, err)
	require.EqualValues(t, 5, snapshot[0].LUN, "3 is a name, and 4 is another volume's")
	_, err = all.add(named("failed", 4, true))
	require.NoError(t, err, "the volume itself")
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
			_, err := all.add(one)
			require.NoError(t, err, one.Name)
		}
		_, err := all.add(plan.Disk{Name: "1"})
		require.ErrorAs(t, err, new(*NameTakenError), "an image comes later")
		_, err = all.add(named("b", 1))
		require.ErrorContains(t, err, "LUN 1 is already used by")
	}
}
