//go:build !race

package scsi // One goroutine computes: the race detector has nothing to find.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
)

// wrongs are the faults of storage, and the kinds of crash.
type wrongs struct {
	keepsNothing, keepsForever, flushesNothing bool

	power bool // unflushed data is lost, not only the process
}

// generations are the atomic writes to one range: each stores its number in every block.
type generations struct {
	lba, blocks    uint64
	sent, answered uint64
}

func (g *generations) content(n uint64) []byte {
	return bytes.Repeat(binary.BigEndian.AppendUint64(nil, n), int(g.blocks)*BlockSize/8)
}

// check returns what is wrong with the range after a restart.
func (g *generations) check(content []byte) error {
	found := binary.BigEndian.Uint64(content)
	switch {
	case !bytes.Equal(content, g.content(found)):
		return fmt.Errorf("the range at %d is a mix", g.lba)
	case found < g.answered:
		return fmt.Errorf("the range at %d is of generation %d, and %d was acknowledged", g.lba,
			found, g.answered)
	case found > g.sent:
		return fmt.Errorf("the range at %d is of generation %d, which was never sent", g.lba, found)
	}
	g.sent, g.answered = found, found
	return nil
}

// atomicCrashes stops a machine this many times while it serves atomic writes, even while it
// starts, and returns the errors found in the ranges.
func atomicCrashes(t *testing.T, seed uint64, w wrongs, rounds int) error {
	const size = 512 * BlockSize
	m := &filetest.Machine{Random: rand.New(rand.NewPCG(seed, 11)), CrashIn: -1}
	file, store := filetest.NewSimFile(m, make([]byte, size)), filetest.NewSimStore(m)
	store.KeepsNothing, store.KeepsForever = w.keepsNothing, w.keepsForever
	ranges := []*generations{{lba: 0, blocks: 64}, {lba: 64, blocks: 8},
		{lba: 72, blocks: maxAtomic / BlockSize}}
	down := func() bool { return m.CrashIn == 0 }
	// start serves the disk; nil: the machine has stopped before it could.
	start := func() *Device {
		file.Lies = w.flushesNothing
		device, err := NewDevice(Options{}, []LUN{{
			Number: 1, Disk: file, Identity: testIdentity(), Access: AccessWriteShared,
			Store: store,
		}})
		if down() {
			return nil
		}
		require.NoError(t, err)
		return device
	}
	stopped := func() {
		if w.power {
			file = file.Crash(m)
		} else {
			file = file.Killed(m)
		}
	}
	// soon is after how many calls to storage the next crash comes; -1: there is none.
	soon := func() int {
		if calls := m.Random.IntN(4); calls > 0 {
			return calls
		}
		return -1
	}
	for range rounds {
		m.CrashIn = 1 + m.Random.IntN(30)
		if device := start(); device != nil {
			nexus := device.Attach(InitiatorPort{Name: "iqn.a"})
			nexus.nth(0).pending.Store(0)
			for !down() {
				g := ranges[m.Random.IntN(len(ranges))]
				g.sent++
				request := make([]byte, 16)
				request[0] = opWriteAtomic16
				binary.BigEndian.PutUint64(request[2:], g.lba)
				binary.BigEndian.PutUint16(request[12:], uint16(g.blocks))
				r := drive(device, nexus, lun1, request, g.content(g.sent), size)
				if r.status == StatusGood {
					g.answered = g.sent
				} else if !down() {
					return fmt.Errorf("a write failed without a crash: %s", r.outcome())
				}
			}
		}
		stopped()
		// The next start recovers, and may crash as well.
		for m.CrashIn = soon(); start() == nil; m.CrashIn = soon() {
			stopped()
		}
		m.CrashIn = -1
		for _, g := range ranges {
			if err := g.check(file.Cache[g.lba*BlockSize:][:g.blocks*BlockSize]); err != nil {
				return err
			}
		}
	}
	return nil
}

// TestAtomicWriteCrashPoints stops the process, or the machine, at any call to storage, in the
// middle of its work. Afterwards each range holds exactly one generation, not older than the last
// acknowledged one.
func TestAtomicWriteCrashPoints(t *testing.T) {
	for name, power := range map[string]bool{"killed": false, "without power": true} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(40) {
				require.NoError(t, atomicCrashes(t, seed, wrongs{power: power}, 25), "seed %d",
					seed)
			}
		})
	}
}

// The harness finds the faults that it is there for.
func TestAtomicWriteCrashPointsFind(t *testing.T) {
	for name, c := range map[string]struct {
		wrongs wrongs
		want   string
	}{
		"nothing is put back, killed":        {wrongs{keepsNothing: true}, "mix"},
		"nothing is put back, without power": {wrongs{keepsNothing: true, power: true}, "mix"},
		"what was acknowledged is undone":    {wrongs{keepsForever: true}, "was acknowledged"},
		"it is forgotten before it was flushed": {wrongs{flushesNothing: true, power: true},
			"range"},
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			for seed := uint64(0); seed < 40 && err == nil; seed++ {
				err = atomicCrashes(t, seed, c.wrongs, 25)
			}
			require.ErrorContains(t, err, c.want)
		})
	}
}
