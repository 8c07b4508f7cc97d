package scsi

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/serving"
)

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
