package target_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/pdu"
	tt "kubevirt.io/disk/target/targettest"
)

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
