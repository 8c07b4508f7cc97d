package targettest

import (
	"encoding/hex"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/target/internal/pdu"
)

// pair returns an initiator and the other end of its connection, which the test plays.
func pair(t *testing.T) (*Conn, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	c, err := Dial(l.Addr())
	require.NoError(t, err)
	there, err := l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close(); _ = there.Close() })
	return c, there
}

// script sends bytes from the other end.
func script(peer net.Conn, b []byte) {
	go func() { _, _ = peer.Write(b) }()
}

func bytesOf(m Message, data []byte) []byte { return (&Conn{}).Bytes(m, data) }

func TestBytes(t *testing.T) {
	c := &Conn{}
	msg := &pdu.NOPOut{TaskTag: 1, TransferTag: pdu.ReservedTag}
	plain := c.Bytes(msg, []byte{1, 2, 3, 4, 5})
	require.Len(t, plain, 48+8)
	require.Equal(t, []byte{0, 0, 0, 0, 5}, plain[3:8])
	require.Equal(t, []byte{1, 2, 3, 4, 5, 0, 0, 0}, plain[48:])

	require.Equal(t, []byte{0xff, 0xff, 0xff},
		c.Bytes(msg, []byte{1, 2, 3, 4, 5}, WithPadding(0xff))[53:])
	require.Len(t, c.Bytes(msg, []byte{1, 2, 3, 4, 5}, CutAfter(20)), 20)
	require.Equal(t, byte(2), c.Bytes(msg, nil, WithAHS([]byte{0, 1, 9, 0, 1}))[4])
	require.Equal(t, byte(7), c.Bytes(msg, nil, WithHeader(func(h *pdu.Header) { h[9] = 7 }))[9])

	c.HeaderDigest, c.DataDigest = true, true
	b := c.Bytes(msg, []byte{1, 2, 3, 4, 5})
	require.Len(t, b, 48+4+8+4)
	require.Equal(t, pdu.AppendDigest(nil, pdu.Digest(b[:48])), b[48:52])
	require.Equal(t, pdu.AppendDigest(nil, pdu.Digest(b[52:60])), b[60:])
	require.Len(t, c.Bytes(msg, nil), 48+4, "no data, no data digest (11.2.3)")
	require.NotEqual(t, b[48:52], c.Bytes(msg, []byte{1, 2, 3, 4, 5}, WrongHeaderDigest())[48:52])
	require.NotEqual(t, b[60:], c.Bytes(msg, []byte{1, 2, 3, 4, 5}, WrongDataDigest())[60:])
	flipped := c.Bytes(msg, []byte{1, 2, 3, 4, 5}, FlipHeaderBit(8*17+7), FlipDataBit(0))
	require.Equal(t, b[17]^1, flipped[17])
	require.Equal(t, b[52]^0x80, flipped[52])
	require.Equal(t, b[60:], flipped[60:])
}

func TestReceive(t *testing.T) {
	in := &pdu.NOPIn{TaskTag: 1, TransferTag: pdu.ReservedTag, StatSN: 7, ExpCmdSN: 3, MaxCmdSN: 10}
	t.Run("with digests", func(t *testing.T) {
		c, peer := pair(t)
		c.HeaderDigest, c.DataDigest = true, true
		script(peer, c.Bytes(in, []byte("ping")))
		got, data, err := Expect[pdu.NOPIn](c)
		require.NoError(t, err)
		require.Equal(t, "ping", string(data))
		require.Equal(t, uint32(1), got.TaskTag)
		require.Equal(t, []uint32{8, 3, 10}, []uint32{c.ExpStatSN, c.ExpCmdSN, c.MaxCmdSN})
	})
	for name, opt := range map[string]Option{"header": WrongHeaderDigest(),
		"data": WrongDataDigest()} {
		t.Run("wrong "+name+" digest", func(t *testing.T) {
			c, peer := pair(t)
			c.HeaderDigest, c.DataDigest = true, true
			script(peer, c.Bytes(in, []byte("ping"), opt))
			_, err := c.Receive()
			require.ErrorContains(t, err, name+" digest")
		})
	}
	t.Run("dirty padding", func(t *testing.T) {
		c, peer := pair(t)
		script(peer, c.Bytes(in, []byte{1}, WithPadding(1)))
		_, err := c.Receive()
		require.ErrorContains(t, err, "padding")
	})
	t.Run("closed", func(t *testing.T) {
		c, peer := pair(t)
		require.NoError(t, peer.Close())
		require.NoError(t, c.ExpectClosed())
		_, err := c.Receive()
		require.ErrorIs(t, err, ErrClosed)
	})
	t.Run("closed within a PDU", func(t *testing.T) {
		c, peer := pair(t)
		go func() { _, _ = peer.Write(make([]byte, 20)); _ = peer.Close() }()
		_, err := c.Receive()
		require.ErrorIs(t, err, ErrClosed)
		require.NotErrorIs(t, err, io.EOF)
	})
	t.Run("silence", func(t *testing.T) {
		c, _ := pair(t)
		require.NoError(t, c.ExpectNothing(time.Millisecond))
		c.Timeout = time.Millisecond
		_, err := c.Receive()
		require.True(t, IsTimeout(err))
		require.Error(t, c.ExpectClosed())
	})
	t.Run("something else", func(t *testing.T) {
		c, peer := pair(t)
		script(peer, append(bytesOf(in, nil),
			bytesOf(&pdu.NOPIn{TaskTag: 1, TransferTag: pdu.ReservedTag, StatSN: 8,
				ExpCmdSN: 3, MaxCmdSN: 10}, nil)...))
		_, _, err := Expect[pdu.R2T](c)
		var ue *UnexpectedError
		require.ErrorAs(t, err, &ue)
		require.Equal(t, pdu.OpNOPIn, ue.PDU.Header.Opcode())
		require.Error(t, c.ExpectNothing(time.Second))
	})
}

func TestReceiveChecksNumbers(t *testing.T) {
	nop := func(stat, exp, limit uint32) []byte {
		return bytesOf(&pdu.NOPIn{TaskTag: 1, TransferTag: pdu.ReservedTag, StatSN: stat,
			ExpCmdSN: exp, MaxCmdSN: limit}, nil)
	}
	for name, tt := range map[string]struct {
		second []byte
		want   string
	}{
		"in order":                  {nop(0, 5, 11), ""},
		"StatSN again":              {nop(0xffffffff, 4, 10), "StatSN"},
		"StatSN left out":           {nop(1, 4, 10), "StatSN"},
		"ExpCmdSN back":             {nop(0, 3, 10), "goes back"},
		"MaxCmdSN back":             {nop(0, 4, 9), "goes back"},
		"MaxCmdSN below the window": {nop(0, 12, 10), "less than"},
		"R2T shows the next StatSN": {bytesOf(&pdu.R2T{StatSN: 0, ExpCmdSN: 4, MaxCmdSN: 10,
			DesiredLength: 1}, nil), ""},
		"R2T with an old StatSN": {bytesOf(&pdu.R2T{StatSN: 0xffffffff, ExpCmdSN: 4,
			MaxCmdSN: 10, DesiredLength: 1}, nil), "StatSN"},
		"Data-In without status":  {bytesOf(&pdu.DataIn{ExpCmdSN: 4, MaxCmdSN: 10}, nil), ""},
		"an opcode of initiators": {bytesOf(&pdu.NOPOut{}, nil), "initiator"},
		"additional header":       {bytesOf(&pdu.SCSICommand{AHSLen: 0}, nil), "initiator"},
		"additional header in a reply": {(&Conn{}).Bytes(&pdu.NOPIn{}, nil,
			WithAHS([]byte{0, 1, 9, 0})), "additional header"},
	} {
		t.Run(name, func(t *testing.T) {
			c, peer := pair(t)
			script(peer, append(nop(0xffffffff, 4, 10), tt.second...))
			_, err := c.Receive()
			require.NoError(t, err)
			_, err = c.Receive()
			if tt.want == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, tt.want)
			}
		})
	}
}

func TestReject(t *testing.T) {
	bad := pdu.Header(bytesOf(&pdu.TextRequest{TaskTag: 9}, nil))
	reject := bytesOf(&pdu.Reject{Reason: pdu.RejectProtocolError}, bad[:])
	c, peer := pair(t)
	script(peer, reject)
	_, _, err := Expect[pdu.TextResponse](c)
	var re *RejectError
	require.True(t, errors.As(err, &re))
	require.Equal(t, pdu.OpTextRequest, re.Header.Opcode())
	reason, ok := ReasonOf(err)
	require.True(t, ok)
	require.Equal(t, pdu.RejectProtocolError, reason)
}

func TestKeys(t *testing.T) {
	ks := KV("A", "1", "B", "", "A", "2")
	require.Equal(t, "A=1\x00B=\x00A=2\x00", string(ks.Text()))
	back, err := ParseText(ks.Text())
	require.NoError(t, err)
	require.Equal(t, ks, back)
	require.Equal(t, []string{"1", "2"}, ks.All("A"))
	ks.Set("B", "3")
	ks.Set("C", "4")
	ks.Remove("A")
	require.Equal(t, KV("B", "3", "C", "4"), ks)
	for _, bad := range []string{"A=1", "A\x00", "=1\x00", "A=1\x00\x00"} {
		_, err := ParseText([]byte(bad))
		require.Error(t, err, "%q", bad)
	}
}

// TestRespond compares with responses from other programs: md5sum, sha1sum, sha256sum and openssl.
func TestRespond(t *testing.T) {
	for algorithm, want := range map[int]string{
		5: "f4ced750c4b47681df9f6aae77e498df",
		6: "e4650e0522cc68a865ae208251a55bcc32e77164",
		7: "e860c79d6e47bb55d60b6ee4387c5b0f5bb22d2e44bba6f3517cb0c8f87209ba",
		8: "27f5403bffec1f8f4d1f970b219d2726d7e1a3622ca71ccdad89e2a70effb6af",
	} {
		require.Equal(t, want,
			hex.EncodeToString(Respond(algorithm, 0x2a, "secret-secret",
				[]byte("challenge-123456"))))
	}
	require.Nil(t, Digest(9))
}

func TestParseSense(t *testing.T) {
	fixed := []byte{0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x24, 1, 0, 0, 0, 0}
	s, err := ParseSense(fixed)
	require.NoError(t, err)
	require.Equal(t, "05/24/01", s.String())
	s, err = ParseSense([]byte{0x72, 6, 0x29, 2, 0, 0, 0, 0})
	require.NoError(t, err)
	require.Equal(t, "06/29/02", s.String())
	require.True(t, s.Descriptor)
	for _, bad := range [][]byte{fixed[:17], {0x72, 6, 0x29, 2, 0, 0, 0, 1}, {0x12, 0}} {
		_, err := ParseSense(bad)
		require.Error(t, err)
	}
}

func TestNegotiated(t *testing.T) {
	sent := KV("MaxBurstLength", "1000", "FirstBurstLength", "900", "InitialR2T", "No",
		"ImmediateData", "No",
		"HeaderDigest", "CRC32C,None", "MaxRecvDataSegmentLength", "4096", "DefaultTime2Wait", "5",
		"iSCSIProtocolLevel", "2")
	got := KV("MaxBurstLength", "800", "FirstBurstLength", "700", "InitialR2T", "Yes",
		"HeaderDigest", "CRC32C",
		"MaxRecvDataSegmentLength", "0x10000", "DefaultTime2Wait", "6", "iSCSIProtocolLevel", "2")
	p, err := negotiated(sent, got)
	require.NoError(t, err)
	require.Equal(t, Params{HeaderDigest: true, MaxSend: 65536, MaxReceive: 4096, MaxBurst: 800,
		FirstBurst:        700,
		MaxOutstandingR2T: 1, InitialR2T: true, ProtocolLevel: 2}, p)
	for _, illegal := range []Keys{
		KV("MaxBurstLength", "1001"), KV("DefaultTime2Wait", "4"), KV("ImmediateData", "Yes"),
		KV("InitialR2T", "maybe"),
		KV("HeaderDigest", "MD5"), KV("FirstBurstLength", "900"), KV("MaxBurstLength", "many"),
		KV("iSCSIProtocolLevel", "3"),
	} {
		wrong := append(Keys(nil), got...)
		wrong.Set(illegal[0].Name, illegal[0].Value)
		wrong.Set("InitialR2T", wrong.Get("InitialR2T"))
		if illegal[0].Name == "FirstBurstLength" {
			wrong.Set("InitialR2T", "No")
		}
		_, err := negotiated(sent, wrong)
		require.Error(t, err, "%v", illegal)
	}
	missing := append(Keys(nil), got...)
	missing.Remove("MaxBurstLength")
	_, err = negotiated(sent, missing)
	require.ErrorContains(t, err, "no answer")
}
