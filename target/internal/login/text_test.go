package login

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

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
		got, err := ParsePairs([]byte(tt.in))
		require.NoError(t, err, "%q", tt.in)
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
