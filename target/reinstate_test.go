package target_test

import (
	"bytes"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/target/internal/pdu"
	tt "kubevirt.io/disk/target/targettest"
)

// TestReinstatedSessionIsOver has a session with requests that were received and not begun when it is reinstated. None of them
// is executed: neither a write over what the new session has written, nor a reset that ends the new session's commands.
func TestReinstatedSessionIsOver(t *testing.T) {
	const rounds = 5
	s := newServer(t)
	resets := 0
	for range rounds {
		old := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
		block := make(chan struct{})
		resume := sync.OnceFunc(func() { close(block) })
		t.Cleanup(resume)
		before := s.disks[0].Calls(disktest.OpWrite)
		s.disks[0].Inject(disktest.Rule{Op: disktest.OpWrite, Times: 1, Block: block})
		var stream []byte
		for _, c := range []tt.Command{tt.Write10(1, 0, make([]byte, 512)), tt.Write10(1, 8, bytes.Repeat([]byte{1}, 512))} {
			cmd, data, _ := old.Prepare(c)
			stream = append(stream, old.Bytes(&cmd, data)...)
		}
		stream = append(stream, old.Bytes(&pdu.TaskManagementRequest{Immediate: true, Function: pdu.TMLogicalUnitReset, LUN: tt.LUN(1),
			TaskTag: old.NewTag(), RefTaskTag: pdu.ReservedTag, CmdSN: old.CmdSN}, nil)...)
		require.NoError(t, old.SendRaw(stream))
		eventually(t, "the first write reaches the disk", func() bool { return s.disks[0].Calls(disktest.OpWrite) > before })

		again, err := tt.Login(s.addr, tt.LoginOptions{})
		require.NoError(t, err)
		_, err = again.ClearAttention(1)
		require.NoError(t, err)
		newer := tt.Write10(1, 8, bytes.Repeat([]byte{2}, 512))
		if !again.MustDo(t, newer).Good() { // a reset that was under way
			again.MustGood(t, newer)
			resets++
		}
		resume()
		eventually(t, "the old session is gone", func() bool { all, _ := s.Connections(); return all == 1 })
		attentions, err := again.ClearAttention(1)
		require.NoError(t, err)
		resets += len(attentions)
		require.Equal(t, byte(2), again.MustGood(t, tt.Read10(1, 8, 1)).Data[0], "an old write comes after a new one")
		require.NoError(t, again.Close())
		require.NoError(t, old.Close())
		eventually(t, "nobody is there", func() bool { all, _ := s.Connections(); return all == 0 })
	}
	require.Less(t, resets, rounds, "resets of sessions that were over; one that was under way may be late")
}
