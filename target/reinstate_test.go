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
				manageAll(t, other, pdu.TMComplete, pdu.TMLogicalUnitReset)
			}},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, func(o *options) { o.LUNs[0].Access = c.access })
			old := tt.MustLogin(t, s.addr,
				tt.LoginOptions{Initiator: first, Keys: solicited.Keys}, 1)
			task, r2t := waiting(t, old, 1, 0, bytes.Repeat([]byte{1}, 512))
			other := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: second})

			require.NoError(t, s.BeginReinstatement(first))
			c.fence(t, s, other)
			_ = task.Answer(r2t)
			require.NoError(t, old.ExpectClosed(), "without an answer")
			require.Zero(t, s.disks[0].Calls(disktest.OpWrite))
		})
	}
}
