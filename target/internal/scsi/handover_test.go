package scsi

import (
	"testing"
	"time"

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

// TestOwnerLeavesBeforeHandOver is the usual end of a live migration: the first machine logs out when the guest runs on the
// second one, and then the LUN is handed over. In between nobody else may take the LUN from under the guest.
func TestOwnerLeavesBeforeHandOver(t *testing.T) {
	b := newBench(t, exclusive)
	second, third := b.attach("iqn.b", 0), b.attach("iqn.c", 0)
	write := func(n *Nexus) string { return b.runAs(n, lun1, cdb(writeOne), pattern(1, 1)).outcome() }
	require.Equal(t, "GOOD", write(b.nexus))
	require.NoError(t, b.d.Admit(1, "iqn.b"))
	require.Equal(t, "GOOD", write(second))
	b.d.Detach(b.nexus)

	require.Equal(t, conflict, write(third))
	require.Equal(t, conflict, b.runAs(third, lun1, cdb(testReady), nil).outcome())
	require.Equal(t, "GOOD", write(second))
	again := b.attach("iqn.a", 1)
	require.Equal(t, "GOOD", write(again), "a connection was lost: the owner comes back")
	b.d.Detach(again)

	require.NoError(t, b.d.HandOver(1))
	require.Equal(t, conflict, write(third))
	require.Equal(t, "GOOD", write(second))
	b.d.Detach(second)
	require.Equal(t, "GOOD", write(third), "the last session of the new owner has ended")

	// Where the second machine is not there either, the LUN is free.
	require.NoError(t, b.d.Admit(1, "iqn.b"))
	b.d.Detach(third)
	require.Equal(t, "GOOD", write(b.attach("iqn.d", 0)))
}

// TestHandOverWaitsForTheDead hands a LUN over while a write of its former owner hangs in the disk, whose session has ended.
func TestHandOverWaitsForTheDead(t *testing.T) {
	b := newBench(t, exclusive)
	stuck, release := make(chan struct{}), make(chan struct{})
	b.disk.enter = func(method string) {
		if method == "write" {
			close(stuck)
			<-release
		}
	}
	written, done := make(chan string), make(chan error)
	go func() { written <- b.runAs(b.nexus, lun1, cdb(writeOne), pattern(1, 5)).outcome() }()
	<-stuck
	require.NoError(t, b.d.Admit(1, "iqn.b"))
	b.attach("iqn.b", 0)
	b.d.Detach(b.nexus)
	go func() { done <- b.d.HandOver(1) }()
	b.waitsForRange()
	select {
	case <-done:
		t.Fatal("handed over while a write of the former owner was under way")
	default:
	}
	close(release)
	require.NoError(t, <-done)
	require.Equal(t, "GOOD", <-written)
}

// waitsForRange waits until somebody waits for a range of the disk.
func (b *bench) waitsForRange() {
	b.t.Helper()
	r := &b.d.units[0].ranges
	require.Eventually(b.t, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.waiting == 1
	}, time.Minute, time.Millisecond)
}
