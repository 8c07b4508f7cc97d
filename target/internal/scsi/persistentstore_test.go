package scsi

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// memStore is a Store of reservations that outlives a device, as a file does.
type memStore struct {
	content []byte
	saves   int
	fail    error
}

func (m *memStore) Load(name string) ([]byte, error) {
	if name != storedReservations {
		return nil, nil
	}
	return m.content, m.fail
}

func (m *memStore) Where(name string) string { return "/volume/unit/" + name }

func (m *memStore) Save(name string, b []byte) error {
	if name != storedReservations {
		return nil
	}
	m.saves++
	if m.fail != nil {
		return m.fail
	}
	m.content = append([]byte(nil), b...)
	return nil
}

func replace(format, value string) string { return strings.Replace(format, "%s", value, 1) }

// restarted is a new device over the same store, as after a power loss.
func restarted(t *testing.T, m *memStore) *bench {
	t.Helper()
	return newBench(t, func(l *LUN) { l.Store = m })
}

func TestReservationsSurvive(t *testing.T) {
	for _, kind := range append(allTypes, typeNone) {
		t.Run(fmt.Sprint(kind), func(t *testing.T) {
			m := &memStore{}
			b := restarted(t, m)
			second := b.attach("iqn.b", 5)
			b.mustPersist(b.nexus, saRegister, 0, 0, 1, bitAPTPL|bitAllTgPt)
			b.mustPersist(second, saRegister, 0, 0, 2, bitAPTPL)
			if kind != typeNone {
				b.mustPersist(second, saReserve, kind, 2, 0)
			}
			full, reserved := b.persistIn(b.nexus, saReadFullStatus), b.reservation()

			b = restarted(t, m)
			second = b.attach("iqn.b", 5)
			require.Equal(t, "0: 1 2", b.keys(), "PRGENERATION begins again")
			require.Equal(t, reserved, b.reservation())
			require.Equal(t, full[4:], b.persistIn(b.nexus, saReadFullStatus)[4:])
			require.Equal(t, "GOOD", b.writes(second))
			stranger := b.attach("iqn.c", 0)
			want := conflict
			if kind == typeNone {
				want = "GOOD"
			}
			require.Equal(t, want, b.writes(stranger))
			requireHex(t, "91", b.persistIn(b.nexus, saReportCapabilities)[3:4])

			b.mustPersist(second, saClear, 0, 2, 0)
			b = restarted(t, m)
			require.Equal(t, "0:", b.keys())
			require.Equal(t, "none", b.reservation())
		})
	}
}

// TestReservationsAreForgotten checks that the last APTPL counts for all (SPC-4 5.13.5).
func TestReservationsAreForgotten(t *testing.T) {
	m := &memStore{}
	b := restarted(t, m)
	second := b.attach("iqn.b", 0)
	b.mustPersist(b.nexus, saRegister, 0, 0, 1)
	b.mustPersist(b.nexus, saReserve, typeExclusiveAccess, 1, 0)
	require.Zero(t, m.saves, "nothing has to survive")
	require.Equal(t, "0:", restarted(t, m).keys())

	b.mustPersist(second, saRegister, 0, 0, 2, bitAPTPL)
	require.Equal(t, "0: 1 2", restarted(t, m).keys(), "what was there before survives, too")
	require.Equal(t, "1/3", restarted(t, m).reservation())
	saves := m.saves
	b.mustPersist(second, saRegister, 0, 2, 2, bitAPTPL)
	require.Equal(t, saves, m.saves, "it is stored already")

	b.mustPersist(second, saRegister, 0, 2, 2)
	require.Equal(t, "0:", restarted(t, m).keys())
	require.Equal(t, "4: 1 2", b.keys())
}

func TestAPTPLOfAVolatileDisk(t *testing.T) {
	m := &memStore{content: testState().encode()}
	b := newBench(t, func(l *LUN) { l.Store, l.Volatile = m, true })
	require.Equal(t, "0:", b.keys())
	require.Equal(t, "5/26/00", b.persist(b.nexus, saRegister, 0, 0, 1, bitAPTPL))
	require.Zero(t, m.saves)
}

func TestAPTPLWithoutStore(t *testing.T) {
	b := newBench(t)
	require.Equal(t, "5/26/00", b.persist(b.nexus, saRegister, 0, 0, 1, bitAPTPL))
	require.Equal(t, "5/26/00", b.persist(b.nexus, saRegisterIgnore, 0, 0, 1, bitAPTPL))
	require.Equal(t, "0:", b.keys())
	b.register(b.nexus, 1)
	b.mustPersist(b.nexus, saReserve, 1, 1, 0, bitAPTPL)
}

func TestStoreFails(t *testing.T) {
	m := &memStore{}
	core, logs := observer.New(zap.ErrorLevel)
	b := restarted(t, m)
	b.d.watchedBy(core)
	b.mustPersist(b.nexus, saRegister, 0, 0, 1, bitAPTPL)
	second := b.attach("iqn.b", 0)
	stored := string(m.content)

	m.fail = errors.New("the volume is gone")
	require.Equal(t, "4/44/00", b.persist(second, saRegister, 0, 0, 2, bitAPTPL))
	require.Equal(t, "4/44/00", b.persist(b.nexus, saReserve, typeExclusiveAccess, 1, 0))
	require.Equal(t, "4/44/00", b.persist(b.nexus, saClear, 0, 1, 0))
	require.Equal(t, "1: 1", b.keys())
	require.Equal(t, "none", b.reservation())
	require.Equal(t, stored, string(m.content))
	require.Equal(t, "GOOD", b.writes(second))
	require.Equal(t, 1, logs.Len(), "once a minute")
	require.Contains(t, logs.All()[0].ContextMap()["error"],
		"LUN 1 could not be saved and stay as they were: the volume is gone")

	// The failed call may have replaced the stored state, so the next call must not be skipped.
	m.fail, m.content = nil, []byte("of a call that failed")
	b.mustPersist(b.nexus, saRegister, 0, 1, 1, bitAPTPL)
	require.Equal(t, stored, string(m.content))
	require.Equal(t, "2: 1", b.keys())
}

// slowStore is a store whose Save waits.
type slowStore struct {
	memStore
	entered, release chan struct{}
}

func (s *slowStore) Save(name string, b []byte) error {
	s.entered <- struct{}{}
	<-s.release
	return s.memStore.Save(name, b)
}

// TestStoreStalls checks that only other changes of reservations wait for a store, and that nothing
// is in force before it is stored.
func TestStoreStalls(t *testing.T) {
	m := &slowStore{entered: make(chan struct{}), release: make(chan struct{})}
	b := newBench(t, func(l *LUN) { l.Store = m })
	second := b.attach("iqn.b", 0)
	ended := make(chan string)
	go func() { ended <- b.persist(second, saRegister, 0, 0, 2, bitAPTPL) }()
	<-m.entered
	require.Equal(t, "0:", b.keys())
	b.good(cdb(writeOne), pattern(1, 1))
	b.d.Detach(b.attach("iqn.c", 0))
	b.d.ResetLUN(lun1)
	pending(b.nexus)
	go func() { ended <- b.runAs(b.nexus, lun1, cdb(reserve), nil).outcome() }()
	m.release <- struct{}{}
	require.ElementsMatch(t, []string{"GOOD", conflict}, []string{<-ended, <-ended},
		"RESERVE(6) comes after the registration")
	require.Equal(t, "1: 2", b.keys())
}

// TestAbortWhileTheStoreStalls: a command that was aborted while the store hung changes nothing
// later. Another initiator may have been told that there is no such registration.
func TestAbortWhileTheStoreStalls(t *testing.T) {
	m := &slowStore{entered: make(chan struct{}), release: make(chan struct{})}
	b := newBench(t, func(l *LUN) { l.Store = m })
	request, list := persistOut(saRegister, 0, 0, 2, bitAPTPL)
	task := b.prepared(b.nexus, request, list)
	ended := make(chan error, 1)
	go func() { ended <- task.Out(0, list); close(m.entered) }()
	<-m.entered
	task.Abort()
	m.release <- struct{}{}
	for range m.entered {
		m.release <- struct{}{}
	}
	require.ErrorIs(t, <-ended, serving.ErrAborted)
	require.Equal(t, "0:", b.keys())
	require.Empty(t, m.content, "nor after a restart")
}

// testState is a state with everything in it.
func testState() *persistentState {
	s := &persistentState{aptpl: true, kind: typeWriteExclusiveRO,
		holder: InitiatorPort{Name: "iqn.b", ISID: [6]byte{1, 2, 3, 4, 5, 6}},
		registrations: []registration{
			{port: InitiatorPort{Name: "iqn.a"}, key: 1, allPorts: true},
			{port: InitiatorPort{Name: "iqn.b", ISID: [6]byte{1, 2, 3, 4, 5, 6}},
				key: 0xfedcba9876543210},
		}}
	s.reindex()
	return s
}

func TestStoredState(t *testing.T) {
	b := testState().encode()
	requireHex(t, "0001 05 00 0001 0002"+
		"0000000000000001 000000000000 01 05 69716e2e61"+
		"fedcba9876543210 010203040506 00 05 69716e2e62", b)
	s := testtool.Must(decodePersistent(b))(t)
	require.Equal(t, testState(), s)
	require.Empty(t, (&persistentState{kind: typeExclusiveAccess,
		registrations: testState().registrations}).encode(), "nothing survives")
	s = testtool.Must(decodePersistent(nil))(t)
	require.Empty(t, s.registrations)
}

// TestDamagedStore cuts off the stored state at every byte, and makes it contradict itself. Each is
// an error, and no device is made. The store's own checksum is tested elsewhere.
func TestDamagedStore(t *testing.T) {
	good := testState().encode()
	for i := range good[1:] {
		require.Error(t, testtool.Err(decodePersistent(good[:i+1])), "%d bytes", i+1)
	}
	sealed := func(change func(b []byte) []byte) []byte {
		return change(append([]byte(nil), good...))
	}
	set := func(at int, v ...byte) []byte {
		return sealed(func(b []byte) []byte { copy(b[at:], v); return b })
	}
	for name, bad := range map[string][]byte{
		"another version":          set(0, 0, 2),
		"an unknown flag":          set(3, 1),
		"an unknown type":          set(2, 2),
		"a type far away":          set(2, 0xff),
		"a holder of nothing":      set(2, 0),
		"a holder of a shared one": set(2, 7),
		"no holder":                set(4, 0xff, 0xff),
		"a holder that is not":     set(4, 0, 2),
		"fewer registrations":      set(6, 0, 1),
		"more registrations":       set(6, 0, 3),
		"key zero":                 set(8, 0, 0, 0, 0, 0, 0, 0, 0),
		"an unknown mark":          set(22, 2),
		"a name with a space":      set(24, ' '),
		"more behind it":           sealed(func(b []byte) []byte { return append(b, 0) }),
		"a port twice": sealed(
			func(b []byte) []byte { return append(b[:29], b[8:29]...) }),
	} {
		_, err := NewDevice(Options{},
			[]LUN{{Number: 3, Disk: newMemDisk(1 << 20), Identity: testIdentity(),
				Store: &memStore{content: bad}}})
		require.ErrorContains(t, err, "LUN 3: what is stored of its persistent reservations", name)
		require.ErrorContains(t, err, "remove /volume/unit/reservations to start without")
	}
	_, err := NewDevice(Options{},
		[]LUN{{Number: 3, Disk: newMemDisk(1 << 20), Identity: testIdentity(),
			Store: &memStore{fail: errors.New("no such volume")}}})
	require.ErrorContains(t, err, "LUN 3: its stored persistent reservations, without which it "+
		"is unknown who may write to the disk: no such volume")
}

// FuzzStoredState decodes anything. If it accepts the data, encoding gives the same data.
func FuzzStoredState(f *testing.F) {
	f.Add(testState().encode())
	f.Add((&persistentState{aptpl: true}).encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, err := decodePersistent(b); err == nil && len(b) > 0 {
			require.Equal(t, b, s.encode())
		}
	})
}
