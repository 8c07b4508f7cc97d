package scsi

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
)

// shortDisk stores the first bytes of every write, and reports a failure at another place, as an
// overlay does that first has to read the surroundings of the write from its image.
type shortDisk struct {
	thinDisk
	stores int
	err    error
}

func (d *shortDisk) WriteAt(ctx context.Context, p []byte, off int64) (int, error) {
	n, err := d.thinDisk.WriteAt(ctx, p[:min(d.stores, len(p))], off)
	return n, errors.Join(err, d.err)
}

// TestBlockOfAFailedWrite checks which block the sense data names. Linux takes the part of a
// request before it as written (sd_completed_bytes). So the disk must have stored all of that part,
// and durably where that was asked for.
func TestBlockOfAFailedWrite(t *testing.T) {
	read := &disk.MediumError{Op: "read", Off: 12 * BlockSize, Length: 4096,
		Err: errors.New("input/output error")}
	write := &disk.MediumError{Op: "write", Off: 12 * BlockSize, Length: 4096,
		Err: errors.New("input/output error")}
	for _, c := range []struct {
		name, cdb, want string
		stores          int
		err             error
		setUp           func(b *bench)
	}{
		{"read around the write", "2a 00 00000008 00 0008 00",
			"f0 00 03 00000008 0a 00000000 1100 00 000000", 0, read, nil},
		{"nothing kept", "2a 00 00000008 00 0008 00",
			"f0 00 03 00000008 0a 00000000 0c00 00 000000", 0, write, nil},
		{"half a block more", "2a 00 00000008 00 0008 00",
			"f0 00 03 0000000a 0a 00000000 0c00 00 000000", 2*BlockSize + 100, write, nil},
		{"FUA", "2a 08 00000008 00 0008 00", "70 00 03 00000000 0a 00000000 0c00 00 000000",
			2 * BlockSize, write, nil},
		{"without write cache", "2a 00 00000008 00 0008 00",
			"70 00 03 00000000 0a 00000000 0c00 00 000000", 2 * BlockSize, write,
			func(b *bench) { b.d.nth(0).mode.bits.Store(0) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, func(l *LUN) {
				l.Disk = &shortDisk{l.Disk.(thinDisk), c.stores,
					c.err}
			})
			if c.setUp != nil {
				c.setUp(b)
			}
			requireHex(t, c.want, b.run(cdb(c.cdb), pattern(8, 1)).sense)
		})
	}
}

// TestCommandsThatReadFail makes storage fail when a command reads for its own purposes. The
// command ends with that error, changes nothing afterwards, and compares nothing with another
// command's data in a buffer.
func TestCommandsThatReadFail(t *testing.T) {
	const blocks = 8
	data := pattern(blocks, 1)
	for _, c := range []struct {
		name, cdb string
		data      []byte
		writes    int // before it reads
	}{
		{"COMPARE AND WRITE", "89 00 0000000000000008 000000 08 00 00",
			append(append([]byte(nil), data...), pattern(blocks, 2)...), 0},
		{"WRITE ATOMIC(16)", "9c 00 0000000000000008 0000 0008 00 00", data, 0},
		{"WRITE AND VERIFY(16)", "8e 00 0000000000000008 00000008 00 00", data, 1},
		{"WRITE AND VERIFY(16) that compares", "8e 02 0000000000000008 00000008 00 00", data, 1},
		{"VERIFY(16)", "8f 00 0000000000000008 00000008 00 00", nil, 0},
		{"VERIFY(16) that compares", "8f 02 0000000000000008 00000008 00 00", data, 0},
		{"VERIFY(16) of one block repeated", "8f 06 0000000000000008 00000001 00 00",
			data[:BlockSize], 0},
		{"PRE-FETCH(16)", "90 00 0000000000000008 00000008 00 00", nil, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, stored)
			b.write(8, data)
			// data that a buffer may still hold
			b.good(cdb("8f 02 0000000000000008 00000008 00 00"), data)
			b.disk.reset()
			b.disk.failWith("read",
				&disk.MediumError{Op: "read", Off: 8 * BlockSize, Length: BlockSize,
					Err: errors.New("input/output error")})
			require.Equal(t, "3/11/00", b.run(cdb(c.cdb), c.data).outcome())
			require.Equal(t, c.writes, b.disk.count("write"))
			require.Zero(t, b.d.nth(0).Ranges.State())
		})
	}
}
