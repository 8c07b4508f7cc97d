package pdu

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseAHS(t *testing.T) {
	cdb := bytes.Repeat([]byte{0xcd}, maxExtendedCDB)
	for _, tt := range []struct {
		name string
		in   []byte
		want AHS
	}{
		{"none", nil, AHS{}},
		{"11.2.2.3/extended CDB of 17 bytes", []byte{0, 2, 1, 0, 0xaa, 0, 0, 0},
			AHS{ExtendedCDB: []byte{0xaa}}},
		{"11.2.2.3/extended CDB of 32 bytes", append([]byte{0, 17, 1, 0}, cdb[:16]...),
			AHS{ExtendedCDB: cdb[:16]}},
		{"11.2.2.3/longest CDB", append([]byte{0, maxExtendedCDB + 1, 1, 0}, cdb...),
			AHS{ExtendedCDB: cdb}},
		{"11.2.2.3/reserved bits of the type", []byte{0, 2, 0xc1, 0, 0xaa, 0, 0, 0},
			AHS{ExtendedCDB: []byte{0xaa}}},
		{"11.2.2.4/bidirectional", []byte{0, 5, 2, 0, 1, 2, 3, 4},
			AHS{HasBidi: true, BidiReadLength: 0x01020304}},
		{"both", []byte{0, 5, 2, 0, 1, 2, 3, 4, 0, 2, 1, 0, 0xaa, 0, 0, 0},
			AHS{ExtendedCDB: []byte{0xaa}, HasBidi: true, BidiReadLength: 0x01020304}},
		{"unknown is skipped", []byte{0, 1, 9, 0, 0, 3, 9, 0, 7, 7, 0, 0, 0, 2, 1, 0, 0xaa, 0, 0,
			0}, AHS{ExtendedCDB: []byte{0xaa}}},
		{"empty unknown is skipped", []byte{0, 0, 0, 0}, AHS{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseAHS(tt.in)
			require.NoError(t, err)
			require.Equal(t, tt.want, got)
		})
	}
}

func TestParseAHSRefuses(t *testing.T) {
	for _, tt := range []struct {
		name string
		in   []byte
	}{
		{"no type", []byte{0, 0}},
		{"longer than its room", []byte{0, 6, 2, 0, 1, 2, 3, 4}},
		{"much longer than its room", []byte{0xff, 0xff, 9, 0}},
		{"11.2.2.3/CDB of 16 bytes", []byte{0, 1, 1, 0}},
		{"11.2.2.3/not even the reserved byte", []byte{0, 0, 1, 0}},
		{"11.2.2.3/longer than any CDB",
			append([]byte{0, maxExtendedCDB + 2, 1, 0}, make([]byte, maxExtendedCDB+4)...)},
		{"11.2.2.3/twice", []byte{0, 2, 1, 0, 1, 0, 0, 0, 0, 2, 1, 0, 1, 0, 0, 0}},
		{"11.2.2.4/short", []byte{0, 4, 2, 0, 1, 2, 3, 0}},
		{"11.2.2.4/long", []byte{0, 6, 2, 0, 1, 2, 3, 4, 5, 0, 0, 0}},
		{"11.2.2.4/twice", []byte{0, 5, 2, 0, 1, 2, 3, 4, 0, 5, 2, 0, 1, 2, 3, 4}},
		{"the second one is cut off", []byte{0, 5, 2, 0, 1, 2, 3, 4, 0, 5, 2, 0}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseAHS(tt.in)
			var fe *FieldError
			require.ErrorAs(t, err, &fe)
			require.Equal(t, AHS{}, got)
		})
	}
}

func TestAppendAHS(t *testing.T) {
	b := AppendExtendedCDB(nil, []byte{1, 2, 3, 4, 5})
	require.Equal(t, []byte{0, 6, 1, 0, 1, 2, 3, 4, 5, 0, 0, 0}, b)
	b = AppendBidiLength(b, 0x0a0b0c0d)
	got, err := ParseAHS(b)
	require.NoError(t, err)
	require.Equal(t, AHS{ExtendedCDB: []byte{1, 2, 3, 4, 5}, HasBidi: true,
		BidiReadLength: 0x0a0b0c0d}, got)
}

func FuzzAHS(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0, 5, 2, 0, 1, 2, 3, 4, 0, 2, 1, 0, 0xaa, 0, 0, 0})
	f.Add([]byte{0xff, 0xff, 1, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := ParseAHS(b)
		if err != nil {
			return
		}
		require.LessOrEqual(t, len(a.ExtendedCDB), min(len(b), maxExtendedCDB))
		var again []byte
		if a.ExtendedCDB != nil {
			again = AppendExtendedCDB(again, a.ExtendedCDB)
		}
		if a.HasBidi {
			again = AppendBidiLength(again, a.BidiReadLength)
		}
		got, err := ParseAHS(again)
		require.NoError(t, err)
		require.Equal(t, a, got)
	})
}
