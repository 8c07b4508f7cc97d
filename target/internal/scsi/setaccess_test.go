package scsi

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSetAccess(t *testing.T) {
	b := newBench(t, exclusive)
	second := b.attach("iqn.b", 0)
	good, conflict := b.writes(b.nexus), b.writes(second)
	require.NotEqual(t, good, conflict)
	require.ErrorContains(t, b.d.disks.SetAccess(2, AccessWriteShared, false), "no LUN 2")

	// A machine that a handover lets in would lose its place, and nobody would know whom to fence.
	require.NoError(t, b.d.disks.Admit(1, "iqn.c", time.Time{}))
	require.ErrorContains(t, b.d.disks.SetAccess(1, AccessWriteShared, false), "handover")
	require.ErrorContains(t, b.d.disks.SetAccess(1, AccessReadShared, false), "handover")
	require.Equal(t, conflict, b.writes(second))
	_, err := b.d.disks.Withdraw(1)
	require.NoError(t, err)

	require.NoError(t, b.d.disks.SetAccess(1, AccessWriteExclusive, true))
	require.Equal(t, "6/2a/01", b.writes(b.nexus))
	require.Equal(t, "7/27/00", b.writes(b.nexus))
	require.Equal(t, "6/2a/01", b.writes(second),
		"everybody is told, whom a conflict keeps out, too")
	require.Equal(t, conflict, b.writes(second))
	require.NoError(t, b.d.disks.SetAccess(1, AccessWriteExclusive, true))
	require.Equal(t, "7/27/00", b.writes(b.nexus), "nothing has changed, and nobody is told")
	require.NoError(t, b.d.disks.SetAccess(1, AccessWriteShared, false))
	for _, n := range []*Nexus{b.nexus, second} {
		require.Equal(t, "6/2a/01", b.writes(n))
		require.Equal(t, good, b.writes(n))
	}
	require.ErrorContains(t, b.d.disks.SetAccess(1, AccessWriteExclusive, false), "restart")
	require.Equal(t, good, b.writes(second))
	require.ErrorContains(t, b.d.disks.Admit(1, "iqn.c", time.Time{}), "every initiator")

	sealed := newBench(t, readSharedLUN)
	require.ErrorContains(t, sealed.d.disks.SetAccess(1, AccessWriteShared, false),
		"opened for reading")
	require.NoError(t, sealed.d.disks.SetAccess(1, AccessWriteShared, true))
}
