package target_test

import (
	"bytes"
	"encoding/binary"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	. "kubevirt.io/disk/target/targettest"
)

// cdb16 is a 16-byte CDB with address and length in their usual places.
func cdb16(opcode, b1 byte, lba uint64, blocks uint32) []byte {
	cdb := make([]byte, 16)
	cdb[0], cdb[1] = opcode, b1
	binary.BigEndian.PutUint64(cdb[2:], lba)
	binary.BigEndian.PutUint32(cdb[10:], blocks)
	return cdb
}

// withStore gives LUN 1 a store.
func withStore(t *testing.T) func(*options) {
	store := disktest.NewStore(filepath.Join(t.TempDir(), "unit"), false)
	return func(o *options) { o.LUNs[0].Store = store }
}

// writeAtomic has a length of two bytes, at the end of the length of other commands.
func writeAtomic(lun uint16, lba uint64, data []byte) Command {
	return Command{LUN: lun, CDB: cdb16(0x9c, 0, lba, uint32(len(data)/BlockSize)), Write: data}
}

func writeSame(lun uint16, b1 byte, lba uint64, blocks uint32, block []byte) Command {
	return Command{LUN: lun, CDB: cdb16(0x93, b1, lba, blocks), Write: block}
}

func compareWrite16(lun uint16, lba uint64, old, replacement []byte) Command {
	cdb := cdb16(0x89, 0, lba, 0)
	cdb[13] = byte(len(old) / BlockSize)
	return Command{LUN: lun, CDB: cdb, Write: append(bytes.Clone(old), replacement...)}
}

func verify(lun uint16, bytchk byte, lba uint64, blocks uint32, data []byte) Command {
	return Command{LUN: lun, CDB: cdb16(0x8f, bytchk<<1, lba, blocks), Write: data}
}

// reads is a command that reads parameter data.
func reads(lun uint16, allocation int, cdb ...byte) Command {
	return Command{LUN: lun, CDB: cdb, Read: allocation}
}

// vpd reads a page of vital product data.
func vpd(lun uint16, page byte) Command { return reads(lun, 255, 0x12, 1, page, 0, 255, 0) }

// unmap is an UNMAP with pairs of address and number of blocks.
func unmap(lun uint16, pairs ...uint64) Command {
	list := make([]byte, 8)
	for i := 0; i < len(pairs); i += 2 {
		list = binary.BigEndian.AppendUint64(list, pairs[i])
		list = binary.BigEndian.AppendUint32(list, uint32(pairs[i+1]))
		list = append(list, 0, 0, 0, 0)
	}
	binary.BigEndian.PutUint16(list, uint16(len(list)-2))
	binary.BigEndian.PutUint16(list[2:], uint16(len(list)-8))
	return Command{LUN: lun, CDB: []byte{0x42, 0, 0, 0, 0, 0, 0, byte(len(list) >> 8),
		byte(len(list)), 0}, Write: list}
}

// TestBlockCommands runs commands over the wire: those that carry no data, some, and more or less
// than they should. What each does otherwise is tested in scsi.
func TestBlockCommands(t *testing.T) {
	s := start(t, withStore(t))
	sess := s.login(t, LoginOptions{})
	old, data, zeros := pattern(8*BlockSize, 1), pattern(8*BlockSize, 2), make([]byte, 8*BlockSize)
	block := data[:BlockSize]
	for _, tt := range []struct {
		name    string
		command Command
		fails   string // sense; "": GOOD
		after   []byte // of blocks 8 to 15
	}{
		{"SBC-3 5.28/UNMAP", unmap(1, 8, 8), "", zeros},
		{"SBC-3 5.45/WRITE SAME", writeSame(1, 0, 8, 8, block), "", bytes.Repeat(block, 8)},
		{"SBC-3 5.45/WRITE SAME without data", writeSame(1, 1, 8, 8, nil), "", zeros},
		{"SBC-3 5.45/WRITE SAME of more than a block of data", writeSame(1, 0, 8, 8, data),
			"05/24/00", old},
		{"SBC-3 5.45/WRITE SAME without its block", writeSame(1, 0, 8, 8, nil), "05/0E/03", old},
		{"SBC-3 5.2/COMPARE AND WRITE", compareWrite16(1, 8, old, data), "", data},
		{"SBC-3 5.2/COMPARE AND WRITE of something else", compareWrite16(1, 8, data, data),
			"0E/1D/00", old},
		{"SBC-4 5.48/WRITE ATOMIC", writeAtomic(1, 8, data), "", data},
		{"SBC-3 5.43/WRITE AND VERIFY", Command{LUN: 1, CDB: cdb16(0x8e, 2, 8, 8), Write: data}, "",
			data},
		{"SBC-3 5.31/VERIFY of data", verify(1, 1, 8, 8, old), "", old},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sess.MustGood(t, Write10(1, 8, old))
			sess.MustGood(t, unmap(1, 16, 8))
			if tt.fails == "" {
				sess.MustGood(t, tt.command)
			} else {
				sess.MustFail(t, tt.command, tt.fails)
			}
			require.Equal(t, tt.after, sess.MustGood(t, Read10(1, 8, 8)).Data)
		})
	}
}
