package login

import (
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestNumericKeys offers values from the whole range of each key, in both notations. The answer
// must match the result function of the key's section in RFC 7143, applied to the offer and our
// limit, and it must take effect.
func TestNumericKeys(t *testing.T) {
	minimum := func(a, b int) int { return min(a, b) }
	maximum := func(a, b int) int { return max(a, b) }
	cfg := openConfig()
	for _, tt := range []struct {
		key      string
		min, max int
		ours     int
		fn       func(offer, ours int) int
		got      func(Params) int
	}{
		{"MaxConnections", 1, 65535, 1, minimum, nil},
		{"MaxBurstLength", 512, 1<<24 - 1, 1 << 20, minimum,
			func(p Params) int { return p.MaxBurstLength }},
		{"FirstBurstLength", 512, 1<<24 - 1, 1 << 18, minimum,
			func(p Params) int { return p.FirstBurstLength }},
		{"DefaultTime2Wait", 0, 3600, 0, maximum, nil},
		{"DefaultTime2Retain", 0, 3600, 0, minimum, nil},
		{"MaxOutstandingR2T", 1, 65535, 1, minimum, nil},
		{"ErrorRecoveryLevel", 0, 2, 0, minimum, nil},
		{"iSCSIProtocolLevel", 0, 31, 2, minimum, func(p Params) int { return p.ProtocolLevel }},
	} {
		extra := []string{}
		if tt.key == "MaxBurstLength" {
			extra = append(extra, "FirstBurstLength=512") // the default could exceed it
		}
		try := func(offer int, spelled string) {
			keys, params := operate(t, cfg, normal, append(extra, tt.key+"="+spelled)...)
			want := tt.fn(offer, tt.ours)
			require.Equal(t, strconv.Itoa(want), keys[tt.key], "%s=%s", tt.key, spelled)
			if tt.got != nil {
				require.Equal(t, want, tt.got(params), "%s=%s", tt.key, spelled)
			}
		}
		offers := []int{tt.min, tt.min + 1, tt.ours - 1, tt.ours, tt.ours + 1, tt.max - 1, tt.max}
		for range 50 {
			offers = append(offers, tt.min+rand.IntN(tt.max-tt.min+1))
		}
		for _, n := range offers {
			if n < tt.min || n > tt.max {
				continue
			}
			try(n, strconv.Itoa(n))
			try(n, "0x"+strconv.FormatInt(int64(n), 16))
		}
		for _, bad := range []string{"", "-1", "Yes", "None", "1.5", "007", " 1", "1,2", "512~1024",
			"0x", "4294967296", "99999999999999999999",
			strconv.Itoa(tt.max + 1), strconv.Itoa(tt.min - 1)} {
			keys, params := operate(t, cfg, normal, tt.key+"="+bad)
			require.Equal(t, "Reject", keys[tt.key], "%s=%s", tt.key, bad)
			require.Equal(t, unchanged(), params, "%s=%s", tt.key, bad)
		}
	}
}

// unchanged are the parameters after a negotiation that has agreed on nothing.
func unchanged() Params {
	p := defaultParams()
	p.RecvMaxDataSegment = MaxDataSegment
	return p
}

func TestBooleanKeys(t *testing.T) {
	and := func(a, b bool) bool { return a && b }
	or := func(a, b bool) bool { return a || b }
	for _, tt := range []struct {
		key  string
		ours bool
		fn   func(a, b bool) bool
		got  func(Params) bool
	}{
		{"InitialR2T", false, or, func(p Params) bool { return p.InitialR2T }},
		{"ImmediateData", true, and, func(p Params) bool { return p.ImmediateData }},
		{"DataPDUInOrder", true, or, nil},
		{"DataSequenceInOrder", true, or, nil},
	} {
		for offer, value := range map[bool]string{true: "Yes", false: "No"} {
			keys, params := operate(t, openConfig(), normal, tt.key+"="+value)
			want := tt.fn(offer, tt.ours)
			require.Equal(t, map[bool]string{true: "Yes", false: "No"}[want], keys[tt.key], "%s=%s",
				tt.key, value)
			if tt.got != nil {
				require.Equal(t, want, tt.got(params), "%s=%s", tt.key, value)
			}
		}
		for _, bad := range []string{"", "yes", "YES", "true", "1", "Yes,No", "None", "Yes "} {
			keys, params := operate(t, openConfig(), normal, tt.key+"="+bad)
			require.Equal(t, "Reject", keys[tt.key], "%s=%s", tt.key, bad)
			require.Equal(t, unchanged(), params)
		}
	}
}

func TestDigests(t *testing.T) {
	for offer, want := range map[string]string{
		"None": "None", "CRC32C": "CRC32C", "CRC32C,None": "CRC32C", "None,CRC32C": "None",
		"Y-foo,CRC32C,None": "CRC32C",
		"":                  "Reject", "Y-foo": "Reject", "crc32c": "Reject", "CRC32C ": "Reject",
	} {
		for _, key := range []string{"HeaderDigest", "DataDigest"} {
			for _, first := range []func(...string) []byte{normal, discovery} {
				keys, params := operate(t, openConfig(), first, key+"="+offer)
				require.Equal(t, want, keys[key], offer)
				on := want == "CRC32C"
				require.Equal(t, on && key == "HeaderDigest", params.HeaderDigest)
				require.Equal(t, on && key == "DataDigest", params.DataDigest)
			}
		}
	}
}

func TestOtherKeys(t *testing.T) {
	for _, tt := range []struct{ sent, key, want string }{
		{"TaskReporting=RFC3720", "TaskReporting", "RFC3720"},
		{"TaskReporting=FastAbort,ResponseFence,RFC3720", "TaskReporting", "RFC3720"},
		{"TaskReporting=FastAbort", "TaskReporting", "Reject"},
		{"IFMarker=Yes", "IFMarker", "No"},
		{"OFMarker=No", "OFMarker", "No"},
		{"IFMarkInt=2048", "IFMarkInt", "Reject"},
		{"OFMarkInt=1~65535", "OFMarkInt", "Reject"},
		{"X-com.example.foo=1", "X-com.example.foo", "NotUnderstood"},
		{"Foo=", "Foo", "NotUnderstood"},
		{"sENDtARGETS=All", "sENDtARGETS", "NotUnderstood"},
		{"headerdigest=None", "headerdigest", "NotUnderstood"},
		{"KRB_AP_REQ=0x00", "KRB_AP_REQ", "NotUnderstood"},
	} {
		keys, params := operate(t, openConfig(), normal, tt.sent)
		require.Equal(t, tt.want, keys[tt.key], tt.sent)
		require.Len(t, keys, 2, tt.sent) // and our MaxRecvDataSegmentLength
		require.Equal(t, unchanged(), params, tt.sent)
	}
	// Declarations are not answered.
	for _, sent := range []string{"InitiatorAlias=x", "X#NodeArchitecture=Linux/6.1,CPU/arm64",
		"MaxRecvDataSegmentLength=4096"} {
		keys, _ := operate(t, openConfig(), normal, sent)
		require.Equal(t, map[string]string{"MaxRecvDataSegmentLength": "262144"}, keys, sent)
	}
}

func TestMaxRecvDataSegmentLength(t *testing.T) {
	for _, first := range []func(...string) []byte{normal, discovery} {
		for sent, want := range map[string]int{"512": 512, "8192": 8192, "0x40000": 262144,
			"16777215": 1<<24 - 1} {
			keys, params := operate(t, openConfig(), first, "MaxRecvDataSegmentLength="+sent)
			require.Equal(t, "262144", keys["MaxRecvDataSegmentLength"],
				"it is declared, not negotiated")
			require.Equal(t, want, params.SendMaxDataSegment)
			require.Equal(t, MaxDataSegment, params.RecvMaxDataSegment)
		}
	}
	for _, bad := range []string{"0", "511", "16777216", "", "-512", "None", "512~1024",
		"4294967808"} {
		newInitiator(t, openConfig()).refused(&Request{CSG: OperationalNegotiation,
			NSG: FullFeature, Transit: true,
			Data: normal("MaxRecvDataSegmentLength=" + bad)}, StatusInitiatorError, "bad_value")
	}
	// It is declared once, with the first operational answer. Without that stage the default stays.
	i := newInitiator(t, openConfig())
	_, keys := i.ok(OperationalNegotiation, 0, false, normal())
	require.Contains(t, keys, "MaxRecvDataSegmentLength")
	_, keys = i.ok(OperationalNegotiation, FullFeature, true, nil)
	require.Empty(t, keys)
	i = newInitiator(t, openConfig())
	_, keys = i.ok(SecurityNegotiation, FullFeature, true, normal("AuthMethod=None"))
	require.NotContains(t, keys, "MaxRecvDataSegmentLength")
	require.Equal(t, 8192, i.m.Result().Params.RecvMaxDataSegment)
}

func TestBurstLengths(t *testing.T) {
	for _, tt := range []struct {
		keys        []string
		first       string // the answer to FirstBurstLength
		params      [2]int // FirstBurstLength, MaxBurstLength
		refused     bool
		description string
	}{
		{[]string{"FirstBurstLength=65536", "MaxBurstLength=262144"}, "65536",
			[2]int{65536, 262144}, false, "consistent"},
		{[]string{"FirstBurstLength=262144", "MaxBurstLength=65536"}, "65536", [2]int{65536, 65536},
			false, "made consistent, although it comes first"},
		{[]string{"MaxBurstLength=1024", "FirstBurstLength=0xffffff"}, "1024", [2]int{1024, 1024},
			false, "made consistent"},
		{[]string{"MaxBurstLength=16384"}, "", [2]int{}, true,
			"the default of FirstBurstLength exceeds it"},
		{[]string{"MaxBurstLength=16384", "InitialR2T=Yes", "ImmediateData=No"}, "",
			[2]int{16384, 16384}, false, "no unsolicited data"},
		{[]string{"FirstBurstLength=4096", "InitialR2T=Yes", "ImmediateData=No"}, "Irrelevant",
			[2]int{65536, 262144}, false, "irrelevant"},
		{[]string{"FirstBurstLength=4096", "InitialR2T=No", "ImmediateData=No"}, "4096",
			[2]int{4096, 262144}, false, "Data-Out only"},
		{[]string{"FirstBurstLength=4096", "InitialR2T=Yes", "ImmediateData=Yes"}, "4096",
			[2]int{4096, 262144}, false, "immediate only"},
	} {
		i := newInitiator(t, openConfig())
		resp := i.m.Step(&Request{CSG: OperationalNegotiation, NSG: FullFeature, Transit: true,
			Data: normal(tt.keys...)})
		if tt.refused {
			i.requireRefused(resp, StatusInitiatorError, "inconsistent_parameters")
			continue
		}
		require.Equal(t, StatusSuccess, resp.Status, tt.description)
		require.Equal(t, tt.first, keysOf(t, resp.Data)["FirstBurstLength"], tt.description)
		p := i.m.Result().Params
		require.Equal(t, tt.params, [2]int{p.FirstBurstLength, p.MaxBurstLength}, tt.description)
	}
	// The two are agreed on one after the other. The check waits for the end.
	i := newInitiator(t, openConfig())
	i.ok(OperationalNegotiation, 0, false, normal("MaxBurstLength=16384"))
	i.ok(OperationalNegotiation, 0, false, text("FirstBurstLength=16384"))
	resp, _ := i.ok(OperationalNegotiation, FullFeature, true, nil)
	require.True(t, resp.Transit)
	i = newInitiator(t, openConfig())
	i.ok(OperationalNegotiation, 0, false, normal("FirstBurstLength=65536"))
	i.ok(OperationalNegotiation, 0, false, text("MaxBurstLength=16384"))
	i.refused(&Request{CSG: OperationalNegotiation, NSG: FullFeature, Transit: true},
		StatusInitiatorError, "inconsistent_parameters")
}

func TestDiscoveryIrrelevant(t *testing.T) {
	keys, params := operate(t, openConfig(), discovery, "MaxConnections=8", "InitialR2T=No",
		"ImmediateData=No", "MaxBurstLength=512", "FirstBurstLength=512", "MaxOutstandingR2T=2",
		"DataPDUInOrder=No", "DataSequenceInOrder=No", "TaskReporting=RFC3720",
		"iSCSIProtocolLevel=2", "ErrorRecoveryLevel=2", "DefaultTime2Wait=7",
		"DefaultTime2Retain=7", "HeaderDigest=None", "X-com.example.a=b", "IFMarker=No")
	require.Equal(t, map[string]string{
		"MaxConnections": "Irrelevant", "InitialR2T": "Irrelevant", "ImmediateData": "Irrelevant",
		"MaxBurstLength":   "Irrelevant",
		"FirstBurstLength": "Irrelevant", "MaxOutstandingR2T": "Irrelevant",
		"DataPDUInOrder":      "Irrelevant",
		"DataSequenceInOrder": "Irrelevant", "TaskReporting": "Irrelevant",
		"iSCSIProtocolLevel": "Irrelevant",
		"ErrorRecoveryLevel": "0", "DefaultTime2Wait": "7", "DefaultTime2Retain": "0",
		"HeaderDigest":    "None",
		"X-com.example.a": "NotUnderstood", "IFMarker": "No", "MaxRecvDataSegmentLength": "262144",
	}, keys)
	require.Equal(t, unchanged(), params)
}
