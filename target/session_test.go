package target

import (
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/pdu"
	"kubevirt.io/disk/target/internal/scsi"
)

// TestCommandNumbers sends random numbered requests around the end of the number space. Some are
// rejected, some of these are sent again, and commands end at random. As long as commands end,
// there is room for more. Nothing is received twice, MaxCmdSN never goes back, and the memory for
// rejected requests is limited.
func TestCommandNumbers(t *testing.T) {
	for _, width := range []int{1, 2, 7} {
		s := &session{conn: &conn{srv: &Server{pool: noMemory()}}, width: width}
		next := uint32(1<<32 - 500)
		s.window.exp.Store(next)
		s.window.max.Store(next + uint32(width) - 1)
		rng := rand.New(rand.NewPCG(1, uint64(width)))
		var rejected []uint32
		request := func(sn uint32) {
			require.Equal(t, admitNow, s.admit(sn, false), "%#x", sn)
			if rng.IntN(3) == 0 {
				s.refuse(sn)
				rejected = append(rejected, sn)
				return
			}
			s.counted++
			s.received(sn, false)
			require.Equal(t, admitNever, s.admit(sn, false), "%#x comes again", sn)
		}
		for range 2000 {
			before := s.window.max.Load()
			switch {
			case s.counted > 0 && (pdu.SNLess(s.window.max.Load(), next) || rng.IntN(2) == 0):
				s.counted--
				s.reopen()
			case len(rejected) > 0 && rng.IntN(3) == 0:
				sn := rejected[len(rejected)-1]
				rejected = rejected[:len(rejected)-1]
				if _, kept := s.refused[sn]; kept {
					request(sn)
				} else {
					require.Equal(t, admitNever, s.admit(sn, false), "%#x is forgotten", sn)
				}
			default:
				require.False(t, pdu.SNLess(s.window.max.Load(), next), "no room for %#x in a "+
					"window for %d, of which %d are taken", next, width, s.counted)
				request(next)
				next++
			}
			require.False(t, pdu.SNLess(s.window.max.Load(), before), "MaxCmdSN goes back")
			require.LessOrEqual(t, len(s.refused), width+1)
			require.LessOrEqual(t, s.counted, 2*width+1)
		}
		require.Less(t, next, uint32(1<<31), "the numbers have wrapped around")
	}
}

// TestPortals checks which portals are listed for an initiator: for those on other hosts, no
// addresses that only this host can reach.
func TestPortals(t *testing.T) {
	portals := []net.Addr{&net.UnixAddr{Name: "/run/portal"}}
	for _, a := range []string{"127.0.0.1:3260", "127.0.0.2:3260", "192.0.2.7:3260",
		"192.0.2.7:3261", "[2001:db8::7]:3260", "0.0.0.0:3262", "[::]:3262"} {
		portals = append(portals, testtool.Must(net.ResolveTCPAddr("tcp", a))(t))
	}
	for here, want := range map[string][]string{
		"127.0.0.1:3260": {"127.0.0.1:3260", "127.0.0.2:3260"},
		"192.0.2.7:3261": {"192.0.2.7:3261", "192.0.2.7:3260", "[2001:db8::7]:3260"},
		"[fe80::1%eth0]:3262": {"[fe80::1]:3262", "192.0.2.7:3260", "192.0.2.7:3261",
			"[2001:db8::7]:3260"},
		"[::ffff:127.0.0.1]:99": {"127.0.0.1:99", "127.0.0.1:3260", "127.0.0.2:3260"},
	} {
		local := testtool.Must(net.ResolveTCPAddr("tcp", here))(t)
		require.Equal(t, want, portalsBeside(local, portals), "from %s", here)
	}
}

// decompressing is a disk that must decompress reads below 1 MiB.
type decompressing struct{ *disktest.Memory }

func (decompressing) Slow(off int64) bool { return off < 1<<20 }

// TestSharedReads checks when a read that keeps a processor busy is passed on: if the reader has
// been busy with such reads for a while, and others wait or are passed on already. There is a
// limit, and a lone read is never passed on.
func TestSharedReads(t *testing.T) {
	d := decompressing{disktest.NewMemory(4 << 20)}
	disks := serving.New(serving.Config{})
	server, err := New(Options{Disks: disks})
	require.NoError(t, err)
	require.NoError(t, disks.Add(serving.Options{Number: 1, Disk: d,
		Access:   serving.AccessWriteShared,
		Identity: disk.Identity{Serial: "x", NAA: [8]byte{0x30}}}))
	device := server.device
	nexus := device.Attach(scsi.InitiatorPort{Name: "iqn.a"})
	prepared := func(cdb ...byte) *task {
		k := &task{}
		k.scsi.Nexus, k.scsi.LUN = nexus, 1<<48
		copy(k.scsi.CDB[:], cdb)
		for range 3 { // unit attentions come first
			if err = device.Prepare(&k.scsi); err == nil {
				return k
			}
		}
		require.NoError(t, err)
		return nil
	}
	slow, quick, write := prepared(0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0),
		prepared(0x28, 0, 0, 0, 0x08, 0, 0, 0, 8, 0), prepared(0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0)
	l := disks.At(1)
	srv := &Server{pool: noMemory(), start: time.Now().Add(-time.Hour)}
	alone := &conn{srv: srv}
	require.False(t, alone.shares(slow, l), "a wake-up would gain nothing")
	busy := &conn{srv: srv}
	busy.rx.Open(nil)
	busy.rx.Push(make([]byte, 48))
	require.False(t, busy.shares(quick, l))
	require.False(t, busy.shares(write, l))
	require.False(t, busy.shares(slow, l), "before the first one nobody has waited")
	require.NotZero(t, busy.slowSince)
	require.NoError(t, busy.beforeWait())
	require.Zero(t, busy.slowSince, "nobody waits when the reader does")
	long := time.Hour - 2*shareAfter
	busy.slowSince, alone.slowSince = long, long
	require.True(t, busy.shares(slow, l))
	require.False(t, alone.shares(slow, l))
	require.True(t, new(serving.Turn).Share(l))
	require.True(t, alone.shares(slow, l), "others are at work already")
}
