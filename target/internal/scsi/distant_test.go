package scsi

import (
	"context"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// halfDisk is a distant disk. Half of each write stores what it can; the content of the rest is far
// away. The disk itself has everything.
type halfDisk struct {
	thinDisk
	stores  int  // bytes of a write
	refuses bool // says so at once
	calls   []time.Time
	until   []time.Time // deadlines of the calls
}

func (d *halfDisk) Far() bool { return true }

func (d *halfDisk) notNow(ctx context.Context) error {
	if !d.refuses {
		<-ctx.Done()
	}
	return disk.ErrNotNow
}

func (d *halfDisk) WriteAt(ctx context.Context, p []byte, off int64) (int, error) {
	n := min(d.stores, len(p))
	if ctx.Done() == nil || n == len(p) {
		return d.thinDisk.WriteAt(ctx, p, off)
	}
	if n, err := d.thinDisk.WriteAt(ctx, p[:n], off); err != nil {
		return n, err
	}
	return n, d.notNow(ctx)
}

// ReadAt waits in each call that may, and has the content then.
func (d *halfDisk) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if ctx.Done() != nil && d.stores == 0 {
		deadline, ok := ctx.Deadline()
		if !ok {
			return 0, disk.ErrNotNow
		}
		d.calls, d.until = append(d.calls, time.Now()), append(d.until, deadline)
		if d.refuses = !d.refuses; d.refuses {
			return 0, disk.ErrNotNow
		}
	}
	return d.thinDisk.ReadAt(ctx, p, off)
}

func newHalfBench(t *testing.T, stores int) (*bench, *halfDisk) {
	var half *halfDisk
	b := newBench(t, stored, func(l *LUN) {
		half = &halfDisk{thinDisk: l.Disk.(thinDisk), stores: stores}
		l.Disk = half
	})
	return b, half
}

// timeout is an Executor that gives a command a limited time, and counts how often it waits.
type timeout struct {
	time.Duration
	waits int
}

func (p *timeout) Waits() (time.Duration, error) {
	p.waits++
	return p.Duration, nil
}

func (p *timeout) Blocks() error { return nil }

func (p *timeout) Blocked(time.Duration) {}

func (p *timeout) Client() *serving.Client { return nil }

// held carries out a command whose data is sent in one piece, if it has any.
func (b *bench) held(p *timeout, cdb, data []byte) result {
	t := &Task{Nexus: b.nexus, LUN: lun1, Offered: int64(len(data)),
		Request: serving.Request{Executor: p}}
	copy(t.CDB[:], cdb)
	err := b.d.Prepare(t)
	if err == nil {
		err = carryOut(t, data)
	}
	status, sense := b.d.Outcome(t, err, nil)
	return result{status: status, sense: sense}
}

// TestNotNowIsUndone sends commands that change all or nothing. They meet missing content after
// they have changed a part. The part is put back, or else a COMPARE AND WRITE that is sent again
// would not find what it compares with.
func TestNotNowIsUndone(t *testing.T) {
	old, next := pattern(16, 1), pattern(16, 2)
	for name, c := range map[string]struct{ cdb, data []byte }{
		"COMPARE AND WRITE": {cdb("89 00 0000000000000000 000000 10 00 00"),
			append(old[:len(old):len(old)], next...)},
		"WRITE ATOMIC(16)": {cdb("9c 00 0000000000000000 0000 0010 00 00"), next},
	} {
		t.Run(name, func(t *testing.T) {
			b, half := newHalfBench(t, len(old))
			b.write(0, old)
			half.stores = 8 * BlockSize
			short := &timeout{Duration: time.Millisecond}
			require.Equal(t, "BUSY", b.held(short, c.cdb, c.data).outcome())
			require.Equal(t, old, b.read(0, 16))
			half.stores = len(old)
			b.good(c.cdb, c.data)
			require.Equal(t, next, b.read(0, 16))
		})
		t.Run(name+", aborted", func(t *testing.T) {
			b, half := newHalfBench(t, len(old))
			b.write(0, old)
			half.stores = 8 * BlockSize
			task := &Task{Nexus: b.nexus, LUN: lun1, Offered: int64(len(c.data)),
				Request: serving.Request{Executor: &timeout{Duration: time.Hour}}}
			copy(task.CDB[:], c.cdb)
			require.NoError(t, b.d.Prepare(task))
			ended := testtool.Go(func() error { return carryOut(task, c.data) })
			testtool.Eventually(t, task.Waiting)
			task.Abort()
			require.ErrorIs(t, <-ended, serving.ErrAborted)
			require.Equal(t, old, b.read(0, 16))
		})
		t.Run(name+", and that fails", func(t *testing.T) {
			b, half := newHalfBench(t, len(old))
			b.write(0, old)
			half.stores = 8 * BlockSize
			writes := 0
			b.disk.enter = func(method string) {
				// Two tries store the first half: at once, and when the command waits.
				if method == "write" {
					if writes++; writes == 3 {
						b.disk.failWith("write", &disk.MediumError{Op: "write", Err: io.EOF})
					}
				}
			}
			short := &timeout{Duration: time.Millisecond}
			got := b.held(short, c.cdb, c.data).outcome()
			require.Equal(t, "3/0c/00", got, "BUSY would hide it")
		})
	}
}

// TestDistantTimeBeginsAnew reads in many steps. Each step is told once that its content is not
// here, and then gets it. The command's time begins anew for each step.
func TestDistantTimeBeginsAnew(t *testing.T) {
	const steps = 4
	b, half := newHalfBench(t, 0)
	verify := cdb("8f 00 0000000000000000 00000800 00 00") // VERIFY(16) of 1 MiB
	require.Equal(t, "GOOD", b.held(&timeout{Duration: time.Hour}, verify, nil).outcome())
	require.Len(t, half.calls, 2*steps)
	for i := range steps {
		require.Equal(t, half.until[2*i], half.until[2*i+1], "what brings nothing costs its time")
		if i > 0 {
			require.True(t, half.until[2*i].After(half.calls[2*i-1].Add(time.Hour)))
		}
	}
}

// TestExecutorIsTold checks that the transport learns of a command before it waits, and only then.
func TestExecutorIsTold(t *testing.T) {
	far := disktest.NewDistant(disktest.NewMemory(testBlocks * BlockSize))
	b := newBench(t, func(l *LUN) { l.Disk = far })
	p := &timeout{Duration: time.Hour}
	read := func() (waited bool) {
		task := &Task{Nexus: b.nexus, LUN: lun1, Request: serving.Request{Executor: p}}
		copy(task.CDB[:], cdb("28 00 00000000 00 0001 00"))
		require.NoError(t, b.d.Prepare(task))
		require.NoError(t, task.In(0, make([]byte, BlockSize)))
		return task.Waited()
	}
	require.True(t, read())
	require.Equal(t, 1, p.waits)
	require.False(t, read(), "it is at hand")
	require.Equal(t, 1, p.waits)
}

// awayDisk is a distant disk whose first block never comes.
type awayDisk struct{ thinDisk }

func (awayDisk) Far() bool { return true }

func (d awayDisk) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if off == 0 {
		<-ctx.Done()
		return 0, disk.ErrNotNow
	}
	return d.thinDisk.ReadAt(ctx, p, off)
}

// TestReadThatWaitsHoldsUpItsBlocksOnly: a COMPARE AND WRITE of other blocks does not wait for the
// registry, too.
func TestReadThatWaitsHoldsUpItsBlocksOnly(t *testing.T) {
	b := newBench(t, func(l *LUN) { l.Disk = awayDisk{l.Disk.(thinDisk)} })
	task := &Task{Nexus: b.nexus, LUN: lun1,
		Request: serving.Request{Executor: &timeout{Duration: time.Hour}}}
	copy(task.CDB[:], cdb("28 00 00000000 00 0001 00"))
	require.NoError(t, b.d.Prepare(task))
	ended := testtool.Go(func() error { return task.In(0, make([]byte, BlockSize)) })
	testtool.Eventually(t, task.Waiting)
	b.good(cdb("89 00 0000000000000008 000000 01 00 00"),
		append(make([]byte, BlockSize), pattern(1, 2)...))
	task.Abort()
	require.ErrorIs(t, <-ended, serving.ErrAborted)
}

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
