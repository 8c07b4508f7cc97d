package scsi

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/disk/image"
)

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
