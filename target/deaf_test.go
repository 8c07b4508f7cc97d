package target_test

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	tt "kubevirt.io/disk/target/targettest"
)

// TestInitiatorsThatTakeNothing: the sessions of one address ask for data, and take none of it,
// until the memory is in use. An initiator of another address still gets its data, and the rest of
// their long reads takes little beyond the limit.
func TestInitiatorsThatTakeNothing(t *testing.T) {
	const limit, sessions = 16 << 20, 80
	s := start(t, func(o *options) { o.Shared.Memory = limit })
	other := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: "iqn.2026-01.test:other"}, 1)
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	for i := range sessions {
		nc, err := dialer.Dial("tcp", s.addr.String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = nc.Close() })
		require.NoError(t, nc.(*net.TCPConn).SetReadBuffer(4096))
		c, err := tt.NewConn(nc).Login(tt.LoginOptions{ISID: [6]byte{0x80, 0, byte(i)}})
		require.NoError(t, err)
		_, err = c.ClearAttention(1)
		require.NoError(t, err)
		for c.MaxCmdSN-c.CmdSN < 1<<31 {
			c.MustStart(t, tt.Read10(1, 0, 8192))
		}
	}
	testtool.Eventually(t, func() bool { return s.MemoryInUse() > limit-512<<10 },
		"the memory is in use: %d", func() any { return s.MemoryInUse() })
	for range 100 {
		other.MustGood(t, tt.Read10(1, 0, 512))
		require.Less(t, s.MemoryInUse(), int64(limit+limit/4+sessions*(128<<10)))
	}
}
