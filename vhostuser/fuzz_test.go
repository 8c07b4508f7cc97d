package vhostuser

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/vhostuser/vhosttest"
)

const (
	fuzzGuest = 1 << 20  // where the memory of a fuzzed ring is in the guest
	fuzzUser  = 1 << 30  // and in the front end
	fuzzSize  = 16 << 10 // bytes
)

// fuzzTable is memory in two regions that follow each other.
func fuzzTable(t testing.TB) *table {
	t.Helper()
	var regions []region
	for i := range uint64(2) {
		all := testtool.Must(unix.Mmap(-1, 0, fuzzSize/2, unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_ANON|unix.MAP_PRIVATE))(t)
		r := region{guest: fuzzGuest + i*fuzzSize/2, user: fuzzUser + i*fuzzSize/2,
			size: fuzzSize / 2, sealed: true, mapping: &mapping{all: all}}
		r.mapping.refs.Store(1)
		regions = append(regions, r)
	}
	table := testtool.Must(newTable(regions))(t)
	return table
}

// FuzzRing: whatever lies in the guest's memory, what comes out of a ring lies in that memory, or
// is refused.
func FuzzRing(f *testing.F) {
	const num = 16
	good := make([]byte, 1024)
	put := func(at int, addr uint64, length uint32, flags, next uint16) {
		binary.LittleEndian.PutUint64(good[at:], addr)
		binary.LittleEndian.PutUint32(good[at+8:], length)
		binary.LittleEndian.PutUint16(good[at+12:], flags)
		binary.LittleEndian.PutUint16(good[at+14:], next)
	}
	put(0, fuzzGuest+512, 16, descNext, 1)
	put(16, fuzzGuest+fuzzSize/2-256, 512, descNext|descWrite, 2) // in both regions
	put(32, fuzzGuest+768, 1, descWrite, 0)
	put(48, fuzzGuest+800, 48, descIndirect, 0)
	put(800, fuzzGuest+512, 16, descNext, 1)
	put(816, fuzzGuest+600, 1, descWrite, 0)
	copy(good[256:], []byte{0, 0, 2, 0, 0, 0, 3, 0}) // two requests are available
	f.Add(good)
	table := fuzzTable(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		memory := [][]byte{table.regions[0].bytes(), table.regions[1].bytes()}
		for i := range memory {
			clear(memory[i])
			b = b[copy(memory[i], b):]
		}
		r := ring{num: num, descUser: fuzzUser, availUser: fuzzUser + 256,
			usedUser: fuzzUser + 320}
		require.NoError(t, r.locate(table))
		var c chain
		for range 2 * num {
			head, ok, err := r.take()
			if !ok || err != nil {
				return
			}
			if r.read(head, table, &c) != nil {
				return
			}
			total := int64(0)
			for _, segs := range [][]segment{c.out, c.in} {
				require.LessOrEqual(t, len(segs), 2*maxChain)
				total += lengthOf(segs)
				for _, s := range segs {
					require.NotEmpty(t, s.p)
					at := table.at(s.guest, 1)
					require.Same(t, &at[0], &s.p[0])
					end := s.guest + uint64(len(s.p))
					require.LessOrEqual(t, end, uint64(fuzzGuest+fuzzSize))
					last := table.at(end-1, 1)
					require.Same(t, &last[0], &s.p[len(s.p)-1])
				}
			}
			require.LessOrEqual(t, total, int64(1)<<32)
			r.put(head, 1, noLog)
			_, _ = r.mustNotify(), r.enableKicks()
		}
	})
}

// noLog is a dirty log that logs nothing.
var noLog = &dirtyLog{}

// FuzzMessages: whatever a front end says, with whatever descriptors, the next one is served.
// Input: for each message its request, how many descriptors of which kind come with it, the length
// of its payload, and the payload.
func FuzzMessages(f *testing.F) {
	f.Add([]byte{reqGetFeatures, 0, 0, reqSetFeatures, 0, 8, 0, 0, 0, 0, 1, 0, 0, 0})
	f.Add(append([]byte{reqSetMemTable, 1, 40, 1, 0, 0, 0, 0, 0, 0, 0}, make([]byte, 32)...))
	f.Add([]byte{reqSetVringNum, 0, 8, 0, 0, 0, 0, 128, 0, 0, 0,
		reqSetVringKick, 2, 8, 0, 0, 0, 0, 0, 0, 0, 0,
		reqGetVringBase, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{reqGetInflightFD, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 64,
		0,
		reqSetLogBase, 1, 16, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add(append([]byte{reqGetConfig, 0, 72, 0, 0, 0, 0, 60, 0, 0, 0}, make([]byte, 64)...))
	v := serve(f, disktest.NewMemory(diskSize))
	memory := testtool.Must(unix.MemfdCreate("fuzz", unix.MFD_CLOEXEC))(f)
	require.NoError(f, unix.Ftruncate(memory, 1<<20))
	event := testtool.Must(unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK))(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		c := testtool.Must(vhosttest.DialConn(v.socket, 0))(t)
		defer c.Close()
		for len(b) >= 3 {
			m := vhosttest.Message{Request: vhosttest.Request(b[0]), Flags: vhosttest.FlagVersion}
			for i := range b[1] % 9 {
				m.FDs = append(m.FDs, []int{memory, event}[(b[1]/16>>(i%4))&1])
			}
			n := min(int(b[2]), len(b)-3)
			m.Payload, b = b[3:3+n], b[3+n:]
			if c.Send(m) != nil {
				break // it was refused before
			}
		}
		require.NoError(t, c.Close())
		d := testtool.Must(vhosttest.Dial(v.socket, vhosttest.Options{Memory: 1 << 20}))(t)
		require.NoError(t, d.Read(0, 0, make([]byte, 512)))
		require.NoError(t, d.Close())
		v.logs.TakeAll()
	})
}
