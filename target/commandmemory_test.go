package target_test

import (
	"io"
	"net"
	"runtime"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/internal/pdu"
	tt "kubevirt.io/disk/target/targettest"
)

// heap returns how many bytes of the heap are in use.
func heap() int64 {
	runtime.GC()
	runtime.GC() // the second collection empties the pools
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// memory returns how many bytes of the heap are in use, and how many the server counts, at one
// moment: while memory is scarce, a session that has been idle for a while gives back what it kept,
// and the two collections of heap may take longer than that.
func (s *server) memory() (onHeap, counted int64) {
	for {
		counted = s.MemoryInUse()
		onHeap = heap()
		if s.MemoryInUse() == counted {
			return onHeap, counted
		}
	}
}

// crowd logs in a number of sessions, and returns them with their connections.
func crowd(t *testing.T, s *server, sessions int, keys ...string) ([]*tt.Session, []net.Conn) {
	t.Helper()
	all, conns := make([]*tt.Session, sessions), make([]net.Conn, sessions)
	for i := range all {
		o := tt.LoginOptions{ISID: [6]byte{0x80, byte(i >> 8), byte(i)}, Keys: tt.KV(keys...)}
		all[i], conns[i] = s.loginFrom(t, "127.0.0.1", o)
	}
	return all, conns
}

// TestMemoryOfOpenCommands has many sessions open as many commands as they may. Each command waits
// for data, in the way that takes the most memory. The memory is counted and limited.
func TestMemoryOfOpenCommands(t *testing.T) {
	const sessions, limit, most = 300, 16 << 20, 120
	s := start(t, func(o *options) {
		o.Shared.Memory, o.Limits.MaxPerAddress = limit, sessions
	})
	all, conns := crowd(t, s, sessions, "InitialR2T", "Yes", "ImmediateData", "No")
	before, counted := s.memory()
	answers := make([]byte, 1<<20)
	commands := 0
	for i, c := range all {
		width := min(int(c.MaxCmdSN-c.CmdSN)+1, most)
		require.GreaterOrEqual(t, width, 8, "every session has at least this window")
		require.True(t, i > 10 || width == most, "a few sessions have the full window")
		commands += width
		var batch []byte
		for n := range width {
			if n < width-1 { // in between, commands that leave something behind
				inquiry, _, _ := c.Prepare(tt.Command{LUN: 1, CDB: []byte{0x12, 1, 0x83, 1, 0, 0},
					Read: 256})
				inquiry.Immediate, inquiry.ExpectedLength = true, 0
				batch = append(batch, c.Bytes(&inquiry, nil)...)
				c.CmdSN--
			}
			cmd, _, _ := c.Prepare(tt.Write10(1, 0, make([]byte, 4096)))
			cmd.Final = true
			batch = append(batch, c.Bytes(&cmd, nil)...)
		}
		require.NoError(t, testtool.Err(conns[i].Write(batch)))
		require.NoError(t, testtool.Err(io.ReadFull(conns[i], answers[:(2*width-1)*pdu.HeaderLen])))
	}
	open := 0
	for _, info := range s.Sessions() {
		open += info.InFlight
	}
	require.Equal(t, commands, open)
	onHeap, nowCounted := s.memory()
	grown, counts := onHeap-before, nowCounted-counted
	t.Logf("%d sessions with %d open commands: %d KiB more on the heap, %d KiB of it counted, %d "+
		"bytes each", sessions, commands, grown>>10, counts>>10, grown/int64(commands))
	require.Less(t, grown, counts, "memory on the heap is counted")
	require.Less(t, grown, int64(limit/2))
	runtime.KeepAlive(all)
	runtime.KeepAlive(answers)
	for _, nc := range conns {
		require.NoError(t, nc.Close())
	}
	testtool.Eventually(t, func() bool { return s.MemoryInUse() == 0 }, "all memory is free")
}

// TestMemoryOfWhatWaits has sessions make the target hold other things than commands: PDUs ahead of
// their turn with their data, negotiations that stop halfway, and answers that nobody reads.
func TestMemoryOfWhatWaits(t *testing.T) {
	const sessions = 100
	var keys []byte
	for i := range 1000 {
		keys = append(keys, "X-"+string(rune('a'+i%26))+string(rune('a'+i/26%26))+
			string(rune('a'+i/676))+"=\x00"...)
	}
	for name, hold := range map[string]func(c *tt.Session) []byte{
		"held PDUs": func(c *tt.Session) (batch []byte) {
			c.CmdSN++ // one is missing
			for range 8 {
				cmd, immediate, _ := c.Prepare(tt.Write10(1, 0, make([]byte, tt.BlockSize)))
				batch = append(batch, c.Bytes(&cmd, immediate)...)
			}
			return batch
		},
		"a negotiation": func(c *tt.Session) []byte {
			return c.Bytes(&pdu.TextRequest{Immediate: true, TaskTag: 1,
				TransferTag: pdu.ReservedTag, CmdSN: c.CmdSN}, keys)
		},
		"answers": func(c *tt.Session) (batch []byte) {
			ping := pdu.NOPOut{Immediate: true, TaskTag: 1, TransferTag: pdu.ReservedTag,
				CmdSN: c.CmdSN}
			for range 200 {
				batch = append(batch, c.Bytes(&ping, nil)...)
			}
			return batch
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t)
			all, conns := crowd(t, s, sessions)
			before, counted := s.memory()
			for i, c := range all {
				require.NoError(t, testtool.Err(conns[i].Write(hold(c))))
			}
			read := make([]byte, 1<<20)
			for _, nc := range conns {
				if name != "held PDUs" {
					require.NoError(t, testtool.Err(nc.Read(read)))
				}
			}
			testtool.Eventually(t,
				func() bool { return s.MemoryInUse()-counted > sessions*3<<10 }, "it is counted")
			onHeap, nowCounted := s.memory() // which waits until all of it has arrived
			grown, counts := onHeap-before, nowCounted-counted
			t.Logf("%d KiB more on the heap, %d KiB counted", grown>>10, counts>>10)
			require.Less(t, grown, counts, "memory on the heap is counted")
			runtime.KeepAlive(all)
			for _, nc := range conns {
				require.NoError(t, nc.Close())
			}
			testtool.Eventually(t,
				func() bool { return s.MemoryInUse() == 0 }, "all memory is free")
		})
	}
}

// TestIdleSessionsLeaveMemory has many sessions work hard at once and then rest. They must give up
// memory that another session needs.
func TestIdleSessionsLeaveMemory(t *testing.T) {
	const sessions, blocks, segment = 160, 200, 512
	s := start(t, func(o *options) { o.Shared.Memory = 4 << 20 })
	all, _ := crowd(t, s, sessions, "MaxRecvDataSegmentLength", strconv.Itoa(segment))
	for _, c := range all {
		for range 2 { // the queue uses two slices in turns
			_, err := c.Do(tt.Read10(1, 0, blocks)) // GOOD, or BUSY towards the end
			require.NoError(t, err)
		}
	}
	t.Logf("%d KiB", s.MemoryInUse()>>10)
	other := testtool.Must(tt.Dial(s.addr))(t)
	c := testtool.Must(other.Login(tt.LoginOptions{ISID: [6]byte{0x80, 0xff}}))(t)
	require.NoError(t, testtool.Err(c.ClearAttention(1)))
	testtool.Eventually(t, func() bool {
		return testtool.Must(c.Do(tt.Read10(1, 0, blocks)))(t).Status == 0
	}, "there is memory for a command")
}
