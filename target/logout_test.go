package target_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

func TestLogout(t *testing.T) {
	s := start(t)
	for name, reason := range map[string]pdu.LogoutReason{"session": pdu.LogoutCloseSession,
		"connection": pdu.LogoutCloseConnection} {
		t.Run("11.14/"+name, func(t *testing.T) {
			sess := s.login(t, LoginOptions{CID: 7})
			require.Equal(t, pdu.LogoutSuccess, testtool.Must(sess.Logout(reason))(t).Response)
			require.NoError(t, sess.ExpectClosed())
			testtool.Eventually(t,
				func() bool { return len(s.Sessions()) == 0 }, "the session is gone")
		})
		t.Run("11.14/"+name+" ends what is pending without an answer",
			func(t *testing.T) {
				sess := s.login(t, solicited)
				_, _ = waiting(t, sess, 1, 0, pattern(8*BlockSize, 1))
				require.Equal(t, pdu.LogoutSuccess, testtool.Must(sess.Logout(reason))(t).Response)
				require.NoError(t, sess.ExpectClosed())
			})
		t.Run("11.14/"+name+" while a command hangs in the disk", func(t *testing.T) {
			sess := s.login(t, LoginOptions{})
			release, hangs := s.stall(t, disktest.OpRead)
			sess.Forget(sess.MustStart(t, Read10(1, 0, 8)))
			hangs(1)
			require.Equal(t, pdu.LogoutSuccess, testtool.Must(sess.Logout(reason))(t).Response)
			require.NoError(t, sess.ExpectClosed())
			release()
		})
	}
	t.Run("11.14/in turn, not immediate", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		tag := sess.NewTag()
		require.NoError(t, sess.Send(&pdu.LogoutRequest{TaskTag: tag, CmdSN: sess.CmdSN,
			ExpStatSN: sess.ExpStatSN}, nil))
		r, _ := testtool.Must2(Expect[pdu.LogoutResponse](sess.Conn))(t)
		require.Equal(t, pdu.LogoutSuccess, r.Response)
		require.Equal(t, sess.CmdSN+1, r.ExpCmdSN)
		require.NoError(t, sess.ExpectClosed())
	})
	t.Run("11.15.1/a connection that is not of this session", func(t *testing.T) {
		sess := s.login(t, LoginOptions{CID: 7})
		r := testtool.Must(sess.LogoutCID(pdu.LogoutCloseConnection, 8))(t)
		require.Equal(t, pdu.LogoutCIDNotFound, r.Response)
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("11.15.1/closing the session ignores the connection identifier", func(t *testing.T) {
		sess := s.login(t, LoginOptions{CID: 7})
		r := testtool.Must(sess.LogoutCID(pdu.LogoutCloseSession, 8))(t)
		require.Equal(t, pdu.LogoutSuccess, r.Response)
		require.NoError(t, sess.ExpectClosed())
	})
	t.Run("11.15.1/no recovery of a connection at level 0", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		r := testtool.Must(sess.Logout(pdu.LogoutRemoveConnection))(t)
		require.Equal(t, pdu.LogoutRecoveryNotSupported, r.Response)
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("11.14.1/a reason that does not exist", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		_, err := sess.Logout(9)
		reason, rejected := ReasonOf(err)
		require.True(t, rejected, "%v", err)
		require.Contains(t, []pdu.RejectReason{pdu.RejectInvalidPDUField, pdu.RejectProtocolError},
			reason)
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("11.14/another session is not touched", func(t *testing.T) {
		sess, neighbour := s.login(t, LoginOptions{}), s.login(t, other)
		require.NoError(t, testtool.Err(sess.Logout(pdu.LogoutCloseSession)))
		neighbour.MustGood(t, TestUnitReady(1))
		require.Empty(t, attentions(t, neighbour, 1))
	})
	require.NotZero(t, s.seen.count("ended logout"))
}

func TestShutdown(t *testing.T) {
	t.Parallel() // it mostly waits
	t.Run("11.9.1/an idle initiator is asked to log out", func(t *testing.T) {
		s := start(t)
		sess, discovery := s.login(t, LoginOptions{}),
			MustLogin(t, s.addr, LoginOptions{Discovery: true})
		stopped := s.shutdown(time.Minute)
		m := testtool.Must(sess.AwaitAsync())(t)
		require.Equal(t, pdu.AsyncLogoutRequest, m.Event)
		require.NotZero(t, m.Parameter3, "the time for the logout in seconds")
		require.NoError(t, testtool.Err(sess.Logout(pdu.LogoutCloseSession)))
		require.NoError(t, sess.ExpectClosed())
		require.NoError(t, <-stopped)
		require.ErrorIs(t, <-s.served, target.ErrServerClosed)
		require.NoError(t, testtool.Err(discovery.ExpectClosedAfter()))
		require.Error(t, testtool.Err(Dial(s.addr)))
	})
	t.Run("11.9.1/commands in flight end, and acknowledged data is written", func(t *testing.T) {
		s := start(t)
		sess := s.login(t, LoginOptions{})
		release, hangs := s.stall(t, disktest.OpWrite)
		data := pattern(8*BlockSize, 5)
		task := sess.MustStart(t, Write10(1, 0, data))
		hangs(1)
		stopped := s.shutdown(time.Minute)
		require.NoError(t, testtool.Err(sess.AwaitAsync()))
		require.Error(t, testtool.Err(Login(s.addr, other)), "nobody logs in any more")
		release()
		require.True(t, task.MustFinish(t).Good())
		got := make([]byte, len(data))
		require.NoError(t, testtool.Err(s.disks[0].ReadAt(t.Context(), got, 0)))
		require.Equal(t, data, got)
		require.NoError(t, testtool.Err(sess.Logout(pdu.LogoutCloseSession)))
		require.NoError(t, <-stopped)
	})
	t.Run("11.9.1/a command that takes longer than the time for a logout", func(t *testing.T) {
		s := start(t)
		sess := s.login(t, LoginOptions{})
		release, hangs := s.stall(t, disktest.OpWrite)
		task := sess.MustStart(t, Write10(1, 0, pattern(8*BlockSize, 5)))
		hangs(1)
		stopped := s.shutdown(time.Minute)
		m := testtool.Must(sess.AwaitAsync())(t)
		time.Sleep(time.Duration(m.Parameter3)*time.Second + 1500*time.Millisecond)
		release()
		require.True(t, task.MustFinish(t).Good())
		require.NoError(t, testtool.Err(sess.ExpectClosedAfter()))
		require.NoError(t, <-stopped)
	})
	t.Run("11.9.1/an initiator that ignores the request is cut off", func(t *testing.T) {
		s := start(t)
		sess := s.login(t, LoginOptions{})
		stopped := s.shutdown(time.Minute)
		require.NoError(t, testtool.Err(sess.AwaitAsync()))
		require.NoError(t, testtool.Err(sess.ExpectClosedAfter()))
		require.NoError(t, <-stopped)
	})
	t.Run("11.9.1/an initiator that is never idle gets an answer to every command",
		func(t *testing.T) {
			s := start(t)
			sess := s.login(t, LoginOptions{})
			stopped := s.shutdown(time.Minute)
			open := func() bool { return !pdu.SNLess(sess.MaxCmdSN, sess.CmdSN) }
			var tasks []*Task
			for begin := time.Now(); open() &&
				time.Since(begin) < 15*time.Second; tasks = tasks[1:] {
				for len(tasks) < 32 && open() {
					tasks = append(tasks, sess.MustStart(t, Write10(1, 0, pattern(8*BlockSize, 5))))
				}
				require.True(t, tasks[0].MustFinish(t).Good())
			}
			for _, task := range tasks {
				require.True(t, task.MustFinish(t).Good())
			}
			require.NoError(t, testtool.Err(sess.ExpectClosedAfter()))
			require.NoError(t, <-stopped)
		})
	t.Run("11.9.1/an initiator that is gone while it sends data does not delay the end",
		func(t *testing.T) {
			s := start(t)
			sess := s.login(t, solicited)
			waiting(t, sess, 1, 0, pattern(8*BlockSize, 5))
			stopped := s.shutdown(time.Minute)
			require.NoError(t, testtool.Err(sess.ExpectClosedAfter()))
			require.NoError(t, <-stopped)
		})
	t.Run("11.9.1/an initiator that is gone and takes no data does not delay the end",
		func(t *testing.T) {
			s := start(t)
			sess := s.login(t, LoginOptions{})
			for range 60 {
				sess.MustStart(t, Read10(1, 0, 8192))
			}
			testtool.Eventually(t, func() bool {
				before := s.disks[0].Calls(disktest.OpRead)
				time.Sleep(50 * time.Millisecond)
				return before > 0 && s.disks[0].Calls(disktest.OpRead) == before
			}, "no more is sent")
			require.NoError(t, <-s.shutdown(time.Minute))
		})
	t.Run("11.9.1/a disk that hangs does not delay the end for ever", func(t *testing.T) {
		s := start(t)
		sess := s.login(t, LoginOptions{})
		release, hangs := s.stall(t, disktest.OpRead)
		sess.MustStart(t, Read10(1, 0, 8))
		hangs(1)
		require.ErrorIs(t, <-s.shutdown(300*time.Millisecond), context.DeadlineExceeded)
		require.NoError(t, testtool.Err(sess.ExpectClosedAfter()))
		release()
	})
	t.Run("11.9.1/a login in progress", func(t *testing.T) {
		s := start(t)
		c := MustDial(t, s.addr)
		_, err := c.LoginStep(loginID, LoginPDU{CSG: StageOperational, Keys: names()})
		require.NoError(t, err)
		require.NoError(t, <-s.shutdown(time.Minute))
		require.NoError(t, c.ExpectClosed())
	})
}

func TestReservationEndsBeforeLogoutIsAnswered(t *testing.T) {
	s := start(t)
	second := s.login(t, other)
	for range 20 {
		holder := s.login(t, LoginOptions{Initiator: DefaultInitiator + ".holder",
			ISID: [6]byte{0x80, 7}})
		holder.MustGood(t, Reserve6(1))
		second.MustFail(t, Read10(1, 0, 1), "status 0x18")
		require.NoError(t, testtool.Err(holder.Logout(pdu.LogoutCloseSession)))
		second.MustGood(t, Read10(1, 0, 1))
	}
}

// TestClosedConnectionIsSeenAtTheNextLogin checks that an initiator that loses its connection and
// logs in at once with another ISID is not blocked by its own claims.
func TestClosedConnectionIsSeenAtTheNextLogin(t *testing.T) {
	s := start(t)
	for i := range 50 {
		o := LoginOptions{Initiator: DefaultInitiator + ".holder", ISID: [6]byte{0x80, byte(i)}}
		holder := s.login(t, o)
		holder.MustGood(t, Reserve6(1))
		require.NoError(t, holder.Close())
	}
	s.login(t, LoginOptions{Initiator: DefaultInitiator + ".holder",
		ISID: [6]byte{0x80, 99}}).MustGood(t, Read10(1, 0, 1))
}
