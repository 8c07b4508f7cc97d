package target_test

import (
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

var discovery = LoginOptions{Discovery: true}

func TestSendTargets(t *testing.T) {
	s := start(t)
	record := KV("TargetName", DefaultTarget, "TargetAddress", s.addr.String()+",1")
	t.Run("App. C/All", func(t *testing.T) {
		sess := MustLogin(t, s.addr, discovery)
		for range 3 { // as often as it likes
			require.Equal(t, record, testtool.Must(sess.Text(KV("SendTargets", "All")))(t))
		}
		r := testtool.Must(sess.Logout(pdu.LogoutCloseSession))(t)
		require.Equal(t, pdu.LogoutSuccess, r.Response)
		require.NoError(t, sess.ExpectClosed())
	})
	t.Run("App. C/by name, in any letters", func(t *testing.T) {
		sess := MustLogin(t, s.addr, discovery)
		for _, name := range []string{DefaultTarget, strings.ToUpper(DefaultTarget)} {
			require.Equal(t, record, testtool.Must(sess.Text(KV("SendTargets", name)))(t))
		}
		got := testtool.Must(sess.Text(KV("SendTargets", "iqn.2017-01.io.kubevirt:other")))(t)
		require.Empty(t, got)
	})
	t.Run("App. C/on a normal session, its own target", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		got := testtool.Must(sess.Text(KV("SendTargets", "")))(t)
		require.Equal(t, record, got)
		got = testtool.Must(sess.Text(KV("SendTargets", "All")))(t)
		require.Empty(t, got, "All must not be supported in a normal session")
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("13.8/every portal, IPv6 in brackets", func(t *testing.T) {
		s := start(t)
		second, err := net.Listen("tcp", "[::1]:0")
		if err != nil {
			t.Skip("this machine has no IPv6")
		}
		go func() { _ = s.Serve(second) }()
		var got Keys
		testtool.Eventually(t, func() bool {
			sess := testtool.Must(Login(s.addr, discovery))(t)
			defer sess.Close()
			got = testtool.Must(sess.Text(KV("SendTargets", "All")))(t)
			return len(got) == 3
		}, "the second portal shows")
		require.Equal(t, KV("TargetName", DefaultTarget, "TargetAddress", s.addr.String()+",1",
			"TargetAddress", second.Addr().String()+",1"), got)
		require.True(t, strings.HasPrefix(got[2].Value, "[::1]:"))
		sess := MustLogin(t, second.Addr(), LoginOptions{}, 1)
		got = testtool.Must(sess.Text(KV("SendTargets", "")))(t)
		require.Equal(t, second.Addr().String()+",1", got.Get("TargetAddress"),
			"the portal of the connection comes first")
	})
	t.Run("App. C/no portal: that of the connection", func(t *testing.T) {
		s := start(t, func(o *options) { o.HidePortals = true })
		got := testtool.Must(MustLogin(t, s.addr, discovery).Text(KV("SendTargets", "All")))(t)
		require.Equal(t, KV("TargetName", DefaultTarget), got)
		got = testtool.Must(s.login(t, LoginOptions{}).Text(KV("SendTargets", "")))(t)
		require.Equal(t, KV("TargetName", DefaultTarget), got)
	})
	t.Run("11.10.4/a long answer continues by its transfer tag", func(t *testing.T) {
		// It takes many portals to make an answer of more than 512 bytes.
		s := start(t)
		for range 30 {
			l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
			go func() { _ = s.Serve(l) }()
		}
		o := discovery
		o.Keys = KV("MaxRecvDataSegmentLength", "512")
		testtool.Eventually(t, func() bool {
			sess := testtool.Must(Login(s.addr, o))(t)
			defer sess.Close()
			got := testtool.Must(sess.Text(KV("SendTargets", "All")))(t)
			return len(got.All("TargetAddress")) == 31
		}, "all portals show")

		sess := MustLogin(t, s.addr, o)
		begin := func(tag uint32) uint32 {
			r, data := testtool.Must2(exchange(t, sess, pdu.TextRequest{Final: true, TaskTag: tag,
				TransferTag: pdu.ReservedTag}, KV("SendTargets", "All").Text()))(t)
			require.False(t, r.Final)
			require.Len(t, data, 512)
			return r.TransferTag
		}
		next := func(tag, transfer uint32) error {
			_, _, err := exchange(t, sess,
				pdu.TextRequest{Final: true, TaskTag: tag, TransferTag: transfer}, nil)
			return err
		}
		first := begin(100)
		require.NoError(t, next(100, first))
		_, rejected := ReasonOf(next(100, first))
		require.True(t, rejected, "a stale tag")
		first = begin(101)
		begin(102) // a new request ends the old exchange
		_, rejected = ReasonOf(next(101, first))
		require.True(t, rejected)
		got := testtool.Must(sess.Text(KV("SendTargets", "All")))(t)
		require.Len(t, got.All("TargetAddress"), 31)
	})
	s.works(t)
}

// exchange sends a Text Request, and receives the answer.
func exchange(t *testing.T, sess *Session, r pdu.TextRequest, text []byte) (pdu.TextResponse,
	[]byte, error) {
	t.Helper()
	r.CmdSN, r.ExpStatSN = sess.CmdSN, sess.ExpStatSN
	require.NoError(t, sess.Send(&r, text))
	sess.CmdSN++
	return Expect[pdu.TextResponse](sess.Conn)
}

func TestTextRequests(t *testing.T) {
	s := start(t)
	sess := s.login(t, LoginOptions{})
	t.Run("13.12/MaxRecvDataSegmentLength again", func(t *testing.T) {
		sess.MustGood(t, Write10(1, 0, pattern(64*BlockSize, 1)))
		require.NoError(t, testtool.Err(sess.Text(KV("MaxRecvDataSegmentLength", "1024"))))
		sess.Params.MaxReceive = 1024
		require.Equal(t, pattern(64*BlockSize, 1), sess.MustGood(t, Read10(1, 0, 64)).Data)
	})
	t.Run("6.2/an unknown key", func(t *testing.T) {
		got := testtool.Must(sess.Text(KV("X-com.example.key", "1")))(t)
		require.Equal(t, "NotUnderstood", got.Get("X-com.example.key"))
	})
	t.Run("6.4/a key twice in one negotiation of two requests", func(t *testing.T) {
		tag, transfer := sess.NewTag(), pdu.ReservedTag
		for i := range 2 {
			r, _, err := exchange(t, sess, pdu.TextRequest{Final: i == 1, TaskTag: tag,
				TransferTag: transfer}, KV("X-com.example.key", "1").Text())
			if i == 0 {
				require.NoError(t, err)
				require.False(t, r.Final)
				transfer = r.TransferTag
				continue
			}
			reason, _ := ReasonOf(err)
			require.Equal(t, pdu.RejectProtocolError, reason, "%v", err)
		}
	})
	t.Run("6.1/a continued text", func(t *testing.T) {
		text := KV("SendTargets", "").Text()
		tag := sess.NewTag()
		transfer := pdu.ReservedTag
		for i := range text {
			last := i == len(text)-1
			r, data, err := exchange(t, sess, pdu.TextRequest{Final: last, Continue: !last,
				TaskTag: tag, TransferTag: transfer}, text[i:i+1])
			require.NoError(t, err)
			if !last {
				require.Empty(t, data)
				require.False(t, r.Final)
				transfer = r.TransferTag
				continue
			}
			require.True(t, r.Final)
			require.Equal(t, DefaultTarget, testtool.Must(ParseText(data))(t).Get("TargetName"))
		}
	})
	t.Run("6.1/a text without end is refused", func(t *testing.T) {
		tag := sess.NewTag()
		transfer := pdu.ReservedTag
		for range 64 {
			r, _, err := exchange(t, sess, pdu.TextRequest{Continue: true, TaskTag: tag,
				TransferTag: transfer}, make([]byte, 8192))
			if _, rejected := ReasonOf(err); rejected {
				sess.MustGood(t, TestUnitReady(1))
				return
			}
			require.NoError(t, err)
			transfer = r.TransferTag
		}
		t.Fatal("the target takes 512 KiB of text")
	})
	s.works(t)
}

func TestDiscoverySession(t *testing.T) {
	s := start(t)
	messages := func(sn, tag uint32) map[string]Message {
		return map[string]Message{
			"SCSI Command": &pdu.SCSICommand{Final: true, TaskTag: tag, LUN: LUN(1), CmdSN: sn},
			"Task Management Request": &pdu.TaskManagementRequest{Immediate: true,
				Function: pdu.TMTargetColdReset, TaskTag: tag, CmdSN: sn},
			"NOP-Out": &pdu.NOPOut{Immediate: true, TaskTag: tag, TransferTag: pdu.ReservedTag,
				CmdSN: sn},
			"SNACK Request": snack(tag),
			"Text Request without SendTargets": &pdu.TextRequest{Immediate: true, Final: true,
				TaskTag: tag, TransferTag: pdu.ReservedTag, CmdSN: sn},
			"Logout Request that closes a connection": &pdu.LogoutRequest{Immediate: true,
				Reason: pdu.LogoutCloseConnection, TaskTag: tag, CmdSN: sn},
			"Data-Out": &pdu.DataOut{Final: true, TaskTag: tag, TransferTag: 1},
		}
	}
	for name := range messages(0, 0) {
		t.Run("13.21/no "+name, func(t *testing.T) {
			bystander := s.login(t, other)
			sess := MustLogin(t, s.addr, discovery)
			tag := sess.NewTag()
			var data []byte
			if strings.HasPrefix(name, "Text") {
				data = KV("MaxRecvDataSegmentLength", "8192").Text()
			}
			require.NoError(t, sess.Send(messages(sess.CmdSN, tag)[name], data))
			require.NotZero(t, testtool.Must(sess.AwaitReject(tag))(t).Reason)
			require.NotEmpty(t, testtool.Must(sess.Text(KV("SendTargets", "All")))(t))
			bystander.MustGood(t, TestUnitReady(1))
		})
	}
	t.Run("7.4.2.1/the same initiator, identifier and portal reinstate it", func(t *testing.T) {
		first := MustLogin(t, s.addr, discovery)
		another := MustLogin(t, s.addr, LoginOptions{Discovery: true, ISID: [6]byte{0x80, 0x44}})
		portal := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
		go func() { _ = s.Serve(portal) }()
		elsewhere := MustLogin(t, portal.Addr(), discovery)
		normal := s.login(t, LoginOptions{})
		_, err := first.Text(KV("SendTargets", "All"))
		require.NoError(t, err, "6.3.5: a normal session does not end it")
		require.True(t, slices.ContainsFunc(s.Sessions(),
			func(info status.Session) bool { return info.Discovery }))
		second := MustLogin(t, s.addr, discovery)
		require.NoError(t, first.ExpectClosed())
		for _, sess := range []*Session{another, elsewhere, second} {
			require.NoError(t, testtool.Err(sess.Text(KV("SendTargets", "All"))))
		}
		// The session has the same name and ISID, but discovery does not touch it.
		normal.MustGood(t, TestUnitReady(1))
	})
}
