package login

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

func TestNegotiateText(t *testing.T) {
	p := defaultParams()
	p.HeaderDigest = true
	pairs := testtool.Must(ParsePairs(text("MaxRecvDataSegmentLength=0x10000", "InitiatorAlias=new",
		"X-com.example.a=1", "Foo=None", "X#NodeArchitecture=a", "HeaderDigest=None",
		"MaxBurstLength=512", "InitiatorName=x", "TargetName=x", "SessionType=Normal",
		"AuthMethod=None", "CHAP_A=5", "CHAP_N=Reject", "TargetAlias=x", "SendTargets=All",
		"IFMarker=No", "ErrorRecoveryLevel=0", "iSCSIProtocolLevel=2", "TaskReporting=RFC3720")))(t)
	reply, updated := testtool.Must2(p.NegotiateText(pairs, map[string]struct{}{}))(t)
	want := []Pair{{"X-com.example.a", "NotUnderstood"}, {"Foo", "NotUnderstood"}}
	for _, key := range []string{"HeaderDigest", "MaxBurstLength", "InitiatorName", "TargetName",
		"SessionType", "AuthMethod", "CHAP_A",
		"CHAP_N", "TargetAlias", "IFMarker", "ErrorRecoveryLevel",
		"iSCSIProtocolLevel", "TaskReporting"} {
		want = append(want, Pair{key, "Reject"})
	}
	require.Equal(t, want, reply)
	after := p
	after.SendMaxDataSegment = 65536
	require.Equal(t, after, updated, "only what may change in full feature phase has changed")

	reply, updated = testtool.Must2(p.NegotiateText(nil, map[string]struct{}{}))(t)
	require.Empty(t, reply)
	require.Equal(t, p, updated)
}

func TestNegotiateTextRefuses(t *testing.T) {
	p := defaultParams()
	for _, bad := range [][]Pair{
		{{"MaxRecvDataSegmentLength", "4096"}, {"MaxRecvDataSegmentLength", "4096"}},
		{{"MaxRecvDataSegmentLength", "4096"}, {"X-a", "1"}, {"X-a", "1"}},
		{{"MaxRecvDataSegmentLength", "511"}},
		{{"MaxRecvDataSegmentLength", ""}},
		{{"MaxRecvDataSegmentLength", "4096"}, {"X-a", "Reject"}},
		{{"MaxRecvDataSegmentLength", "NotUnderstood"}},
		{{"MaxRecvDataSegmentLength", "Irrelevant"}},
	} {
		reply, updated, err := p.NegotiateText(bad, map[string]struct{}{})
		require.Error(t, err, "%v", bad)
		require.Nil(t, reply)
		require.Equal(t, p, updated, "a failed negotiation must have no effect: %v", bad)
	}
}

func FuzzNegotiateText(f *testing.F) {
	f.Add(text("MaxRecvDataSegmentLength=4096", "X-a=1"))
	f.Add(text("HeaderDigest=CRC32C", "HeaderDigest=None"))
	f.Add(text("SendTargets=All", "InitiatorAlias=Reject"))
	f.Fuzz(func(t *testing.T, data []byte) {
		pairs, err := ParsePairs(data)
		if err != nil {
			return
		}
		p := defaultParams()
		reply, updated, err := p.NegotiateText(pairs, map[string]struct{}{})
		if err != nil {
			if updated != p || reply != nil {
				t.Fatal("a failed negotiation took effect")
			}
			return
		}
		if n := updated.SendMaxDataSegment; n < minLength || n > maxLength {
			t.Fatalf("MaxRecvDataSegmentLength %d", n)
		}
		updated.SendMaxDataSegment = p.SendMaxDataSegment
		if updated != p {
			t.Fatalf("%+v changed to %+v", p, updated)
		}
		if len(reply) > len(pairs) {
			t.Fatal("more answers than questions")
		}
		for _, r := range reply {
			known := roles[r.Key] != roleUnknown
			if r.Value != valueReject && r.Value != valueNotUnderstood ||
				known != (r.Value == valueReject) {
				t.Fatalf("answer %v", r)
			}
		}
	})
}

// TestNamesOfOtherProtocols: an initiator must not pass for a client of another protocol.
func TestNamesOfOtherProtocols(t *testing.T) {
	for _, name := range []string{"cert:alice", "CERT:alice", "unix:/run/x", "tcp:1.2.3.4:5"} {
		require.False(t, SameName(name, name), name)
	}
	require.True(t, SameName("iqn.2026-01.test:Unix:a", "IQN.2026-01.test:unix:a"))
}

func TestParsePairs(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want []Pair
	}{
		{"", nil},
		{"A=b\x00", []Pair{{"A", "b"}}},
		{"A=\x00", []Pair{{"A", ""}}},
		{"A=b=c=\x00B=,\x00", []Pair{{"A", "b=c="}, {"B", ","}}},
		{"A=b\x00\x00\x00", []Pair{{"A", "b"}}}, // padding
		{"\x00A=b\x00", []Pair{{"A", "b"}}},
		// ParsePairs allows duplicates; whether they are allowed depends on the key
		{"A=b\x00A=b\x00", []Pair{{"A", "b"}, {"A", "b"}}},
		{"sENDtARGETS=All\x00", []Pair{{"sENDtARGETS", "All"}}},
		{"X-com.example.do_it=1\x00X#NodeArchitecture=a/1,b\x00",
			[]Pair{{"X-com.example.do_it", "1"}, {"X#NodeArchitecture", "a/1,b"}}},
		{"InitiatorAlias=Büro Ω\x00", []Pair{{"InitiatorAlias", "Büro Ω"}}},
		{repeat("K", 63) + "=" + repeat("v", 255) + "\x00",
			[]Pair{{repeat("K", 63), repeat("v", 255)}}},
		{"TargetName=" + repeat("n", 223) + "\x00", []Pair{{"TargetName", repeat("n", 223)}}},
		{"CHAP_R=0x" + repeat("0", 2050) + "\x00", []Pair{{"CHAP_R", "0x" + repeat("0", 2050)}}},
		{"HeaderDigest=" + repeat("v", 255) + "," + repeat("w", 255) + "\x00",
			[]Pair{{"HeaderDigest", repeat("v", 255) + "," + repeat("w", 255)}}},
	} {
		got := testtool.Must(ParsePairs([]byte(tt.in)))(t, "%q", tt.in)
		require.Equal(t, tt.want, got, "%q", tt.in)
	}
	for _, in := range []string{
		"A=b",            // not ended
		"A=b\x00C=d",     // not ended
		"A\x00",          // no =
		"=b\x00",         // no key
		"=\x00",          // neither
		"A B=c\x00",      // a space in the key
		"A\tB=c\x00",     // a control character
		"Ä=c\x00",        // not ASCII
		"A\xff=c\x00",    // not UTF-8
		"A=\xff\xfe\x00", // not UTF-8
		repeat("K", 64) + "=v\x00",
		"K=" + repeat("v", 256) + "\x00",
		"InitiatorName=" + repeat("n", 224) + "\x00",
		"TargetName=" + repeat("n", 224) + "\x00",
		"HeaderDigest=None," + repeat("v", 256) + "\x00",
		"CHAP_A=5," + repeat("6", 256) + "\x00",
		"CHAP_N=" + repeat("n", 256) + "\x00",
	} {
		got, err := ParsePairs([]byte(in))
		require.Error(t, err, "%q", in)
		require.Nil(t, got)
		require.Less(t, len(err.Error()), 200)
	}
}

func FuzzParsePairs(f *testing.F) {
	f.Add([]byte{})
	f.Add(normal("AuthMethod=CHAP,None"))
	f.Add(text("A=b=c", "", "CHAP_C=0x00ff"))
	f.Add([]byte("A=b"))
	f.Add([]byte("\x00\x00=\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		before := bytes.Clone(data)
		pairs, err := ParsePairs(data)
		if !bytes.Equal(before, data) {
			t.Fatal("the input was changed")
		}
		if err != nil {
			return
		}
		var again []byte
		for _, p := range pairs {
			if p.Key == "" || len(p.Key) > maxKeyLen {
				t.Fatalf("key %q", p.Key)
			}
			again = AppendPair(again, p.Key, p.Value)
		}
		if len(again) > len(data) {
			t.Fatalf("%q is longer than %q", again, data)
		}
		back, err := ParsePairs(again)
		if err != nil || len(back) != len(pairs) {
			t.Fatalf("%q does not parse back: %v", again, err)
		}
		for i := range back {
			if back[i] != pairs[i] {
				t.Fatalf("%v became %v", pairs[i], back[i])
			}
		}
	})
}
