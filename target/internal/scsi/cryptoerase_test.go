package scsi

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/rangelock"
)

// givingDisk is a memDisk that gives space back, and does not report what is allocated.
type givingDisk struct{ *memDisk }

func (d givingDisk) Discard(off, length int64) error { return d.zero("discard", off, length) }

// syncedDisk is a thinDisk whose flush reaches no storage.
type syncedDisk struct{ thinDisk }

func (d syncedDisk) Sync() error { return d.begin("sync", 0, 0) }

func synced(l *LUN) { l.Disk = syncedDisk{l.Disk.(thinDisk)} }

// calls records the calls that change a disk or reach storage, and has each of them looked at
// before it is carried out.
func (b *bench) calls(look func(method string)) *[]string {
	var calls []string
	b.disk.enter = func(method string) {
		switch method {
		case "write", "discard", "flush", "sync":
			calls = append(calls, method)
			look(method)
		}
	}
	return &calls
}

func TestCryptoErase(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*LUN)
		want   []string
	}{
		{"a disk that promises durability", func(*LUN) {},
			[]string{"write", "write", "flush", "discard", "flush"}},
		{"a disk that dies with its pod", synced,
			[]string{"write", "write", "sync", "discard", "sync"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, c.change)
			old := pattern(8, 1)
			b.good(cdb("2a 00 00 00 00 10 00 00 08 00"), old)
			b.good(cdb("2a 00 00 00 10 00 00 00 08 00"), old)
			b.disk.written = nil
			calls := b.calls(func(method string) {
				if method != "discard" {
					return
				}
				require.Equal(t, 2, b.disk.allocated(), "nothing but what was allocated")
				var pages [2][memPage]byte
				for i, off := range []int64{0x10 * BlockSize, 0x1000 * BlockSize} {
					page := pages[i][:]
					_, err := b.disk.content.ReadAt(page, off)
					require.NoError(t, err)
					require.Less(t, bytes.Count(page, []byte{0}), memPage/64, "random")
					for i := 0; i < memPage; i += 16 {
						require.NotContains(t, string(old), string(page[i:i+16]))
					}
				}
				require.NotEqual(t, pages[0], pages[1], "nothing that could be folded")
			})
			b.good(cdb(cryptoErase), nil)
			require.Equal(t, c.want, *calls)
			want := []rangelock.Span{
				{Off: 0x10 * BlockSize, Length: memPage},
				{Off: 0x1000 * BlockSize, Length: memPage},
			}
			require.Equal(t, want, b.disk.written)
			b.disk.enter = nil
			require.Zero(t, b.disk.allocated())
			require.Equal(t, make([]byte, 8*BlockSize), b.read(0x10, 8))
			require.EqualValues(t, 0x50, b.good(cdb("12 01 b1 00 40 00"), nil)[7],
				"WABEREQ, WACEREQ: reads work after it")
		})
	}
}

// TestCryptoEraseUntold erases disks that do not report what is allocated, or that have nothing
// allocated.
func TestCryptoEraseUntold(t *testing.T) {
	b := newBench(t, func(l *LUN) { l.Disk = givingDisk{l.Disk.(thinDisk).memDisk} })
	b.good(cdb("2a 00 00 00 00 10 00 00 08 00"), pattern(8, 1))
	b.disk.written = nil
	b.good(cdb(cryptoErase), nil)
	written := int64(0)
	for _, s := range b.disk.written {
		require.Equal(t, written, s.Off)
		written += s.Length
	}
	require.Equal(t, b.disk.Size(), written, "all of it")
	require.Zero(t, b.disk.allocated())

	empty := newBench(t)
	calls := empty.calls(func(string) {})
	empty.good(cdb(cryptoErase), nil)
	require.Equal(t, []string{"discard", "flush"}, *calls)
}

func TestCryptoEraseThatFails(t *testing.T) {
	for _, method := range []string{"write", "flush", "discard", "extent"} {
		t.Run(method, func(t *testing.T) {
			b := newBench(t)
			b.good(cdb("2a 00 00 00 00 10 00 00 08 00"), pattern(8, 1))
			b.disk.failWith(method, errors.New("broken"))
			require.Equal(t, mediumLost, b.run(cdb(cryptoErase), nil).outcome())
			b.disk.failWith(method, nil)
			require.Equal(t, mediumLost, b.run(cdb(readOne), nil).outcome())
			b.good(cdb(cryptoErase), nil)
			require.Equal(t, make([]byte, 8*BlockSize), b.read(0x10, 8))
		})
	}
}

// TestSanitizeForgetsWhatWasToBePutBack makes an atomic write fail for good, so that the next start
// would put its former blocks back.
func TestSanitizeForgetsWhatWasToBePutBack(t *testing.T) {
	request, list := overwrite(0, 1, []byte{7})
	for _, c := range []struct {
		name      string
		cdb, list []byte
		want      byte
	}{
		{"overwrite", request, list, 7},
		{"block erase", cdb(blockErase), nil, 0},
		{"cryptographic erase", cdb(cryptoErase), nil, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			store := &keptStore{}
			b := newBench(t, func(l *LUN) { l.Store = store })
			b.good(cdb("2a 00 00 00 00 00 00 00 08 00"), pattern(8, 1))
			b.disk.failWith("flush", disk.ErrFailed)
			require.NotEqual(t, "GOOD",
				b.run(cdb("9c 00 0000000000000000 0000 0008 00 00"), pattern(8, 2)).outcome())
			b.disk.failWith("flush", nil)
			kept, err := store.Load(storedAtomic)
			require.NoError(t, err)
			require.NotEmpty(t, kept)
			b.good(c.cdb, c.list)
			require.NoError(t, b.d.nth(0).undoAtomic(), "the next start")
			require.Equal(t, bytes.Repeat([]byte{c.want}, 8*BlockSize), b.read(0, 8))
		})
	}
	store := &keptStore{}
	b := newBench(t, func(l *LUN) { l.Store = store })
	store.failWith(errors.New("full"))
	require.NotEqual(t, "GOOD", b.run(cdb(cryptoErase), nil).outcome(), "it could come back")
	require.Zero(t, b.disk.count("discard"))
}
