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
	gone, err := all.remove(1)
	require.NoError(t, err)
	_, err = all.remove(1)
	require.Error(t, err, "it goes once")
	second, err := all.add(plan.Disk{Name: "b"})
	require.NoError(t, err)
	require.EqualValues(t, 2, second[0].LUN)
	all.drop(gone)
	third, err := all.add(plan.Disk{Name: "c"})
	require.NoError(t, err)
	require.EqualValues(t, 1, third[0].LUN)
}
