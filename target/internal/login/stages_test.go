package login

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

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
