package scsi

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/testtool"
)

const (
	cachingPage       = "08 12 04 00 00000000 00000000 00000000 00000000"
	controlPage       = "0a 0a 00 10 0000 0000 0000 0000"
	informationalPage = "1c 0a 08 00 00000000 00000000"
)

func TestModeSense(t *testing.T) {
	thin := func(*LUN) {}
	for _, c := range []struct {
		name, cdb, want string
		change          func(*LUN)
	}{
		{"6, all pages", "1a 00 3f 00 ff 00",
			"37 00 10 08 00004e20 00000200" + cachingPage + controlPage + informationalPage, thin},
		{"6, all pages and subpages", "1a 08 3f ff ff 00",
			"2f 00 10 00" + cachingPage + controlPage + informationalPage, thin},
		{"6, write-protected", "1a 08 0a 00 ff 00", "0f 00 90 00" + controlPage, readOnly},
		{"6, read-shared", "1a 08 0a 00 ff 00", "0f 00 90 00" + controlPage, readSharedLUN},
		{"6, caching", "1a 08 08 00 ff 00", "17 00 10 00" + cachingPage, thin},
		{"6, caching and its subpages", "1a 08 08 ff ff 00", "17 00 10 00" + cachingPage, thin},
		{"6, caching, changeable", "1a 08 48 00 ff 00",
			"17 00 10 00 08 12 04 00 00000000 00000000 00000000 00000000", thin},
		{"6, control, changeable", "1a 08 4a 00 ff 00",
			"0f 00 10 00 0a 0a 04 00 0800 0000 0000 0000", thin},
		{"6, informational, changeable", "1a 08 5c 00 ff 00",
			"0f 00 10 00 1c 0a 00 00 00000000 00000000", thin},
		{"6, default", "1a 08 88 00 ff 00", "17 00 10 00" + cachingPage, thin},
		{"6, cut off", "1a 00 3f 00 04 00", "37 00 10 08", thin},
		{"10", "5a 00 0a 00 00 00 00 00 ff 00",
			"001a 00 10 00 00 0008 00004e20 00000200" + controlPage, thin},
		{"10, long descriptor", "5a 10 0a 00 00 00 00 00 ff 00",
			"0022 00 10 01 00 0010 0000000000004e20 00000000 00000200" + controlPage, thin},
		{"10, no descriptor", "5a 08 0a 00 00 00 00 00 ff 00",
			"0012 00 10 00 00 0000" + controlPage, thin},
		{"6, more blocks than fit", "1a 00 1c 00 ff 00",
			"17 00 10 08 ffffffff 00000200" + informationalPage,
			func(l *LUN) { l.Disk = newMemDisk(1 << 42) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			requireHex(t, c.want, newBench(t, c.change).good(cdb(c.cdb), nil))
		})
	}
	b := newBench(t)
	for _, c := range []struct{ name, cdb, want string }{
		{"saved pages", "1a 00 ff 00 ff 00", "5/39/00"},
		{"saved pages, 10", "5a 00 c8 00 00 00 00 00 ff 00", "5/39/00"},
		{"unknown page", "1a 00 19 00 ff 00", "5/24/00"},
		{"unknown subpage", "1a 00 0a 01 ff 00", "5/24/00"},
		{"all pages of one subpage", "1a 00 3f 01 ff 00", "5/24/00"},
		{"provisioning, which has no thresholds", "1a 08 1c 02 ff 00", "5/24/00"},
		{"reserved bit", "1a 01 3f 00 ff 00", "5/24/00"},
		{"long descriptor, which 6 bytes do not have", "1a 10 3f 00 ff 00", "5/24/00"},
	} {
		require.Equal(t, c.want, b.run(cdb(c.cdb), nil).outcome(), c.name)
	}
}

func modeSelect6(b *bench, list string) result {
	data := unhex(list)
	return b.run([]byte{opModeSelect6, bitPF, 0, 0, byte(len(data)), 0}, data)
}

func modeSelect10(b *bench, list string) result {
	data := unhex(list)
	return b.run([]byte{opModeSelect10, bitPF, 0, 0, 0, 0, 0, 0, byte(len(data)), 0}, data)
}

func TestModeSelectAccepts(t *testing.T) {
	for _, c := range []struct {
		name, list string
		long       bool
		state      uint32
	}{
		{"nothing", "", false, modeDefault},
		{"only a header", "00 00 00 00", false, modeDefault},
		{"what MODE SENSE gave", "37 00 10 08 00004e20 00000200" + cachingPage + controlPage +
			informationalPage, false, modeDefault},
		{"no number of blocks", "00 00 00 08 00000000 00000200", false, modeDefault},
		{"saveable bit", "00 00 00 00 88 12 04 00 00000000 00000000 00000000 00000000", false,
			modeDefault},
		{"write cache off", "00 00 00 00" + cacheOff, false,
			0},
		{"descriptor format sense", "00 00 00 00 0a 0a 04 10 0000 0000 0000 0000", false,
			modeWCE | modeDSense},
		{"software write protect, 10", "0000 00 00 00 00 0000 0a 0a 00 10 0800 0000 0000 0000",
			true, modeWCE | modeSWP},
		{"long block descriptor", "0000 00 00 01 00 0010 0000000000004e20 00000000 00000200", true,
			modeDefault},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			send := modeSelect6
			if c.long {
				send = modeSelect10
			}
			require.Equal(t, "GOOD", send(b, c.list).outcome())
			require.Equal(t, c.state, b.d.nth(0).mode.bits.Load())
		})
	}
}

func TestModeSelectRefuses(t *testing.T) {
	const header = "00 00 00 00"
	for _, c := range []struct{ name, list, want, pointer string }{
		{"truncated header", "00 00 00", "5/1a/00", "000000"},
		{"medium type", "00 01 00 00", "5/26/00", "8f0001"},
		{"truncated block descriptor", "00 00 00 08 00004e20", "5/1a/00", "000000"},
		{"length of the block descriptor", "00 00 00 07 00004e20000200", "5/26/00", "8f0003"},
		{"other capacity", "00 00 00 08 00004e21 00000200", "5/26/00", "8f0004"},
		{"other block length", "00 00 00 08 00004e20 00001000", "5/26/00", "8f0008"},
		{"truncated page header", header + "08", "5/1a/00", "000000"},
		{"truncated page", header + "08 12 04 00", "5/1a/00", "000000"},
		{"page length", header + "08 0a 04 00 00000000 00000000 00000000 00000000", "5/26/00",
			"8f0005"},
		{"unknown page", header + "01 0a 00 00 0000 0000 0000 0000", "5/26/00", "8d0004"},
		{"subpage format", header + "48 12 04 00 00000000 00000000 00000000 00000000", "5/26/00",
			"8e0004"},
		{"unchangeable bit", header + "08 12 05 00 00000000 00000000 00000000 00000000", "5/26/00",
			"800006"},
		{"unchangeable byte of a second page",
			header + controlPage + "1c 0a 00 00 00000000 00000000", "5/26/00", "800012"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			r := modeSelect6(b, c.list)
			require.Equal(t, c.want, r.outcome())
			requireHex(t, c.pointer, r.sense[15:18])
			require.EqualValues(t, modeDefault, b.d.nth(0).mode.bits.Load())
		})
	}
	b := newBench(t)
	require.Equal(t, "5/24/00", b.run(cdb("15 00 00 00 04 00"), unhex(header)).outcome(),
		"PF is zero")
	require.Equal(t, "5/24/00", b.run(cdb("15 11 00 00 04 00"), unhex(header)).outcome(),
		"save pages")
	require.Equal(t, "5/0e/03", b.run(cdb("15 10 00 00 08 00"), unhex(header)).outcome(),
		"initiator sends less than the list")
	require.Equal(t, "5/26/00", modeSelect6(b, header+"08 12 00 00 00000000 00000000 00000000 "+
		"00000000 0a 0a 01 10 0000 0000 0000 0000").outcome())
	require.EqualValues(t, modeDefault, b.d.nth(0).mode.bits.Load(),
		"nothing is changed by a list that is refused")
}

func TestModeSelectTellsOtherNexuses(t *testing.T) {
	b := newBench(t)
	other := b.attach("iqn.b", 0)
	require.Equal(t, "GOOD", modeSelect6(b, "00 00 00 00"+cachingPage).outcome())
	require.Equal(t, "GOOD", b.runAs(other, lun1, cdb("00 00 00 00 00 00"), nil).outcome(),
		"nothing has changed")
	require.Equal(t, "GOOD", modeSelect6(b, "00 00 00 00"+cacheOff).outcome())
	require.Equal(t, "GOOD", b.run(cdb("00 00 00 00 00 00"), nil).outcome())
	require.Equal(t, "6/2a/01", b.runAs(other, lun1, cdb("00 00 00 00 00 00"), nil).outcome())
	for _, c := range []struct{ what, page string }{
		{"the write cache on again", cachingPage},
		{"sense data in another format", "0a 0a 04 10 0000 0000 0000 0000"},
		{"write-protected", "0a 0a 04 10 0800 0000 0000 0000"},
	} {
		require.Equal(t, "GOOD", modeSelect6(b, "00 00 00 00"+c.page).outcome(), c.what)
		require.Empty(t, pending(b.nexus), c.what)
		require.Equal(t, []string{"2a01"}, pending(other), c.what)
	}
}

func TestWriteCacheOffFlushesEveryWrite(t *testing.T) {
	b := newBench(t)
	require.Equal(t, "GOOD", modeSelect6(b, "00 00 00 00"+cacheOff).outcome())
	require.Equal(t, 1, b.disk.count("flush"), "what the cache held")
	b.good(cdb("2a 00 00 00 00 00 00 00 01 00"), pattern(1, 1))
	require.Equal(t, 2, b.disk.count("flush"))
	b.good(cdb("41 00 00 00 00 00 00 00 10 00"), make([]byte, BlockSize))
	require.Equal(t, 3, b.disk.count("flush"))
	b.good(cdb("42 00 00 00 00 00 00 00 18 00"),
		unhex("0016 0010 00000000 0000000000000008 00000008 00000000"))
	require.Equal(t, 4, b.disk.count("flush"))
	b.good(cdb("93 01 00 00 00 00 00 00 00 00 00 00 00 08 00 00"), nil)
	require.Equal(t, 5, b.disk.count("flush"), "WRITE SAME without data")
	b.good(cdb("28 00 00 00 00 00 00 00 01 00"), nil)
	require.Equal(t, 5, b.disk.count("flush"))
	b.d.ResetLUN(lun1)
	require.True(t, b.d.nth(0).mode.writeBack(), "a reset returns to the defaults")
}

// TestModeSelectShowsNoCacheWhenItIsEmpty turns the write cache off while the disk flushes slowly:
// until the flush has ended, no other initiator can see that there is no cache, as it would send no
// flush for its earlier writes.
func TestModeSelectShowsNoCacheWhenItIsEmpty(t *testing.T) {
	const caching = "1a 08 08 00 ff 00"
	stalled := func(t *testing.T) (b *bench, other *Nexus, done chan string, goOn func()) {
		b = newBench(t, stored)
		other = b.attach("iqn.b", 0)
		b.good(cdb(writeOne), pattern(1, 1))
		flushing, release := b.hang("flush")
		goOn = sync.OnceFunc(func() { close(release) })
		t.Cleanup(goOn)
		done = make(chan string, 1)
		go func() { done <- modeSelect6(b, "00 00 00 00"+cacheOff).outcome() }()
		<-flushing
		requireHex(t, "17 00 10 00"+cachingPage, b.runAs(other, lun1, cdb(caching), nil).data)
		require.Empty(t, pending(other))
		return b, other, done, goOn
	}
	t.Run("flushed", func(t *testing.T) {
		b, other, done, goOn := stalled(t)
		goOn()
		require.Equal(t, "GOOD", <-done)
		require.Equal(t, []string{"2a01"}, pending(other))
		require.Empty(t, pending(b.nexus), "it has asked for that")
		requireHex(t, "17 00 10 00"+cacheOff, b.runAs(other, lun1, cdb(caching), nil).data)
	})
	t.Run("fails", func(t *testing.T) {
		b, other, done, goOn := stalled(t)
		b.disk.failWith("flush", fmt.Errorf("%w: no such device", disk.ErrFailed))
		goOn()
		require.Equal(t, "4/44/00", <-done)
		require.Empty(t, pending(other))
		requireHex(t, "17 00 10 00"+cachingPage, b.runAs(other, lun1, cdb(caching), nil).data)
	})
	t.Run("on and off again meanwhile", func(t *testing.T) {
		b, other, done, goOn := stalled(t)
		b.disk.enter = nil
		require.Equal(t, "GOOD", modeSelect6(b, "00 00 00 00"+cachingPage).outcome())
		b.good(cdb(writeOne), pattern(1, 2))
		b.disk.failWith("flush", errors.New("no"))
		require.NotEqual(t, "GOOD", modeSelect6(b, "00 00 00 00"+cacheOff).outcome())
		b.disk.failWith("flush", nil)
		goOn()
		require.Equal(t, "GOOD", <-done)
		// That flush may have begun before the second write.
		requireHex(t, "17 00 10 00"+cachingPage, b.runAs(other, lun1, cdb(caching), nil).data)
		require.Equal(t, "GOOD", modeSelect6(b, "00 00 00 00"+cacheOff).outcome())
		require.Equal(t, []string{"2a01"}, pending(other))
		requireHex(t, "17 00 10 00"+cacheOff, b.runAs(other, lun1, cdb(caching), nil).data)
	})
}

func TestSoftwareWriteProtect(t *testing.T) {
	b := newBench(t)
	require.Equal(t, "GOOD", modeSelect6(b,
		"00 00 00 00 0a 0a 00 10 0800 0000 0000 0000").outcome())
	require.Equal(t, "7/27/02",
		b.run(cdb("2a 00 00 00 00 00 00 00 01 00"), pattern(1, 1)).outcome())
	require.EqualValues(t, 0x90, b.good(cdb("1a 08 0a 00 ff 00"), nil)[2])
	require.Equal(t, "GOOD", modeSelect6(b,
		"00 00 00 00 0a 0a 00 10 0000 0000 0000 0000").outcome())
	b.good(cdb("2a 00 00 00 00 00 00 00 01 00"), pattern(1, 1))
}

func TestDescriptorFormatSense(t *testing.T) {
	b := newBench(t)
	require.Equal(t, "GOOD", modeSelect6(b,
		"00 00 00 00 0a 0a 04 10 0000 0000 0000 0000").outcome())
	requireHex(t, "72 05 24 00 000000 08 02 06 0000 cd 0001 00",
		b.run(cdb("28 20 00 00 00 00 00 00 01 00"), nil).sense)
	requireHex(t, "72 05 21 00 000000 0c 00 0a 8000 0000001234567890",
		b.run(cdb("88 00 00 00 00 12 34 56 78 90 00 00 00 01 00 00"), nil).sense)
}

func FuzzModeSelect(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0}, false)
	f.Add(unhex("37 00 10 08 00004e20 00000200"+cachingPage+controlPage+informationalPage), false)
	f.Add(unhex("0000 00 00 01 00 0010 0000000000004e20 00000000 00000200"+controlPage), true)
	f.Add(unhex("00 00 00 00 0a 0a 04 10 0800 0000 0000 0000"), false)
	f.Add(unhex("00 00 00 00 5c 02 000c 00 00 0000 00000000 00000000"), false)
	u := newBench(f).d.nth(0)
	f.Fuzz(func(t *testing.T, list []byte, long bool) {
		state, err := u.parseModeSelect(list, long, modeDefault)
		if err != nil {
			require.Zero(t, state)
			return
		}
		require.Zero(t, state&^(modeWCE|modeDSense|modeSWP))
		again := testtool.Must(u.parseModeSelect(list, long, state))(t)
		require.Equal(t, state, again, "a list means the same twice")
	})
}
