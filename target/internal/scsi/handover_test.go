package scsi

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

func TestHandOver(t *testing.T) {
	b := newBench(t, exclusive)
	number := uint16(1)
	var fenced []*Nexus
	b.d.opt.Abort = func(nexuses []*Nexus, _ func(*Task) bool) { fenced = nexuses }
	second, third := b.attach("iqn.b", 0), b.attach("iqn.c", 0)
	require.Equal(t, "GOOD", b.writes(b.nexus))
	require.Equal(t, conflict, b.reads(second))

	require.ErrorContains(t, b.finish(), "open it first")
	require.ErrorContains(t, withdraw(b.d, number), "nobody")
	require.ErrorContains(t, b.d.disks.Admit(9, "iqn.b", time.Time{}), "no LUN 9")
	require.ErrorContains(t, b.admit("iqn.a"), "belongs to iqn.a")
	require.NoError(t, b.admit("IQN.B"))
	require.NoError(t, b.admit("iqn.b"), "the same once more")
	require.ErrorContains(t, b.admit("iqn.c"), "open to iqn.b")
	for _, n := range []*Nexus{b.nexus, second} {
		require.Equal(t, "GOOD", b.reads(n))
		require.Equal(t, "GOOD", b.writes(n))
	}
	require.Equal(t, conflict, b.reads(third))

	require.Equal(t, "iqn.b", testtool.Must(b.d.disks.Withdraw(number))(t))
	require.Equal(t, []*Nexus{second}, fenced)
	require.Equal(t, conflict, b.writes(second))
	require.Equal(t, "GOOD", b.writes(b.nexus), "the owner goes on after a migration that failed")

	require.NoError(t, b.admit("iqn.b"))
	require.NoError(t, b.finish())
	require.ElementsMatch(t, []*Nexus{b.nexus, third}, fenced)
	require.Equal(t, conflict, b.writes(b.nexus))
	require.Equal(t, conflict, b.reads(b.nexus))
	require.Equal(t, "GOOD", b.writes(second))

	// An initiator that is away cannot take it over.
	require.NoError(t, b.admit("iqn.gone"))
	require.ErrorContains(t, b.finish(), "not logged in")
	require.Equal(t, "GOOD", b.writes(second))
	require.NoError(t, withdraw(b.d, number))

	require.Equal(t, serving.Holders{Owner: "iqn.b", Fenced: []string{"iqn.a", "iqn.gone"}},
		b.d.disks.Holders(number))
	require.NoError(t, b.admit("iqn.a"))
	b.d.Detach(second)
	have := b.d.disks.Holders(number)
	require.Equal(t, []string{"iqn.b", "iqn.a"}, []string{have.Owner, have.Guest},
		"nobody else gets it meanwhile")
	require.NoError(t, withdraw(b.d, number))
	require.Equal(t, serving.Holders{Fenced: []string{"iqn.gone", "iqn.a"}},
		b.d.disks.Holders(number), "its last session has ended")
	require.Empty(t, b.d.disks.Holders(9))

	shared := newBench(t)
	require.Equal(t, "GOOD", shared.reads(shared.nexus))
	require.Empty(t, shared.d.disks.Holders(number), "it is everybody's")
	require.ErrorContains(t, shared.admit("iqn.b"), "open to every initiator")
}

// admit opens LUN 1 without a limit of time.
func (b *bench) admit(initiator string) error { return b.d.disks.Admit(1, initiator, time.Time{}) }

// finish hands LUN 1 over.
func (b *bench) finish() error {
	_, err := b.d.disks.HandOver(1)
	return err
}

// TestHandOverTellsWhoIsFenced: the caller that ends a migration must not believe that a machine is
// fenced when it is not.
func TestHandOverTellsWhoIsFenced(t *testing.T) {
	b := newBench(t, exclusive)
	for _, step := range []struct{ to, former string }{{"iqn.b", ""}, {"iqn.c", "iqn.b"}} {
		b.attach(step.to, 0)
		require.NoError(t, b.admit(step.to))
		require.Equal(t, step.former, testtool.Must(b.d.disks.HandOver(1))(t))
	}
}

func TestGrownLUNTellsItsCapacity(t *testing.T) {
	b := newBench(t, func(l *LUN) { l.Grown = true })
	n := b.d.Attach(InitiatorPort{Name: "iqn.new"})
	require.Equal(t, "6/29/00", b.ready(n))
	require.Equal(t, "6/2a/09", b.ready(n))
	require.Equal(t, "GOOD", b.ready(n))
	b.d.Detach(n)
	require.Equal(t, []string{"2907"}, pending(b.d.Attach(n.port)), "once to each port")
	require.Equal(t, []string{"2900", "2a09"},
		pending(b.d.Attach(InitiatorPort{Name: "iqn.other"})))
}

// TestOwnerLeavesBeforeHandOver is the usual end of a live migration: the first machine logs out
// when the guest runs on the second one, and then the LUN is handed over. In between nobody else
// may take the LUN.
func TestOwnerLeavesBeforeHandOver(t *testing.T) {
	b := newBench(t, exclusive)
	second, third := b.attach("iqn.b", 0), b.attach("iqn.c", 0)
	require.Equal(t, "GOOD", b.writes(b.nexus))
	require.NoError(t, b.admit("iqn.b"))
	require.Equal(t, "GOOD", b.writes(second))
	b.d.Detach(b.nexus)

	require.Equal(t, conflict, b.writes(third))
	require.Equal(t, conflict, b.ready(third))
	require.Equal(t, "GOOD", b.writes(second))
	again := b.attach("iqn.a", 1)
	require.Equal(t, "GOOD", b.writes(again), "a connection was lost: the owner comes back")
	b.d.Detach(again)

	require.NoError(t, b.finish())
	require.Equal(t, conflict, b.writes(third))
	require.Equal(t, "GOOD", b.writes(second))
	b.d.Detach(second)
	require.Equal(t, "GOOD", b.writes(third), "the last session of the new owner has ended")

	// The same holds if the second machine is away, too, as when both restart. The LUN is free when
	// the migration has ended.
	require.NoError(t, b.admit("iqn.b"))
	b.d.Detach(third)
	fourth := b.attach("iqn.d", 0)
	require.Equal(t, conflict, b.writes(fourth))
	require.NoError(t, withdraw(b.d, 1))
	require.Equal(t, "GOOD", b.writes(fourth))
}

// TestGuestOfALUNOfNobody checks that a guest of a LUN without an owner is fenced like any other.
// It does not even learn whether the disk is ready.
func TestGuestOfALUNOfNobody(t *testing.T) {
	b := newBench(t, exclusive)
	require.NoError(t, b.admit("iqn.a"))
	require.Equal(t, "GOOD", b.ready(b.nexus))
	require.NoError(t, withdraw(b.d, 1))
	require.Empty(t, b.d.disks.Holders(1).Owner)
	for _, command := range []string{testReady, readOne} {
		require.Equal(t, conflict, b.run(cdb(command), nil).outcome())
	}
}

// TestHandOverEndsReservations hands over a LUN that its owner has reserved: the new owner can use
// it, because nobody else can release the reservations of a fenced initiator. The new owner's
// registrations stay.
func TestHandOverEndsReservations(t *testing.T) {
	for _, kind := range allTypes {
		t.Run(fmt.Sprint(kind), func(t *testing.T) {
			m := &memStore{}
			b := newBench(t, exclusive, func(l *LUN) { l.Store = m })
			second := b.attach("iqn.b", 0)
			b.mustPersist(b.nexus, saRegister, 0, 0, 1, bitAPTPL)
			require.NoError(t, b.admit("iqn.b"))
			b.mustPersist(second, saRegister, 0, 0, 2, bitAPTPL)
			b.mustPersist(b.nexus, saReserve, kind, 1, 0)
			if !kind.registrants() {
				require.Equal(t, conflict, b.writes(second))
			}
			require.NoError(t, b.finish())
			require.Equal(t, []string{"2a05"}, pending(b.nexus))
			require.Equal(t, "3: 2", b.keys())
			told, reserved := []string(nil), "none"
			switch {
			case kind.shared():
				reserved = fmt.Sprintf("0/%d", kind)
			case kind.registrants():
				told = []string{"2a04"}
			}
			require.Equal(t, told, pending(second))
			require.Equal(t, reserved, b.reservation())
			require.Equal(t, "GOOD", b.writes(second))
			require.Equal(t, conflict, b.writes(b.nexus))

			again := newBench(t, exclusive, func(l *LUN) { l.Store = m })
			require.Equal(t, "0: 2", again.keys(), "nor does a restart bring it back")
		})
	}
	t.Run("of the new owner", func(t *testing.T) {
		b := newBench(t, exclusive)
		second := b.attach("iqn.b", 0)
		b.good(cdb(writeOne), pattern(1, 1))
		require.NoError(t, b.admit("iqn.b"))
		b.register(second, 2)
		b.mustPersist(second, saReserve, typeExclusiveAccess, 2, 0)
		require.NoError(t, b.finish())
		require.Equal(t, "2/3", b.reservation())
		require.Equal(t, "GOOD", b.writes(second))
	})
	t.Run("RESERVE(6)", func(t *testing.T) {
		b := newBench(t, exclusive)
		second := b.attach("iqn.b", 0)
		b.good(cdb(writeOne), pattern(1, 1))
		b.good(cdb(reserve), nil)
		require.NoError(t, b.admit("iqn.b"))
		require.Equal(t, conflict, b.writes(second))
		require.NoError(t, b.finish())
		require.Equal(t, "GOOD", b.writes(second))
	})
	t.Run("that cannot be saved", func(t *testing.T) {
		m := &memStore{}
		b := newBench(t, exclusive, func(l *LUN) { l.Store = m })
		b.attach("iqn.b", 0)
		b.mustPersist(b.nexus, saRegister, 0, 0, 1, bitAPTPL)
		require.NoError(t, b.admit("iqn.b"))
		m.fail = errors.New("no such device")
		require.ErrorContains(t, b.finish(), "no such device")
		require.Equal(t, "1: 1", b.keys())
		require.Equal(t, "GOOD", b.writes(b.nexus), "nothing has changed")
		m.fail = nil
		require.NoError(t, b.finish())
		require.Equal(t, []string{"2a05"}, pending(b.nexus))
		require.Equal(t, conflict, b.writes(b.nexus))
	})
}

// TestWithdrawEndsReservations closes a LUN again to an initiator that has reserved it: the owner
// goes on.
func TestWithdrawEndsReservations(t *testing.T) {
	for name, take := range map[string]func(b *bench, n *Nexus){
		"persistent": func(b *bench, n *Nexus) {
			b.register(n, 2)
			b.mustPersist(n, saReserve, typeExclusiveAccess, 2, 0)
		},
		"RESERVE(6)": func(b *bench, n *Nexus) {
			require.Equal(b.t, "GOOD", b.runAs(n, lun1, cdb(reserve), nil).outcome())
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, exclusive)
			second := b.attach("iqn.b", 0)
			b.good(cdb(writeOne), pattern(1, 1))
			require.NoError(t, b.admit("iqn.b"))
			take(b, second)
			require.Equal(t, conflict, b.writes(b.nexus))
			require.NoError(t, withdraw(b.d, 1))
			b.good(cdb(writeOne), pattern(1, 1))
		})
	}
}

// TestHandOverOvertakesReservations fences an initiator whose commands for reservations are under
// way. They have no effect.
func TestHandOverOvertakesReservations(t *testing.T) {
	for name, c := range map[string]string{"REGISTER": "5f 00 00 00 00 00 00 00 18 00",
		"RESERVE(6)": reserve} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, exclusive)
			b.good(cdb(writeOne), pattern(1, 1))
			task := b.prepared(b.nexus, cdb(c), nil)
			second := b.attach("iqn.b", 0)
			require.NoError(t, b.admit("iqn.b"))
			require.NoError(t, b.finish())
			_, list := persistOut(saRegister, 0, 0, 7)
			require.ErrorIs(t, carryOut(task, list[:task.Length]), errConflict)
			require.Equal(t, "0:", b.keys())
			require.Equal(t, "GOOD", b.writes(second))
		})
	}
}

// TestHandOverOvertakesChanges fences an initiator whose commands that change the unit are under
// way and not in force yet. They have no effect, and nothing of them is kept. The transport aborts
// such commands as well, a moment after the fence is set.
func TestHandOverOvertakesChanges(t *testing.T) {
	list := unhex("00 00 00 00" + cacheOff)
	b := newBench(t, exclusive)
	b.good(cdb(writeOne), pattern(1, 1))
	task := b.prepared(b.nexus, []byte{opModeSelect6, bitPF, 0, 0, byte(len(list)), 0}, nil)
	b.attach("iqn.b", 0)
	require.NoError(t, b.admit("iqn.b"))
	ended := error(nil)
	b.d.opt.Abort = func([]*Nexus, func(*Task) bool) { ended = carryOut(task, list) }
	require.NoError(t, b.finish())
	require.ErrorIs(t, ended, errConflict)
	require.EqualValues(t, modeDefault, b.d.nth(0).mode.bits.Load())
}

// TestNewOwnerLeavesDuringHandOver logs the new owner out while the store is busy with the end of
// the former one's reservation.
func TestNewOwnerLeavesDuringHandOver(t *testing.T) {
	store := &keptStore{}
	b := newBench(t, exclusive, func(l *LUN) { l.Store = store })
	b.mustPersist(b.nexus, saRegister, 0, 0, 1, bitAPTPL)
	b.mustPersist(b.nexus, saReserve, typeExclusiveAccess, 1, 0)
	second := b.attach("iqn.b", 0)
	require.NoError(t, b.admit("iqn.b"))
	store.saving = func() { b.d.Detach(second) }
	require.ErrorContains(t, b.finish(), "not logged in")
	require.Equal(t, "1/3", b.reservation())
	b.good(cdb(writeOne), pattern(1, 1))
	b = newBench(t, exclusive, func(l *LUN) { l.Store = store })
	require.Equal(t, "1/3", b.reservation(), "on storage, too")
}

// TestHandOverWaitsForTheDead hands over a LUN while a write of its former owner hangs in the disk.
// The session of that owner has ended.
func TestHandOverWaitsForTheDead(t *testing.T) {
	for name, c := range storing {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, exclusive, stored)
			stuck, release := b.hang("write")
			written, done := make(chan string), make(chan error)
			go func() { written <- b.runAs(b.nexus, lun1, cdb(c.cdb), c.data).outcome() }()
			<-stuck
			require.NoError(t, b.admit("iqn.b"))
			b.attach("iqn.b", 0)
			b.d.Detach(b.nexus)
			go func() { done <- b.finish() }()
			b.waitsForRange(1)
			select {
			case <-done:
				t.Fatal("handed over while a write of the former owner was under way")
			default:
			}
			close(release)
			require.NoError(t, <-done)
			require.Equal(t, "GOOD", <-written)
		})
	}
}

// TestIdleOwnerIsFenced migrates a guest back that has not used its disk since the target was
// restarted.
func TestIdleOwnerIsFenced(t *testing.T) {
	m := newMigration(t)
	require.Equal(t, "GOOD", m.write("iqn.a"))
	m.handOver("iqn.b")
	m.restart(t)
	m.handOver("iqn.a")
	require.Equal(t, serving.Holders{Owner: "iqn.a", Fenced: []string{"iqn.b"}},
		m.d.disks.Holders(1))
	m.restart(t)
	require.Equal(t, conflict, m.write("iqn.b"))
}

// TestOwnerIsRemembered hands over a LUN that nobody has used since a restart. The former owner is
// fenced all the same, even if there was no handover before, or if somebody else has taken the LUN
// since then.
func TestOwnerIsRemembered(t *testing.T) {
	for name, use := range map[string]func(m *migration, n *Nexus) string{
		"WRITE": func(m *migration, n *Nexus) string { return m.writes(n) },
		"READ":  func(m *migration, n *Nexus) string { return m.reads(n) },
		"SYNCHRONIZE CACHE": func(m *migration, n *Nexus) string {
			return m.runAs(n, lun1, cdb("35 00 00 00 00 00 00 00 00 00"), nil).outcome()
		},
		"REGISTER": func(m *migration, n *Nexus) string {
			return m.persist(n, saRegister, 0, 0, 1)
		},
		"EXTENDED COPY": func(m *migration, n *Nexus) string {
			list := copyParameters(1, 0, []string{ownNAA}, block(0, 0, 1, 0, 1))
			return m.runAs(n, lun1, extendedCopy(list), list).outcome()
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMigration(t)
			for _, last := range []string{"iqn.a", "iqn.c"} {
				m.at[last] = m.attach(last, 0)
				require.Equal(t, "GOOD", use(m, m.at[last]))
				m.restart(t)
				m.handOver("iqn.b")
				require.Contains(t, m.d.disks.Holders(1).Fenced, last)
				m.logout("iqn.b")
				require.Equal(t, conflict, m.write(last))
			}
		})
	}
}

// TestOwnerIsSavedOnce logs in and out, and restarts: storage is written to when the LUN changes
// hands, and only then.
func TestOwnerIsSavedOnce(t *testing.T) {
	m := newMigration(t)
	saves := 0
	m.store.saving = func() { saves++ }
	for i, initiator := range []string{"iqn.a", "iqn.c", "iqn.a"} {
		for range 3 {
			require.Equal(t, "GOOD", m.write(initiator))
			require.Equal(t, "GOOD", m.write(initiator))
			m.logout(initiator)
			require.Equal(t, "GOOD", m.write(initiator))
			m.restart(t)
			m.at["iqn.idle"] = m.attach("iqn.idle", 0)
			require.Equal(t, i+1, saves)
		}
	}
	m.handOver("iqn.b")
	saves = 0
	require.Equal(t, "GOOD", m.write("iqn.b"))
	m.restart(t)
	require.Equal(t, "GOOD", m.write("iqn.b"))
	require.Zero(t, saves, "the handover has saved it")
}

// TestOwnerThatComesLateIsRemembered opens the LUN before its owner is seen again, and then
// restarts the target.
func TestOwnerThatComesLateIsRemembered(t *testing.T) {
	m := newMigration(t)
	require.NoError(t, m.admit("iqn.b"))
	require.Equal(t, "GOOD", m.write("iqn.b"))
	require.Equal(t, "GOOD", m.write("iqn.a"))
	m.restart(t)
	require.Equal(t, serving.Holders{Owner: "iqn.a", Guest: "iqn.b"}, m.d.disks.Holders(1))
	require.Equal(t, "GOOD", m.write("iqn.b"))
	require.NoError(t, m.finish())
	require.Equal(t, serving.Holders{Owner: "iqn.b", Fenced: []string{"iqn.a"}},
		m.d.disks.Holders(1))
}

// TestOwnerThatCannotBeSaved makes storage refuse the name. The disk is served, the log explains
// the consequences, and a handover still works.
func TestOwnerThatCannotBeSaved(t *testing.T) {
	m := newMigration(t)
	core, logs := observer.New(zap.DebugLevel)
	m.d.watchedBy(core)
	m.store.failWith(errors.New("no such device"))
	for range 3 {
		require.Equal(t, "GOOD", m.write("iqn.a"))
	}
	require.Equal(t, 1, logs.Len())
	require.Equal(t, map[string]any{"lun": uint16(1), "initiator": "iqn.a",
		"error": "no such device"}, logs.All()[0].ContextMap())
	m.logout("iqn.a")
	require.Equal(t, "GOOD", m.write("iqn.a"))
	require.Equal(t, 2, logs.Len(), "its next session tries again")
	m.store.failWith(nil)
	m.handOver("iqn.b")
	m.restart(t)
	require.Equal(t, conflict, m.write("iqn.a"))
}
