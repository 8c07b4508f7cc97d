package target_test

import (
	"bytes"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/pdu"
	tt "kubevirt.io/disk/target/targettest"
)

// TestReinstatedSessionIsOver reinstates a session with a write that was received but not begun,
// because the watchdog passes the reading role on only after some milliseconds. The write must not
// overwrite a write of the new session.
func TestReinstatedSessionIsOver(t *testing.T) {
	const rounds = 5
	s := start(t)
	for range rounds {
		old := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
		block := make(chan struct{})
		resume := sync.OnceFunc(func() { close(block) })
		t.Cleanup(resume)
		before := s.disks[0].Calls(disktest.OpWrite)
		s.disks[0].Inject(disktest.Rule{Op: disktest.OpWrite, Length: 512, Times: 1, Block: block})
		var stream []byte
		for _, c := range []tt.Command{tt.Write10(1, 0, make([]byte, 512)),
			tt.Write10(1, 8, bytes.Repeat([]byte{1}, 512))} {
			cmd, data, _ := old.Prepare(c)
			stream = append(stream, old.Bytes(&cmd, data)...)
		}
		require.NoError(t, old.SendRaw(stream))
		testtool.Eventually(t, func() bool { return s.disks[0].Calls(disktest.OpWrite) > before },
			"a write reaches the disk")

		again, err := tt.Login(s.addr, tt.LoginOptions{})
		require.NoError(t, err)
		_, err = again.ClearAttention(1)
		require.NoError(t, err)
		again.MustGood(t, tt.Write10(1, 8, bytes.Repeat([]byte{2}, 512)))
		resume()
		testtool.Eventually(t,
			func() bool { all, _ := s.Connections(); return all == 1 }, "the old session is gone")
		require.Equal(t, byte(2), again.MustGood(t, tt.Read10(1, 8, 1)).Data[0],
			"an old write comes after a new one")
		require.NoError(t, again.Close())
		require.NoError(t, old.Close())
		testtool.Eventually(t,
			func() bool { all, _ := s.Connections(); return all == 0 }, "nobody is there")
	}
}

// TestReinstatedSessionIsFenced fences a session whose reinstatement has begun but not ended. Its
// writes must be over, too.
func TestReinstatedSessionIsFenced(t *testing.T) {
	const first, second = "iqn.2026-01.test:first", "iqn.2026-01.test:second"
	for name, c := range map[string]struct {
		access serving.AccessMode
		fence  func(t *testing.T, s *server, other *tt.Session)
	}{
		"handover": {serving.AccessWriteExclusive, func(t *testing.T, s *server, _ *tt.Session) {
			require.NoError(t, s.inUse.Admit(1, second, time.Time{}))
			_, err := s.inUse.HandOver(1)
			require.NoError(t, err)
		}},
		"LOGICAL UNIT RESET": {serving.AccessWriteShared,
			func(t *testing.T, s *server, other *tt.Session) {
				got, err := other.TaskManagement(pdu.TaskManagementRequest{Immediate: true,
					Function: pdu.TMLogicalUnitReset, LUN: tt.LUN(1)})
				require.NoError(t, err)
				require.Equal(t, pdu.TMComplete, got)
			}},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, func(o *options) { o.LUNs[0].Access = c.access })
			old := tt.MustLogin(t, s.addr,
				tt.LoginOptions{Initiator: first,
					Keys: tt.KV("InitialR2T", "Yes", "ImmediateData", "No")}, 1)
			write := tt.Write10(1, 0, bytes.Repeat([]byte{1}, 512))
			write.OnR2T = tt.HoldR2T
			task := old.MustStart(t, write)
			r2t, err := task.AwaitR2T()
			require.NoError(t, err)
			other := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: second})

			require.NoError(t, s.BeginReinstatement(first))
			c.fence(t, s, other)
			_ = task.Answer(r2t)
			require.NoError(t, old.ExpectClosed(), "without an answer")
			require.Zero(t, s.disks[0].Calls(disktest.OpWrite))
		})
	}
}
