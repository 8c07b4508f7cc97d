package login

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNegotiateText(t *testing.T) {
	p := defaultParams()
	p.HeaderDigest = true
	pairs, err := ParsePairs(text("MaxRecvDataSegmentLength=0x10000", "InitiatorAlias=new",
		"X-com.example.a=1", "Foo=None",
		"X#NodeArchitecture=a", "HeaderDigest=None", "MaxBurstLength=512", "InitiatorName=x",
		"TargetName=x", "SessionType=Normal",
		"AuthMethod=None", "CHAP_A=5", "CHAP_N=Reject", "TargetAlias=x", "SendTargets=All",
		"IFMarker=No", "ErrorRecoveryLevel=0",
		"iSCSIProtocolLevel=2", "TaskReporting=RFC3720"))
	require.NoError(t, err)
	reply, updated, err := p.NegotiateText(pairs)
	require.NoError(t, err)
	want := []Pair{{"X-com.example.a", "NotUnderstood"}, {"Foo", "NotUnderstood"}}
	for _, key := range []string{"HeaderDigest", "MaxBurstLength", "InitiatorName", "TargetName",
		"SessionType", "AuthMethod", "CHAP_A",
		"CHAP_N", "TargetAlias", "SendTargets", "IFMarker", "ErrorRecoveryLevel",
		"iSCSIProtocolLevel", "TaskReporting"} {
		want = append(want, Pair{key, "Reject"})
	}
	require.Equal(t, want, reply)
	after := p
	after.SendMaxDataSegment = 65536
	require.Equal(t, after, updated, "only what may change in full feature phase has changed")

	reply, updated, err = p.NegotiateText(nil)
	require.NoError(t, err)
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
		reply, updated, err := p.NegotiateText(bad)
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
		reply, updated, err := p.NegotiateText(pairs)
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
