package target_test

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	. "kubevirt.io/disk/target/targettest"
)

// reads is a command that reads parameter data.
func reads(lun uint16, allocation int, cdb ...byte) Command {
	return Command{LUN: lun, CDB: cdb, Read: allocation}
}

// vpd reads a page of vital product data.
func vpd(lun uint16, page byte) Command { return reads(lun, 255, 0x12, 1, page, 0, 255, 0) }

func TestInquiryData(t *testing.T) {
	s := start(t, withStore(t))
	sess := s.login(t, LoginOptions{})
	t.Run("SPC-4 6.6.2/standard data", func(t *testing.T) {
		data := sess.MustGood(t, Inquiry(1, 96)).Data
		require.Len(t, data, 96)
		require.Zero(t, data[0], "a disk")
		require.Zero(t, data[1], "fixed")
		require.GreaterOrEqual(t, data[2], byte(5), "SPC-3 or later")
		require.EqualValues(t, 0x02, data[3]&0x0f, "response data format")
		require.EqualValues(t, 0x10, data[5]&0x30, "TPGS")
		require.EqualValues(t, 0x02, data[7]&0x02, "CMDQUE")
		require.NotZero(t, binary.BigEndian.Uint16(data[58:]), "version descriptors")
	})
	t.Run("SPC-4 6.6.2/no disk", func(t *testing.T) {
		require.EqualValues(t, 0x3f, sess.MustGood(t, Inquiry(0, 36)).Data[0])
		require.EqualValues(t, 0x7f, sess.MustGood(t, Inquiry(9, 36)).Data[0])
		sess.MustFail(t, TestUnitReady(9), "05/25/00")
		sess.MustFail(t, Read10(0, 0, 1), "05/25/00")
	})
	t.Run("SPC-4 6.6.1/page code without EVPD", func(t *testing.T) {
		sess.MustFail(t, reads(1, 96, 0x12, 0, 0x80, 0, 96, 0), "05/24/00")
	})
	t.Run("SPC-4 7.8.14/listed pages are in order and answer", func(t *testing.T) {
		for _, lun := range []uint16{0, 1, 2} {
			list := sess.MustGood(t, vpd(lun, 0)).Data[4:]
			require.True(t, slices.IsSorted(list))
			for _, page := range list {
				data := sess.MustGood(t, vpd(lun, page)).Data
				require.Equal(t, page, data[1])
				require.Len(t, data, 4+int(binary.BigEndian.Uint16(data[2:])))
			}
		}
		sess.MustFail(t, vpd(1, 0xb7), "05/24/00")
	})
	t.Run("SPC-4 7.8.6/identification is the unit's own", func(t *testing.T) {
		require.NotEqual(t, sess.MustGood(t, vpd(1, 0x83)).Data,
			sess.MustGood(t, vpd(2, 0x83)).Data)
		require.NotEqual(t, sess.MustGood(t, vpd(1, 0x80)).Data,
			sess.MustGood(t, vpd(2, 0x80)).Data)
	})
	t.Run("SBC-4 6.6.4/block limits", func(t *testing.T) {
		data := sess.MustGood(t, vpd(1, 0xb0)).Data
		require.Len(t, data, 64)
		require.NotZero(t, data[5], "MAXIMUM COMPARE AND WRITE LENGTH")
		for _, field := range []struct {
			name string
			at   int
		}{{"MAXIMUM TRANSFER LENGTH", 8}, {"OPTIMAL TRANSFER LENGTH", 12},
			{"MAXIMUM UNMAP LBA COUNT", 20}, {"MAXIMUM UNMAP BLOCK DESCRIPTOR COUNT", 24},
			{"OPTIMAL UNMAP GRANULARITY", 28}, {"MAXIMUM WRITE SAME LENGTH", 40},
			{"MAXIMUM ATOMIC TRANSFER LENGTH", 44},
			{"ATOMIC ALIGNMENT", 48}, {"ATOMIC TRANSFER LENGTH GRANULARITY", 52}} {
			require.NotZero(t, binary.BigEndian.Uint32(data[field.at:]), field.name)
		}
		require.LessOrEqual(t, binary.BigEndian.Uint32(data[44:]),
			binary.BigEndian.Uint32(data[8:]))
	})
	t.Run("SBC-4 6.6.4/no atomic writes without a store", func(t *testing.T) {
		require.Equal(t, make([]byte, 20), sess.MustGood(t, vpd(2, 0xb0)).Data[44:])
		sess.MustFail(t, writeAtomic(2, 0, pattern(8*BlockSize, 1)), "05/20/00")
	})
	t.Run("SBC-3 6.6.6/provisioning", func(t *testing.T) {
		require.Equal(t, []byte{0, 0xb2, 0, 4, 11, 0xe4, 2, 0}, sess.MustGood(t, vpd(1, 0xb2)).Data)
	})
	t.Run("SBC-3 6.6.6/a disk without discard has no provisioning", func(t *testing.T) {
		plain := start(t,
			func(o *options) {
				o.LUNs[0].Disk = plainDisk{
					disktest.NewMemory(diskSize)}
			}).login(t, LoginOptions{})
		plain.MustFail(t, vpd(1, 0xb2), "05/24/00")
		require.NotContains(t, plain.MustGood(t, vpd(1, 0)).Data[4:], byte(0xb2))
		plain.MustFail(t, unmap(1, 0, 8), "05/20/00")
	})
}

// plainDisk hides a disk's optional interfaces.
type plainDisk struct{ disk.Disk }

func TestReadCapacity16(t *testing.T) {
	sess := start(t).login(t, LoginOptions{})
	t.Run("SBC-3 5.16/thin", func(t *testing.T) {
		data := sess.MustGood(t, reads(1, 32, 0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0,
			0)).Data
		require.EqualValues(t, diskSize/BlockSize-1, binary.BigEndian.Uint64(data))
		require.EqualValues(t, BlockSize, binary.BigEndian.Uint32(data[8:]))
		require.EqualValues(t, 3, data[13]&0x0f, "8 logical blocks in a physical one")
		require.EqualValues(t, 0xc0, data[14], "LBPME, LBPRZ")
	})
	t.Run("SBC-3 5.16/cut off", func(t *testing.T) {
		require.Len(t, sess.MustGood(t,
			reads(1, 12, 0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0)).Data, 12)
	})
	t.Run("SBC-3 5.16/obsolete PMI", func(t *testing.T) {
		sess.MustFail(t, reads(1, 32, 0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 1, 0),
			"05/24/00")
	})
}

func TestLUNInventory(t *testing.T) {
	sess := start(t).login(t, LoginOptions{})
	list := func(selection byte, allocation byte) Command {
		return reads(1, int(allocation), 0xa0, 0, selection, 0, 0, 0, 0, 0, 0, allocation, 0, 0)
	}
	both := append([]byte{0, 0, 0, 16, 0, 0, 0, 0}, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0)
	for _, tt := range []struct {
		name      string
		selection byte
		want      []byte
	}{{"addressable", 0, both}, {"well-known", 1, make([]byte, 8)}, {"all", 2, both}} {
		t.Run("SPC-4 6.33/SELECT REPORT "+tt.name, func(t *testing.T) {
			require.Equal(t, tt.want, sess.MustGood(t, list(tt.selection, 64)).Data)
		})
	}
	t.Run("SPC-4 6.33/unknown SELECT REPORT",
		func(t *testing.T) { sess.MustFail(t, list(3, 64), "05/24/00") })
	t.Run("SPC-4 6.33/allocation length below 16",
		func(t *testing.T) { sess.MustFail(t, list(0, 15), "05/24/00") })

	groups := func(format byte) Command {
		return reads(1, 64, 0xa3, 0x0a|format<<5, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0)
	}
	t.Run("SPC-4 6.37/REPORT TARGET PORT GROUPS", func(t *testing.T) {
		want := []byte{0, 0x01, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1}
		require.Equal(t, append([]byte{0, 0, 0, 12}, want...), sess.MustGood(t, groups(0)).Data)
		require.Equal(t, append([]byte{0, 0, 0, 16, 0x10, 0, 0, 0}, want...),
			sess.MustGood(t, groups(1)).Data)
		identification := sess.MustGood(t, vpd(1, 0x83)).Data
		require.True(t, bytes.Contains(identification, []byte{0x51, 0x95, 0, 4, 0, 0, 0, 1}),
			"the same group")
	})
	t.Run("SPC-4 6.37/unknown format",
		func(t *testing.T) { sess.MustFail(t, groups(2), "05/24/00") })
}

func TestSupportedCommands(t *testing.T) {
	sess := start(t, withStore(t)).login(t, LoginOptions{})
	one := func(options, opcode, action byte) Command {
		return reads(1, 255, 0xa3, 0x0c, options, opcode, 0, action, 0, 0, 0, 255, 0, 0)
	}
	for _, tt := range []struct {
		name                    string
		options, opcode, action byte
		length                  byte // of the CDB; 0: not supported
	}{
		{"WRITE SAME(10)", 1, 0x41, 0, 10},
		{"WRITE SAME(16)", 1, 0x93, 0, 16},
		{"UNMAP", 1, 0x42, 0, 10},
		{"COMPARE AND WRITE", 1, 0x89, 0, 16},
		{"WRITE ATOMIC(16)", 1, 0x9c, 0, 16},
		{"LOG SENSE", 1, 0x4d, 0, 10},
		{"START STOP UNIT", 1, 0x1b, 0, 6},
		{"GET LBA STATUS", 2, 0x9e, 0x12, 16},
		{"REPORT TARGET PORT GROUPS", 2, 0xa3, 0x0a, 12},
		{"GET LBA STATUS, unknown service action", 2, 0x9e, 0x04, 0},
		{"SANITIZE", 1, 0x48, 0, 0},
		{"PREVENT ALLOW MEDIUM REMOVAL", 1, 0x1e, 0, 0},
	} {
		t.Run("SPC-4 6.35/"+tt.name, func(t *testing.T) {
			data := sess.MustGood(t, one(tt.options, tt.opcode, tt.action)).Data
			if tt.length == 0 {
				require.EqualValues(t, 1, data[1]&7, "not supported")
				return
			}
			require.EqualValues(t, 3, data[1]&7, "supported as the standard says")
			require.Equal(t, tt.length, data[3])
			require.Equal(t, tt.opcode, data[4])
		})
	}
	t.Run("SPC-4 6.35/a service action for a command without any", func(t *testing.T) {
		sess.MustFail(t, one(2, 0x28, 0), "05/24/00")
		sess.MustFail(t, one(7, 0x28, 0), "05/24/00")
	})
	t.Run("SPC-4 6.36/task management functions", func(t *testing.T) {
		data := sess.MustGood(t, reads(1, 16, 0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0)).Data
		require.Equal(t, []byte{0xda, 0, 0, 0}, data,
			"abort task, abort task set, clear task set, LUN reset, target reset")
		sess.MustFail(t, reads(1, 16, 0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0), "05/24/00")
	})
	t.Run("SPC-4 4.3.3/an unknown operation code",
		func(t *testing.T) { sess.MustFail(t, reads(1, 0, 0xc1, 0, 0, 0, 0, 0), "05/20/00") })
}
