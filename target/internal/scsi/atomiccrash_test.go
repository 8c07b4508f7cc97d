package scsi

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// crashing is a machine that stops in the midst of one of the calls to its storage, and starts again.
type crashing struct {
	random *rand.Rand
	in     int  // calls until it stops; negative: it does not
	down   bool // nothing works any more
	power  bool // what was not flushed is lost, and not only the process

	keepsNothing, keepsForever, flushesNothing bool // what the storage does wrong
}

var errCrash = errors.New("the machine has stopped")

// step counts a call, and tells whether the machine stops in it.
func (m *crashing) step() bool {
	m.in--
	m.down = m.down || m.in == 0
	return m.down
}

// crashDisk is a disk with a page cache.
type crashDisk struct {
	*crashing
	cache, platter []byte
	unflushed      map[int64][][]byte // by block: what a loss of power may leave
}

func (d *crashDisk) Size() int64  { return int64(len(d.cache)) }
func (d *crashDisk) Close() error { return nil }

func (d *crashDisk) ReadAt(p []byte, off int64) (int, error) {
	if d.down {
		return 0, errCrash
	}
	return copy(p, d.cache[off:]), nil
}

func (d *crashDisk) WriteAt(p []byte, off int64) (int, error) {
	if d.down {
		return 0, errCrash
	}
	if d.step() {
		p = p[:d.random.IntN(len(p)/BlockSize+1)*BlockSize]
	}
	copy(d.cache[off:], p)
	for at := 0; at < len(p); at += BlockSize {
		block := (off + int64(at)) / BlockSize
		d.unflushed[block] = append(d.unflushed[block], bytes.Clone(p[at:at+BlockSize]))
	}
	if d.down {
		return 0, errCrash
	}
	return len(p), nil
}

func (d *crashDisk) Flush() error {
	if d.down || d.step() {
		return errCrash
	}
	if !d.flushesNothing {
		copy(d.platter, d.cache)
		clear(d.unflushed)
	}
	return nil
}

// restart is the disk of the machine that starts again.
func (d *crashDisk) restart() {
	if !d.power {
		return
	}
	for _, block := range slices.Sorted(maps.Keys(d.unflushed)) {
		if versions := d.unflushed[block]; d.random.IntN(2) == 0 {
			copy(d.platter[block*BlockSize:], versions[d.random.IntN(len(versions))])
		}
	}
	clear(d.unflushed)
	copy(d.cache, d.platter)
}

// crashStore has saved what Save has returned for; what is cut off may have been saved, or not.
type crashStore struct {
	*crashing
	kept map[string][]byte
}

func (s *crashStore) Load(name string) ([]byte, error) { return s.kept[name], nil }
func (s *crashStore) Where(name string) string         { return name }

func (s *crashStore) Save(name string, data []byte) error {
	if s.down {
		return errCrash
	}
	crash := s.step()
	forget := len(data) == 0
	if !(forget && s.keepsForever) && !(!forget && s.keepsNothing) && !(crash && s.random.IntN(2) == 0) {
		s.kept[name] = bytes.Clone(data)
	}
	if crash {
		return errCrash
	}
	return nil
}

// generations are what atomic writes have done to one range: each stores its number in every block.
type generations struct {
	lba, blocks    uint64
	sent, answered uint64
}

func (g *generations) content(n uint64) []byte {
	return bytes.Repeat(binary.BigEndian.AppendUint64(nil, n), int(g.blocks)*BlockSize/8)
}

// check tells what is wrong with the range after a restart.
func (g *generations) check(content []byte) error {
	found := binary.BigEndian.Uint64(content)
	switch {
	case !bytes.Equal(content, g.content(found)):
		return fmt.Errorf("the range at %d is a mix", g.lba)
	case found < g.answered:
		return fmt.Errorf("the range at %d is of generation %d, and %d was acknowledged", g.lba, found, g.answered)
	case found > g.sent:
		return fmt.Errorf("the range at %d is of generation %d, which was never sent", g.lba, found)
	}
	g.sent, g.answered = found, found
	return nil
}

// atomicCrashes lets a machine stop that many times while it serves atomic writes, also while it starts, and returns what was found
// wrong with the ranges.
func atomicCrashes(t *testing.T, m *crashing, rounds int) error {
	const size = 512 * BlockSize
	d := &crashDisk{crashing: m, cache: make([]byte, size), platter: make([]byte, size), unflushed: map[int64][][]byte{}}
	store := &crashStore{crashing: m, kept: map[string][]byte{}}
	ranges := []*generations{{lba: 0, blocks: 64}, {lba: 64, blocks: 8}, {lba: 72, blocks: maxAtomic}}
	// start serves the disk; nil: the machine has stopped before it could.
	start := func() *Device {
		device, err := NewDevice(Options{}, []LUN{{Number: 1, Disk: d, Identity: testIdentity(), Access: AccessWriteShared, Store: store}})
		if m.down {
			return nil
		}
		require.NoError(t, err)
		t.Cleanup(device.Close)
		return device
	}
	for range rounds {
		m.in, m.down = 1+m.random.IntN(30), false
		if device := start(); device != nil {
			nexus := device.Attach(InitiatorPort{Name: "iqn.a"})
			nexus.nth(0).pending.Store(0)
			for !m.down {
				g := ranges[m.random.IntN(len(ranges))]
				g.sent++
				request := make([]byte, 16)
				request[0] = opWriteAtomic16
				binary.BigEndian.PutUint64(request[2:], g.lba)
				binary.BigEndian.PutUint16(request[12:], uint16(g.blocks))
				if r := drive(device, nexus, lun1, request, g.content(g.sent), size); r.status == StatusGood {
					g.answered = g.sent
				} else if !m.down {
					return fmt.Errorf("a write failed without a crash: %s", r.outcome())
				}
			}
		}
		d.restart()
		// What the next start makes of it, which may stop too.
		m.down = false
		for m.in = m.random.IntN(4); start() == nil; m.in = m.random.IntN(4) {
			m.down = false
			d.restart()
		}
		m.in = -1
		for _, g := range ranges {
			if err := g.check(d.cache[g.lba*BlockSize:][:g.blocks*BlockSize]); err != nil {
				return err
			}
		}
	}
	return nil
}

// TestAtomicWriteCrashPoints stops the process, or the machine, at any call to storage, in the middle of what that call does. Each
// range holds exactly one generation afterwards, and none older than what was acknowledged.
func TestAtomicWriteCrashPoints(t *testing.T) {
	for name, power := range map[string]bool{"killed": false, "without power": true} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(40) {
				m := &crashing{random: rand.New(rand.NewPCG(seed, 11)), power: power}
				require.NoError(t, atomicCrashes(t, m, 25), "seed %d", seed)
			}
		})
	}
}

// The harness finds what it is there for.
func TestAtomicWriteCrashPointsFind(t *testing.T) {
	for name, c := range map[string]struct {
		machine crashing
		want    string
	}{
		"nothing is put back, killed":           {crashing{keepsNothing: true}, "mix"},
		"nothing is put back, without power":    {crashing{keepsNothing: true, power: true}, "mix"},
		"what was acknowledged is undone":       {crashing{keepsForever: true}, "was acknowledged"},
		"it is forgotten before it was flushed": {crashing{flushesNothing: true, power: true}, "range"},
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			for seed := uint64(0); seed < 40 && err == nil; seed++ {
				m := c.machine
				m.random = rand.New(rand.NewPCG(seed, 11))
				err = atomicCrashes(t, &m, 25)
			}
			require.ErrorContains(t, err, c.want)
		})
	}
}
