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
