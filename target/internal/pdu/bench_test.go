package pdu

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func BenchmarkSCSICommandDecode(b *testing.B) {
	var h Header
	(&SCSICommand{Final: true, Read: true, TaskTag: 1, ExpectedLength: 4096}).Encode(&h)
	var p SCSICommand
	b.ReportAllocs()
	for b.Loop() {
		if p.Decode(&h) != nil {
			b.Fatal("refused")
		}
	}
}

func BenchmarkDataInEncode(b *testing.B) {
	p := DataIn{Final: true, HasStatus: true, TaskTag: 1, DataLen: 4096}
	var h Header
	b.ReportAllocs()
	for b.Loop() {
		p.Encode(&h)
	}
}

// TestNoAllocation: decoders and encoders run once per PDU, so they must not allocate.
func TestNoAllocation(t *testing.T) {
	for _, g := range goldens {
		h, p := header(t, g.hex), g.pdu
		require.Zero(t, testing.AllocsPerRun(10, func() {
			if p.Decode(&h) != nil {
				t.Error("refused")
			}
			p.Encode(&h)
		}), g.name)
	}
}
