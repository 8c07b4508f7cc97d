package pdu

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func newByOpcode(op Opcode) codec {
	for _, p := range []codec{&NOPOut{}, &SCSICommand{}, &TaskManagementRequest{}, &LoginRequest{},
		&TextRequest{}, &DataOut{},
		&LogoutRequest{}, &NOPIn{}, &SCSIResponse{}, &TaskManagementResponse{},
		&LoginResponse{},
		&TextResponse{}, &DataIn{}, &LogoutResponse{}, &R2T{}, &AsyncMessage{}, &Reject{}} {
		var h Header
		p.Encode(&h)
		if h.Opcode() == op {
			return p
		}
	}
	return nil
}

func TestDecodeRefuses(t *testing.T) {
	mutate := func(p codec, change func(h *Header)) *Header {
		h := new(Header)
		p.Encode(h)
		change(h)
		return h
	}
	clearFinal := func(h *Header) { h[1] &^= bitFinal }
	oneByte := func(h *Header) { h.SetDataLen(1) }
	none := func(*Header) {}
	tests := []struct {
		name  string
		pdu   codec
		bad   func(h *Header)
		field string
	}{
		{"11.2.1.2/another opcode", &NOPOut{Immediate: true}, func(h *Header) { h[0]++ }, "opcode"},
		{"11.2.1.5/additional header in a NOP-Out", &NOPOut{}, func(h *Header) { h.SetAHSLen(4) },
			"TotalAHSLength"},
		{"11.2.1.5/additional header in a Data-Out", &DataOut{}, func(h *Header) { h.SetAHSLen(4) },
			"TotalAHSLength"},
		{"11.2.1.8/reserved tag on a command", &SCSICommand{TaskTag: ReservedTag}, none,
			"initiator task tag"},
		{"11.2.1.8/reserved tag on a task management request",
			&TaskManagementRequest{TaskTag: ReservedTag}, none, "initiator task tag"},
		{"11.2.1.8/reserved tag on a text request", &TextRequest{TaskTag: ReservedTag}, none,
			"initiator task tag"},
		{"11.2.1.8/reserved tag on a logout", &LogoutRequest{TaskTag: ReservedTag}, none,
			"initiator task tag"},
		{"11.4.1/both residuals", &SCSIResponse{Overflow: true, Underflow: true}, none,
			"O and U bits"},
		{"11.4.1/residual without completion", &SCSIResponse{Response: 1, Underflow: true}, none,
			"residual bits"},
		{"11.4/final bit", &SCSIResponse{}, clearFinal, "F bit"},
		{"11.5/final bit", &TaskManagementRequest{}, clearFinal, "F bit"},
		{"11.5.2/data", &TaskManagementRequest{}, oneByte, "DataSegmentLength"},
		{"11.6/final bit", &TaskManagementResponse{}, clearFinal, "F bit"},
		{"11.7.2/acknowledgement without transfer tag",
			&DataIn{Acknowledge: true, TransferTag: ReservedTag}, none, "target transfer tag"},
		{"11.7.3/status before the last", &DataIn{HasStatus: true, Final: true}, clearFinal,
			"S bit"},
		{"11.7.3/both residuals",
			&DataIn{HasStatus: true, Final: true, Overflow: true, Underflow: true}, none,
			"O and U bits"},
		{"11.8/final bit", &R2T{DesiredLength: 1}, clearFinal, "F bit"},
		{"11.8.1/data", &R2T{DesiredLength: 1}, oneByte, "DataSegmentLength"},
		{"11.8.4/nothing desired", &R2T{}, none, "desired data transfer length"},
		{"11.8.5/reserved transfer tag", &R2T{DesiredLength: 1, TransferTag: ReservedTag}, none,
			"target transfer tag"},
		{"11.9/final bit", &AsyncMessage{}, clearFinal, "F bit"},
		{"11.10.2/final and continued", &TextRequest{Final: true, Continue: true}, none,
			"F and C bits"},
		{"11.11.2/final and continued", &TextResponse{Final: true, Continue: true}, none,
			"F and C bits"},
		{"11.11.1/final with transfer tag", &TextResponse{Final: true}, none,
			"target transfer tag"},
		{"11.11.1/more to come without transfer tag", &TextResponse{TransferTag: ReservedTag}, none,
			"target transfer tag"},
		{"11.14/final bit", &LogoutRequest{}, clearFinal, "F bit"},
		{"11.14.2/data", &LogoutRequest{}, oneByte, "DataSegmentLength"},
		{"11.15/final bit", &LogoutResponse{}, clearFinal, "F bit"},
		{"11.17.4/no rejected header", &Reject{DataLen: 47}, none, "DataSegmentLength"},
		{"11.18/final bit", &NOPOut{}, clearFinal, "F bit"},
		{"11.19/unasked with data", &NOPIn{TaskTag: ReservedTag, DataLen: 1}, none,
			"DataSegmentLength"},
		{"11.19.1/answer with transfer tag", &NOPIn{TaskTag: 1, TransferTag: 1}, none,
			"target transfer tag"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := newByOpcode(mutate(tt.pdu, none).Opcode()).Decode(mutate(tt.pdu, tt.bad))
			var fe *FieldError
			require.True(t, errors.As(err, &fe), "%v", err)
			require.Equal(t, tt.field, fe.Field)
			require.Equal(t, mutate(tt.pdu, none).Opcode(), fe.Opcode)
			require.Contains(t, err.Error(), fe.Opcode.String())
		})
	}
}

// Decoders ignore reserved bits, because a later standard may define them.
func TestDecodeIgnoresReserved(t *testing.T) {
	var h Header
	want := TaskManagementRequest{Function: TMQueryTask, TaskTag: 1}
	want.Encode(&h)
	h[0] |= 0x80
	h[2], h[3], h[40], h[47] = 0xff, 0xff, 0xff, 0xff
	var got TaskManagementRequest
	require.NoError(t, got.Decode(&h))
	require.Equal(t, want, got)

	// A Login Request always counts as immediate (11.12).
	h = Header{}
	(&LoginRequest{TaskTag: 1}).Encode(&h)
	h[0] &^= bitImmediate
	require.NoError(t, new(LoginRequest).Decode(&h))

	// Without status, the status fields have no meaning (11.7.3).
	h = Header{0: byte(OpDataIn), 1: bitOverflow | bitUnderflow, 3: 2, 24: 1, 44: 1}
	var d DataIn
	require.NoError(t, d.Decode(&h))
	require.Equal(t, DataIn{}, d)
}

func TestCheckAHS(t *testing.T) {
	for _, tt := range []struct {
		name string
		in   []byte
		bad  bool
	}{
		{"none", nil, false},
		{"11.2.2.3/extended CDB of 17 bytes", []byte{0, 2, 1, 0, 0xaa, 0, 0, 0}, false},
		{"11.2.2.4/bidirectional", []byte{0, 5, 2, 0, 1, 2, 3, 4}, false},
		{"two", []byte{0, 5, 2, 0, 1, 2, 3, 4, 0, 2, 1, 0, 0xaa, 0, 0, 0}, false},
		{"empty", []byte{0, 0, 0, 0}, false},
		{"as many as there can be", bytes.Repeat([]byte{0, 1, 9, 0}, 255), false},
		{"no type", []byte{0, 0}, true},
		{"longer than its room", []byte{0, 6, 2, 0, 1, 2, 3, 4}, true},
		{"much longer than its room", []byte{0xff, 0xff, 9, 0}, true},
		{"the second one is cut off", []byte{0, 5, 2, 0, 1, 2, 3, 4, 0, 5, 2, 0}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := CheckAHS(tt.in)
			require.Equal(t, tt.bad, err != nil, err)
		})
	}
}

// FuzzDecode decodes any header by its opcode, and encodes accepted ones.
func FuzzDecode(f *testing.F) {
	for _, g := range goldens {
		h := header(f, g.hex)
		f.Add(h[:])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < HeaderLen {
			return
		}
		h := Header(b[:HeaderLen])
		p := newByOpcode(h.Opcode())
		if p == nil {
			return
		}
		if err := p.Decode(&h); err != nil {
			require.True(t, errors.As(err, new(*FieldError)))
			return
		}
		var again Header
		p.Encode(&again)
		q := fresh(p)
		require.NoError(t, q.Decode(&again))
		require.Equal(t, p, q)
	})
}

// TestDigest runs the examples of RFC 7143 A.4, with the digests as bytes on the wire.
func TestDigest(t *testing.T) {
	up, down := make([]byte, 32), make([]byte, 32)
	for i := range up {
		up[i], down[i] = byte(i), byte(31-i)
	}
	read10 := []byte{0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x14, 0, 0, 0, 0, 0,
		0x04, 0, 0, 0, 0, 0x14,
		0, 0, 0, 0x18, 0x28, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0, 0, 0, 0}
	for _, tt := range []struct {
		name string
		data []byte
		want []byte
	}{
		{"32 bytes of zeros", make([]byte, 32), []byte{0xaa, 0x36, 0x91, 0x8a}},
		{"32 bytes of ones", bytes.Repeat([]byte{0xff}, 32), []byte{0x43, 0xab, 0xa8, 0x62}},
		{"32 bytes up", up, []byte{0x4e, 0x79, 0xdd, 0x46}},
		{"32 bytes down", down, []byte{0x5c, 0xdb, 0x3f, 0x11}},
		{"SCSI Command READ(10)", read10, []byte{0x56, 0x3a, 0x96, 0xd9}},
	} {
		t.Run("A.4/"+tt.name, func(t *testing.T) {
			d := Digest(tt.data)
			require.Equal(t, tt.want, AppendDigest(nil, d))
			var wire [4]byte
			PutDigest(wire[:], d)
			require.Equal(t, tt.want, wire[:])
			require.Equal(t, d, Digest(tt.data[:5], nil, tt.data[5:]), "in pieces")
			require.Equal(t, d, UpdateDigest(UpdateDigest(0, tt.data[:7]), tt.data[7:]),
				"continued")
			require.NotEqual(t, d, Digest(append([]byte{tt.data[0] ^ 1}, tt.data[1:]...)),
				"a flipped bit must change the digest")
		})
	}
}

func TestSerialNumbers(t *testing.T) {
	for _, tt := range []struct {
		a, b uint32
		less bool
	}{
		{0, 0, false}, {0, 1, true}, {1, 0, false}, {0xffffffff, 0, true}, {0, 0xffffffff, false},
		{0xfffffff0, 0x10, true}, {0x10, 0xfffffff0, false}, {0, 0x7fffffff, true},
		{0x7fffffff, 0, false},
	} {
		require.Equal(t, tt.less, SNLess(tt.a, tt.b), "%#x < %#x", tt.a, tt.b)
	}
}
