package scsi

import (
	"bytes"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/serving"
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
	saveable       = "88 12 04 00 00000000 00000000 00000000 00000000"
	cacheOff       = "08 12 00 00 00000000 00000000 00000000 00000000"
	savedCacheOff  = "88 12 00 00 00000000 00000000 00000000 00000000"
	senseSavedPage = "1a 08 c8 00 ff 00"
)

func TestSavedModePages(t *testing.T) {
	store := &keptStore{}
	kept := func(l *LUN) { l.Store = store }
	b := newBench(t, kept)
	requireHex(t, "17 00 10 00"+saveable, b.good(cdb("1a 08 08 00 ff 00"), nil))
	requireHex(t, "17 00 10 00"+saveable, b.good(cdb(senseSavedPage), nil))
	requireHex(t, "0f 00 10 00"+informationalPage, b.good(cdb("1a 08 dc 00 ff 00"), nil))
	requireHex(t, "17 00 10 00 88 12 04 00 00000000 00000000 00000000 00000000",
		b.good(cdb("1a 08 48 00 ff 00"), nil))

	list := unhex("00 00 00 00" + cacheOff)
	b.good([]byte{opModeSelect6, bitPF, 0, 0, byte(len(list)), 0}, list)
	requireHex(t, "17 00 10 00"+savedCacheOff, b.good(cdb("1a 08 08 00 ff 00"), nil))
	requireHex(t, "17 00 10 00"+saveable, b.good(cdb(senseSavedPage), nil))
	b.d.ResetLUN(lun1)
	require.Equal(t, "6/29/03", b.run(cdb(testReady), nil).outcome())
	requireHex(t, "17 00 10 00"+saveable, b.good(cdb("1a 08 08 00 ff 00"), nil))

	b.good([]byte{opModeSelect6, bitPF | bitSP, 0, 0, byte(len(list)), 0}, list)
	b.d.ResetLUN(lun1)
	require.Equal(t, "6/29/03", b.run(cdb(testReady), nil).outcome())
	requireHex(t, "17 00 10 00"+savedCacheOff, b.good(cdb("1a 08 08 00 ff 00"), nil))
	requireHex(t, "17 00 10 00"+savedCacheOff, b.good(cdb(senseSavedPage), nil))
	requireHex(t, "17 00 10 00"+saveable, b.good(cdb("1a 08 88 00 ff 00"), nil))

	again := newBench(t, kept)
	requireHex(t, "17 00 10 00"+savedCacheOff, again.good(cdb("1a 08 08 00 ff 00"), nil))

	// SP without pages keeps the present values.
	again.good([]byte{opModeSelect6, bitPF, 0, 0, 16, 0},
		unhex("00 00 00 00 0a 0a 04 10 0000 0000 0000 0000"))
	again.good([]byte{opModeSelect10, bitPF | bitSP, 0, 0, 0, 0, 0, 0, 0, 0}, nil)
	third := newBench(t, kept)
	require.EqualValues(t, modeDSense, third.d.nth(0).mode.bits.Load())
}

// TestResetDuringModeSelect resets the logical unit while a MODE SELECT that saves pages is held up
// by the store. What is in force then is what is saved, as if the reset had come after it. A second
// MODE SELECT that waits behind it is aborted by the reset and changes nothing.
func TestResetDuringModeSelect(t *testing.T) {
	list := unhex("00 00 00 00" + cacheOff)
	for name, c := range map[string]struct{ cdb, data []byte }{
		"pages":    {[]byte{opModeSelect6, bitPF | bitSP, 0, 0, byte(len(list)), 0}, list},
		"no pages": {[]byte{opModeSelect6, bitPF | bitSP, 0, 0, 0, 0}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			store := &keptStore{}
			b := newBench(t, func(l *LUN) { l.Store = store })
			b.good([]byte{opModeSelect6, bitPF, 0, 0, byte(len(list)), 0}, list)
			saving, goOn := make(chan struct{}), make(chan struct{})
			store.saving = func() { close(saving); <-goOn }
			done, next := make(chan string), make(chan error)
			go func() { done <- b.run(c.cdb, c.data).outcome() }()
			<-saving

			protect := unhex("00 00 00 00 0a 0a 00 10 0800 0000 0000 0000")
			aborted := &Task{Nexus: b.nexus, LUN: lun1}
			copy(aborted.CDB[:], []byte{opModeSelect6, bitPF, 0, 0, byte(len(protect)), 0})
			require.NoError(t, b.d.Prepare(aborted))
			go func() { next <- aborted.Out(0, protect) }()
			aborted.Abort()
			b.d.ResetLUN(lun1)
			close(goOn)
			require.Equal(t, "GOOD", <-done)
			require.ErrorIs(t, <-next, serving.ErrAborted)
			require.Zero(t, b.d.nth(0).mode.bits.Load())
			require.Zero(t, b.d.nth(0).mode.saved.Load())
		})
	}
}

func TestModePagesThatCannotBeSaved(t *testing.T) {
	b := newBench(t)
	require.Equal(t, "5/39/00", b.run(cdb(senseSavedPage), nil).outcome())
	require.Equal(t, "5/24/00", b.run(cdb("15 11 00 00 00 00"), nil).outcome())
	require.Equal(t, "5/24/00", b.run(cdb("55 11 00 00 00 00 00 00 00 00"), nil).outcome())

	store := &keptStore{}
	b = newBench(t, func(l *LUN) { l.Store = store })
	store.failWith(errors.New("disk full"))
	list := unhex("00 00 00 00" + cacheOff)
	require.Equal(t, "4/44/00",
		b.run([]byte{opModeSelect6, bitPF | bitSP, 0, 0, byte(len(list)), 0}, list).outcome())
	require.True(t, b.d.nth(0).mode.writeBack(), "what is not saved is not changed either")
	require.Equal(t, "4/44/00", b.run(cdb("15 11 00 00 00 00"), nil).outcome())
	require.Equal(t, "4/44/00", b.run(cdb(blockErase), nil).outcome())
	require.Zero(t, b.disk.count("discard"), "an operation that could not be recorded does not "+
		"begin")
	b.good(cdb(testReady), nil)
}

func TestStoreThatCannotBeRead(t *testing.T) {
	for name, store := range map[string]*keptStore{
		"load mode-pages": {fail: errors.New("no such device")},
		"kept as mode-pages cannot be read, remove /volume/unit/mode-pages to": {
			kept: map[string][]byte{storedMode: []byte("{")}},
		"kept as sanitize cannot be read, remove /volume/unit/sanitize to": {
			kept: map[string][]byte{storedSanitize: []byte("7")}},
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
	require.Equal(t, "4/44/00", b.run(cdb(blockErase), nil).outcome())
	protect := unhex("00 00 00 00 0a 0a 00 10 0800 0000 0000 0000")
	require.Equal(t, "4/44/00",
		b.run([]byte{opModeSelect6, bitPF | bitSP, 0, 0, byte(len(protect)), 0}, protect).outcome())
	b.good(cdb(writeOne), pattern(1, 1))

	again := newBench(t, kept)
	require.Equal(t, "0: 1", again.keys())
	require.Equal(t, "1/3", again.reservation())
	require.Equal(t, conflict,
		again.runAs(again.attach("iqn.b", 0), lun1, cdb(readOne), nil).outcome())
	again.good(cdb(writeOne), pattern(1, 1))
}

func TestProvisioningModePage(t *testing.T) {
	b := newBench(t, accounted)
	requireHex(t, "13 00 10 00"+provisioningModePage, b.good(cdb("1a 08 1c 02 ff 00"), nil))
	requireHex(t, "1f 00 10 00"+informationalPage+provisioningModePage,
		b.good(cdb("1a 08 1c ff ff 00"), nil))
	requireHex(t, "0f 00 10 00"+informationalPage, b.good(cdb("1a 08 1c 00 ff 00"), nil))
	requireHex(t, "13 00 10 00 5c 02 000c 00 00 0000 00000000 00000000",
		b.good(cdb("1a 08 5c 02 ff 00"), nil))
	require.Equal(t, "GOOD", modeSelect6(b, "00 00 00 00"+provisioningModePage).outcome())
	require.Equal(t, "5/26/00", modeSelect6(b, "00 00 00 00 5c 02 000c 01 00 0000 00000000 "+
		"00000000").outcome(), "SITUA")
	require.Equal(t, "5/26/00",
		modeSelect6(b, "00 00 00 00 5c 02 0008 00 00 0000 00000000").outcome(), "length")
	require.Equal(t, "5/1a/00", modeSelect6(b, "00 00 00 00 5c 02 00").outcome())
	require.Equal(t, "5/26/00", modeSelect6(b, "00 00 00 00 5c 03 000c 00 00 0000 00000000 "+
		"00000000").outcome())
	plain := newBench(t)
	require.Equal(t, "5/24/00", plain.run(cdb("1a 08 1c 02 ff 00"), nil).outcome())
	require.Equal(t, "5/26/00", modeSelect6(plain, "00 00 00 00"+provisioningModePage).outcome())
}
