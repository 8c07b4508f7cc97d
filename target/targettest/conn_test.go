package targettest

import (
	"encoding/hex"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/internal/pdu"
)

// pair returns an initiator and the other end of its connection, which the test plays.
func pair(t *testing.T) (*Conn, net.Conn) {
	t.Helper()
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	c := testtool.Must(Dial(l.Addr()))(t)
	there := testtool.Must(l.Accept())(t)
	t.Cleanup(func() { _ = c.Close(); _ = there.Close() })
	return c, there
}

// script sends bytes from the other end.
func script(peer net.Conn, b []byte) {
	go func() { _, _ = peer.Write(b) }()
}

func bytesOf(m Message, data []byte) []byte { return (&Conn{}).Bytes(m, data) }

func TestReceive(t *testing.T) {
	in := &pdu.NOPIn{TaskTag: 1, TransferTag: pdu.ReservedTag, StatSN: 7, ExpCmdSN: 3, MaxCmdSN: 10}
	for name, opt := range map[string]Option{"header": WrongHeaderDigest(),
		"data": WrongDataDigest()} {
		t.Run("wrong "+name+" digest", func(t *testing.T) {
			c, peer := pair(t)
			c.HeaderDigest, c.DataDigest = true, true
			script(peer, c.Bytes(in, []byte("ping"), opt))
			require.ErrorContains(t, testtool.Err(c.Receive()), name+" digest")
		})
	}
	t.Run("dirty padding", func(t *testing.T) {
		c, peer := pair(t)
		script(peer, c.Bytes(in, []byte{1}, WithPadding(1)))
		require.ErrorContains(t, testtool.Err(c.Receive()), "padding")
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
			require.NoError(t, testtool.Err(c.Receive()))
			_, err := c.Receive()
			if tt.want == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, tt.want)
			}
		})
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

func TestNegotiated(t *testing.T) {
	sent := KV("MaxBurstLength", "1000", "FirstBurstLength", "900", "InitialR2T", "No",
		"ImmediateData", "No",
		"HeaderDigest", "CRC32C,None", "MaxRecvDataSegmentLength", "4096", "DefaultTime2Wait", "5",
		"iSCSIProtocolLevel", "2")
	got := KV("MaxBurstLength", "800", "FirstBurstLength", "700", "InitialR2T", "Yes",
		"HeaderDigest", "CRC32C",
		"MaxRecvDataSegmentLength", "0x10000", "DefaultTime2Wait", "6", "iSCSIProtocolLevel", "2")
	p := testtool.Must(negotiated(sent, got))(t)
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
		require.Error(t, testtool.Err(negotiated(sent, wrong)), "%v", illegal)
	}
	missing := append(Keys(nil), got...)
	missing.Remove("MaxBurstLength")
	require.ErrorContains(t, testtool.Err(negotiated(sent, missing)), "no answer")
}
