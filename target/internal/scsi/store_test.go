package scsi

import (
	"bytes"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// keptStore is a Store in memory that fails on demand.
type keptStore struct {
	mu   sync.Mutex
	kept map[string][]byte // guarded by mu
	fail error             // guarded by mu

	saving func() // called outside mu when a Save begins; nil: nothing
}

func (s *keptStore) failWith(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = err
}

func (s *keptStore) Load(name string) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.kept[name], s.fail
}

func (s *keptStore) Where(name string) string { return "/volume/unit/" + name }

func (s *keptStore) Save(name string, data []byte) error {
	if s.saving != nil {
		s.saving()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.kept == nil {
		s.kept = map[string][]byte{}
	}
	if s.fail == nil {
		s.kept[name] = bytes.Clone(data)
	}
	return s.fail
}

const (
	cacheOff       = "08 12 00 00 00000000 00000000 00000000 00000000"
	senseSavedPage = "1a 08 c8 00 ff 00"
)

// TestModePagesCannotBeSaved: no page says that it can be saved, and SP and saved values are
// refused. What an earlier version saved is not in force.
func TestModePagesCannotBeSaved(t *testing.T) {
	b := newBench(t, func(l *LUN) {
		l.Store = &keptStore{kept: map[string][]byte{
			"mode-pages": []byte(`{"software_write_protect":true}`)}}
	})
	requireHex(t, "17 00 10 00"+cachingPage, b.good(cdb("1a 08 08 00 ff 00"), nil))
	require.Equal(t, "5/39/00", b.run(cdb(senseSavedPage), nil).outcome())
	list := unhex("00 00 00 00" + cacheOff)
	require.Equal(t, "5/24/00",
		b.run([]byte{opModeSelect6, bitPF | 1, 0, 0, byte(len(list)), 0}, list).outcome())
	require.Equal(t, "5/24/00", b.run(cdb("55 11 00 00 00 00 00 00 00 00"), nil).outcome())
	b.good([]byte{opModeSelect6, bitPF, 0, 0, byte(len(list)), 0}, list)
	requireHex(t, "17 00 10 00"+cacheOff, b.good(cdb("1a 08 08 00 ff 00"), nil))
	b.d.ResetLUN(lun1)
	require.Equal(t, "6/29/03", b.ready(b.nexus))
	requireHex(t, "17 00 10 00"+cachingPage, b.good(cdb("1a 08 08 00 ff 00"), nil))
}

// TestCommandsThatAreGone: what no initiator in use asks for is refused, and nothing is promised.
func TestCommandsThatAreGone(t *testing.T) {
	b := newBench(t, stored)
	reported := map[byte]bool{}
	all := b.good(cdb("a3 0c 00 00 00 00 00 01 00 00 00 00"), nil)
	for at := 4; at < len(all); at += 8 {
		reported[all[at]] = true
	}
	for name, c := range map[string]string{
		"SANITIZE":                     "48 83 00 00 00 00 00 0000 00",
		"ORWRITE(16)":                  "8b 00 0000000000000000 00000008 00 00",
		"READ DEFECT DATA(10)":         "37 00 00 00 00 00 00 00 20 00",
		"READ DEFECT DATA(12)":         "b7 18 00 00 00 00 00 00 00 20 00 00",
		"PREVENT ALLOW MEDIUM REMOVAL": "1e 00 00 00 01 00",
	} {
		require.Equal(t, "5/20/00", b.run(cdb(c), pattern(8, 1)).outcome(), name)
		require.False(t, reported[cdb(c)[0]], name)
	}
	require.Equal(t, "5/24/00", b.run(cdb("1b 00 00 00 02 00"), nil).outcome(), "eject")
	require.Zero(t, b.good(cdb("12 01 b1 00 ff 00"), nil)[7], "WABEREQ, WACEREQ")
}

// TestUnfinishedErase: a disk whose SANITIZE an earlier version did not finish is not served until
// somebody says so.
func TestUnfinishedErase(t *testing.T) {
	store := &keptStore{kept: map[string][]byte{"sanitize": []byte(`{"unrestricted":false}`)}}
	lun := LUN{Number: 3, Disk: newMemDisk(1 << 20), Identity: testIdentity(), Store: store,
		Access: AccessWriteShared}
	_, err := NewDevice(Options{}, []LUN{lun})
	require.ErrorContains(t, err, "partly destroyed. Remove /volume/unit/sanitize")
	delete(store.kept, "sanitize")
	_, err = NewDevice(Options{}, []LUN{lun})
	require.NoError(t, err)
}

func TestStoreThatCannotBeRead(t *testing.T) {
	for name, store := range map[string]*keptStore{
		"load sanitize: no such device": {fail: errors.New("no such device")},
		"remove /volume/unit/reservations to start": {
			kept: map[string][]byte{storedReservations: []byte("{")}},
	} {
		_, err := NewDevice(Options{},
			[]LUN{{Number: 3, Disk: newMemDisk(1 << 20), Identity: testIdentity(), Store: store,
				Access: AccessWriteShared}})
		require.ErrorContains(t, err, name)
		require.ErrorContains(t, err, "LUN 3")
	}
}

// TestStoreThatIsUnsure has a store that keeps state although it reports a failure. The next start
// follows what initiators were told.
func TestStoreThatIsUnsure(t *testing.T) {
	store := &unsureStore{}
	kept := func(l *LUN) { l.Store = store }
	b := newBench(t, kept)
	b.mustPersist(b.nexus, saRegister, 0, 0, 1, bitAPTPL)
	b.mustPersist(b.nexus, saReserve, typeExclusiveAccess, 1, 0)
	store.unsure = true
	require.Equal(t, "4/44/00", b.persist(b.nexus, saRegister, 0, 1, 2, bitAPTPL))
	require.Equal(t, "4/44/00", b.persist(b.nexus, saClear, 0, 1, 0))
	b.good(cdb(writeOne), pattern(1, 1))

	again := newBench(t, kept)
	require.Equal(t, "0: 1", again.keys())
	require.Equal(t, "1/3", again.reservation())
	require.Equal(t, conflict, again.reads(again.attach("iqn.b", 0)))
	again.good(cdb(writeOne), pattern(1, 1))
}
