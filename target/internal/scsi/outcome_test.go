package scsi

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

func TestDiskErrors(t *testing.T) {
	storage := errors.New("input/output error")
	for _, c := range []struct {
		name, method, cdb, want string
		err                     error
	}{
		{"no space", "write", writeOne, "70 00 07 00000000 0a 00000000 2707 00 000000",
			fmt.Errorf("disk.img: %w", disk.ErrNoSpace)},
		{"no space for zeros", "zero", "93 01 00 00 00 00 00 00 00 00 00 00 00 01 00 00",
			"70 00 07 00000000 0a 00000000 2707 00 000000", disk.ErrNoSpace},
		{"read-only", "write", writeOne, "70 00 07 00000000 0a 00000000 2700 00 000000",
			disk.ErrReadOnly},
		{"read error", "read", readOne, "f0 00 03 00000007 0a 00000000 1100 00 000000",
			&disk.MediumError{Op: "read", Off: 7*BlockSize + 100, Length: 4096, Err: storage}},
		{"read error beyond 32 bits", "read", readOne,
			"70 00 03 00000000 0a 00000000 1100 00 000000",
			&disk.MediumError{Op: "read", Off: 1 << 43, Length: 4096, Err: storage}},
		{"verify", "read", "2f 00 00 00 00 00 00 00 01 00",
			"f0 00 03 00000000 0a 00000000 1100 00 000000",
			&disk.MediumError{Op: "read", Err: storage}},
		{"write error", "write", writeOne, "f0 00 03 00000000 0a 00000000 0c00 00 000000",
			&disk.MediumError{Op: "write", Off: BlockSize, Length: 512, Err: storage}},
		{"discard error", "discard", "93 09 00 00 00 00 00 00 00 00 00 00 00 01 00 00",
			"70 00 03 00000000 0a 00000000 0c00 00 000000",
			&disk.MediumError{Op: "write", Off: BlockSize, Length: 512, Err: storage}},
		{"failed", "flush", "35 00 00 00 00 00 00 00 00 00",
			"70 00 04 00000000 0a 00000000 4400 00 000000",
			fmt.Errorf("disk.img: %w", disk.ErrFailed)},
		{"failed with FUA", "flush", "2a 08 00 00 00 00 00 00 01 00",
			"70 00 04 00000000 0a 00000000 4400 00 000000", disk.ErrFailed},
		{"extent", "extent", "9e 12 00 00 00 00 00 00 00 00 00 00 00 18 00 00",
			"70 00 04 00000000 0a 00000000 4400 00 000000", storage},
		{"anything else", "read", readOne, "70 00 04 00000000 0a 00000000 4400 00 000000", storage},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			data := pattern(1, 1)
			if cdb(c.cdb)[0] == opWriteSame16 { // with NDOB
				data = nil
			}
			b.disk.failWith(c.method, c.err)
			requireHex(t, c.want, b.run(cdb(c.cdb), data).sense)
			if c.method != "flush" {
				b.disk.failWith(c.method, nil)
				require.Equal(t, "GOOD", b.run(cdb(c.cdb), data).outcome(), "it works again")
			}
		})
	}
}

// TestFaultsAreLoggedOnce checks that an initiator that retries does not fill the log, and that the
// log says what happened to which disk.
func TestFaultsAreLoggedOnce(t *testing.T) {
	core, logs := observer.New(zapcore.InfoLevel)
	m := newMemDisk(1 << 20)
	d := testtool.Must(NewDevice(Options{Log: zap.New(core)},
		[]LUN{{Number: 3, Disk: m, Identity: testIdentity(), Access: AccessWriteShared}}))(t)
	n := d.Attach(InitiatorPort{Name: "iqn.a"})
	n.nth(0).pending.Store(0)
	m.failWith("write", disk.ErrNoSpace)
	m.failWith("read", errors.New("surprise"))
	for range 100 {
		drive(d, n, 3<<48, cdb(writeOne), pattern(1, 1), 4096)
		drive(d, n, 3<<48, cdb(readOne), nil, 4096)
		drive(d, n, 3<<48, cdb("28 00 ff 00 00 00 00 00 01 00"), nil, 4096)
	}
	require.Equal(t, 2, logs.Len(), "one for each cause; what the initiator does wrong is not one")
	first := logs.All()[0]
	require.Contains(t, first.Message, "disk is full")
	require.EqualValues(t, 3, first.ContextMap()["lun"])
	require.Equal(t, "WRITE(10)", first.ContextMap()["command"])
	require.Equal(t, "surprise", logs.All()[1].ContextMap()["error"])
	m.failWith("write", fmt.Errorf("%w: write disk.img: read-only file system", disk.ErrReadOnly))
	drive(d, n, 3<<48, cdb(writeOne), pattern(1, 1), 4096)
	require.Contains(t, logs.All()[2].Message, "storage has become read-only")
	require.Contains(t, logs.All()[2].ContextMap()["error"], "read-only file system")
}

func TestCheckCondition(t *testing.T) {
	b := newBench(t)
	prefix := []byte{1, 2}
	status, sense := b.d.Outcome(&Task{}, CheckCondition(AbortedCommand, 0x0c, 0x0d), prefix)
	require.Equal(t, StatusCheckCondition, status)
	requireHex(t, "0102 70 00 0b 00000000 0a 00000000 0c0d 00 000000", sense)
	require.EqualError(t, CheckCondition(AbortedCommand, 0x47, 0x05), "ABORTED COMMAND 47/05")
	status, sense = b.d.Outcome(nil, nil, prefix)
	require.Equal(t, StatusGood, status)
	require.Equal(t, prefix, sense)
	status, sense = b.d.Outcome(nil, fmt.Errorf("wrapped: %w", errConflict), nil)
	require.Equal(t, StatusReservationConflict, status)
	require.Empty(t, sense)
}

func TestTransportMistakesAreErrors(t *testing.T) {
	b := newBench(t)
	task := b.prepared(b.nexus, cdb(readOne), nil)
	require.ErrorIs(t, task.In(0, make([]byte, 1024)), errPastEnd)
	require.ErrorIs(t, task.In(-1, nil), errPastEnd)
	require.ErrorIs(t, task.Out(0, nil), errPastEnd)
	require.NoError(t, task.In(0, make([]byte, 512)))
	require.Equal(t, serving.OpRead, task.Op())
	number, ok := task.LUNNumber()
	require.True(t, ok)
	require.EqualValues(t, 1, number)
	task.Reset()
	require.Equal(t, serving.OpOther, task.Op())
	_, ok = task.LUNNumber()
	require.False(t, ok)
}

func TestNames(t *testing.T) {
	require.Equal(t, "TASK ABORTED", StatusTaskAborted.String())
	require.Equal(t, "status 66", Status(0x42).String())
	require.Equal(t, "DATA PROTECT", DataProtect.String())
	require.Equal(t, "sense key 9", SenseKey(9).String())
	require.Equal(t, "discard", serving.OpDiscard.String())
	require.Equal(t, "operation 9", serving.Operation(9).String())
}

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
				l.Disk = &shortDisk{l.Disk.(thinDisk), c.stores, c.err}
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
// command's data in a buffer. One that writes names no block: Linux would take the part of a WRITE
// ATOMIC before it as written.
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
				&disk.MediumError{Op: "read", Off: 9 * BlockSize, Length: BlockSize,
					Err: errors.New("input/output error")})
			failed := b.run(cdb(c.cdb), c.data)
			require.Equal(t, "3/11/00", failed.outcome())
			require.Equal(t, !strings.Contains(c.name, "WRITE"), failed.sense[0] == 0xf0)
			require.Equal(t, c.writes, b.disk.count("write"))
			require.Zero(t, b.d.nth(0).Ranges.State())
		})
	}
}
