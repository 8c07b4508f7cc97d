package target_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

// TestResetOfSomebodyElsesLUN checks that an initiator that may not use a write-exclusive LUN
// cannot end the commands of its owner. The kernel of a machine tries that after a guest has
// migrated away. It is refused, and the commands go on (RFC 7143 11.5.1, 11.6.1).
func TestResetOfSomebodyElsesLUN(t *testing.T) {
	s := start(t, func(o *options) { o.LUNs[0].Access = serving.AccessWriteExclusive })
	data := pattern(8*BlockSize, 1)
	named := func(name string, isid byte) *Session {
		return s.login(t, LoginOptions{Initiator: DefaultInitiator + name,
			ISID: [6]byte{0x80, isid}, Keys: solicited.Keys})
	}
	first, second, third := named(".first", 1), named(".second", 2), named(".third", 3)
	functions := []pdu.TMFunction{pdu.TMClearTaskSet, pdu.TMLogicalUnitReset, pdu.TMTargetWarmReset,
		pdu.TMTargetColdReset}
	refused := func(t *testing.T, owner *Session, by ...*Session) {
		task, r2t := waiting(t, owner, 1, 0, data)
		for _, sess := range by {
			for _, function := range functions {
				manageAll(t, sess, pdu.TMAuthorizationFailed, function)
			}
			// its own tasks
			manageAll(t, sess, pdu.TMComplete, pdu.TMAbortTaskSet)
			manage(t, sess, pdu.TMComplete,
				pdu.TaskManagementRequest{Function: pdu.TMLogicalUnitReset, LUN: LUN(2)})
		}
		require.NoError(t, task.Answer(r2t))
		require.True(t, task.MustFinish(t).Good())
		require.Empty(t, attentions(t, owner, 1))
		attentions(t, owner, 2)
	}

	first.MustGood(t, Write10(1, 0, data))
	t.Run("another initiator's", func(t *testing.T) { refused(t, first, second, third) })
	require.NoError(t, s.inUse.Admit(1, DefaultInitiator+".second", time.Time{}))
	require.NoError(t, testtool.Err(s.inUse.HandOver(1)))
	t.Run("after a handover", func(t *testing.T) { refused(t, second, first, third) })
	t.Run("the owner itself", func(t *testing.T) {
		for _, function := range functions[:3] {
			manageAll(t, second, pdu.TMComplete, function)
		}
		attentions(t, second, 1)
		attentions(t, second, 2)
	})
	t.Run("nobody's", func(t *testing.T) {
		require.NoError(t, testtool.Err(second.Logout(pdu.LogoutCloseSession)))
		manageAll(t, first, pdu.TMAuthorizationFailed, pdu.TMLogicalUnitReset)
		manageAll(t, third, pdu.TMComplete, pdu.TMLogicalUnitReset)
	})
	t.Run("opened again by a handover", func(t *testing.T) {
		require.NoError(t, s.inUse.Admit(1, DefaultInitiator+".first", time.Time{}))
		manageAll(t, first, pdu.TMComplete, pdu.TMLogicalUnitReset)
		attentions(t, first, 1)
		first.MustGood(t, Write10(1, 0, data))
	})
}
