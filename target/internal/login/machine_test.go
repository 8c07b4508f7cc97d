package login

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLoginWithoutAuthentication(t *testing.T) {
	cfg := openConfig()
	cfg.PortalGroupTag = 7
	i := newInitiator(t, cfg)
	resp, keys := i.ok(SecurityNegotiation, OperationalNegotiation, true,
		normal("InitiatorAlias=my \x07host", "AuthMethod=CHAP,None"))
	require.True(t, resp.Transit)
	require.Equal(t, OperationalNegotiation, resp.NSG)
	require.Equal(t, map[string]string{"TargetPortalGroupTag": "7", "AuthMethod": "None"}, keys)
	require.False(t, i.m.Done())
	resp, keys = i.ok(OperationalNegotiation, FullFeature, true,
		text("HeaderDigest=CRC32C,None", "DataDigest=None", "InitialR2T=No", "ImmediateData=Yes",
			"MaxRecvDataSegmentLength=262144", "MaxBurstLength=16776192", "FirstBurstLength=262144",
			"MaxOutstandingR2T=1", "MaxConnections=1", "ErrorRecoveryLevel=0", "DefaultTime2Wait=2",
			"DefaultTime2Retain=0", "IFMarker=No", "OFMarker=No", "DataPDUInOrder=Yes",
			"DataSequenceInOrder=Yes"))
	require.True(t, resp.Transit)
	require.Equal(t, FullFeature, resp.NSG)
	require.True(t, i.m.Done())
	require.Equal(t, "CRC32C", keys["HeaderDigest"])
	require.NotContains(t, keys, "TargetPortalGroupTag")
	require.Equal(t, Result{
		InitiatorName: hostIQN, InitiatorAlias: "my host", TargetName: targetIQN,
		SessionType: Normal,
		Params: Params{HeaderDigest: true, SendMaxDataSegment: 262144, RecvMaxDataSegment: 262144,
			MaxBurstLength:   1048576,
			FirstBurstLength: 262144, ImmediateData: true, ProtocolLevel: 1},
	}, i.m.Result())
	over := i.m.Step(&Request{CSG: OperationalNegotiation, NSG: FullFeature, Transit: true})
	require.Equal(t, StatusInitiatorError, over.Status)
	require.True(t, i.m.Done())
}

func TestDiscoverySession(t *testing.T) {
	i := newInitiator(t, openConfig())
	resp, keys := i.ok(OperationalNegotiation, FullFeature, true, discovery())
	require.True(t, resp.Transit)
	require.Equal(t, map[string]string{"TargetPortalGroupTag": "1",
		"MaxRecvDataSegmentLength": "262144"}, keys)
	require.Equal(t, Discovery, i.m.Result().SessionType)
	require.Empty(t, i.m.Result().TargetName)
}

func TestNames(t *testing.T) {
	for _, tt := range []struct {
		name   string
		data   []byte
		status Status
		reason string
	}{
		{"empty", nil, StatusMissingParameter, "missing_initiator_name"},
		{"no initiator", text("TargetName=" + targetIQN), StatusMissingParameter,
			"missing_initiator_name"},
		{"no target", text("InitiatorName=" + hostIQN), StatusMissingParameter,
			"missing_target_name"},
		{"discovery without initiator", text("SessionType=Discovery"), StatusMissingParameter,
			"missing_initiator_name"},
		{"empty initiator", text("InitiatorName=", "TargetName="+targetIQN), StatusInitiatorError,
			"bad_initiator_name"},
		{"initiator with a space", text("InitiatorName=iqn a", "TargetName="+targetIQN),
			StatusInitiatorError, "bad_initiator_name"},
		{"initiator with a newline", text("InitiatorName=iqn\na", "TargetName="+targetIQN),
			StatusInitiatorError, "bad_initiator_name"},
		{"long initiator", text("InitiatorName="+repeat("n", 224), "TargetName="+targetIQN),
			StatusInitiatorError, "bad_text"},
		{"unknown target", text("InitiatorName="+hostIQN,
			"TargetName=iqn.2001-04.com.example:other"), StatusNotFound, "unknown_target"},
		{"longer target", text("InitiatorName="+hostIQN, "TargetName="+targetIQN+"x"),
			StatusNotFound, "unknown_target"},
		{"empty target", text("InitiatorName="+hostIQN, "TargetName="), StatusNotFound,
			"unknown_target"},
		{"bad session type", normalWith("SessionType=discovery"), StatusSessionTypeNotSupported,
			"bad_session_type"},
		{"initiator twice", normal("InitiatorName=" + hostIQN), StatusInitiatorError,
			"duplicate_key"},
		{"target's key", normal("TargetAlias=x"), StatusInitiatorError, "key_not_allowed"},
		{"target's tag", normal("TargetPortalGroupTag=1"), StatusInitiatorError, "key_not_allowed"},
		{"address", normal("TargetAddress=1.2.3.4"), StatusInitiatorError, "key_not_allowed"},
		{"SendTargets", normal("SendTargets=All"), StatusInitiatorError, "key_not_allowed"},
		{"reserved value", normal("X-foo=NotUnderstood"), StatusInitiatorError, "reserved_value"},
		{"rejected proposal", normal("MaxBurstLength=Reject"), StatusInitiatorError,
			"reserved_value"},
		{"no zero byte", []byte("InitiatorName=" + hostIQN), StatusInitiatorError, "bad_text"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, stage := range []Stage{SecurityNegotiation, OperationalNegotiation} {
				newInitiator(t, openConfig()).refused(&Request{CSG: stage, NSG: FullFeature,
					Transit: true, Data: tt.data}, tt.status, tt.reason)
			}
		})
	}
	for name, want := range map[string]string{
		hostIQN: hostIQN, strings.ToUpper(hostIQN): hostIQN,
		"eui.02004567A425678D": "eui.02004567a425678d",
		"naa.52004567BA64678D": "naa.52004567ba64678d",
		"x":                    "x", repeat("n", 223): repeat("n", 223),
		"iqn.2001-04.com.example:bücher": "iqn.2001-04.com.example:bücher",
	} {
		i := newInitiator(t, openConfig())
		i.ok(OperationalNegotiation, FullFeature, true,
			text("InitiatorName="+name, "TargetName="+strings.ToUpper(targetIQN)))
		require.Equal(t, want, i.m.Result().InitiatorName)
		require.Equal(t, targetIQN, i.m.Result().TargetName)
	}
	// The log needs the requested name, even if it was refused.
	i := newInitiator(t, openConfig())
	i.refused(&Request{Data: text("InitiatorName="+hostIQN, "TargetName=other")}, StatusNotFound,
		"unknown_target")
	require.Equal(t, Result{InitiatorName: hostIQN, TargetName: "other", Params: defaultParams()},
		i.m.Result())
}

func normalWith(more ...string) []byte {
	return append(text("InitiatorName="+hostIQN, "TargetName="+targetIQN), text(more...)...)
}

func TestNamesOnlyFirst(t *testing.T) {
	for _, late := range []string{"SessionType=Normal", "TargetName=" + targetIQN} {
		i := newInitiator(t, openConfig())
		i.ok(OperationalNegotiation, 0, false, discovery())
		reason := "key_not_allowed"
		if strings.HasPrefix(late, "SessionType") {
			reason = "duplicate_key"
		}
		i.refused(&Request{CSG: OperationalNegotiation, Data: text(late)}, StatusInitiatorError,
			reason)
	}
	i := newInitiator(t, openConfig())
	i.ok(OperationalNegotiation, 0, false, normalWith())
	i.refused(&Request{CSG: OperationalNegotiation, Data: text("SessionType=Normal")},
		StatusInitiatorError, "key_not_allowed")
}

func TestDuplicateAcrossRequests(t *testing.T) {
	for _, key := range []string{"MaxBurstLength=65536", "X-com.example.a=b", "InitiatorAlias=x",
		"MaxRecvDataSegmentLength=8192"} {
		i := newInitiator(t, openConfig())
		i.ok(OperationalNegotiation, 0, false, normal(key))
		i.refused(&Request{CSG: OperationalNegotiation, Data: text(key)}, StatusInitiatorError,
			"duplicate_key")
		newInitiator(t, openConfig()).refused(&Request{CSG: OperationalNegotiation,
			Data: normal(key, key)}, StatusInitiatorError, "duplicate_key")
	}
	// Also across stages.
	i := newInitiator(t, openConfig())
	i.ok(SecurityNegotiation, OperationalNegotiation, true, normal("InitiatorAlias=x"))
	i.refused(&Request{CSG: OperationalNegotiation, Data: text("InitiatorAlias=y")},
		StatusInitiatorError, "duplicate_key")
}

// libiscsi does this if it has a credential and the target asks for none. The log must explain it.
func TestDuplicateNameAfterCHAPWasDeclined(t *testing.T) {
	i := newInitiator(t, openConfig())
	i.ok(SecurityNegotiation, OperationalNegotiation, true, normal("AuthMethod=CHAP,None"))
	r := i.refused(&Request{CSG: OperationalNegotiation, Data: normal()}, StatusInitiatorError,
		"duplicate_key")
	require.ErrorContains(t, r.Err, "the target has none")
}

func TestKeysOfTheOtherStage(t *testing.T) {
	for key, r := range roles {
		stage := SecurityNegotiation
		switch r {
		case roleSecurity:
			stage = OperationalNegotiation
		case roleOperational:
		default:
			continue
		}
		newInitiator(t, openConfig()).refused(&Request{CSG: stage, Data: normal(key + "=1")},
			StatusInitiatorError, "key_not_allowed")
	}
}

func TestVersion(t *testing.T) {
	newInitiator(t, openConfig()).refused(&Request{VersionMin: 1, VersionMax: 1, Data: normal()},
		StatusUnsupportedVersion, "unsupported_version")
	i := newInitiator(t, openConfig())
	// 0 is within 0 to 3
	resp := i.m.Step(&Request{CSG: OperationalNegotiation, VersionMax: 3, Data: normal()})
	require.Equal(t, StatusSuccess, resp.Status)
	i.refused(&Request{CSG: OperationalNegotiation, VersionMax: 2}, StatusInitiatorError,
		"header_changed")
}

func TestHeaderChanges(t *testing.T) {
	for _, change := range []func(*Request){
		func(r *Request) { r.ISID[5]++ }, func(r *Request) { r.TSIH++ },
		func(r *Request) { r.CID++ },
		func(r *Request) { r.VersionMin, r.VersionMax = 1, 1 },
	} {
		i := newInitiator(t, openConfig())
		i.ok(OperationalNegotiation, 0, false, normal())
		req := &Request{CSG: OperationalNegotiation}
		change(req)
		i.refused(req, StatusInitiatorError, "header_changed")
	}
}

func TestTooMuchText(t *testing.T) {
	// 8192 bytes, first in one request and then in pieces.
	var big []byte
	for n := 0; len(big) < 8192-300; n++ {
		big = append(big, text(fmt.Sprintf("X-com.example.key%d=%s", n, repeat("v", 200)))...)
	}
	first := normal()
	big = append(first, big...)
	big = append(big, text("X-last="+repeat("v", 8192-len(big)-len("X-last=")-1))...)
	require.Len(t, big, 8192)
	i := newInitiator(t, openConfig())
	resp, keys := i.ok(OperationalNegotiation, FullFeature, true, big)
	require.True(t, resp.Transit)
	require.Equal(t, "NotUnderstood", keys["X-last"])

	i = newInitiator(t, openConfig())
	sent := 0
	for sent+1000 <= maxKeyBytes {
		resp := i.m.Step(&Request{CSG: OperationalNegotiation, Continue: true,
			Data: make([]byte, 1000)})
		require.Equal(t, StatusSuccess, resp.Status)
		sent += 1000
	}
	i.refused(&Request{CSG: OperationalNegotiation, Continue: true,
		Data: make([]byte, maxKeyBytes-sent+1)}, StatusInitiatorError, "too_much_text")
	require.LessOrEqual(t, cap(i.m.pending), 2*maxKeyBytes)
	// The limit is for the whole login, over all stages.
	i = newInitiator(t, openConfig())
	i.ok(OperationalNegotiation, 0, false, big)
	i.refused(&Request{CSG: OperationalNegotiation, Data: make([]byte, 8193)}, StatusInitiatorError,
		"too_much_text")
}

// TestLongResponse makes an answer so long that the initiator has to fetch it in several responses.
func TestLongResponse(t *testing.T) {
	var data []byte
	want := map[string]string{"TargetPortalGroupTag": "1", "MaxRecvDataSegmentLength": "262144"}
	data = append(data, normal()...)
	for n := range 1500 {
		key := fmt.Sprintf("K%d", n)
		data = append(data, text(key+"=")...)
		want[key] = "NotUnderstood"
	}
	require.Less(t, len(data), 16384)
	i := newInitiator(t, openConfig())
	var got []byte
	resp := i.m.Step(&Request{CSG: OperationalNegotiation, NSG: FullFeature, Transit: true,
		Data: data})
	for n := 0; resp.Continue; n++ {
		require.Equal(t, StatusSuccess, resp.Status)
		require.Len(t, resp.Data, 8192)
		require.False(t, resp.Transit)
		require.False(t, i.m.Done())
		got = append(got, resp.Data...)
		resp = i.m.Step(&Request{CSG: OperationalNegotiation, NSG: FullFeature, Transit: true})
	}
	got = append(got, resp.Data...)
	require.Greater(t, len(got), 2*8192)
	require.Equal(t, want, keysOf(t, got))
	require.True(t, resp.Transit)
	require.True(t, i.m.Done())

	for _, bad := range []*Request{{CSG: OperationalNegotiation, Data: text("X-a=b")},
		{CSG: OperationalNegotiation, Continue: true}} {
		i := newInitiator(t, openConfig())
		require.True(t, i.m.Step(&Request{CSG: OperationalNegotiation, Data: data}).Continue)
		i.refused(bad, StatusInitiatorError, "unexpected_text")
	}
}

func TestTooManySteps(t *testing.T) {
	for _, again := range []bool{false, true} {
		i := newInitiator(t, openConfig())
		i.ok(OperationalNegotiation, 0, false, normal())
		for range 63 {
			require.Equal(t, StatusSuccess,
				i.m.Step(&Request{CSG: OperationalNegotiation, Continue: again}).Status)
		}
		i.refused(&Request{CSG: OperationalNegotiation, Continue: again}, StatusInitiatorError,
			"too_many_steps")
	}
}

func TestClosedMachine(t *testing.T) {
	m := NewMachine(openConfig())
	m.Close()
	m.Close()
	resp := m.Step(&Request{CSG: OperationalNegotiation, NSG: FullFeature, Transit: true,
		Data: normal()})
	require.Equal(t, StatusInitiatorError, resp.Status)
	require.True(t, errors.As(resp.Err, new(*refusal)))
}

func TestStrings(t *testing.T) {
	require.Equal(t, "SecurityNegotiation LoginOperationalNegotiation Stage(2) FullFeaturePhase",
		fmt.Sprint(SecurityNegotiation, " ", OperationalNegotiation, " ", Stage(2), " ",
			FullFeature))
	require.Equal(t, "Normal Discovery SessionType(7)",
		fmt.Sprint(Normal, " ", Discovery, " ", SessionType(7)))
}

// TestStageMatrix sends every combination of CSG, NSG, T and C in the first request, and within a
// stage (RFC 7143 6.3, 11.12). A request for another stage is refused, and so is a step back.
func TestStageMatrix(t *testing.T) {
	const nowhere = FullFeature // the first request
	for n := range 3 * 4 * 4 * 4 {
		now := []Stage{nowhere, SecurityNegotiation, OperationalNegotiation}[n%3]
		csg, nsg, transit, more := Stage(n/3%4), Stage(n/12%4), n/48%2 == 1, n/96 == 1
		name := fmt.Sprintf("in %v: CSG %d NSG %d T %v C %v", now, csg, nsg, transit, more)
		i := newInitiator(t, openConfig())
		var data []byte
		switch now {
		case nowhere:
			data = normal()
		case SecurityNegotiation:
			i.ok(SecurityNegotiation, 0, false, normal())
		default:
			i.ok(SecurityNegotiation, OperationalNegotiation, true, normal())
		}
		resp := i.m.Step(&Request{CSG: csg, NSG: nsg, Transit: transit, Continue: more, Data: data})
		switch {
		case csg >= 2 || now != nowhere && csg != now:
			i.requireRefused(resp, StatusInitiatorError, "bad_stage")
		case transit && more:
			i.requireRefused(resp, StatusInitiatorError, "bad_flags")
		case transit && (nsg <= csg || nsg == 2):
			i.requireRefused(resp, StatusInitiatorError, "bad_stage")
		case more:
			require.Equal(t, Response{CSG: csg}, resp, name)
		default:
			require.Equal(t, StatusSuccess, resp.Status, name)
			require.Equal(t, csg, resp.CSG, name)
			require.Equal(t, transit, resp.Transit, name)
			require.Equal(t, transit && nsg == FullFeature, i.m.Done(), name)
			if now == nowhere {
				require.NotEmpty(t, resp.Data, name)
			}
			if transit {
				require.Equal(t, nsg, resp.NSG, name)
			} else {
				require.Zero(t, resp.NSG, "reserved")
			}
		}
	}
}

func TestPortalGroupTagOnlyOnceAndFirst(t *testing.T) {
	for _, first := range []func(...string) []byte{normal, discovery} {
		i := newInitiator(t, openConfig())
		// The answer to a request with the C bit is empty, so it comes with the next one.
		data := first()
		resp := i.m.Step(&Request{Continue: true, Data: data[:5]})
		require.Equal(t, Response{}, resp)
		_, keys := i.ok(SecurityNegotiation, 0, false, data[5:])
		require.Equal(t, "1", keys["TargetPortalGroupTag"])
		_, keys = i.ok(SecurityNegotiation, OperationalNegotiation, true, text("AuthMethod=None"))
		require.NotContains(t, keys, "TargetPortalGroupTag")
		_, keys = i.ok(OperationalNegotiation, FullFeature, true, nil)
		require.NotContains(t, keys, "TargetPortalGroupTag")
	}
}

// TestSplitAnywhere cuts the text of a request in two at every position, and into single bytes.
func TestSplitAnywhere(t *testing.T) {
	data := normal("HeaderDigest=CRC32C", "X-com.example.a=b=c", "MaxBurstLength=65536",
		"FirstBurstLength=4096", "InitiatorAlias=a")
	i := newInitiator(t, openConfig())
	want := i.m.Step(&Request{CSG: OperationalNegotiation, NSG: FullFeature, Transit: true,
		Data: data})
	require.True(t, i.m.Done())
	result := i.m.Result()
	run := func(parts ...[]byte) {
		t.Helper()
		i := newInitiator(t, openConfig())
		for _, p := range parts[:len(parts)-1] {
			buf := append([]byte(nil), p...)
			resp := i.m.Step(&Request{CSG: OperationalNegotiation, Continue: true, Data: buf})
			require.Equal(t, Response{CSG: OperationalNegotiation}, resp)
			clear(buf) // the machine must not have kept it
		}
		resp := i.m.Step(&Request{CSG: OperationalNegotiation, NSG: FullFeature, Transit: true,
			Data: parts[len(parts)-1]})
		require.Equal(t, want, resp)
		require.Equal(t, result, i.m.Result())
	}
	for at := range len(data) + 1 {
		run(data[:at], data[at:])
	}
	var single [][]byte
	for at := range data {
		single = append(single, data[at:at+1])
	}
	run(single...)
	run(append(single, nil)...)
}
