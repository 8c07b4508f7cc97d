package scsi

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHandOver(t *testing.T) {
	b := newBench(t, exclusive)
	number := uint16(1)
	var fenced []*Nexus
	b.d.opt.Abort = func(_ uint16, nexuses []*Nexus, _ *Task) { fenced = nexuses }
	second, third := b.attach("iqn.b", 0), b.attach("iqn.c", 0)
	read := func(n *Nexus) string { return b.runAs(n, lun1, cdb(readOne), nil).outcome() }
	write := func(n *Nexus) string { return b.runAs(n, lun1, cdb(writeOne), pattern(1, 1)).outcome() }
	require.Equal(t, "GOOD", write(b.nexus))
	require.Equal(t, conflict, read(second))

	require.ErrorContains(t, b.d.HandOver(number), "open it first")
	require.ErrorContains(t, b.d.Withdraw(number), "nobody")
	require.ErrorContains(t, b.d.Admit(9, "iqn.b"), "no LUN 9")
	require.ErrorContains(t, b.d.Admit(number, "iqn.a"), "belongs to iqn.a")
	require.NoError(t, b.d.Admit(number, "IQN.B"))
	require.NoError(t, b.d.Admit(number, "iqn.b"), "the same once more")
	require.ErrorContains(t, b.d.Admit(number, "iqn.c"), "open to iqn.b")
	for _, n := range []*Nexus{b.nexus, second} {
		require.Equal(t, "GOOD", read(n))
		require.Equal(t, "GOOD", write(n))
	}
	require.Equal(t, conflict, read(third))

	require.NoError(t, b.d.Withdraw(number))
	require.Equal(t, []*Nexus{second}, fenced)
	require.Equal(t, conflict, write(second))
	require.Equal(t, "GOOD", write(b.nexus), "the owner goes on after a migration that failed")

	require.NoError(t, b.d.Admit(number, "iqn.b"))
	require.NoError(t, b.d.HandOver(number))
	require.ElementsMatch(t, []*Nexus{b.nexus, third}, fenced)
	require.Equal(t, conflict, write(b.nexus))
	require.Equal(t, conflict, read(b.nexus))
	require.Equal(t, "GOOD", write(second))

	// Whoever is not there cannot take it over.
	require.NoError(t, b.d.Admit(number, "iqn.gone"))
	require.ErrorContains(t, b.d.HandOver(number), "not logged in")
	require.Equal(t, "GOOD", write(second))
	require.NoError(t, b.d.Withdraw(number))

	shared := newBench(t)
	require.ErrorContains(t, shared.d.Admit(number, "iqn.b"), "open to every initiator")
}

func TestGrownLUNTellsItsCapacity(t *testing.T) {
	b := newBench(t, func(l *LUN) { l.Grown = true })
	n := b.d.Attach(InitiatorPort{Name: "iqn.new"})
	require.Equal(t, "6/29/00", b.runAs(n, lun1, cdb(testReady), nil).outcome())
	require.Equal(t, "6/2a/09", b.runAs(n, lun1, cdb(testReady), nil).outcome())
	require.Equal(t, "GOOD", b.runAs(n, lun1, cdb(testReady), nil).outcome())
}
