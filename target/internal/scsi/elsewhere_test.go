package scsi

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// elsewhereDisk is a disk that another server has.
type elsewhereDisk struct {
	thinDisk
	shared, protected atomic.Bool
}

func (*elsewhereDisk) Generation() string { return "x" }
func (e *elsewhereDisk) Shared() bool     { return e.shared.Load() }
func (e *elsewhereDisk) ReadOnly() bool   { return e.protected.Load() }

// TestDiskThatOthersReach: while others write a disk at its server, no command promises what would
// not bind them, and no list has such a command.
func TestDiskThatOthersReach(t *testing.T) {
	e := &elsewhereDisk{}
	b := newBench(t, func(l *LUN) {
		e.thinDisk = l.Disk.(thinDisk)
		l.Disk = e
	})
	list := func() map[byte]bool {
		codes, all := map[byte]bool{}, b.good(cdb("a3 0c 00 00 00 00 00 01 00 00 00 00"), nil)[4:]
		for ; len(all) > 0; all = all[8:] {
			codes[all[0]] = true
		}
		return codes
	}
	promises := map[string][]byte{
		readCapabilities:                nil,
		reserve:                         nil,
		release:                         nil,
		"5f 00 00 00 00 00 00 00 18 00": make([]byte, 24), // PERSISTENT RESERVE OUT
		"89 00 00 00 00 00 00 00 00 00 00 00 00 01 00 00": pattern(1, 2), // COMPARE AND WRITE
	}
	for _, shared := range []bool{false, true, false} {
		e.shared.Store(shared)
		limits := b.good(cdb("12 01 b0 00 ff 00"), nil)
		require.Equal(t, shared, limits[5] == 0, "MAXIMUM COMPARE AND WRITE LENGTH")
		codes := list()
		for c, data := range promises {
			require.Equal(t, !shared, codes[cdb(c)[0]], c)
			outcome := b.run(cdb(c), data).outcome()
			require.Equal(t, shared, outcome == "5/20/00", "%s: %s", c, outcome)
		}
		b.good(cdb(writeOne), pattern(1, 1))
		b.good(cdb(readOne), nil)
	}
}

// TestDiskThatItsServerProtects: initiators learn that it takes no writes.
func TestDiskThatItsServerProtects(t *testing.T) {
	e := &elsewhereDisk{}
	b := newBench(t, func(l *LUN) {
		e.thinDisk = l.Disk.(thinDisk)
		l.Disk = e
	})
	e.protected.Store(true)
	require.Equal(t, "7/27/00", b.writes(b.nexus))
	b.good(cdb(readOne), nil)
	e.protected.Store(false)
	b.good(cdb(writeOne), pattern(1, 1))
}
