package scsi

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	eject   = "1b 00 00 00 02 00"
	load    = "1b 00 00 00 03 00"
	prevent = "1e 00 00 00 01 00"
	allow   = "1e 00 00 00 00 00"
)

func TestEjectAndLoad(t *testing.T) {
	b := newBench(t, removableLUN)
	other := b.attach("iqn.b", 0)
	b.good(cdb(eject), nil)
	require.Equal(t, 1, b.disk.count("flush"),
		"what was written is durable before the medium leaves")
	for i := range b.d.nth(0).table().commands {
		c := &b.d.nth(0).table().commands[i]
		request := make([]byte, 16)
		request[0], request[1] = c.opcode, c.action
		switch c.opcode {
		case opInquiry, opRequestSense, opReportLUNs, opMaintenanceIn, opModeSense6, opModeSense10,
			opModeSelect6, opModeSelect10,
			opReserve6, opRelease6, opPersistIn, opPersistOut, opStartStop, opPreventAllow,
			opLogSense:
			require.NotEqual(t, "2/3a/00", b.run(request, nil).outcome(), c.name)
		case opExtendedCopy, opReceiveCopy: // ask the units that they name, if any
			require.NotEqual(t, "2/3a/00", b.run(request, nil).outcome(), c.name)
		default:
			require.Equal(t, "2/3a/00", b.run(request, nil).outcome(), c.name)
		}
	}
	b.good(cdb(load), nil)
	b.good(cdb(testReady), nil)
	require.Equal(t, "6/28/00", b.runAs(other, lun1, cdb(testReady), nil).outcome())
	b.good(cdb(load), nil)
	require.Equal(t, "GOOD", b.runAs(other, lun1, cdb(testReady), nil).outcome(),
		"it was loaded already")
}

func TestStartStopWithoutEjecting(t *testing.T) {
	for _, c := range []struct {
		name, cdb, want string
		flushes         int
	}{
		{"stop", "1b 00 00 00 00 00", "GOOD", 1},
		{"stop, immediately", "1b 01 00 00 00 00", "GOOD", 1},
		{"stop without flush", "1b 00 00 00 04 00", "GOOD", 0},
		{"start", "1b 00 00 00 01 00", "GOOD", 0},
		{"load", load, "GOOD", 0},
		{"standby", "1b 00 00 00 32 00", "GOOD", 0},
		{"power condition modifier", "1b 00 00 01 00 00", "5/24/00", 0},
		{"reserved bit", "1b 00 00 00 08 00", "5/24/00", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, removableLUN)
			require.Equal(t, c.want, b.run(cdb(c.cdb), nil).outcome())
			require.Equal(t, c.flushes, b.disk.count("flush"))
			b.good(cdb(testReady), nil)
		})
	}
	fixed := newBench(t)
	require.Equal(t, "5/24/00", fixed.run(cdb(eject), nil).outcome())
	require.Equal(t, "5/24/00", fixed.run(cdb(load), nil).outcome())
	fixed.good(cdb("1b 00 00 00 00 00"), nil)
	require.Equal(t, 1, fixed.disk.count("flush"), "stopping flushes")
	fixed.good(cdb("1b 00 00 00 12 00"), nil) // LOEJ is ignored with a power condition
	require.Equal(t, "5/20/00", fixed.run(cdb(prevent), nil).outcome())
}

func TestPreventRemoval(t *testing.T) {
	b := newBench(t, removableLUN)
	other := b.attach("iqn.b", 0)
	b.good(cdb(prevent), nil)
	for _, n := range []*Nexus{b.nexus, other} {
		require.Equal(t, "5/53/02", b.runAs(n, lun1, cdb(eject), nil).outcome())
	}
	b.good(cdb(testReady), nil)
	require.Equal(t, "GOOD", b.runAs(other, lun1, cdb(allow), nil).outcome())
	require.Equal(t, "5/53/02", b.runAs(other, lun1, cdb(eject), nil).outcome(),
		"only who prevents it can allow it")
	b.good(cdb(allow), nil)
	b.good(cdb(eject), nil)
	b.good(cdb(prevent), nil)
	require.Equal(t, "5/53/02", b.run(cdb(load), nil).outcome())
	b.good(cdb(allow), nil)
	b.good(cdb(load), nil)
	require.Equal(t, "5/24/00", b.run(cdb("1e 00 00 00 02 00"), nil).outcome(), "obsolete value")
}

func TestPreventionEnds(t *testing.T) {
	for name, end := range map[string]func(b *bench, n *Nexus){
		"nexus loss":   func(b *bench, n *Nexus) { b.d.Detach(n) },
		"LUN reset":    func(b *bench, _ *Nexus) { b.d.ResetLUN(lun1) },
		"target reset": func(b *bench, _ *Nexus) { b.d.ResetTarget() },
		"PREEMPT AND ABORT": func(b *bench, n *Nexus) {
			b.register(b.nexus, 1)
			b.register(n, 2)
			require.Equal(b.t, "GOOD", b.persist(b.nexus, saPreemptAndAbort, 0, 1, 2))
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, removableLUN)
			holder := b.attach("iqn.b", 0)
			require.Equal(t, "GOOD", b.runAs(holder, lun1, cdb(prevent), nil).outcome())
			end(b, holder)
			b.nexus.nth(0).pending.Store(0)
			b.good(cdb(eject), nil)
		})
	}
}

func TestMediumReturnsWhenNobodyIsLeft(t *testing.T) {
	b := newBench(t, removableLUN)
	b.good(cdb(eject), nil)
	b.d.Detach(b.nexus)
	require.Equal(t, "GOOD", b.runAs(b.attach("iqn.b", 0), lun1, cdb(testReady), nil).outcome())
}
