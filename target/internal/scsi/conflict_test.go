package scsi

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/serving"
)

// watchLog lets a test read the device's log.
func (b *bench) watchLog() *observer.ObservedLogs {
	core, logs := observer.New(zap.WarnLevel)
	b.d.watchedBy(core)
	return logs
}

// warned returns the only line of the log: its initiator, its owner and the text after the
// message's colon. It then empties the log.
func warned(t *testing.T, logs *observer.ObservedLogs) (cause, initiator, owner string) {
	t.Helper()
	all := logs.TakeAll()
	require.Len(t, all, 1)
	require.Equal(t, zap.WarnLevel, all[0].Level)
	m := all[0].ContextMap()
	require.Equal(t, uint16(1), m["lun"])
	require.NotEmpty(t, m["try"])
	owner, _ = m["owner"].(string)
	_, cause, _ = strings.Cut(all[0].Message, ": ")
	return cause, m["initiator"].(string), owner
}

// TestConflictsAreLogged causes every kind of conflict. The log has one line for each, with the
// owner of the LUN, and another line when the owner changes.
func TestConflictsAreLogged(t *testing.T) {
	for _, c := range []struct {
		name   string
		access serving.AccessMode
		take   func(b *bench, n *Nexus)
		free   func(b *bench, n *Nexus)
		cause  conflictCause
		owner  string // "": the taker
	}{
		{"owner", AccessWriteExclusive, does(readOne), leaves, conflictOwner, ""},
		{"RESERVE(6)", AccessWriteShared, does("16 00 00 00 00 00"), leaves, conflictReserve, ""},
		{"write exclusive", AccessWriteShared, reserves(typeWriteExclusive), clears,
			conflictPersistent, ""},
		{"exclusive access, registrants only", AccessWriteShared, reserves(typeExclusiveAccessRO),
			clears,
			conflictPersistent, ""},
		{"all registrants", AccessWriteShared, reserves(typeExclusiveAccessShared), clears,
			conflictPersistent, "everyone who is registered"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, func(l *LUN) { l.Access = c.access })
			logs := b.watchLog()
			c.take(b, b.nexus)
			for _, initiator := range []string{"iqn.b", "iqn.c"} {
				// A second session of it is the same initiator.
				for isid := range byte(2) {
					n := b.attach(initiator, isid)
					for range 100 {
						require.Equal(t, conflict, b.writes(n))
					}
				}
				cause, who, owner := warned(t, logs)
				require.Equal(t, string(c.cause), cause)
				require.Equal(t, initiator, who)
				if c.owner == "" {
					require.Equal(t, "iqn.a", owner)
				} else {
					require.Equal(t, c.owner, owner)
				}
			}
			c.free(b, b.nexus)
			second, third := b.attach("iqn.d", 0), b.attach("iqn.b", 3)
			c.take(b, second)
			require.Equal(t, conflict, b.writes(third))
			if c.owner == "" {
				_, who, owner := warned(t, logs)
				require.Equal(t, []string{"iqn.b", "iqn.d"}, []string{who, owner},
					"the owner is another one")
			}
			require.Empty(t, logs.TakeAll())
		})
	}
	t.Run("a key that is not the registered one", func(t *testing.T) {
		b := newBench(t)
		logs := b.watchLog()
		for range 10 {
			require.Equal(t, conflict, b.persist(b.nexus, saReserve, typeWriteExclusive, 7, 0))
		}
		cause, who, _ := warned(t, logs)
		require.Equal(t, []string{string(conflictKey), "iqn.a"}, []string{cause, who})
	})
	t.Run("a reset", func(t *testing.T) {
		b := newBench(t, exclusive)
		logs := b.watchLog()
		require.Equal(t, "GOOD", b.reads(b.nexus))
		n := b.attach("iqn.b", 0)
		for range 10 {
			require.False(t, b.d.MayReset(lun1, n))
			require.False(t, b.d.MayResetTarget(n))
		}
		cause, who, owner := warned(t, logs)
		require.Equal(t, []string{string(conflictOwner), "iqn.b", "iqn.a"},
			[]string{cause, who, owner})
	})
	t.Run("EXTENDED COPY", func(t *testing.T) {
		b := newBench(t)
		logs := b.watchLog()
		reserves(typeWriteExclusive)(b, b.attach("iqn.d", 0))
		list := copyParameters(1, 0, []string{ownNAA}, block(0, 0, 1, 0, 1))
		for range 10 {
			require.NotEqual(t, "GOOD", b.run(extendedCopy(list), list).outcome())
		}
		cause, who, owner := warned(t, logs)
		require.Equal(t, []string{string(conflictPersistent), "iqn.a", "iqn.d"},
			[]string{cause, who, owner})
	})
}

func reserves(kind reservationType) func(*bench, *Nexus) {
	return func(b *bench, n *Nexus) {
		require.Equal(b.t, "GOOD", b.persist(n, saRegisterIgnore, 0, 0, 5))
		require.Equal(b.t, "GOOD", b.persist(n, saReserve, kind, 5, 0))
	}
}

func does(command string) func(*bench, *Nexus) {
	return func(b *bench, n *Nexus) {
		require.Equal(b.t, "GOOD", b.runAs(n, lun1, cdb(command), nil).outcome())
	}
}

func leaves(b *bench, n *Nexus) { b.d.Detach(n) }

func clears(b *bench, n *Nexus) { require.Equal(b.t, "GOOD", b.persist(n, saClear, 0, 5, 0)) }

// TestOneNameFromTwoAddresses uses a LUN as two machines of one initiator name do, at both ends of
// a live migration.
func TestOneNameFromTwoAddresses(t *testing.T) {
	for _, c := range []struct {
		name     string
		change   func(*LUN)
		first    string // CDB of the first session
		addr     string // of the second one
		second   string // its initiator name
		warnings int
	}{
		{"two machines", exclusive, writeOne, "192.0.2.2", "iqn.a", 1},
		{"the first one only reads", exclusive, readOne, "192.0.2.2", "iqn.a", 1},
		{"one machine", exclusive, writeOne, "192.0.2.1", "iqn.a", 0},
		{"the first one does not use the medium", exclusive, testReady, "192.0.2.2", "iqn.a", 0},
		{"another name", exclusive, testReady, "192.0.2.2", "iqn.b", 0},
		{"write-shared", func(*LUN) {}, writeOne, "192.0.2.2", "iqn.a", 0},
		{"read-only", func(l *LUN) { readOnly(l); exclusive(l) }, readOne, "192.0.2.2", "iqn.a", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, c.change)
			b.nexus.SetAddress("192.0.2.1")
			logs := b.watchLog()
			require.Equal(t, "GOOD", b.run(cdb(c.first), pattern(1, 1)).outcome())
			for isid := range byte(3) {
				second := b.attach(c.second, isid)
				second.SetAddress(c.addr)
				for range 3 {
					require.Equal(t, "GOOD", b.reads(second))
				}
				b.d.Detach(second)
			}
			all := logs.All()
			require.Len(t, all, c.warnings)
			for _, line := range all {
				m := line.ContextMap()
				require.Equal(t, uint16(1), m["lun"])
				require.Equal(t, "iqn.a", m["initiator"])
				require.Equal(t, []any{"192.0.2.1", c.addr}, m["addresses"])
				require.Contains(t, m["try"], "initiator-name=")
			}
		})
	}
	t.Run("one after the other", func(t *testing.T) {
		b := newBench(t, exclusive)
		b.nexus.SetAddress("192.0.2.1")
		logs := b.watchLog()
		require.Equal(t, "GOOD", b.writes(b.nexus))
		b.d.Detach(b.nexus)
		second := b.attach("iqn.a", 1)
		second.SetAddress("192.0.2.2")
		require.Equal(t, "GOOD", b.writes(second))
		require.Empty(t, logs.All())
	})
	t.Run("while others log in", func(t *testing.T) {
		b := newBench(t, exclusive)
		b.nexus.SetAddress("192.0.2.1")
		var logins sync.WaitGroup
		logins.Go(func() {
			for range 1000 {
				n := b.d.Attach(InitiatorPort{Name: "iqn.a", ISID: [6]byte{9}})
				n.SetAddress("192.0.2.2")
				b.d.Detach(n)
			}
		})
		for range 1000 {
			n := b.attach("iqn.a", 1)
			n.SetAddress("192.0.2.1")
			require.Equal(t, "GOOD", b.reads(n))
			b.d.Detach(n)
		}
		logins.Wait()
	})
	t.Run("names are bounded", func(t *testing.T) {
		b := newBench(t, exclusive)
		b.d.Detach(b.nexus)
		logs := b.watchLog()
		const manyKinds = 64
		for i := range 3 * manyKinds {
			for end := range byte(2) {
				n := b.attach(fmt.Sprint("iqn.", i), end)
				n.SetAddress(fmt.Sprint("192.0.2.", end))
				require.Equal(t, "GOOD", b.reads(n))
				defer b.d.Detach(n)
			}
			for n := range b.d.nexuses {
				b.d.Detach(n)
			}
		}
		require.Len(t, logs.All(), 3*manyKinds)
	})
}

// TestANobodysLUNIsLogged: who asks for a LUN that no disk has finds one line in the log for each.
func TestANobodysLUNIsLogged(t *testing.T) {
	b := newBench(t)
	logs := b.watchLog()
	for range 3 {
		for lun := uint64(7); lun < 9; lun++ {
			task := &Task{Nexus: b.nexus, LUN: lun << 48}
			require.ErrorIs(t, b.d.Prepare(task), errLUNNotSupported)
		}
	}
	all := logs.TakeAll()
	require.Len(t, all, 2)
	require.Equal(t, "an initiator asks for a LUN that no disk has", all[0].Message)
	require.Equal(t, uint16(7), all[0].ContextMap()["lun"])
	require.NotEmpty(t, all[0].ContextMap()["initiator"])
}
