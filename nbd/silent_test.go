package nbd

import (
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// TestDeadMachine: a client whose machine dies while a reply is under way loses its disk, to a
// client that could not have it before.
func TestDeadMachine(t *testing.T) {
	v := serve(t, 1, func(o *serving.Options) { o.Access = serving.AccessWriteExclusive })
	dead := unknown(t, v)(structured)
	dead.writeAt(0, []byte("mine"))
	other := v.open(t, "", structured)
	require.Equal(t, uint32(ePerm), other.do(cmdRead, 0, 0, 512, nil).code)
	gate := make(chan struct{})
	opened := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(opened)
	defer v.disks[0].Inject(disktest.Rule{Op: disktest.OpRead, Block: gate})()
	calls := v.disks[0].Calls(disktest.OpRead)
	dead.send(dead.request(cmdRead, 0, 0, 4096, nil))
	testtool.Eventually(t, func() bool { return v.disks[0].Calls(disktest.OpRead) > calls },
		"its read is under way")
	raw, err := dead.Conn.(*net.TCPConn).SyscallConn()
	require.NoError(t, err)
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}} // what comes is not taken
	require.NoError(t, raw.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: 1, Filter: &drop[0]})
	}))
	require.NoError(t, err)
	opened()
	v.conns.LookNow(time.Now())
	require.Len(t, v.Sessions(), 2, "it is too early")
	testtool.Eventually(t, func() bool {
		for _, c := range v.conns.All(func(c *conn) bool { return c.Silent(time.Second) }) {
			c.fail(serving.ErrSilent)
		}
		return len(v.Sessions()) == 1
	}, "its connection ends")
	other.writeAt(0, []byte("now mine"))
}
