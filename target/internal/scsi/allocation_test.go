package scsi

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
)

// noDisk does nothing, so that only the device server costs anything.
type noDisk struct{}

func (noDisk) ReadAt(ctx context.Context, p []byte, _ int64) (int, error)  { return len(p), nil }
func (noDisk) WriteAt(ctx context.Context, p []byte, _ int64) (int, error) { return len(p), nil }
func (noDisk) Flush() error                                                { return nil }
func (noDisk) Size() int64                                                 { return 1 << 40 }
func (noDisk) Close() error                                                { return nil }

// noDistance is a distant disk whose content is here.
type noDistance struct{ noDisk }

func (noDistance) Far() bool { return true }

func mediumCommand(b testing.TB, dsk disk.Disk, opcode byte) (run func()) {
	d, err := NewDevice(Options{}, []LUN{{Number: 1, Disk: dsk, Identity: testIdentity()}})
	require.NoError(b, err)
	n := d.Attach(InitiatorPort{Name: "iqn.a"})
	n.nth(0).pending.Store(0)
	t := &Task{}
	p := make([]byte, 4096)
	buf := make([]byte, 0, 64)
	return func() {
		t.Nexus, t.LUN = n, lun1
		t.CDB = [16]byte{opcode, 0, 0, 1, 2, 3, 0, 0, 8, 0}
		if err := d.Prepare(t); err != nil {
			b.Fatal(err)
		}
		if t.Dir == DirIn {
			err = t.In(0, p)
		} else {
			err = t.Out(0, p)
		}
		if err != nil {
			b.Fatal(err)
		}
		if _, err := t.Finish(); err != nil {
			b.Fatal(err)
		}
		if s, _ := d.Outcome(t, nil, buf); s != StatusGood {
			b.Fatal(s)
		}
		t.Reset()
	}
}

func TestReadWriteDoNotAllocate(t *testing.T) {
	for _, op := range []byte{opRead10, opWrite10} {
		for _, d := range []disk.Disk{noDisk{}, noDistance{}} {
			each := testing.AllocsPerRun(100, mediumCommand(t, d, op))
			require.Zero(t, each, "opcode %02x, %T", op, d)
		}
	}
}

func BenchmarkWrite10(b *testing.B) {
	run := mediumCommand(b, noDisk{}, opWrite10)
	b.ReportAllocs()
	for b.Loop() {
		run()
	}
}
