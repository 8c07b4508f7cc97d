package target_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
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

func TestLoginFirstPDU(t *testing.T) {
	s := start(t)
	for _, tt := range []struct {
		name string
		msg  Message
	}{
		{"NOP-Out", &pdu.NOPOut{Immediate: true, TaskTag: 1, TransferTag: pdu.ReservedTag}},
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
			r, _ := testtool.Must2(Expect[pdu.LoginResponse](c))(t)
			require.Equal(t, []uint8{0x02, 0x0b}, []uint8{r.StatusClass, r.StatusDetail})
			require.NoError(t, c.ExpectClosed())
		})
	}
	t.Run("6.3/a data segment over 8192 bytes", func(t *testing.T) {
		c := MustDial(t, s.addr)
		require.NoError(t, c.SendLogin(loginID,
			LoginPDU{CSG: StageOperational, Raw: bytes.Repeat([]byte{'x'}, 8193)}))
		require.NoError(t, testtool.Err(c.ExpectClosedAfter()))
	})
	s.works(t)
}

// rawMessage is a raw header.
type rawMessage pdu.Header

func (m rawMessage) Encode(h *pdu.Header) { *h = pdu.Header(m) }

// snack is a SNACK Request (RFC 7143 11.16) about a task, without a target transfer tag.
func snack(task uint32) rawMessage {
	m := rawMessage{0: byte(pdu.OpSNACKRequest), 1: 0x80, 20: 0xff, 21: 0xff, 22: 0xff, 23: 0xff}
	binary.BigEndian.PutUint32(m[16:], task)
	return m
}

func TestLoginResponseFields(t *testing.T) {
	s := start(t)
	c := MustDial(t, s.addr)
	c.ExpStatSN, c.CmdSN = 1000, 0xfffffff0
	id := LoginID{ISID: [6]byte{0x80, 1}, Tag: 5, CID: 9}

	r := testtool.Must(c.LoginStep(id, LoginPDU{CSG: StageOperational, Keys: names()}))(t)
	require.Equal(t, "1", r.Keys.Get("TargetPortalGroupTag"), "6.3.1: in the first response")
	require.Zero(t, r.TSIH, "11.13.3: only in the final response")
	require.Equal(t, uint32(0xfffffff0), r.ExpCmdSN,
		"11.12.8: a login request is immediate and uses no CmdSN")

	// Conn checks that StatSN goes on from response to response.
	r = testtool.Must(c.LoginStep(id, LoginPDU{CSG: StageOperational, NSG: StageFull, Transit: true,
		Keys: KV("InitiatorAlias", "tester")}))(t)
	require.True(t, r.Transit)
	require.Equal(t, StageFull, r.NSG)
	require.NotZero(t, r.TSIH)
	require.Empty(t, r.Keys.All("TargetPortalGroupTag"), "6.3.1: once")
	require.Equal(t, uint32(0xfffffff0), r.ExpCmdSN)
	require.False(t, pdu.SNLess(r.MaxCmdSN, r.ExpCmdSN), "the window is open")

	require.NoError(t, c.Send(&pdu.NOPOut{TaskTag: 1, TransferTag: pdu.ReservedTag,
		CmdSN: 0xfffffff0, ExpStatSN: c.ExpStatSN}, nil))
	in, _ := testtool.Must2(Expect[pdu.NOPIn](c))(t)
	require.Equal(t, uint32(0xfffffff1), in.ExpCmdSN)
}

// TestLoginDeadline runs by a clock of its own.
func TestLoginDeadline(t *testing.T) {
	const limit = time.Second
	for name, try := range map[string]func(*testing.T, *Conn){
		"a silent connection": func(t *testing.T, c *Conn) {
			require.NoError(t, c.ExpectClosed())
		},
		"one byte at a time": func(t *testing.T, c *Conn) {
			b := c.Bytes(&pdu.LoginRequest{CSG: StageOperational, TaskTag: 1}, names().Text())
			for i := range b {
				if err := c.SendRaw(b[i : i+1]); err != nil {
					require.ErrorIs(t, err, ErrClosed)
					return
				}
				time.Sleep(20 * time.Millisecond)
			}
			t.Fatal("the target waits for as long as bytes come")
		},
		"a login that never ends": func(t *testing.T, c *Conn) {
			_, err := c.LoginStep(loginID, LoginPDU{CSG: StageOperational, Keys: names()})
			require.NoError(t, err)
			require.NoError(t, c.ExpectClosed())
		},
		"a login in time stays": func(t *testing.T, c *Conn) {
			sess := testtool.Must(c.Login(LoginOptions{}))(t)
			require.NoError(t, testtool.Err(sess.ClearAttention(1)))
			time.Sleep(2 * limit)
			sess.MustGood(t, TestUnitReady(1))
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newPipes()
				t.Cleanup(func() { time.Sleep(limit) }) // the watchdog sees that no reader is left
				startOn(t, l, limits(target.Limits{LoginTimeout: limit}))
				c := NewConn(l.dial())
				defer c.Close()
				try(t, c)
			})
		})
	}
}

// TestCHAP: an initiator has to prove itself in every session, and so does the target if it asks,
// by each algorithm.
func TestCHAP(t *testing.T) {
	s := start(t, withCHAP(mutual))
	s.refused(t, LoginOptions{}, 0x0201)
	s.refused(t, LoginOptions{Discovery: true}, 0x0201)
	s.refused(t, LoginOptions{CHAP: &CHAP{Username: user, Password: "another password"}}, 0x0201)
	testtool.Eventually(t, func() bool { return s.seen.count("refused bad_password") == 1 })
	require.NoError(t, testtool.Err(Login(s.addr, LoginOptions{Discovery: true, CHAP: good()})))
	for _, offer := range []string{"5", "6", "7", "8"} {
		t.Run("12.1.3/algorithm "+offer, func(t *testing.T) {
			a := good()
			a.TargetUsername, a.TargetPassword = targetUser, targetPassword
			a.Offer, a.Identifier = offer, 255
			s.login(t, LoginOptions{CHAP: a}).MustGood(t, TestUnitReady(1))
			a.Base64 = true
			s.login(t, LoginOptions{CHAP: a})
		})
	}
}

// TestNegotiationProperty proposes random values in random order, split over random PDUs. Login
// checks that the answers are legal outcomes, and Session that the session keeps to them.
func TestNegotiationProperty(t *testing.T) {
	s := start(t)
	seed := rand.Int63()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewSource(seed))
	length := func() string {
		n := []int{512, 513, 1024, 4096, 8192, 65536, 262144, 1 << 20, 1<<24 - 1}[r.Intn(9)]
		return strconv.Itoa(n)
	}
	yesNo := func() string { return []string{"Yes", "No"}[r.Intn(2)] }
	data := pattern(300*BlockSize, 1)
	refused := 0
	for range 60 {
		o := LoginOptions{Keys: KV("MaxRecvDataSegmentLength", length(), "MaxBurstLength", length(),
			"FirstBurstLength", length(), "InitialR2T", yesNo(), "ImmediateData", yesNo(),
			"MaxOutstandingR2T", strconv.Itoa(1+r.Intn(4)), "DefaultTime2Wait",
			strconv.Itoa(r.Intn(10)), "MaxConnections", strconv.Itoa(1+r.Intn(8))),
			HeaderDigest: r.Intn(2) == 0, DataDigest: r.Intn(2) == 0, CmdSN: r.Uint32()}
		shuffle := func(keys Keys) {
			r.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
		}
		o.Edit = func(step int, p *LoginPDU) {
			if step == 0 {
				shuffle(p.Keys)
			}
		}
		c := MustDial(t, s.addr)
		sess, err := c.Login(o)
		if le, ok := errors.AsType[*LoginError](err); ok {
			require.Equal(t, uint16(0x0200), le.Status, "%v", o.Keys)
			refused++
			continue
		}
		require.NoError(t, err, "%v", o.Keys)
		require.NoError(t, testtool.Err(sess.ClearAttention(1)))
		blocks := 1 + r.Intn(300)
		w := sess.MustDo(t, Write10(1, 7, data[:blocks*BlockSize]))
		require.True(t, w.Good(), "%v: %s", o.Keys, w.Failed())
		if sess.Params.InitialR2T && !sess.Params.ImmediateData {
			require.Zero(t, w.R2Ts[0].BufferOffset)
		}
		read := sess.MustGood(t, Read10(1, 7, blocks))
		require.Equal(t, data[:blocks*BlockSize], read.Data, "%v", o.Keys)
		require.True(t, read.StatusInData, "good status comes with the last data")
		require.NoError(t, c.Close())
	}
	require.Zero(t, refused, "burst lengths that contradict each other can be answered by "+
		"smaller ones (13.14)")
}
