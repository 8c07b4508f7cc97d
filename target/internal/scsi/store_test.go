package scsi

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/disk/image"
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

func TestStoreThatCannotBeRead(t *testing.T) {
	for name, store := range map[string]*keptStore{
		"no such device": {fail: errors.New("no such device")},
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

// savingCommands are commands that save something before they end. make prepares the unit for one.
func savingCommands() []struct {
	name string
	make func(b *bench)
	run  func(b *bench) string
} {
	registered := func(b *bench) { b.mustPersist(b.nexus, saRegister, 0, 0, 1, bitAPTPL) }
	return []struct {
		name string
		make func(b *bench)
		run  func(b *bench) string
	}{
		{"WRITE ATOMIC(16)", nil, func(b *bench) string {
			return b.run(cdb("9c 00 0000000000000008 0000 0010 00 00"), pattern(16, 2)).outcome()
		}},
		{"REGISTER", nil, func(b *bench) string {
			return b.persist(b.nexus, saRegister, 0, 0, 1, bitAPTPL)
		}},
		{"RESERVE", registered, func(b *bench) string {
			return b.persist(b.nexus, saReserve, typeExclusiveAccess, 1, 0)
		}},
		{"CLEAR", registered, func(b *bench) string {
			return b.persist(b.nexus, saClear, 0, 1, 0)
		}},
		{"WRITE behind an atomic one", func(b *bench) {
			b.d.nth(0).atomicKept.Store(true)
		}, func(b *bench) string { return b.writes(b.nexus) }},
		{"UNMAP behind an atomic one", func(b *bench) {
			b.d.nth(0).atomicKept.Store(true)
		}, func(b *bench) string { return b.run(unmapCDB(8+16), unmapList(0, 8)).outcome() }},
	}
}

// TestStoreWithoutSpace has no space for a unit's state. Initiators get the same answer as for a
// write on a full disk, however the store reports it: Linux then ends the command with ENOSPC,
// while a hardware error would mean a broken disk.
func TestStoreWithoutSpace(t *testing.T) {
	for _, c := range savingCommands() {
		for name, cause := range map[string]error{
			"space": syscall.ENOSPC,
			"quota": fmt.Errorf("keep it: %w", &fs.PathError{Op: "write",
				Path: "/volume/unit/x", Err: syscall.EDQUOT}),
			"size":            &os.LinkError{Op: "rename", Old: "a", New: "b", Err: syscall.EFBIG},
			"joined":          errors.Join(errors.New("close"), syscall.ENOSPC),
			"no space":        fmt.Errorf("store: %w", disk.ErrNoSpace),
			"no space needed": &image.SpaceError{Dir: "/volume"},
		} {
			t.Run(c.name+"/"+name, func(t *testing.T) {
				store := &keptStore{}
				b := newBench(t, func(l *LUN) { l.Store = store })
				if c.make != nil {
					c.make(b)
				}
				store.failWith(cause)
				require.Equal(t, "7/27/07", c.run(b))
				store.failWith(nil)
				require.Equal(t, "GOOD", c.run(b), "there is space again")
			})
		}
	}
}

// TestStoreThatIsReadOnly uses a file system that has become read-only, as ext4 does after an
// error. A failed disk stays failed, whatever the cause was.
func TestStoreThatIsReadOnly(t *testing.T) {
	store := &keptStore{}
	b := newBench(t, func(l *LUN) { l.Store = store })
	store.failWith(&fs.PathError{Op: "open", Path: "/volume/unit/x", Err: syscall.EROFS})
	request := cdb("9c 00 0000000000000008 0000 0010 00 00")
	require.Equal(t, "7/27/00", b.run(request, pattern(16, 2)).outcome())
	store.failWith(nil)
	for _, cause := range []error{syscall.ENOSPC, syscall.EROFS} {
		b.disk.failWith("flush", fmt.Errorf("%w: flush of disk.img: %w", disk.ErrFailed, cause))
		require.Equal(t, "4/44/00", b.run(request, pattern(16, 2)).outcome())
	}
}

// TestStoreOnAFullVolume fills the volume of a store, which then has a spare of 32 KiB. That is
// less than the longest atomic write has to keep.
func TestStoreOnAFullVolume(t *testing.T) {
	volume := t.TempDir()
	if err := syscall.Mount("tmpfs", volume, "tmpfs", 0, "size=512k"); err != nil {
		t.Skipf("mounting a tmpfs takes root: %v", err)
	}
	defer func() { require.NoError(t, syscall.Unmount(volume, 0)) }()
	store := disktest.NewStore(filepath.Join(volume, "unit"), true)
	b := newBench(t, func(l *LUN) { l.Store = store })
	most := cdb("9c 00 0000000000000008 0000 0100 00 00")
	b.good(most, pattern(256, 1))
	filler := filepath.Join(volume, "filler")
	f, err := os.Create(filler)
	require.NoError(t, err)
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.NoError(t, f.Close())

	require.Equal(t, "7/27/07", b.run(most, pattern(256, 2)).outcome())
	require.True(t, bytes.Equal(pattern(256, 1), b.read(8, 256)), "nothing of it is left")
	b.good(cdb("9c 00 0000000000000008 0000 0008 00 00"), pattern(8, 2))
	require.NoError(t, os.Remove(filler))
	b.good(most, pattern(256, 3))
}
