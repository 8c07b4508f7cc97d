package pdu

import (
	"encoding/hex"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// codec is the interface of all PDU types.
type codec interface {
	Decode(*Header) error
	Encode(*Header)
}

// golden is a PDU and its header, taken from the drawings in RFC 7143 11, with 8 bytes on a line.
type golden struct {
	name string
	pdu  codec
	hex  string
}

var goldens = []golden{
	{"11.18 NOP-Out, ping", &NOPOut{Immediate: true, LUN: 0x0001000000000000, TaskTag: 0x11121314,
		TransferTag: ReservedTag,
		CmdSN:       0x21222324, ExpStatSN: 0x31323334, DataLen: 5}, `
		40 80 0000 00 000005
		0001000000000000
		11121314 ffffffff
		21222324 31323334
		0000000000000000
		0000000000000000`},
	{"11.18 NOP-Out, answer", &NOPOut{Immediate: true, LUN: 0x0102030405060708,
		TaskTag: ReservedTag, TransferTag: 7,
		CmdSN: 1, ExpStatSN: 2}, `
		40 80 0000 00 000000
		0102030405060708
		ffffffff 00000007
		00000001 00000002
		0000000000000000
		0000000000000000`},
	{"11.19 NOP-In", &NOPIn{LUN: 1, TaskTag: ReservedTag, TransferTag: 0x05060708,
		StatSN: 0x11121314, ExpCmdSN: 0x21222324,
		MaxCmdSN: 0x31323334}, `
		20 80 0000 00 000000
		0000000000000001
		ffffffff 05060708
		11121314 21222324
		31323334 00000000
		0000000000000000`},
	{"11.3 SCSI Command, read",
		&SCSICommand{Final: true, Read: true, Attr: TaskAttrSimple, LUN: 0x0001000000000000,
			TaskTag: 0xa1a2a3a4, ExpectedLength: 0x00001000, CmdSN: 0xb1b2b3b4,
			ExpStatSN: 0xc1c2c3c4,
			CDB:       [16]byte{0x28, 0, 0, 0, 0, 0x10, 0, 0, 8}}, `
		01 c1 0000 00 000000
		0001000000000000
		a1a2a3a4 00001000
		b1b2b3b4 c1c2c3c4
		2800000000100000
		0800000000000000`},
	{"11.3 SCSI Command, immediate write with additional header and unsolicited data to come",
		&SCSICommand{Immediate: true,
			Write: true, Attr: TaskAttrACA, TaskTag: 1, ExpectedLength: 0xfffffffe, CmdSN: 2,
			ExpStatSN: 3, AHSLen: 20, DataLen: 0x010203,
			CDB: [16]byte{0x7f, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}}, `
		41 24 0000 05 010203
		0000000000000000
		00000001 fffffffe
		00000002 00000003
		7f01020304050607
		08090a0b0c0d0e0f`},
	{"RFC 7144 5.1 SCSI Command with a priority",
		&SCSICommand{Final: true, Attr: TaskAttrSimple, Priority: 0xf, TaskTag: 1, CmdSN: 2,
			ExpStatSN: 3}, `
		01 81 f000 00 000000
		0000000000000000
		00000001 00000000
		00000002 00000003
		0000000000000000
		0000000000000000`},
	{"RFC 7144 5.2 SCSI Response with a status qualifier",
		&SCSIResponse{Status: 8, StatusQualifier: 0x8102, TaskTag: 1}, `
		21 80 00 08 00 000000
		8102 000000000000
		00000001 00000000
		00000000 00000000
		00000000 00000000
		00000000 00000000`},
	{"11.4 SCSI Response, check condition with underflow",
		&SCSIResponse{Underflow: true, Status: 2, TaskTag: 0x01020304,
			SNACKTag: 0x05060708, StatSN: 0x11121314, ExpCmdSN: 0x21222324, MaxCmdSN: 0x31323334,
			ExpDataSN: 0x41424344,
			Residual:  0x61626364, DataLen: 20}, `
		21 82 00 02 00 000014
		0000000000000000
		01020304 05060708
		11121314 21222324
		31323334 41424344
		00000000 61626364`},
	{"11.4 SCSI Response, overflow",
		&SCSIResponse{Overflow: true, TaskTag: 1, Residual: 0x61626364}, `
		21 84 00 00 00 000000
		0000000000000000
		00000001 00000000
		00000000 00000000
		00000000 00000000
		00000000 61626364`},
	{"11.4 SCSI Response, target failure", &SCSIResponse{Response: 1, TaskTag: 1}, `
		21 80 01 00 00 000000
		0000000000000000
		00000001 00000000
		0000000000000000
		0000000000000000
		0000000000000000`},
	{"11.5 Task Management Request", &TaskManagementRequest{Immediate: true, Function: TMAbortTask,
		LUN:     0x0002000000000000,
		TaskTag: 0x01020304, RefTaskTag: 0x05060708, CmdSN: 0x11121314, ExpStatSN: 0x21222324,
		RefCmdSN:  0x31323334,
		ExpDataSN: 0x41424344}, `
		42 81 0000 00 000000
		0002000000000000
		01020304 05060708
		11121314 21222324
		31323334 41424344
		0000000000000000`},
	{"11.6 Task Management Response",
		&TaskManagementResponse{Response: TMRejected, TaskTag: 0x01020304, StatSN: 0x11121314,
			ExpCmdSN: 0x21222324, MaxCmdSN: 0x31323334}, `
		22 80 ff 00 00 000000
		0000000000000000
		01020304 00000000
		11121314 21222324
		31323334 00000000
		0000000000000000`},
	{"RFC 7144 6.4 Task Management Response with additional information",
		&TaskManagementResponse{Response: TMSucceeded,
			Additional: [3]byte{0x16, 0x29, 0x07}, TaskTag: 1, StatSN: 2, ExpCmdSN: 3, MaxCmdSN: 4},
		`
		22 80 07 00 00 000000
		16 29 07 0000000000
		00000001 00000000
		00000002 00000003
		00000004 00000000
		0000000000000000`},
	{"11.7 SCSI Data-Out", &DataOut{Final: true, LUN: 0x0001000000000000, TaskTag: 0x01020304,
		TransferTag: 0x05060708,
		ExpStatSN:   0x21222324, DataSN: 0x31323334, BufferOffset: 0x41424344, DataLen: 0x002000}, `
		05 80 0000 00 002000
		0001000000000000
		01020304 05060708
		00000000 21222324
		00000000 31323334
		41424344 00000000`},
	{"11.7 SCSI Data-In with status",
		&DataIn{Final: true, Underflow: true, HasStatus: true, Status: 4, TaskTag: 0x01020304,
			TransferTag: ReservedTag, StatSN: 0x11121314, ExpCmdSN: 0x21222324,
			MaxCmdSN:     0x31323334,
			DataSN:       0x41424344,
			BufferOffset: 0x51525354, Residual: 0x61626364, DataLen: 512}, `
		25 83 00 04 00 000200
		0000000000000000
		01020304 ffffffff
		11121314 21222324
		31323334 41424344
		51525354 61626364`},
	{"11.7 SCSI Data-In that wants an acknowledgement",
		&DataIn{Acknowledge: true, LUN: 0x0001000000000000, TaskTag: 1,
			TransferTag: 2, ExpCmdSN: 3, MaxCmdSN: 4, DataSN: 5, BufferOffset: 6, DataLen: 7}, `
		25 40 00 00 00 000007
		0001000000000000
		00000001 00000002
		00000000 00000003
		00000004 00000005
		00000006 00000000`},
	{"11.8 R2T", &R2T{LUN: 0x0001000000000000, TaskTag: 0x01020304, TransferTag: 0x05060708,
		StatSN:   0x11121314,
		ExpCmdSN: 0x21222324, MaxCmdSN: 0x31323334, R2TSN: 0x41424344, BufferOffset: 0x51525354,
		DesiredLength: 0x61626364}, `
		31 80 0000 00 000000
		0001000000000000
		01020304 05060708
		11121314 21222324
		31323334 41424344
		51525354 61626364`},
	{"11.9 Asynchronous Message", &AsyncMessage{Event: AsyncLogoutRequest, StatSN: 0x11121314,
		ExpCmdSN: 0x21222324,
		MaxCmdSN: 0x31323334, VendorCode: 9, Parameter1: 0x4142, Parameter2: 0x4344,
		Parameter3: 0x4546}, `
		32 80 0000 00 000000
		0000000000000000
		ffffffff 00000000
		11121314 21222324
		31323334 01 09 4142
		4344 4546 00000000`},
	{"11.10 Text Request", &TextRequest{Immediate: true, Final: true, LUN: 1, TaskTag: 0x01020304,
		TransferTag: ReservedTag,
		CmdSN:       0x11121314, ExpStatSN: 0x21222324, DataLen: 16}, `
		44 80 0000 00 000010
		0000000000000001
		01020304 ffffffff
		11121314 21222324
		0000000000000000
		0000000000000000`},
	{"11.11 Text Response, to be continued",
		&TextResponse{Continue: true, TaskTag: 0x01020304, TransferTag: 0x05060708,
			StatSN: 0x11121314, ExpCmdSN: 0x21222324, MaxCmdSN: 0x31323334, DataLen: 8192}, `
		24 40 0000 00 002000
		0000000000000000
		01020304 05060708
		11121314 21222324
		31323334 00000000
		0000000000000000`},
	{"11.12 Login Request", &LoginRequest{Transit: true, CSG: 1, NSG: 3, VersionMax: 2,
		VersionMin: 1,
		ISID:       [6]byte{0x80, 1, 2, 3, 4, 5}, TSIH: 0x0607, TaskTag: 0x01020304, CID: 0x0809,
		CmdSN:     0x11121314,
		ExpStatSN: 0x21222324, DataLen: 100}, `
		43 87 02 01 00 000064
		800102030405 0607
		01020304 0809 0000
		11121314 21222324
		0000000000000000
		0000000000000000`},
	{"11.13 Login Response, refused", &LoginResponse{Continue: true, CSG: 0, NSG: 1, VersionMax: 3,
		VersionActive: 4,
		ISID:          [6]byte{0x80, 1, 2, 3, 4, 5}, TSIH: 0x0607, TaskTag: 0x01020304,
		StatSN:   0x11121314,
		ExpCmdSN: 0x21222324,
		MaxCmdSN: 0x31323334, StatusClass: 2, StatusDetail: 1, DataLen: 3}, `
		23 41 03 04 00 000003
		800102030405 0607
		01020304 00000000
		11121314 21222324
		31323334 02 01 0000
		0000000000000000`},
	{"11.14 Logout Request", &LogoutRequest{Immediate: true, Reason: LogoutRemoveConnection,
		TaskTag: 0x01020304, CID: 0x0506,
		CmdSN: 0x11121314, ExpStatSN: 0x21222324}, `
		46 82 0000 00 000000
		0000000000000000
		01020304 0506 0000
		11121314 21222324
		0000000000000000
		0000000000000000`},
	{"11.15 Logout Response", &LogoutResponse{Response: LogoutRecoveryNotSupported,
		TaskTag: 0x01020304, StatSN: 0x11121314,
		ExpCmdSN: 0x21222324, MaxCmdSN: 0x31323334, Time2Wait: 2, Time2Retain: 20}, `
		26 80 02 00 00 000000
		0000000000000000
		01020304 00000000
		11121314 21222324
		31323334 00000000
		0002 0014 00000000`},
	{"11.17 Reject", &Reject{Reason: RejectProtocolError, StatSN: 0x11121314, ExpCmdSN: 0x21222324,
		MaxCmdSN: 0x31323334,
		DataSN:   0x41424344, DataLen: 48}, `
		3f 80 04 00 00 000030
		0000000000000000
		ffffffff 00000000
		11121314 21222324
		31323334 41424344
		0000000000000000`},
}

func header(t testing.TB, s string) Header {
	t.Helper()
	b := testtool.Must(hex.DecodeString(strings.Join(strings.Fields(s), "")))(t)
	require.Len(t, b, HeaderLen)
	return Header(b)
}

// fresh is a new value of p's type, filled with garbage as a reused one would be.
func fresh(p codec) codec {
	v := reflect.New(reflect.TypeOf(p).Elem())
	for i := range v.Elem().NumField() {
		switch f := v.Elem().Field(i); f.Kind() {
		case reflect.Bool:
			f.SetBool(true)
		case reflect.Int:
			f.SetInt(-1)
		case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
			f.SetUint(0x5a)
		}
	}
	return v.Interface().(codec)
}

func TestGolden(t *testing.T) {
	seen := map[Opcode]bool{}
	for _, g := range goldens {
		t.Run(g.name, func(t *testing.T) {
			want := header(t, g.hex)
			got := Header{47: 0xff} // garbage from the buffer's last use
			g.pdu.Encode(&got)
			require.Equal(t, hex.EncodeToString(want[:]), hex.EncodeToString(got[:]))

			back := fresh(g.pdu)
			require.NoError(t, back.Decode(&want))
			require.Equal(t, g.pdu, back)
			seen[want.Opcode()] = true
		})
	}
	for op := range opcodeNames {
		if op == OpSNACKRequest { // no field of it is read
			continue
		}
		require.True(t, seen[op], "no golden of %v", op)
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

func TestString(t *testing.T) {
	require.Equal(t, "Ready To Transfer", OpR2T.String())
	require.Equal(t, "0x07", Opcode(7).String())
	require.Equal(t, "SNACK reject", RejectSNACK.String())
	require.Equal(t, "0x7f", RejectReason(0x7f).String())
}

func TestHeaderLengths(t *testing.T) {
	var h Header
	for _, c := range []struct{ n, padded int }{{0, 0}, {1, 4}, {3, 4}, {4, 4}, {5, 8},
		{MaxDataLen, MaxDataLen + 1}} {
		h.SetDataLen(c.n)
		require.Equal(t, c.n, h.DataLen())
		require.Equal(t, c.padded, h.PaddedDataLen())
	}
	h[4] = 0xff
	require.Equal(t, 1020, h.AHSLen())
	h.SetAHSLen(16)
	require.Equal(t, byte(4), h[4])
}
