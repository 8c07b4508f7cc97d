package target_test

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

	. "kubevirt.io/disk/target/targettest"
)

// addressed is a CDB with address and length in the places of its group of operation codes (SPC-4
// 4.2.2).
func addressed(opcode, flags byte, lba uint32, blocks int) []byte {
	switch opcode >> 5 {
	case 0:
		return []byte{opcode, byte(lba >> 16), byte(lba >> 8), byte(lba), byte(blocks), 0}
	case 1, 2:
		cdb := append([]byte{opcode, flags}, binary.BigEndian.AppendUint32(nil, lba)...)
		return append(cdb, 0, byte(blocks>>8), byte(blocks), 0)
	case 5:
		cdb := append([]byte{opcode, flags}, binary.BigEndian.AppendUint32(nil, lba)...)
		return append(binary.BigEndian.AppendUint32(cdb, uint32(blocks)), 0, 0)
	}
	return cdb16(opcode, flags, uint64(lba), uint32(blocks))
}

// TestCommandLengths runs commands with CDBs of several lengths in each of them.
func TestCommandLengths(t *testing.T) {
	s := start(t)
	sess := s.login(t, LoginOptions{})
	const end = diskSize / BlockSize
	old, data := pattern(8*BlockSize, 1), pattern(8*BlockSize, 2)
	for _, tt := range []struct {
		name          string
		opcode, flags byte
		read          bool
		write, want   []byte // want: blocks 8 to 15 afterwards
	}{
		{"SBC-3 5.11/READ(6)", 0x08, 0, true, nil, old},
		{"SBC-3 5.12/READ(10)", 0x28, 0, true, nil, old},
		{"SBC-3 5.13/READ(12)", 0xa8, 0, true, nil, old},
		{"SBC-3 5.14/READ(16)", 0x88, 0, true, nil, old},
		{"SBC-3 5.37/WRITE(6)", 0x0a, 0, false, data, data},
		{"SBC-3 5.38/WRITE(10)", 0x2a, 0, false, data, data},
		{"SBC-3 5.39/WRITE(12)", 0xaa, 0, false, data, data},
		{"SBC-3 5.40/WRITE(16)", 0x8a, 0, false, data, data},
		{"SBC-3 5.41/WRITE AND VERIFY(10)", 0x2e, 2, false, data, data},
		{"SBC-3 5.42/WRITE AND VERIFY(12)", 0xae, 2, false, data, data},
		{"SBC-3 5.43/WRITE AND VERIFY(16)", 0x8e, 2, false, data, data},
		{"SBC-3 5.29/VERIFY(10)", 0x2f, 2, false, old, old},
		{"SBC-3 5.30/VERIFY(12)", 0xaf, 2, false, old, old},
		{"SBC-3 5.31/VERIFY(16)", 0x8f, 2, false, old, old},
		{"SBC-3 5.44/WRITE SAME(10)", 0x41, 0, false, data[:BlockSize],
			bytes.Repeat(data[:BlockSize], 8)},
		{"SBC-3 5.45/WRITE SAME(16)", 0x93, 0, false, data[:BlockSize],
			bytes.Repeat(data[:BlockSize], 8)},
		{"SBC-3 5.9/PRE-FETCH(10)", 0x34, 0, false, nil, old},
		{"SBC-3 5.10/PRE-FETCH(16)", 0x90, 0, false, nil, old},
		{"SBC-3 5.25/SYNCHRONIZE CACHE(10)", 0x35, 0, false, nil, old},
		{"SBC-3 5.26/SYNCHRONIZE CACHE(16)", 0x91, 0, false, nil, old},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sess.MustGood(t, Write10(1, 8, old))
			c := Command{LUN: 1, CDB: addressed(tt.opcode, tt.flags, 8, 8), Write: tt.write}
			if tt.read {
				c.Read = len(old)
			}
			r := sess.MustDo(t, c)
			// a PRE-FETCH ends in CONDITION MET
			require.Contains(t, []uint8{0, 0x04}, r.Status, "%s", r.Failed())
			if tt.read {
				require.Equal(t, old, r.Data)
			}
			require.Equal(t, tt.want, sess.MustGood(t, Read10(1, 8, 8)).Data)
		})
		t.Run(tt.name+", beyond the end", func(t *testing.T) {
			last := sess.MustGood(t, Read10(1, end-8, 8)).Data
			c := Command{LUN: 1, CDB: addressed(tt.opcode, tt.flags, end-4, 8), Write: tt.write}
			if tt.read {
				c.Read = len(old)
			}
			sess.MustFail(t, c, "05/21/00")
			require.Equal(t, last, sess.MustGood(t, Read10(1, end-8, 8)).Data)
		})
	}
}

// TestGrownDisk serves a disk that has grown since the last start.
func TestGrownDisk(t *testing.T) {
	s := start(t, func(o *options) { o.LUNs[0].Grown = true })
	sess := MustLogin(t, s.addr, LoginOptions{})
	t.Run("SBC-3 4.7.2/its new capacity is reported", func(t *testing.T) {
		require.Equal(t, []string{"06/29/00", "06/2A/09"}, attentions(t, sess, 1))
	})
	t.Run("SBC-3 4.7.2/not that of another LUN", func(t *testing.T) {
		require.Equal(t, []string{"06/29/00"}, attentions(t, sess, 2))
	})
	t.Run("SBC-3 4.7.2/once to each initiator port", func(t *testing.T) {
		require.NoError(t, sess.Close())
		require.Equal(t, []string{"06/29/07"},
			attentions(t, MustLogin(t, s.addr, LoginOptions{}), 1))
		require.Equal(t, []string{"06/29/00", "06/2A/09"},
			attentions(t, MustLogin(t, s.addr, other), 1))
	})
}

func TestReserve6(t *testing.T) {
	s := start(t)
	holder, neighbour := s.login(t, LoginOptions{}), s.login(t, other)
	reserve, release := Command{LUN: 1, CDB: []byte{0x16, 0, 0, 0, 0, 0}},
		Command{LUN: 1, CDB: []byte{0x17, 0, 0, 0, 0, 0}}
	t.Run("SPC-2 5.5.1/only the holder goes on", func(t *testing.T) {
		holder.MustGood(t, reserve)
		holder.MustGood(t, reserve)
		holder.MustGood(t, Write10(1, 0, pattern(BlockSize, 1)))
		for _, c := range []Command{reserve, TestUnitReady(1), Read10(1, 0, 1),
			Write10(1, 0, pattern(BlockSize, 2))} {
			neighbour.MustFail(t, c, reserved)
		}
		neighbour.MustGood(t, Inquiry(1, 96))
		neighbour.MustGood(t, Read10(2, 0, 1))
		require.Equal(t, pattern(BlockSize, 1), holder.MustGood(t, Read10(1, 0, 1)).Data)
	})
	t.Run("SPC-2 7.22/a release by somebody else changes nothing", func(t *testing.T) {
		neighbour.MustGood(t, release)
		neighbour.MustFail(t, TestUnitReady(1), reserved)
	})
	t.Run("SPC-2 7.22/the holder's does", func(t *testing.T) {
		holder.MustGood(t, release)
		neighbour.MustGood(t, reserve)
		holder.MustFail(t, Read10(1, 0, 1), reserved)
		neighbour.MustGood(t, release)
	})
	t.Run("SPC-2 7.21/third-party and extent reservations are refused", func(t *testing.T) {
		for _, bits := range []byte{0x10, 0x01} {
			holder.MustFail(t, Command{LUN: 1, CDB: []byte{0x16, bits, 0, 0, 0, 0}}, "05/24/00")
		}
		neighbour.MustGood(t, Read10(1, 0, 1))
	})
}
