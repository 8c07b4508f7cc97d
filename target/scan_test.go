package target_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/serving"
	. "kubevirt.io/disk/target/targettest"
)

// vitalPage is an INQUIRY for a page of vital product data.
func vitalPage(lun uint16, page byte) Command {
	return Command{LUN: lun, CDB: []byte{0x12, 1, page, 1, 0, 0}, Read: 256}
}

// TestScan sends the requests by which initiators find disks and learn what they can do.
func TestScan(t *testing.T) {
	s := start(t, func(o *options) {
		o.LUNs = append(o.LUNs,
			serving.Options{Number: 300, Name: "high.raw", Disk: disktest.NewMemory(8 << 20),
				Identity: identity(3), Access: serving.AccessWriteShared})
	})
	sess := MustLogin(t, s.addr, LoginOptions{}, 1, 2, 300)
	t.Run("SPC-4 6.33/REPORT LUNS", func(t *testing.T) {
		d := sess.MustGood(t, ReportLUNs(256)).Data
		require.Len(t, d, 8+3*8)
		require.EqualValues(t, 24, binary.BigEndian.Uint32(d))
		for i, lun := range []uint16{1, 2, 300} {
			require.Equal(t, LUN(lun), binary.BigEndian.Uint64(d[8+8*i:]))
		}
		require.EqualValues(t, 24, binary.BigEndian.Uint32(sess.MustGood(t, ReportLUNs(16)).Data),
			"a list that is cut off has its full length in the header")
		sess.MustFail(t, ReportLUNs(15), "05/24/00")
		c := ReportLUNs(256)
		c.CDB[2] = 0x77
		sess.MustFail(t, c, "05/24/00")
	})
	t.Run("SPC-4 6.6.2/LUN 0 without a disk answers INQUIRY but no disk command",
		func(t *testing.T) {
			require.EqualValues(t, 0x3f, sess.MustGood(t, Inquiry(0, 96)).Data[0])
			sess.MustFail(t, TestUnitReady(0), "05/25/00")
			sess.MustFail(t, Read10(0, 0, 1), "05/25/00")
		})
	t.Run("SAM-5 4.7/a LUN that does not exist", func(t *testing.T) {
		require.EqualValues(t, 0x7f, sess.MustGood(t, Inquiry(9, 96)).Data[0])
		c := ReportLUNs(256)
		c.LUN = 9
		sess.MustFail(t, c, "05/25/00")
		sess.MustFail(t, ReadCapacity10(9), "05/25/00")
	})
	t.Run("SPC-4 6.6/standard INQUIRY data", func(t *testing.T) {
		d := sess.MustGood(t, Inquiry(300, 96)).Data
		require.Len(t, d, 96)
		require.GreaterOrEqual(t, d[2], byte(5), "SPC-3 or later")
		require.EqualValues(t, len(d)-5, d[4])
		require.NotZero(t, binary.BigEndian.Uint16(d[58:]), "version descriptors")
		sess.MustFail(t, Command{LUN: 1, CDB: []byte{0x12, 0, 0x80, 0, 96, 0}, Read: 96},
			"05/24/00")
	})
	t.Run("SPC-4 7.8/every VPD page that is listed answers", func(t *testing.T) {
		listed := sess.MustGood(t, vitalPage(1, 0)).Data[4:]
		require.IsIncreasing(t, listed)
		require.Subset(t, listed, []byte{0x00, 0x80, 0x83, 0x8f, 0xb0, 0xb1, 0xb2})
		for page := range 256 {
			r := sess.MustDo(t, vitalPage(1, byte(page)))
			if bytes.IndexByte(listed, byte(page)) < 0 {
				require.Equal(t, "05/24/00", r.Failed(), "page %02x", page)
				continue
			}
			require.True(t, r.Good(), "page %02x", page)
			require.EqualValues(t, page, r.Data[1])
			require.Len(t, r.Data, 4+int(binary.BigEndian.Uint16(r.Data[2:])))
		}
	})
	t.Run("SPC-4 7.8.6/two disks are never taken for two paths to one", func(t *testing.T) {
		one, two := sess.MustGood(t, vitalPage(1, 0x83)).Data,
			sess.MustGood(t, vitalPage(2, 0x83)).Data
		require.Equal(t, one, s.login(t, other).MustGood(t, vitalPage(1, 0x83)).Data,
			"one disk has the same identifiers in every session")
		require.Equal(t, []byte{0x01, 0x03, 0, 8}, one[4:8], "the NAA identifier comes first")
		require.NotEqual(t, one[8:16], two[8:16])
		require.NotEqual(t, sess.MustGood(t, vitalPage(1, 0x80)).Data,
			sess.MustGood(t, vitalPage(2, 0x80)).Data)
	})
	t.Run("SBC-3 5.15/READ CAPACITY", func(t *testing.T) {
		d := sess.MustGood(t, ReadCapacity10(1)).Data
		require.Equal(t, []uint32{diskSize/BlockSize - 1, BlockSize},
			[]uint32{binary.BigEndian.Uint32(d), binary.BigEndian.Uint32(d[4:])})
		c := block16(300, 0x9e, 0x10, 0, 32, nil)
		c.Read = 32
		require.EqualValues(t, 8<<20/BlockSize-1, binary.BigEndian.Uint64(sess.MustGood(t, c).Data))
		c.CDB[1] = 0x1f
		sess.MustFail(t, c, "05/24/00")
	})
	t.Run("SPC-4 6.13/MODE SENSE reports the write cache", func(t *testing.T) {
		d := sess.MustGood(t, Command{LUN: 1, CDB: []byte{0x1a, 0x08, 0x08, 0, 255, 0},
			Read: 255}).Data
		require.NotZero(t, d[2]&0x10, "DPOFUA")
		require.EqualValues(t, 0x08, d[4]&0x3f)
		require.NotZero(t, d[6]&0x04, "WCE: without it Linux never flushes")
		all := sess.MustGood(t,
			Command{LUN: 1, CDB: []byte{0x1a, 0x08, 0x3f, 0, 255, 0}, Read: 255}).Data
		require.EqualValues(t, len(all)-1, all[0])
		sess.MustFail(t, Command{LUN: 1, CDB: []byte{0x1a, 0x08, 0x3e, 0, 255, 0}, Read: 255},
			"05/24/00")
	})
	t.Run("SPC-4 6.35/REPORT SUPPORTED OPERATION CODES agrees with the commands",
		func(t *testing.T) {
			for op := range 256 {
				c := Command{LUN: 1, CDB: []byte{0xa3, 0x0c, 1, byte(op), 0, 0, 0, 0, 1, 0, 0, 0},
					Read: 256}
				r := sess.MustDo(t, c)
				if !r.Good() {
					require.Equal(t, "05/24/00", r.Failed(), "%02x has service actions", op)
					continue
				}
				command := Command{LUN: 1, CDB: append([]byte{byte(op)}, make([]byte, 15)...)}
				unknown := sess.MustDo(t, command).Failed() == "05/20/00"
				require.Equal(t, unknown, r.Data[1]&7 == 1, "%02x", op)
			}
		})
	t.Run("SAM-5 5.14/unit attentions come once, on each LUN of each session", func(t *testing.T) {
		fresh := MustLogin(t, s.addr,
			LoginOptions{Initiator: fmt.Sprintf("%s.fresh", DefaultInitiator),
				ISID: [6]byte{0x80, 7}})
		sess.MustGood(t, Inquiry(1, 96))
		for _, lun := range []uint16{1, 300} {
			fresh.MustGood(t, Inquiry(lun, 96)) // leaves the unit attention pending
			fresh.MustFail(t, Read10(lun, 0, 1), "06/29/00")
			fresh.MustGood(t, Read10(lun, 0, 1))
		}
		sess.MustGood(t, TestUnitReady(1))
	})
}
