package scsi

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	reserve = "16 00 00 00 00 00"
	release = "17 00 00 00 00 00"
)

func TestReserve(t *testing.T) {
	b := newBench(t)
	second, twin := b.attach("iqn.b", 0), b.attach("iqn.a", 1)
	b.good(cdb(reserve), nil)
	b.good(cdb(reserve), nil)
	for _, n := range []*Nexus{second, twin} {
		require.Equal(t, conflict, b.runAs(n, lun1, cdb(reserve), nil).outcome())
		require.Equal(t, "GOOD", b.runAs(n, lun1, cdb(release), nil).outcome())
		require.Equal(t, conflict, b.ready(n), "see also TestConflictMatrix")
	}
	b.good(cdb(writeOne), pattern(1, 1))
	b.good(cdb(release), nil)
	require.Equal(t, "GOOD", b.runAs(second, lun1, cdb(reserve), nil).outcome())
	require.Equal(t, conflict, b.reads(b.nexus))
	require.Equal(t, "5/24/00", b.runAs(second, lun1, cdb("16 01 00 00 00 00"), nil).outcome(),
		"an extent")
	require.Equal(t, "5/24/00", b.runAs(second, lun1, cdb("16 10 00 00 00 00"), nil).outcome(),
		"a third party")
}

func TestReservationEnds(t *testing.T) {
	for name, end := range map[string]func(b *bench, holder *Nexus){
		"nexus loss":   func(b *bench, holder *Nexus) { b.d.Detach(holder) },
		"LUN reset":    func(b *bench, _ *Nexus) { b.d.ResetLUN(lun1) },
		"target reset": func(b *bench, _ *Nexus) { b.d.ResetTarget() },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			holder := b.attach("iqn.b", 0)
			require.Equal(t, "GOOD", b.runAs(holder, lun1, cdb(reserve), nil).outcome())
			require.Equal(t, conflict, b.ready(b.nexus))
			end(b, holder)
			b.nexus.nth(0).pending.Store(0)
			require.Equal(t, "GOOD", b.ready(b.nexus))
		})
	}
	b := newBench(t)
	b.d.Detach(b.nexus)
	require.Equal(t, conflict, b.run(cdb(reserve), nil).outcome(),
		"an ended session would hold it for ever")
	require.Equal(t, "GOOD", b.reads(b.attach("iqn.b", 0)))
}

// TestReserveRace lets a second nexus reserve between the check and the execution of the first
// one's command.
func TestReserveRace(t *testing.T) {
	b := newBench(t)
	task := &Task{Nexus: b.nexus, LUN: lun1, CDB: [16]byte{opReserve6}}
	require.NoError(t, b.d.Prepare(task))
	require.Equal(t, "GOOD", b.runAs(b.attach("iqn.b", 0), lun1, cdb(reserve), nil).outcome())
	_, err := task.Finish()
	status, _ := b.d.Outcome(task, err, nil)
	require.Equal(t, StatusReservationConflict, status)
}
