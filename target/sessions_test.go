package target_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

func TestReinstatement(t *testing.T) {
	s := start(t, withCHAP())
	o := LoginOptions{CHAP: good(), ISID: [6]byte{0x80, 5}}
	t.Run("6.3.5/the old session ends, its tasks die, and the new one works", func(t *testing.T) {
		old := s.login(t, LoginOptions{CHAP: good(), ISID: o.ISID, Keys: solicited.Keys})
		sn := s.login(t, LoginOptions{CHAP: good(), ISID: [6]byte{0x80, 6}})
		before := sn.MustGood(t, Read10(1, 0, 8)).Data
		task, r2t := waiting(t, old, 1, 0, pattern(8*BlockSize, 1))
		fresh := MustLogin(t, s.addr, o)
		require.NotEqual(t, old.TSIH, fresh.TSIH)
		require.NoError(t, old.ExpectClosed(), "it ends without an answer for the task")
		_ = task.Answer(r2t)
		require.NotEmpty(t, attentions(t, fresh, 1), "6.3.5.1: the nexus was lost")
		fresh.MustGood(t, TestUnitReady(1))
		require.Equal(t, before, fresh.MustGood(t, Read10(1, 0, 8)).Data)
		sn.MustGood(t, TestUnitReady(1))
		require.Empty(t, attentions(t, sn, 1), "other sessions are not affected")
	})
	t.Run("6.3.5/a task that hangs in the disk", func(t *testing.T) {
		old := s.login(t, o)
		release, hangs := s.stall(t, disktest.OpWrite)
		old.MustStart(t, Write10(1, 0, pattern(8*BlockSize, 1)))
		hangs(1)
		fresh := MustLogin(t, s.addr, o)
		require.NoError(t, old.ExpectClosed())
		attentions(t, fresh, 1)
		release()
		data := pattern(8*BlockSize, 2)
		fresh.MustGood(t, Write10(1, 0, data)) // a write of the old session must not come later
		require.Equal(t, data, fresh.MustGood(t, Read10(1, 0, 8)).Data)
	})
	t.Run("6.3.5/not before the new session has authenticated", func(t *testing.T) {
		old := s.login(t, o)
		s.refused(t, LoginOptions{CHAP: &CHAP{Username: user, Password: "not the password"},
			ISID: o.ISID}, 0x0201)
		s.refused(t, LoginOptions{ISID: o.ISID}, 0x0201)
		c := MustDial(t, s.addr)
		require.NoError(t, testtool.Err(c.LoginStep(LoginID{ISID: o.ISID, Tag: 1},
			LoginPDU{CSG: StageSecurity, NSG: StageOperational,
				Keys: append(names(), KV("AuthMethod", "CHAP", "CHAP_A", "5")...)})))
		old.MustGood(t, TestUnitReady(1))
		// Nor before the login is complete.
		s.refused(t, LoginOptions{CHAP: good(), ISID: o.ISID, Edit: func(_ int, p *LoginPDU) {
			if p.CSG == StageOperational {
				p.CSG = StageReserved
			}
		}}, 0x0200)
		old.MustGood(t, TestUnitReady(1))
	})
	t.Run("6.3.1/another name or identifier is another session", func(t *testing.T) {
		first := s.login(t, o)
		second := s.login(t, LoginOptions{CHAP: good(), ISID: [6]byte{0x80, 5, 0, 0, 0, 1}})
		third := s.login(t, LoginOptions{CHAP: good(), ISID: o.ISID, Initiator: other.Initiator})
		require.Len(t, map[uint16]bool{first.TSIH: true, second.TSIH: true, third.TSIH: true}, 3)
		for _, sess := range []*Session{first, second, third} {
			sess.MustGood(t, TestUnitReady(1))
		}
	})
	t.Run("4.2.7/a name in another case is the same initiator", func(t *testing.T) {
		old := s.login(t, o)
		s.login(t, LoginOptions{CHAP: good(), ISID: o.ISID,
			Initiator: strings.ToUpper(DefaultInitiator[:4]) + DefaultInitiator[4:]})
		require.NoError(t, old.ExpectClosed())
	})
	testtool.Eventually(t,
		func() bool { return s.seen.count("ended reinstated") > 0 }, "the log says why")
}

func TestSessions(t *testing.T) {
	s := start(t, withCHAP())
	sess := s.login(t, LoginOptions{CHAP: good(), ISID: [6]byte{0x80, 1, 2, 3, 4, 5},
		HeaderDigest: true, Keys: KV("InitiatorAlias", "vm-1")})
	list := s.Sessions()
	require.Len(t, list, 1)
	info := list[0]
	require.Equal(t, DefaultInitiator, info.Initiator)
	require.Equal(t, "vm-1", info.Alias)
	require.Equal(t, user, info.User)
	require.Equal(t, "800102030405", info.ISID)
	require.Equal(t, sess.TSIH, info.TSIH)
	require.Equal(t, sess.LocalAddr().String(), info.Remote)
	require.True(t, info.HeaderDigest)
	require.False(t, info.DataDigest)
	require.False(t, info.Discovery)
	require.Zero(t, info.InFlight)

	t.Run("a connection that breaks ends its session and frees its tasks", func(t *testing.T) {
		release, hangs := s.stall(t, disktest.OpRead)
		for range 10 {
			sess.MustStart(t, Read10(1, 0, 8))
		}
		hangs(1)
		testtool.Eventually(t,
			func() bool { return s.Sessions()[0].InFlight > 0 }, "they are in flight")
		require.NoError(t, sess.Reset())
		testtool.Eventually(t, func() bool { return len(s.Sessions()) == 0 }, "the session ends")
		release()
	})
	require.Equal(t, 1, s.seen.count("accepted"))
}

// TestReplacedCredential checks that sessions go on when the credential is replaced, and that their
// initiators can come back with the new one. The new user may also reinstate a session of the old
// one, whose connection may be broken without the target knowing.
func TestReplacedCredential(t *testing.T) {
	var auth *chap.Authenticator
	s := start(t, withCHAP(), func(o *options) { auth = o.Auth })
	sess := s.login(t, LoginOptions{CHAP: good()})
	secret := chap.NewSecret(targetPassword)
	next := chap.Credential{Username: "next", Secret: secret}
	require.NoError(t, auth.Replace(chap.Config{Initiator: next}))
	sess.MustGood(t, TestUnitReady(1))
	s.refused(t, LoginOptions{CHAP: good()}, 0x0201)
	sess.MustGood(t, TestUnitReady(1))
	again := s.login(t, LoginOptions{CHAP: &CHAP{Username: "next", Password: targetPassword}})
	again.MustGood(t, TestUnitReady(1))
	require.Len(t, s.Sessions(), 1, "the new session has reinstated the old one")
	require.Equal(t, "next", s.Sessions()[0].User)
}

// TestPeerThatDoesNotRead checks that a peer that does not read is dropped and delays nobody.
func TestPeerThatDoesNotRead(t *testing.T) {
	t.Parallel() // it mostly waits
	s := start(t, limits(target.Limits{PDUTimeout: 400 * time.Millisecond}))
	sess := s.login(t, LoginOptions{Keys: KV("MaxRecvDataSegmentLength", "262144")})
	neighbour := s.login(t, other)
	for range 100 {
		cmd, _, _ := sess.Prepare(Read10(1, 0, 4096))
		if sess.Send(&cmd, nil) != nil {
			break
		}
	}
	for range 20 {
		neighbour.MustGood(t, Read10(1, 0, 8))
	}
	testtool.Eventually(t, func() bool { return s.seen.count("ended timeout") > 0 }, "it is let go")
	neighbour.MustGood(t, TestUnitReady(1))
	require.Len(t, s.Sessions(), 1)
	require.NoError(t, neighbour.Send(&pdu.NOPOut{Immediate: true, TaskTag: pdu.ReservedTag,
		TransferTag: pdu.ReservedTag, CmdSN: neighbour.CmdSN}, nil))
}

// TestJoiningTellsNothingBeforeAuthentication logs in with the TSIH of an existing session, and
// with others. Until the initiator has authenticated, the answers are the same, including the
// refusal of a wrong secret. Only afterwards do they differ.
func TestJoiningTellsNothingBeforeAuthentication(t *testing.T) {
	s := start(t, withCHAP())
	sess := s.login(t, LoginOptions{CHAP: good(), ISID: [6]byte{0x80, 3}})
	finder := LoginOptions{CHAP: good(), Discovery: true, ISID: [6]byte{0x80, 4}}
	discovery := testtool.Must(Login(s.addr, finder))(t)
	for _, c := range []struct {
		name   string
		id     LoginID
		as     LoginOptions
		status uint16 // once authenticated
	}{
		{"a session", LoginID{ISID: sess.ISID, TSIH: sess.TSIH}, LoginOptions{}, 0x0206},
		{"another handle", LoginID{ISID: sess.ISID, TSIH: sess.TSIH + 77}, LoginOptions{}, 0x020a},
		{"another identifier", LoginID{ISID: [6]byte{0x80, 9}, TSIH: sess.TSIH}, LoginOptions{},
			0x020a},
		{"another initiator", LoginID{ISID: sess.ISID, TSIH: sess.TSIH}, other, 0x020a},
		{"a discovery session", LoginID{ISID: discovery.ISID, TSIH: discovery.TSIH}, finder,
			0x0206},
		{"no discovery session", LoginID{ISID: discovery.ISID, TSIH: sess.TSIH}, finder, 0x020a},
	} {
		t.Run("6.3.1/"+c.name, func(t *testing.T) {
			c.as.ISID, c.as.TSIH = c.id.ISID, c.id.TSIH
			for chap, status := range map[*CHAP]uint16{
				{Username: user, Password: "a wrong password"}: 0x0201,
				{Username: "nobody", Password: password}:       0x0201,
				good():                                         c.status,
			} {
				c.as.CHAP = chap
				s.refused(t, c.as, status)
			}
			c.as.CHAP = nil
			s.refused(t, c.as, 0x0201)
			c.as.WithSecurity = true
			s.refused(t, c.as, 0x0201)
			sess.MustGood(t, TestUnitReady(1))
		})
	}
	require.NoError(t, testtool.Err(discovery.Logout(pdu.LogoutCloseSession)))
}

// TestJoiningIsRefusedWithoutAuthentication does the same on a target without authentication, in
// both stages. It answers at once.
func TestJoiningIsRefusedWithoutAuthentication(t *testing.T) {
	s := start(t)
	sess := s.login(t, LoginOptions{ISID: [6]byte{0x80, 3}})
	for _, o := range []LoginOptions{{}, {WithSecurity: true}} {
		o.ISID, o.TSIH = sess.ISID, sess.TSIH
		s.refused(t, o, 0x0206)
		o.TSIH += 77
		s.refused(t, o, 0x020a)
	}
	sess.MustGood(t, TestUnitReady(1))
}

// TestLoginThatNobodyWaitsFor closes the connection after the last request of a login. A session
// whose end is counted has been counted, too: metrics subtract one from the other.
func TestLoginThatNobodyWaitsFor(t *testing.T) {
	l := newPipes()
	s := startOn(t, l)
	nc := l.dial()
	require.NoError(t, NewConn(nc).SendLogin(LoginID{ISID: [6]byte{0x80}, Tag: 1},
		LoginPDU{Transit: true, CSG: StageOperational, NSG: StageFull, Keys: names()}))
	require.NoError(t, nc.Close())
	testtool.Eventually(t, func() bool { return s.seen.count("ended") == 1 }, "the session ends")
	testtool.Eventually(t, func() bool {
		all, _ := s.Connections()
		return all == 0
	}, "the connection ends")
	require.Equal(t, 1, s.seen.count("accepted"))
	require.Zero(t, s.seen.count("refused"))
}
