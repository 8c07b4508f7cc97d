package target_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/target"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

// loginID is common to the Login Requests of these tests.
var loginID = LoginID{ISID: [6]byte{0x80, 1}, Tag: 77, CID: 3}

// names are the keys of a first Login Request.
func names() Keys {
	return KV("InitiatorName", DefaultInitiator, "SessionType", "Normal", "TargetName",
		DefaultTarget)
}

// status sends one Login Request on a fresh connection and checks the status of the answer. A
// refusal must close the connection.
func (s *server) status(t *testing.T, want uint16, p LoginPDU) {
	t.Helper()
	c := MustDial(t, s.addr)
	r, err := c.LoginStep(loginID, p)
	require.NoError(t, err)
	require.Equal(t, fmt.Sprintf("%04x", want), fmt.Sprintf("%04x", r.Status()))
	if want != 0 {
		require.NoError(t, c.ExpectClosed())
	}
}

func TestLoginStages(t *testing.T) {
	s := start(t)
	operational := KV("HeaderDigest", "None")

	t.Run("6.3/operational stage straight to full feature", func(t *testing.T) {
		s.login(t, LoginOptions{}).MustGood(t, TestUnitReady(1))
	})
	t.Run("6.3/security, operational, full feature", func(t *testing.T) {
		s.login(t, LoginOptions{WithSecurity: true}).MustGood(t, TestUnitReady(1))
	})
	t.Run("6.3/security straight to full feature", func(t *testing.T) {
		s.login(t, LoginOptions{StraightToFull: true}).MustGood(t, TestUnitReady(1))
	})
	t.Run("6.3.1/security without any key but the names", func(t *testing.T) {
		c := MustDial(t, s.addr)
		r, err := c.LoginStep(loginID,
			LoginPDU{CSG: StageSecurity, NSG: StageOperational, Transit: true, Keys: names()})
		require.NoError(t, err)
		require.Zero(t, r.Status())
		require.True(t, r.Transit)
		require.Equal(t, StageOperational, r.NSG)
		require.Equal(t, KV("TargetPortalGroupTag", "1"), r.Keys)
	})
	t.Run("6.3.3/operational in several exchanges", func(t *testing.T) {
		c := MustDial(t, s.addr)
		r, err := c.LoginStep(loginID, LoginPDU{CSG: StageOperational, Keys: names()})
		require.NoError(t, err)
		require.False(t, r.Transit)
		r, err = c.LoginStep(loginID, LoginPDU{CSG: StageOperational, Keys: operational})
		require.NoError(t, err)
		require.Equal(t, "None", r.Keys.Get("HeaderDigest"))
		r, err = c.LoginStep(loginID, LoginPDU{CSG: StageOperational, NSG: StageFull, Transit: true,
			Keys: KV("DataDigest", "None")})
		require.NoError(t, err)
		require.True(t, r.Transit)
		require.NotZero(t, r.TSIH)
	})

	// Try every combination of stages and flags in a first request. Only the table's transitions
	// may succeed.
	for csg := range uint8(4) {
		for nsg := range uint8(4) {
			for _, flags := range []struct{ transit, cont bool }{{false, false}, {true, false},
				{false, true}, {true, true}} {
				legal := csg <= 1 && !(flags.transit && flags.cont) &&
					(!flags.transit || nsg > csg && nsg != StageReserved)
				t.Run(fmt.Sprintf("11.12.3/CSG %d NSG %d T %t C %t", csg, nsg, flags.transit,
					flags.cont), func(t *testing.T) {
					want := uint16(0x0200)
					if legal {
						want = 0
					}
					s.status(t, want,
						LoginPDU{CSG: csg, NSG: nsg, Transit: flags.transit, Continue: flags.cont,
							Keys: names()})
				})
			}
		}
	}

	t.Run("6.3/stages never go back", func(t *testing.T) {
		c := MustDial(t, s.addr)
		_, err := c.LoginStep(loginID,
			LoginPDU{CSG: StageSecurity, NSG: StageOperational, Transit: true,
				Keys: append(names(), KV("AuthMethod", "None")...)})
		require.NoError(t, err)
		r, err := c.LoginStep(loginID,
			LoginPDU{CSG: StageSecurity, NSG: StageOperational, Transit: true})
		require.NoError(t, err)
		require.Equal(t, uint16(0x0200), r.Status())
		require.NoError(t, c.ExpectClosed())
	})
	t.Run("6.3/no stage is skipped without its transition", func(t *testing.T) {
		c := MustDial(t, s.addr)
		_, err := c.LoginStep(loginID,
			LoginPDU{CSG: StageSecurity, Keys: append(names(), KV("AuthMethod", "None")...)})
		require.NoError(t, err)
		r, err := c.LoginStep(loginID,
			LoginPDU{CSG: StageOperational, NSG: StageFull, Transit: true, Keys: operational})
		require.NoError(t, err)
		require.Equal(t, uint16(0x0200), r.Status())
	})
	t.Run("6.3/a login request in full feature phase ends the session", func(t *testing.T) {
		sess := s.login(t, LoginOptions{ISID: [6]byte{0x80, 2}})
		require.NoError(t, sess.SendLogin(loginID,
			LoginPDU{CSG: StageOperational, NSG: StageFull, Transit: true, Keys: names()}))
		_, err := sess.ExpectClosedAfter()
		require.NoError(t, err)
	})
	s.works(t)
}

func TestLoginFirstPDU(t *testing.T) {
	s := start(t)
	first := func(keys Keys) LoginPDU {
		return LoginPDU{CSG: StageOperational, NSG: StageFull, Transit: true, Keys: keys}
	}
	for _, tt := range []struct {
		name   string
		keys   Keys
		status uint16
	}{
		{"6.3/no InitiatorName", KV("SessionType", "Normal", "TargetName", DefaultTarget), 0x0207},
		{"6.3/no TargetName in a normal session",
			KV("InitiatorName", DefaultInitiator, "SessionType", "Normal"), 0x0207},
		{"6.3/no TargetName and no SessionType", KV("InitiatorName", DefaultInitiator), 0x0207},
		{"13.21/SessionType defaults to Normal",
			KV("InitiatorName", DefaultInitiator, "TargetName", DefaultTarget), 0},
		{"11.13.5/unknown target",
			KV("InitiatorName", DefaultInitiator, "TargetName", "iqn.2017-01.io.kubevirt:other"),
			0x0203},
		{"11.13.5/a part of the target's name",
			KV("InitiatorName", DefaultInitiator, "TargetName",
				DefaultTarget[:len(DefaultTarget)-1]), 0x0203},
		{"13.21/unknown session type", KV("InitiatorName", DefaultInitiator, "SessionType", "Weird",
			"TargetName", DefaultTarget), 0x0209},
		{"13.5/empty InitiatorName", KV("InitiatorName", "", "TargetName", DefaultTarget), 0x0200},
		{"4.2.7/InitiatorName over 223 bytes",
			KV("InitiatorName", "iqn.2026-01.x:"+string(bytes.Repeat([]byte{'a'}, 210)),
				"TargetName", DefaultTarget), 0x0200},
		{"4.2.7/InitiatorName of 223 bytes",
			KV("InitiatorName", "iqn.2026-01.x:"+string(bytes.Repeat([]byte{'a'}, 209)),
				"TargetName", DefaultTarget), 0},
		{"13.5/InitiatorName twice",
			KV("InitiatorName", DefaultInitiator, "InitiatorName", DefaultInitiator, "TargetName",
				DefaultTarget), 0x0200},
		{"6.3/discovery needs no TargetName",
			KV("InitiatorName", DefaultInitiator, "SessionType", "Discovery"), 0},
	} {
		t.Run(tt.name, func(t *testing.T) { s.status(t, tt.status, first(tt.keys)) })
	}
	t.Run("4.2.7/names in another case are the same name", func(t *testing.T) {
		s.status(t, 0, first(KV("InitiatorName", "IQN.2026-01.test.example:Initiator", "TargetName",
			"IQN.2017-01.io.KUBEVIRT:wrapper")))
	})

	t.Run("11.12.4/version 1 to 1", func(t *testing.T) {
		p := first(names())
		p.Header = func(r *pdu.LoginRequest) { r.VersionMax, r.VersionMin = 1, 1 }
		s.status(t, 0x0205, p)
	})
	t.Run("11.12.4/version 0 to 5", func(t *testing.T) {
		p := first(names())
		p.Header = func(r *pdu.LoginRequest) { r.VersionMax = 5 }
		s.status(t, 0, p)
	})
	t.Run("6.3.1/a TSIH that does not exist", func(t *testing.T) {
		c := MustDial(t, s.addr)
		r, err := c.LoginStep(LoginID{TSIH: 4711, Tag: 1}, first(names()))
		require.NoError(t, err)
		require.Equal(t, uint16(0x020a), r.Status())
		require.NoError(t, c.ExpectClosed())
	})
	t.Run("6.3.1/the TSIH of another initiator's session", func(t *testing.T) {
		sess := s.login(t, LoginOptions{ISID: [6]byte{0x80, 3}})
		for name, id := range map[string]LoginID{DefaultInitiator: {ISID: [6]byte{0x80, 4}},
			other.Initiator: {ISID: sess.ISID}} {
			c := MustDial(t, s.addr)
			id.TSIH, id.CID, id.Tag = sess.TSIH, sess.CID, 1
			r, err := c.LoginStep(id, first(KV("InitiatorName", name, "TargetName", DefaultTarget)))
			require.NoError(t, err)
			require.Equal(t, uint16(0x020a), r.Status())
			require.NoError(t, c.ExpectClosed())
		}
		sess.MustGood(t, TestUnitReady(1))
	})
	t.Run("6.3.1/a second connection for a session", func(t *testing.T) {
		sess := s.login(t, LoginOptions{ISID: [6]byte{0x80, 3}})
		c := MustDial(t, s.addr)
		r, err := c.LoginStep(LoginID{ISID: sess.ISID, TSIH: sess.TSIH, CID: 9, Tag: 1},
			first(names()))
		require.NoError(t, err)
		require.Equal(t, uint16(0x0206), r.Status())
		sess.MustGood(t, TestUnitReady(1)) // the session still works
	})
	for _, tt := range []struct {
		name string
		msg  Message
	}{
		{"NOP-Out", &pdu.NOPOut{Immediate: true, TaskTag: 1, TransferTag: pdu.ReservedTag}},
		{"SCSI Command", &pdu.SCSICommand{Final: true, TaskTag: 1, LUN: LUN(1)}},
		{"Text Request", &pdu.TextRequest{Final: true, TaskTag: 1, TransferTag: pdu.ReservedTag}},
		{"an opcode that does not exist", rawMessage{0: 0x1b}},
	} {
		t.Run("6.3/first PDU is "+tt.name, func(t *testing.T) {
			c := MustDial(t, s.addr)
			require.NoError(t, c.Send(tt.msg, nil))
			require.NoError(t, c.ExpectClosed())
		})
		t.Run("6.3/during login comes "+tt.name, func(t *testing.T) {
			c := MustDial(t, s.addr)
			_, err := c.LoginStep(loginID, LoginPDU{CSG: StageOperational, Keys: names()})
			require.NoError(t, err)
			require.NoError(t, c.Send(tt.msg, nil))
			r, _, err := Expect[pdu.LoginResponse](c)
			require.NoError(t, err)
			require.Equal(t, []uint8{0x02, 0x0b}, []uint8{r.StatusClass, r.StatusDetail})
			require.NoError(t, c.ExpectClosed())
		})
	}
	for _, tt := range []struct {
		name string
		edit func(*pdu.LoginRequest)
	}{
		{"11.12.5/ISID changes", func(r *pdu.LoginRequest) { r.ISID[5]++ }},
		{"11.12.6/TSIH changes", func(r *pdu.LoginRequest) { r.TSIH++ }},
		{"11.12.7/CID changes", func(r *pdu.LoginRequest) { r.CID++ }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := MustDial(t, s.addr)
			_, err := c.LoginStep(loginID, LoginPDU{CSG: StageOperational, Keys: names()})
			require.NoError(t, err)
			require.NoError(t,
				c.SendLogin(loginID, LoginPDU{CSG: StageOperational, NSG: StageFull, Transit: true,
					Header: tt.edit}))
			r, _, err := Expect[pdu.LoginResponse](c)
			require.NoError(t, err)
			require.Equal(t, uint8(2), r.StatusClass)
			require.NoError(t, c.ExpectClosed())
		})
	}
	s.works(t)
}

// rawMessage is a raw header.
type rawMessage pdu.Header

func (m rawMessage) Encode(h *pdu.Header) { *h = pdu.Header(m) }

func TestLoginResponseFields(t *testing.T) {
	s := start(t, func(o *options) { o.PortalGroupTag = 7; o.Alias = "a demo disk" })
	c := MustDial(t, s.addr)
	c.ExpStatSN, c.CmdSN = 1000, 0xfffffff0
	id := LoginID{ISID: [6]byte{0x80, 1}, Tag: 5, CID: 9}

	r, err := c.LoginStep(id, LoginPDU{CSG: StageOperational, Keys: names()})
	require.NoError(t, err)
	require.Equal(t, "7", r.Keys.Get("TargetPortalGroupTag"), "6.3.1: in the first response")
	require.Zero(t, r.TSIH, "11.13.3: only in the final response")
	require.Equal(t, uint32(0xfffffff0), r.ExpCmdSN,
		"11.12.8: a login request is immediate and uses no CmdSN")

	// Conn checks that StatSN goes on from response to response.
	r, err = c.LoginStep(id, LoginPDU{CSG: StageOperational, NSG: StageFull, Transit: true,
		Keys: KV("InitiatorAlias", "tester")})
	require.NoError(t, err)
	require.True(t, r.Transit)
	require.Equal(t, StageFull, r.NSG)
	require.NotZero(t, r.TSIH)
	require.Empty(t, r.Keys.All("TargetPortalGroupTag"), "6.3.1: once")
	require.Equal(t, uint32(0xfffffff0), r.ExpCmdSN)
	require.False(t, pdu.SNLess(r.MaxCmdSN, r.ExpCmdSN), "the window is open")

	require.NoError(t, c.Send(&pdu.NOPOut{TaskTag: 1, TransferTag: pdu.ReservedTag,
		CmdSN: 0xfffffff0, ExpStatSN: c.ExpStatSN}, nil))
	in, _, err := Expect[pdu.NOPIn](c)
	require.NoError(t, err)
	require.Equal(t, uint32(0xfffffff1), in.ExpCmdSN)

	t.Run("6.3.1/TargetPortalGroupTag waits for the whole first text", func(t *testing.T) {
		c := MustDial(t, s.addr)
		text := names().Text()
		r, err := c.LoginStep(id, LoginPDU{CSG: StageOperational, Continue: true, Raw: text[:10]})
		require.NoError(t, err)
		require.Empty(t, r.Keys)
		r, err = c.LoginStep(id, LoginPDU{CSG: StageOperational, Raw: text[10:]})
		require.NoError(t, err)
		require.Equal(t, "7", r.Keys.Get("TargetPortalGroupTag"))
	})
	t.Run("13.6/TargetAlias", func(t *testing.T) {
		sess := s.login(t, LoginOptions{})
		require.Equal(t, "a demo disk", sess.Answers.Get("TargetAlias"))
	})
}

func TestLoginText(t *testing.T) {
	s := start(t)
	text := append(names(), KV("HeaderDigest", "None", "X-com.example.test", "1")...).Text()
	final := func(c *Conn, raw []byte) (*LoginReply, error) {
		return c.LoginStep(loginID, LoginPDU{CSG: StageOperational, NSG: StageFull, Transit: true,
			Raw: raw})
	}
	t.Run("6.1/a text may be split at any byte", func(t *testing.T) {
		for at := 1; at < len(text); at++ {
			c := MustDial(t, s.addr)
			r, err := c.LoginStep(loginID,
				LoginPDU{CSG: StageOperational, Continue: true, Raw: text[:at]})
			require.NoError(t, err)
			require.Zero(t, r.Status())
			r, err = final(c, text[at:])
			require.NoError(t, err, "split at %d", at)
			require.Zero(t, r.Status())
			require.Equal(t, "NotUnderstood", r.Keys.Get("X-com.example.test"))
			require.NoError(t, c.Close())
		}
	})
	t.Run("6.1/one byte a PDU", func(t *testing.T) {
		c := MustDial(t, s.addr)
		for _, b := range text[:len(text)-1] {
			_, err := c.LoginStep(loginID,
				LoginPDU{CSG: StageOperational, Continue: true, Raw: []byte{b}})
			require.NoError(t, err)
		}
		r, err := final(c, text[len(text)-1:])
		require.NoError(t, err)
		require.True(t, r.Transit)
	})
	t.Run("6.1/at least 8192 bytes of keys", func(t *testing.T) {
		keys := names()
		for len(keys.Text()) < 8192-200 {
			keys = append(keys, KV(fmt.Sprintf("X-com.example.k%d", len(keys)),
				strings.Repeat("v", 100))...)
		}
		pad := 8192 - len(keys.Text()) - len("X-com.example.last=") - 1
		keys = append(keys, KV("X-com.example.last", strings.Repeat("v", pad))...)
		require.Len(t, keys.Text(), 8192)
		c := MustDial(t, s.addr)
		r, err := final(c, keys.Text())
		require.NoError(t, err)
		require.Zero(t, r.Status())
		require.Equal(t, "NotUnderstood", r.Keys.Get("X-com.example.last"))
	})
	t.Run("6.1/a text without end is refused", func(t *testing.T) {
		c := MustDial(t, s.addr)
		part := bytes.Repeat([]byte{'x'}, 8192)
		for range 64 {
			r, err := c.LoginStep(loginID,
				LoginPDU{CSG: StageOperational, Continue: true, Raw: part})
			require.NoError(t, err)
			if r.StatusClass != 0 {
				require.Equal(t, uint8(2), r.StatusClass)
				require.NoError(t, c.ExpectClosed())
				return
			}
		}
		t.Fatal("the target takes 512 KiB of login text")
	})
	t.Run("6.3/a data segment over 8192 bytes", func(t *testing.T) {
		c := MustDial(t, s.addr)
		require.NoError(t, c.SendLogin(loginID,
			LoginPDU{CSG: StageOperational, Raw: bytes.Repeat([]byte{'x'}, 8193)}))
		_, err := c.ExpectClosedAfter()
		require.NoError(t, err)
	})

	for _, tt := range []struct {
		name, more string
		status     uint16
	}{
		{"6.1/pair without NUL at the end", "HeaderDigest=None", 0x0200},
		{"6.1/pair without =", "HeaderDigest\x00", 0x0200},
		{"6.1/empty key", "=None\x00", 0x0200},
		{"6.1/value may hold =", "X-com.example.a=b=c\x00", 0},
		{"6.1/key of 63 characters", "X-" + string(bytes.Repeat([]byte{'k'}, 61)) + "=1\x00", 0},
		{"6.1/key of 64 characters", "X-" + string(bytes.Repeat([]byte{'k'}, 62)) + "=1\x00",
			0x0200},
		{"6.1/value of 255 bytes", "X-com.example.a=" + string(bytes.Repeat([]byte{'v'}, 255)) +
			"\x00", 0},
		{"6.1/value of 256 bytes", "X-com.example.a=" + string(bytes.Repeat([]byte{'v'}, 256)) +
			"\x00", 0x0200},
		{"6.3/a key twice in one PDU", "HeaderDigest=None\x00HeaderDigest=None\x00", 0x0200},
		{"6.3/a name again", "TargetName=" + DefaultTarget + "\x00", 0x0200},
		{"6.3/a key of the security stage", "AuthMethod=None\x00", 0x0200},
		{"6.3/a key of full feature phase", "SendTargets=All\x00", 0x0200},
		{"13/a key that only targets send", "TargetAddress=1.2.3.4\x00", 0x0200},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s.status(t, tt.status, LoginPDU{CSG: StageOperational, NSG: StageFull, Transit: true,
				Raw: append(names().Text(), tt.more...)})
		})
	}
	t.Run("6.3/a key twice across PDUs", func(t *testing.T) {
		c := MustDial(t, s.addr)
		_, err := c.LoginStep(loginID,
			LoginPDU{CSG: StageOperational, Keys: append(names(), KV("HeaderDigest", "None")...)})
		require.NoError(t, err)
		r, err := final(c, KV("HeaderDigest", "None").Text())
		require.NoError(t, err)
		require.Equal(t, uint16(0x0200), r.Status())
	})
	t.Run("6.3/a key of the operational stage in the security stage", func(t *testing.T) {
		s.status(t, 0x0200, LoginPDU{CSG: StageSecurity,
			Keys: append(names(), KV("HeaderDigest", "None")...)})
	})
	t.Run("6.1/keys are case-sensitive", func(t *testing.T) {
		c := MustDial(t, s.addr)
		r, err := final(c, append(names(),
			KV("headerdigest", "CRC32C", "sENDtARGETS", "All")...).Text())
		require.NoError(t, err)
		require.Zero(t, r.Status())
		require.Equal(t, "NotUnderstood", r.Keys.Get("headerdigest"))
		require.Equal(t, "NotUnderstood", r.Keys.Get("sENDtARGETS"))
		require.Empty(t, r.Keys.Get("HeaderDigest"))
	})
	s.works(t)
}

func TestLoginDeadline(t *testing.T) {
	t.Parallel()                  // it mostly waits
	const limit = 5 * time.Second // enough for a login on a busy machine
	s, patient := start(t, limits(target.Limits{LoginTimeout: time.Second})),
		start(t, limits(target.Limits{LoginTimeout: limit}))
	t.Run("a silent connection", func(t *testing.T) {
		require.NoError(t, MustDial(t, s.addr).ExpectClosed())
	})
	t.Run("one byte at a time", func(t *testing.T) {
		c := MustDial(t, s.addr)
		b := c.Bytes(&pdu.LoginRequest{CSG: StageOperational, TaskTag: 1}, names().Text())
		for i := range b {
			if err := c.SendRaw(b[i : i+1]); err != nil {
				require.ErrorIs(t, err, ErrClosed)
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
		t.Fatal("the target waits for as long as bytes come")
	})
	t.Run("a login that never ends", func(t *testing.T) {
		c := MustDial(t, patient.addr)
		_, err := c.LoginStep(loginID, LoginPDU{CSG: StageOperational, Keys: names()})
		require.NoError(t, err)
		require.NoError(t, c.ExpectClosed())
	})
	t.Run("a login in time stays", func(t *testing.T) {
		sess := patient.login(t, LoginOptions{})
		time.Sleep(limit + limit/10)
		sess.MustGood(t, TestUnitReady(1))
	})
}
