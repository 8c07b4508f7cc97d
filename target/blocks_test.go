package target_test

import (
	"bytes"
	"encoding/binary"
	"path/filepath"
	"sync"
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

func TestBlockCommands(t *testing.T) {
	const end = diskSize / BlockSize
	s := start(t, withStore(t))
	sess := s.login(t, LoginOptions{})
	old, data, zeros := pattern(8*BlockSize, 1), pattern(8*BlockSize, 2), make([]byte, 8*BlockSize)
	ored := make([]byte, len(old))
	for i := range ored {
		ored[i] = old[i] | data[i]
	}
	block := data[:BlockSize]
	tooLong := writeAtomic(1, 8, nil)
	tooLong.CDB[12] = 0x02
	bounded := writeAtomic(1, 8, data)
	bounded.CDB[11] = 8
	for _, tt := range []struct {
		name    string
		command Command
		fails   string // sense; "": GOOD
		after   []byte // of blocks 8 to 15
	}{
		{"SBC-3 5.28/UNMAP", unmap(1, 8, 8), "", zeros},
		{"SBC-3 5.28/UNMAP of nothing", unmap(1, 8, 0), "", old},
		{"SBC-3 5.28/UNMAP beyond the end", unmap(1, end-1, 2), "05/21/00", old},
		{"SBC-3 5.28/UNMAP of more than its limit", unmap(1, 0, 1<<31), "05/21/00", old},
		{"SBC-3 5.28/UNMAP list of less than a header",
			Command{LUN: 1, CDB: []byte{0x42, 0, 0, 0, 0, 0, 0, 0, 7, 0}, Write: make([]byte, 7)},
			"05/1A/00", old},
		{"SBC-3 5.28/UNMAP with ANCHOR",
			Command{LUN: 1, CDB: []byte{0x42, 1, 0, 0, 0, 0, 0, 0, 0, 0}}, "05/24/00", old},

		{"SBC-3 5.45/WRITE SAME", writeSame(1, 0, 8, 8, block), "", bytes.Repeat(block, 8)},
		{"SBC-3 5.45/WRITE SAME with UNMAP of zeros", writeSame(1, 8, 8, 8, zeros[:BlockSize]), "",
			zeros},
		{"SBC-3 5.45/WRITE SAME with UNMAP of a block that is not zero",
			writeSame(1, 8, 8, 8, block), "",
			bytes.Repeat(block, 8)},
		{"SBC-3 5.45/WRITE SAME without data", writeSame(1, 1, 8, 8, nil), "", zeros},
		{"SBC-3 5.45/WRITE SAME to the end", writeSame(1, 0, end-4, 0, block), "", old},
		{"SBC-3 5.45/WRITE SAME beyond the end", writeSame(1, 0, end-4, 5, block), "05/21/00", old},
		{"SBC-3 5.45/WRITE SAME of more than a block of data", writeSame(1, 0, 8, 8, data),
			"05/24/00", old},
		{"SBC-3 5.45/WRITE SAME without its block", writeSame(1, 0, 8, 8, nil), "05/0E/03", old},

		{"SBC-3 5.2/COMPARE AND WRITE", compareWrite16(1, 8, old, data), "", data},
		{"SBC-3 5.2/COMPARE AND WRITE of something else", compareWrite16(1, 8, data, data),
			"0E/1D/00", old},
		{"SBC-3 5.2/COMPARE AND WRITE of nothing", compareWrite16(1, 8, nil, nil), "", old},
		{"SBC-3 5.2/COMPARE AND WRITE of more than its limit",
			compareWrite16(1, 8, make([]byte, 129*BlockSize), make([]byte, 129*BlockSize)),
			"05/24/00", old},
		{"SBC-3 5.2/COMPARE AND WRITE beyond the end", compareWrite16(1, end, block, block),
			"05/21/00", old},

		{"SBC-4 5.48/WRITE ATOMIC", writeAtomic(1, 8, data), "", data},
		{"SBC-4 5.48/WRITE ATOMIC of nothing", writeAtomic(1, 8, nil), "", old},
		{"SBC-4 5.48/WRITE ATOMIC that is not aligned", writeAtomic(1, 9, data), "05/24/00", old},
		{"SBC-4 5.48/WRITE ATOMIC of a part of a physical block", writeAtomic(1, 8, block),
			"05/24/00", old},
		{"SBC-4 5.48/WRITE ATOMIC of more than its limit", tooLong, "05/24/00", old},
		{"SBC-4 5.48/WRITE ATOMIC with a boundary", bounded, "05/24/00", old},
		{"SBC-4 5.48/WRITE ATOMIC beyond the end", writeAtomic(1, end-8, pattern(16*BlockSize, 1)),
			"05/21/00", old},

		{"SBC-3 5.43/WRITE AND VERIFY", Command{LUN: 1, CDB: cdb16(0x8e, 2, 8, 8), Write: data}, "",
			data},
		{"SBC-3 5.43/WRITE AND VERIFY with a reserved BYTCHK",
			Command{LUN: 1, CDB: cdb16(0x8e, 4, 8, 8), Write: data}, "05/24/00", old},

		{"SBC-3 5.31/VERIFY of the medium", verify(1, 0, 8, 8, nil), "", old},
		{"SBC-3 5.31/VERIFY of data", verify(1, 1, 8, 8, old), "", old},
		{"SBC-3 5.31/VERIFY of other data", verify(1, 1, 8, 8, data), "0E/1D/00", old},
		{"SBC-3 5.31/VERIFY of a repeated block", verify(1, 3, 16, 8, zeros[:BlockSize]), "", old},
		{"SBC-3 5.31/VERIFY of another repeated block", verify(1, 3, 16, 8, block), "0E/1D/00",
			old},
		{"SBC-3 5.31/VERIFY with a reserved BYTCHK", verify(1, 2, 8, 8, nil), "05/24/00", old},

		{"SBC-3 5.10/PRE-FETCH", Command{LUN: 1, CDB: cdb16(0x90, 0, 8, 8)}, "", old},
		{"SBC-3 5.10/PRE-FETCH beyond the end", Command{LUN: 1, CDB: cdb16(0x90, 0, end, 1)},
			"05/21/00", old},
		{"SBC-3 5.26/SYNCHRONIZE CACHE", Command{LUN: 1, CDB: cdb16(0x91, 0, 8, 8)}, "", old},
		{"SBC-3 5.26/SYNCHRONIZE CACHE beyond the end",
			Command{LUN: 1, CDB: cdb16(0x91, 0, end, 1)}, "05/21/00", old},
		{"SBC-3 5.40/WRITE with protection",
			Command{LUN: 1, CDB: cdb16(0x8a, 0x20, 8, 8), Write: data}, "05/24/00", old},
		{"SBC-3 5.40/WRITE with FUA", Command{LUN: 1, CDB: cdb16(0x8a, 0x08, 8, 8), Write: data},
			"", data},
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

func TestLBAStatus(t *testing.T) {
	sess := start(t).login(t, LoginOptions{})
	status := func(lba uint64) Command {
		return Command{LUN: 1, CDB: cdb16(0x9e, 0x12, lba, 24), Read: 24}
	}
	sess.MustGood(t, Write10(1, 64, pattern(8*BlockSize, 1)))
	for _, tt := range []struct {
		name   string
		lba    uint64
		blocks uint32
		state  byte
	}{{"a hole", 0, 64, 1}, {"written blocks", 64, 8, 0}, {"the middle of them", 66, 6, 0},
		{"up to the end", 72, diskSize/BlockSize - 72, 1}} {
		t.Run("SBC-3 5.4/"+tt.name, func(t *testing.T) {
			data := sess.MustGood(t, status(tt.lba)).Data
			require.Equal(t, tt.lba, binary.BigEndian.Uint64(data[8:]))
			require.Equal(t, []any{tt.blocks, tt.state},
				[]any{binary.BigEndian.Uint32(data[16:]), data[20]})
		})
	}
	t.Run("SBC-3 5.4/beyond the end",
		func(t *testing.T) { sess.MustFail(t, status(diskSize/BlockSize), "05/21/00") })
}

// TestMiscompare checks the INFORMATION field: the offset of the first byte that differs (SBC-3
// 5.2).
func TestMiscompare(t *testing.T) {
	sess := start(t).login(t, LoginOptions{})
	data := pattern(8*BlockSize, 1)
	sess.MustGood(t, Write10(1, 8, data))
	for _, at := range []int{0, 1, 511, 512, 8*BlockSize - 1} {
		wrong := bytes.Clone(data)
		wrong[at] ^= 0x10
		for name, c := range map[string]Command{
			"COMPARE AND WRITE": compareWrite16(1, 8, wrong, data),
			"VERIFY":            verify(1, 1, 8, 8, wrong),
		} {
			r := sess.MustFail(t, c, "0E/1D/00")
			require.EqualValues(t, 0xf0, r.Sense.Raw[0], "%s: VALID", name)
			require.EqualValues(t, at, binary.BigEndian.Uint32(r.Sense.Raw[3:]), name)
		}
	}
}

// TestAtomicAcrossSessions has two initiators increment one block by COMPARE AND WRITE and write
// others by WRITE ATOMIC. No increment is lost, and a third initiator never reads a part of a
// write.
func TestAtomicAcrossSessions(t *testing.T) {
	s := start(t, withStore(t))
	const rounds = 100
	counter := func(n int) []byte {
		b := make([]byte, BlockSize)
		binary.BigEndian.PutUint64(b, uint64(n))
		return b
	}
	var writers sync.WaitGroup
	for w := range 2 {
		sess := s.login(t, LoginOptions{Initiator: DefaultInitiator + string(rune('a'+w)),
			ISID: [6]byte{0x80, byte(w)}})
		writers.Add(1)
		go func() {
			defer writers.Done()
			for i := range rounds {
				if r,
					err := sess.Do(writeAtomic(1, 64,
					bytes.Repeat([]byte{byte(2*i + w)}, 64*BlockSize))); err != nil || !r.Good() {
					t.Errorf("WRITE ATOMIC: %v %v", r, err)
					return
				}
				for done := false; !done; {
					r, err := sess.Do(Read10(1, 0, 1))
					if err != nil {
						t.Error(err)
						return
					}
					n := int(binary.BigEndian.Uint64(r.Data))
					r, err = sess.Do(compareWrite16(1, 0, counter(n), counter(n+1)))
					if err != nil {
						t.Error(err)
						return
					}
					done = r.Good()
				}
			}
		}()
	}
	reader := s.login(t, LoginOptions{Initiator: DefaultInitiator + "r", ISID: [6]byte{0x80, 9}})
	ended := make(chan struct{})
	go func() {
		writers.Wait()
		close(ended)
	}()
	for reading := true; reading; {
		select {
		case <-ended:
			reading = false
		default:
		}
		data := reader.MustGood(t, Read10(1, 64, 64)).Data
		require.Equal(t, bytes.Repeat(data[:1], len(data)), data, "parts of two writes")
	}
	require.Equal(t, counter(2*rounds), reader.MustGood(t, Read10(1, 0, 1)).Data)
}
