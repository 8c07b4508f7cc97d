package scsi

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// migration is an exclusive LUN with a store, over restarts.
type migration struct {
	*bench
	store *keptStore
	at    map[string]*Nexus
}

func newMigration(t *testing.T) *migration {
	m := &migration{store: &keptStore{}}
	m.restart(t)
	return m
}

// restart kills the target and starts it again: only the store is left.
func (m *migration) restart(t *testing.T) {
	t.Helper()
	m.bench = newBench(t, exclusive, func(l *LUN) { l.Store = m.store })
	m.d.Detach(m.nexus)
	m.at = map[string]*Nexus{}
}

// write logs an initiator in, unless it is, and writes.
func (m *migration) write(initiator string) string {
	if m.at[initiator] == nil {
		m.at[initiator] = m.attach(initiator, 0)
	}
	return m.writes(m.at[initiator])
}

// take logs an initiator in, which takes the LUN by a write that does not end.
func (m *migration) take(initiator string) {
	m.at[initiator] = m.attach(initiator, 0)
	m.prepared(m.at[initiator], cdb(writeOne), nil)
}

func (m *migration) logout(initiator string) {
	m.d.Detach(m.at[initiator])
	delete(m.at, initiator)
}

// handOver is a migration to an initiator.
func (m *migration) handOver(to string) {
	m.t.Helper()
	require.NoError(m.t, m.admit(to))
	require.Equal(m.t, "GOOD", m.write(to))
	require.NoError(m.t, m.finish())
}

// TestFencedStayOut lets the first machine of a migration come back while the second one is away:
// for a moment, as its connection was lost or the target restarted, or for good. Its writes would
// be stale, as the guest has run elsewhere since.
func TestFencedStayOut(t *testing.T) {
	for name, lose := range map[string]func(*testing.T, *migration){
		"lost connection": func(_ *testing.T, m *migration) { m.logout("iqn.b") },
		"restart":         func(t *testing.T, m *migration) { m.restart(t) },
		"two restarts":    func(t *testing.T, m *migration) { m.restart(t); m.restart(t) },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMigration(t)
			require.Equal(t, "GOOD", m.write("iqn.a"))
			m.handOver("iqn.b")
			require.Equal(t, conflict, m.write("iqn.a"))

			lose(t, m)
			require.Equal(t, conflict, m.write("iqn.a"))
			require.Equal(t, conflict, m.reads(m.at["iqn.a"]))
			require.Equal(t, conflict, m.ready(m.at["iqn.a"]))
			require.Equal(t, conflict, m.runAs(m.at["iqn.a"], lun1, cdb(reserve), nil).outcome())
			require.Equal(t, conflict, m.persist(m.at["iqn.a"], saRegister, 0, 0, 1))
			require.Equal(t, serving.Holders{Fenced: []string{"iqn.a"}}, m.d.disks.Holders(1))
			require.Equal(t, "GOOD", m.write("iqn.b"))

			// Its machine is gone, so any other one may take its place.
			m.logout("iqn.b")
			require.Equal(t, "GOOD", m.write("iqn.c"))
			m.logout("iqn.c")

			// Back, and forth again.
			lose = func(t *testing.T, m *migration) { m.restart(t) }
			for _, to := range []string{"iqn.a", "iqn.b", "iqn.a"} {
				m.handOver(to)
				lose(t, m)
				require.Equal(t, "GOOD", m.write(to))
			}
			require.Equal(t, []string{"iqn.c", "iqn.b"}, m.d.disks.Holders(1).Fenced)
		})
	}
}

// TestFencedAreLogged checks that the log says why a machine meets conflicts and what to do, once
// for each session and each fence.
func TestFencedAreLogged(t *testing.T) {
	m := newMigration(t)
	var logs *observer.ObservedLogs
	observe := func() {
		var core zapcore.Core
		core, logs = observer.New(zap.DebugLevel)
		m.d.watchedBy(core)
	}
	observe()
	refused := func(n *Nexus) {
		for range 3 {
			require.Equal(t, conflict, m.writes(n))
			require.Equal(t, conflict, m.ready(n))
		}
	}
	require.Equal(t, "GOOD", m.write("iqn.a"))
	require.Equal(t, conflict, m.write("iqn.c"))
	require.Zero(t, logs.FilterMessageSnippet("fenced").Len(),
		"it is not fenced: the LUN is somebody else's")
	require.Len(t, logs.TakeAll(), 1)
	m.handOver("iqn.b")
	require.Zero(t, logs.Len(), "nobody has tried")
	refused(m.at["iqn.a"])
	require.Equal(t, 1, logs.Len())
	require.Equal(t, map[string]any{"lun": uint16(1), "initiator": "iqn.a", "owner": "iqn.b",
		"try": "handover --lun 1 --to iqn.a, if the guest is to run there and runs nowhere else"},
		logs.All()[0].ContextMap())
	refused(m.attach("iqn.a", 1))
	require.Equal(t, 2, logs.Len(), "another session")

	require.NoError(t, m.admit("iqn.a"))
	require.Equal(t, "GOOD", m.write("iqn.a"))
	require.NoError(t, withdraw(m.d, 1))
	refused(m.at["iqn.a"])
	require.Equal(t, 3, logs.Len(), "another fence")

	m.restart(t)
	observe()
	refused(m.attach("iqn.a", 0))
	require.Equal(t, 1, logs.Len())
}

// TestWithdrawnStaysOut is the same for the second machine of a migration that failed.
func TestWithdrawnStaysOut(t *testing.T) {
	m := newMigration(t)
	require.Equal(t, "GOOD", m.write("iqn.a"))
	require.NoError(t, m.admit("iqn.b"))
	require.Equal(t, "GOOD", m.write("iqn.b"))
	require.NoError(t, withdraw(m.d, 1))
	m.restart(t)
	require.Equal(t, conflict, m.write("iqn.b"))
	require.Equal(t, "GOOD", m.write("iqn.a"))
	m.handOver("iqn.b")
}

// TestRestartDuringHandOver restarts the target while a LUN is open. Afterwards it is open to the
// same two initiators, whichever comes back first.
func TestRestartDuringHandOver(t *testing.T) {
	until := time.Now().Add(time.Hour)
	opened := func(t *testing.T) *migration {
		m := newMigration(t)
		require.Equal(t, "GOOD", m.write("iqn.a"))
		require.NoError(t, m.d.disks.Admit(1, "iqn.b", until))
		m.restart(t)
		openings := m.d.disks.Openings()
		require.Len(t, openings, 1)
		require.Equal(t, []any{uint16(1), "iqn.b"}, []any{openings[0].LUN, openings[0].To})
		require.WithinDuration(t, until, openings[0].Until, 0)
		require.Equal(t, serving.Holders{Owner: "iqn.a", Guest: "iqn.b"}, m.d.disks.Holders(1))
		require.Equal(t, conflict, m.write("iqn.c"), "nobody else gets it meanwhile")
		return m
	}
	t.Run("the first is back first", func(t *testing.T) {
		m := opened(t)
		require.Equal(t, "GOOD", m.write("iqn.a"))
		require.ErrorContains(t, m.finish(), "not logged in")
		require.Equal(t, "GOOD", m.write("iqn.b"))
		require.Equal(t, "GOOD", m.write("iqn.a"))
		require.NoError(t, m.finish())
		require.Equal(t, conflict, m.write("iqn.a"))
	})
	t.Run("the first never comes back", func(t *testing.T) {
		m := opened(t)
		require.Equal(t, "GOOD", m.write("iqn.b"))
		require.NoError(t, m.finish())
		require.Equal(t, serving.Holders{Owner: "iqn.b", Fenced: []string{"iqn.a"}},
			m.d.disks.Holders(1))
		require.Empty(t, m.d.disks.Openings())
		m.restart(t)
		require.Empty(t, m.d.disks.Openings())
		require.Equal(t, conflict, m.write("iqn.a"))
	})
	t.Run("cancelled", func(t *testing.T) {
		m := opened(t)
		require.NoError(t, withdraw(m.d, 1))
		require.Equal(t, conflict, m.write("iqn.b"))
		require.Equal(t, "GOOD", m.write("iqn.a"))
	})
	t.Run("opened for longer", func(t *testing.T) {
		m := opened(t)
		require.NoError(t, m.admit("iqn.b"))
		m.restart(t)
		require.Zero(t, m.d.disks.Openings()[0].Until)
	})
}

// TestHandOverThatCannotBeSaved changes nothing now, and nothing after a restart as far as storage
// lets it be put back.
func TestHandOverThatCannotBeSaved(t *testing.T) {
	broken := errors.New("no such device")
	for _, step := range []string{"open", "finish", "cancel"} {
		// All saves of a step fail, or the one that counts does although it was kept, as when a
		// volume is too slow to say so.
		for _, kept := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, kept %v", step, kept), func(t *testing.T) {
				m := newMigration(t)
				require.Equal(t, "GOOD", m.write("iqn.a"))
				act := func() error { return m.admit("iqn.b") }
				opened := step != "open"
				if opened {
					require.NoError(t, act())
					require.Equal(t, "GOOD", m.write("iqn.b"))
				}
				switch step {
				case "finish":
					act = func() error { return m.finish() }
				case "cancel":
					act = func() error { return withdraw(m.d, 1) }
				}
				before := m.d.disks.Holders(1)
				m.store.failWith(broken)
				if kept {
					saves := 0
					m.store.saving = func() {
						if saves++; saves == 2 {
							m.store.failWith(nil)
							require.NoError(t,
								m.store.Save(storedHandover, []byte(`{"fenced":["iqn.a"]}`)))
						}
					}
				}
				err := act()
				require.ErrorIs(t, err, broken)
				require.ErrorContains(t, err,
					"who may use LUN 1 could not be saved, and stays as it was")
				if !kept {
					require.ErrorContains(t, err, "ask again before the daemon is restarted")
				}
				m.store.failWith(nil)
				m.store.saving = nil
				require.Equal(t, before, m.d.disks.Holders(1))
				require.Equal(t, "GOOD", m.write("iqn.a"))
				if opened {
					require.Equal(t, "GOOD", m.write("iqn.b"))
				} else {
					require.Equal(t, conflict, m.write("iqn.b"))
				}
				m.restart(t)
				require.Equal(t, before.Guest, m.d.disks.Holders(1).Guest)
				require.Equal(t, "GOOD", m.write("iqn.a"))
				if opened {
					require.Equal(t, "GOOD", m.write("iqn.b"))
				}
				require.NoError(t, act())
			})
		}
	}
}

// brokenFor is a store that cannot save under one name.
type brokenFor struct {
	keptStore
	name string
}

func (s *brokenFor) Save(name string, data []byte) error {
	if name == s.name {
		return errors.New("no such device")
	}
	return s.keptStore.Save(name, data)
}

// TestHandOverIsTakenBack fails to save the end of the former owner's reservation, after the fence
// was saved.
func TestHandOverIsTakenBack(t *testing.T) {
	store := &brokenFor{}
	b := newBench(t, exclusive, func(l *LUN) { l.Store = store })
	b.mustPersist(b.nexus, saRegister, 0, 0, 1, bitAPTPL)
	b.attach("iqn.b", 0)
	require.NoError(t, b.admit("iqn.b"))
	store.name = storedReservations
	require.ErrorContains(t, b.finish(), "no such device")
	want := serving.Holders{Owner: "iqn.a", Guest: "iqn.b"}
	require.Equal(t, want, b.d.disks.Holders(1))
	b = newBench(t, exclusive, func(l *LUN) { l.Store = store })
	require.Equal(t, want, b.d.disks.Holders(1), "on storage, too")
}

// TestKilledBetweenTheSavesOfAFence leaves on storage both the fence of an initiator and its
// reservation. It could not release that any more, so the next start must drop it.
func TestKilledBetweenTheSavesOfAFence(t *testing.T) {
	store := &keptStore{}
	kept := func(l *LUN) { l.Store = store }
	b := newBench(t, exclusive, kept)
	b.mustPersist(b.nexus, saRegister, 0, 0, 1, bitAPTPL)
	b.mustPersist(b.nexus, saReserve, typeExclusiveAccess, 1, 0)
	b.attach("iqn.b", 0)
	require.NoError(t, b.admit("iqn.b"))
	reserved := store.kept[storedReservations]
	require.NoError(t, b.finish())
	require.NoError(t, store.Save(storedReservations, reserved))

	b = newBench(t, exclusive, kept)
	second := b.attach("iqn.b", 0)
	require.Equal(t, "0:", b.keys())
	require.Equal(t, "GOOD", b.writes(second))
	require.Equal(t, conflict, b.writes(b.nexus))

	// It does not come back either when nobody is fenced any more.
	require.NoError(t, b.admit("iqn.a"))
	require.NoError(t, b.finish())
	b = newBench(t, exclusive, kept)
	require.Equal(t, "0:", b.keys())
	b.good(cdb(writeOne), pattern(1, 1))
}

// TestOwnerComesDuringAdmit has the first machine take the LUN while the store is busy with the
// second one's name.
func TestOwnerComesDuringAdmit(t *testing.T) {
	m := newMigration(t)
	m.store.saving = func() {
		m.store.saving = nil
		m.take("iqn.a")
	}
	require.ErrorContains(t, m.admit("iqn.b"), "taken by iqn.a meanwhile")
	require.Equal(t, serving.Holders{Owner: "iqn.a"}, m.d.disks.Holders(1))
	require.Empty(t, m.store.kept[storedHandover], "on storage, too")
	m.handOver("iqn.b")
	require.Equal(t, []string{"iqn.a"}, m.d.disks.Holders(1).Fenced)
}

// TestOwnerComesDuringHandOver lets the owner come just before the LUN is handed over: it would not
// be fenced for good.
func TestOwnerComesDuringHandOver(t *testing.T) {
	m := newMigration(t)
	require.NoError(t, m.admit("iqn.b"))
	require.Equal(t, "GOOD", m.write("iqn.b"))
	m.store.saving = func() {
		m.store.saving = nil
		m.take("iqn.a")
	}
	require.ErrorContains(t, m.finish(), "LUN 1 was taken by iqn.a meanwhile, and stays open to "+
		"iqn.b; try again")
	require.NoError(t, m.finish())
	m.restart(t)
	require.Equal(t, conflict, m.write("iqn.a"))
}

func TestStoredHandover(t *testing.T) {
	device := func(content string, change ...func(*LUN)) (*Device, error) {
		store := &keptStore{kept: map[string][]byte{storedHandover: []byte(content)}}
		lun := LUN{Number: 3, Disk: newMemDisk(1 << 20), Identity: testIdentity(), Store: store}
		for _, c := range change {
			c(&lun)
		}
		return NewDevice(Options{}, []LUN{lun})
	}
	d := testtool.Must(device(
		`{"owner":"iqn.a","open_to":"iqn.b","until":"2026-01-02T03:04:05Z","fenced":["iqn.c"]}`))(t)
	require.Equal(t, serving.Holders{Owner: "iqn.a", Guest: "iqn.b", Fenced: []string{"iqn.c"}},
		d.disks.Holders(3))
	require.Equal(t,
		[]serving.Opening{{LUN: 3, To: "iqn.b",
			Until: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}}, d.disks.Openings())
	d = testtool.Must(device(""))(t, "what an older program has left")
	require.Empty(t, d.disks.Holders(3))
	for _, bad := range []string{"{", "[]", `{"fenced":[""]}`, `{"fenced":["a b"]}`,
		`{"open_to":" "}`, `{"owner":"\n"}`, `{"until":"soon"}`} {
		_, err := device(bad)
		require.ErrorContains(t, err, "LUN 3: what a handover has left cannot be read", bad)
		require.ErrorContains(t, err, "remove /volume/unit/handover to start with nobody fenced",
			bad)
		_, err = device(bad, func(l *LUN) { l.Access = AccessWriteShared })
		require.NoError(t, err, "nobody is fenced there")
	}
}
