package target_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	. "kubevirt.io/disk/target/targettest"
)

// block16 is a 16-byte CDB with an address and a number of blocks.
func block16(lun uint16, op, flags byte, lba uint64, blocks uint32, data []byte) Command {
	cdb := make([]byte, 16)
	cdb[0], cdb[1] = op, flags
	binary.BigEndian.PutUint64(cdb[2:], lba)
	binary.BigEndian.PutUint32(cdb[10:], blocks)
	return Command{LUN: lun, CDB: cdb, Write: data}
}

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

// lbaStatus returns the descriptor of GET LBA STATUS: "address+blocks mapped" or "… deallocated".
func lbaStatus(t *testing.T, sess *Session, lun uint16, lba uint64) string {
	t.Helper()
	c := block16(lun, 0x9e, 0x12, lba, 24, nil)
	c.Read = 24
	d := sess.MustGood(t, c).Data
	require.Len(t, d, 24)
	require.EqualValues(t, 20, binary.BigEndian.Uint32(d))
	status := map[byte]string{0: "mapped", 1: "deallocated"}[d[20]]
	return fmt.Sprintf("%d+%d %s", binary.BigEndian.Uint64(d[8:]), binary.BigEndian.Uint32(d[16:]),
		status)
}

// TestProvisioning unmaps, writes zeros and asks what is allocated: thin provisioning (SBC-3 4.7).
func TestProvisioning(t *testing.T) {
	memory := disktest.NewMemory(diskSize)
	s := start(t, func(o *options) { o.LUNs[1].Disk = memory })
	sess := s.login(t, LoginOptions{})
	const last = diskSize/BlockSize - 1
	fill := func() {
		sess.MustGood(t, Write10(2, 0, pattern(64*BlockSize, 1)))
	}
	mapped := func(t *testing.T, from, to int) {
		t.Helper()
		want := pattern(64*BlockSize, 1)
		clear(want[from*BlockSize : to*BlockSize])
		require.Equal(t, want, sess.MustGood(t, Read10(2, 0, 64)).Data)
	}
	t.Run("SBC-3 5.28/UNMAP gives space back and reads zeros", func(t *testing.T) {
		fill()
		sess.MustGood(t, unmap(2, 8, 16))
		mapped(t, 8, 24)
		require.Equal(t, "0+8 mapped", lbaStatus(t, sess, 2, 0))
		require.Equal(t, "8+16 deallocated", lbaStatus(t, sess, 2, 8))
		require.Equal(t, "17+7 deallocated", lbaStatus(t, sess, 2, 17))
		require.Equal(t, "24+40 mapped", lbaStatus(t, sess, 2, 24))
		require.Equal(t, int64(48*BlockSize), memory.Allocated())
	})
	t.Run("SBC-3 5.28/UNMAP of part of a physical block", func(t *testing.T) {
		fill()
		sess.MustGood(t, unmap(2, 3, 2))
		mapped(t, 3, 5)
		require.Equal(t, "0+64 mapped", lbaStatus(t, sess, 2, 0), "its neighbours stay mapped")
	})
	t.Run("SBC-3 5.28/UNMAP of the last block, and of no list", func(t *testing.T) {
		sess.MustGood(t, Write10(2, last, pattern(BlockSize, 1)))
		sess.MustGood(t, unmap(2, last, 1))
		require.Equal(t, make([]byte, BlockSize), sess.MustGood(t, Read10(2, last, 1)).Data)
		sess.MustGood(t, Command{LUN: 2, CDB: []byte{0x42, 0, 0, 0, 0, 0, 0, 0, 0, 0}})
		sess.MustGood(t, unmap(2))
		sess.MustGood(t, unmap(2, 5, 0))
	})
	for _, tt := range []struct {
		name, want string
		command    func() Command
	}{
		{"a range beyond the end", "05/21/00", func() Command { return unmap(2, 8, 8, last, 2) }},
		{"an address beyond the end", "05/21/00", func() Command { return unmap(2, last+1, 1) }},
		{"more blocks than there are", "05/21/00",
			func() Command { return unmap(2, 8, 0xffffffff) }},
		{"more ranges than MAXIMUM UNMAP BLOCK DESCRIPTOR COUNT", "05/26/00",
			func() Command { return unmap(2, make([]uint64, 514)...) }},
		{"ANCHOR", "05/24/00", func() Command { c := unmap(2, 8, 8); c.CDB[1] = 1; return c }},
		{"a list that is cut off", "05/1A/00",
			func() Command {
				c := unmap(2, 8, 8)
				c.Write = c.Write[:20]
				c.CDB[8] = 20
				return c
			}},
		{"a list without a header", "05/1A/00",
			func() Command { c := unmap(2, 8, 8); c.Write = c.Write[:7]; c.CDB[8] = 7; return c }},
		{"less data than the list", "05/0E/03",
			func() Command { c := unmap(2, 8, 8); c.Write = c.Write[:16]; return c }},
	} {
		t.Run("SBC-3 5.28/UNMAP/"+tt.name, func(t *testing.T) {
			fill()
			sess.MustFail(t, tt.command(), tt.want)
			mapped(t, 0, 0)
		})
	}
	t.Run("SBC-3 5.45/WRITE SAME that unmaps", func(t *testing.T) {
		fill()
		sess.MustGood(t, block16(2, 0x93, 0x08, 8, 16, make([]byte, BlockSize)))
		mapped(t, 8, 24)
		require.Equal(t, "8+16 deallocated", lbaStatus(t, sess, 2, 8))
		sess.MustGood(t, block16(2, 0x93, 0x09, 32, 8, nil)) // without data
		require.Equal(t, "32+8 deallocated", lbaStatus(t, sess, 2, 32))
	})
	t.Run("SBC-3 5.45/WRITE SAME of a block that is not zero never unmaps", func(t *testing.T) {
		sess.MustGood(t, unmap(2, 0, 64))
		block := pattern(BlockSize, 6)
		sess.MustGood(t, block16(2, 0x93, 0x08, 8, 16, block))
		require.Equal(t, bytes.Repeat(block, 16), sess.MustGood(t, Read10(2, 8, 16)).Data)
		require.Equal(t, "8+16 mapped", lbaStatus(t, sess, 2, 8))
	})
	for _, tt := range []struct {
		name, want string
		command    Command
	}{
		{"beyond the end", "05/21/00", block16(2, 0x93, 0, last, 2, make([]byte, BlockSize))},
		{"an anchor", "05/24/00", block16(2, 0x93, 0x18, 8, 8, make([]byte, BlockSize))},
		{"protection information", "05/24/00",
			block16(2, 0x93, 0x20, 8, 8, make([]byte, BlockSize))},
		{"half a block", "05/0E/03", block16(2, 0x93, 0, 8, 8, make([]byte, BlockSize/2))},
		{"two blocks", "05/24/00", block16(2, 0x93, 0, 8, 8, make([]byte, 2*BlockSize))},
	} {
		t.Run("SBC-3 5.45/WRITE SAME/"+tt.name, func(t *testing.T) {
			fill()
			sess.MustFail(t, tt.command, tt.want)
			mapped(t, 0, 0)
		})
	}
	t.Run("SBC-3 5.4/GET LBA STATUS up to the end and not beyond", func(t *testing.T) {
		sess.MustGood(t, unmap(2, last-15, 16))
		require.Equal(t, fmt.Sprintf("%d+10 deallocated", last-9), lbaStatus(t, sess, 2, last-9))
		require.Equal(t, fmt.Sprintf("%d+1 deallocated", last), lbaStatus(t, sess, 2, last))
		c := block16(2, 0x9e, 0x12, last+1, 24, nil)
		c.Read = 24
		sess.MustFail(t, c, "05/21/00")
		c = block16(2, 0x9e, 0x12, 1<<63, 24, nil)
		c.Read = 24
		sess.MustFail(t, c, "05/21/00")
		c = block16(2, 0x9e, 0x13, 0, 24, nil)
		c.Read = 24
		sess.MustFail(t, c, "05/24/00")
	})
	t.Run("SBC-3 5.16/READ CAPACITY(16) reports thin provisioning", func(t *testing.T) {
		c := block16(2, 0x9e, 0x10, 0, 32, nil)
		c.Read = 32
		require.EqualValues(t, 0xc0, sess.MustGood(t, c).Data[14]&0xc0, "LBPME, LBPRZ")
	})
	t.Run("SBC-3/a write-protected LUN unmaps nothing", func(t *testing.T) {
		s := start(t, func(o *options) { o.LUNs[0].ReadOnly = true })
		sess := s.login(t, LoginOptions{})
		for _, c := range []Command{unmap(1, 0, 8), block16(1, 0x93, 0x09, 0, 8, nil),
			block16(1, 0x89, 0, 0, 0, nil), block16(1, 0x8a, 0, 0, 1, make([]byte, BlockSize))} {
			sess.MustFail(t, c, "07/27/00")
		}
	})
}

// compareAndWrite puts the number of blocks in the place of COMPARE AND WRITE.
func compareAndWrite(lun uint16, lba uint64, old, fresh []byte) Command {
	return block16(lun, 0x89, 0, lba, uint32(len(old)/BlockSize),
		append(bytes.Clone(old), fresh...))
}

// TestReadModifyWrite sends commands that read and change the medium in one step, from several
// sessions at once.
func TestReadModifyWrite(t *testing.T) {
	s := start(t)
	sess := s.login(t, LoginOptions{})
	t.Run("SBC-3 5.2/COMPARE AND WRITE", func(t *testing.T) {
		old, fresh := pattern(4*BlockSize, 1), pattern(4*BlockSize, 2)
		sess.MustGood(t, Write10(1, 8, old))
		r := sess.MustFail(t, compareAndWrite(1, 8,
			append(bytes.Clone(old[:3*BlockSize]), fresh[:BlockSize]...), fresh), "0E/1D/00")
		require.EqualValues(t, 3*BlockSize, binary.BigEndian.Uint32(r.Sense.Raw[3:]),
			"the offset of the difference")
		require.Equal(t, old, sess.MustGood(t, Read10(1, 8, 4)).Data)
		sess.MustGood(t, compareAndWrite(1, 8, old, fresh))
		require.Equal(t, fresh, sess.MustGood(t, Read10(1, 8, 4)).Data)
		sess.MustFail(t, compareAndWrite(1, 8, make([]byte, 129*BlockSize),
			make([]byte, 129*BlockSize)), "05/24/00")
		sess.MustFail(t, compareAndWrite(1, diskSize/BlockSize-1, make([]byte, 2*BlockSize),
			make([]byte, 2*BlockSize)), "05/21/00")
		c := compareAndWrite(1, 8, fresh, old)
		c.Write = fresh
		sess.MustFail(t, c, "05/0E/03")
		sess.MustGood(t, block16(1, 0x89, 0, 8, 0, nil))
		require.Equal(t, fresh, sess.MustGood(t, Read10(1, 8, 4)).Data)
	})
	t.Run("SBC-3 5.2/a counter of four sessions loses no increment", func(t *testing.T) {
		const adds = 50
		sess.MustGood(t, Write10(1, 100, make([]byte, BlockSize)))
		var wg sync.WaitGroup
		errs := make(chan error, 4)
		for i := range 4 {
			peer := s.login(t, LoginOptions{Initiator: fmt.Sprintf("%s.add%d", DefaultInitiator, i),
				ISID: [6]byte{0x80, byte(i)}})
			wg.Go(func() {
				for n := 0; n < adds; {
					r, err := peer.Do(Read10(1, 100, 1))
					if err != nil {
						errs <- err
						return
					}
					fresh := bytes.Clone(r.Data)
					binary.BigEndian.PutUint64(fresh, binary.BigEndian.Uint64(fresh)+1)
					r, err = peer.Do(compareAndWrite(1, 100, r.Data, fresh))
					switch {
					case err != nil:
						errs <- err
						return
					case r.Good():
						n++
					case r.Failed() != "0E/1D/00":
						errs <- errors.New(r.Failed())
						return
					}
				}
			})
		}
		wg.Wait()
		close(errs)
		for err := range errs {
			require.NoError(t, err)
		}
		require.EqualValues(t, 4*adds,
			binary.BigEndian.Uint64(sess.MustGood(t, Read10(1, 100, 1)).Data))
	})
	t.Run("SBC-3 5.31/VERIFY", func(t *testing.T) {
		data := pattern(8*BlockSize, 4)
		sess.MustGood(t, Write10(1, 8, data))
		sess.MustGood(t, block16(1, 0x8f, 0, 8, 8, nil))
		sess.MustGood(t, block16(1, 0x8f, 0x02, 8, 8, data))
		r := sess.MustFail(t, block16(1, 0x8f, 0x02, 9, 8, data), "0E/1D/00")
		require.Zero(t, binary.BigEndian.Uint32(r.Sense.Raw[3:]))
		sess.MustFail(t, block16(1, 0x8f, 0x04, 8, 8, nil), "05/24/00")
		sess.MustFail(t, block16(1, 0x8f, 0, diskSize/BlockSize, 1, nil), "05/21/00")
	})
	t.Run("SBC-3 5.10/PRE-FETCH", func(t *testing.T) {
		sess.MustGood(t, block16(1, 0x90, 0, 8, 8, nil))
		sess.MustFail(t, block16(1, 0x90, 0, diskSize/BlockSize, 1, nil), "05/21/00")
		sess.MustFail(t, block16(1, 0x90, 0x01, 8, 8, nil), "05/24/00")
	})
}

// TestStorageFails checks how commands end whose storage is full or broken.
func TestStorageFails(t *testing.T) {
	t.Run("SBC-3 4.7.3.6/a full disk recovers when space returns", func(t *testing.T) {
		memory := disktest.NewMemory(diskSize)
		s := start(t, func(o *options) { o.LUNs[1].Disk = memory })
		sess := s.login(t, LoginOptions{})
		data := pattern(16*BlockSize, 1)
		sess.MustGood(t, Write10(2, 0, data))
		memory.SetFree(0)
		sess.MustFail(t, Write10(2, 64, data), "07/27/07")
		sess.MustFail(t, block16(2, 0x93, 0, 64, 16, pattern(BlockSize, 2)), "07/27/07")
		sess.MustFail(t, compareAndWrite(2, 64, make([]byte, BlockSize), pattern(BlockSize, 2)),
			"07/27/07")
		r := sess.MustFail(t, ExtendedCopy(1, CopyList(1, units, segment(1, 1, 16, 0, 64))),
			"0A/0D/01")
		inner, err := ParseSense(r.Sense.Raw[r.Sense.Raw[9]+1:])
		require.NoError(t, err)
		require.Equal(t, "07/27/07", inner.String())
		sess.MustGood(t, Write10(2, 0, data))
		require.Equal(t, data, sess.MustGood(t, Read10(2, 0, 16)).Data,
			"allocated blocks can be written and read")
		sess.MustGood(t, unmap(2, 0, 16))
		sess.MustGood(t, Write10(2, 64, data))
		require.Equal(t, data, sess.MustGood(t, Read10(2, 64, 16)).Data)
	})
	s := start(t)
	sess := s.login(t, LoginOptions{})
	t.Run("SBC-3 4.18/blocks that cannot be read", func(t *testing.T) {
		remove := s.disks[0].Inject(disktest.Rule{Op: disktest.OpRead, Off: 100 * BlockSize,
			Length: BlockSize,
			Err: &disk.MediumError{Op: "read", Off: 100 * BlockSize, Length: BlockSize,
				Err: errDisk}})
		for _, c := range []Command{Read10(1, 96, 8), block16(1, 0x8f, 0, 96, 8, nil)} {
			r := sess.MustFail(t, c, "03/11/00")
			require.EqualValues(t, 100, binary.BigEndian.Uint32(r.Sense.Raw[3:]),
				"the first bad block")
		}
		sess.MustGood(t, Read10(1, 101, 8))
		remove()
		sess.MustGood(t, Read10(1, 96, 8))
	})
	t.Run("SBC-3 4.18/blocks that cannot be written", func(t *testing.T) {
		remove := s.disks[0].Inject(disktest.Rule{Op: disktest.OpWrite,
			Err: &disk.MediumError{Op: "write", Off: 8 * BlockSize, Length: BlockSize,
				Err: errDisk}})
		r := sess.MustFail(t, Write10(1, 8, make([]byte, BlockSize)), "03/0C/00")
		require.EqualValues(t, 8, binary.BigEndian.Uint32(r.Sense.Raw[3:]))
		remove()
		sess.MustGood(t, Write10(1, 8, make([]byte, BlockSize)))
	})
	t.Run("SBC-3 5.25/a cache that cannot be flushed", func(t *testing.T) {
		remove := s.disks[0].Inject(disktest.Rule{Op: disktest.OpFlush, Err: disk.ErrFailed})
		sess.MustFail(t, SynchronizeCache10(1), "04/44/00")
		c := Write10(1, 8, make([]byte, BlockSize))
		c.CDB[1] = 0x08 // FUA
		sess.MustFail(t, c, "04/44/00")
		remove()
	})
	s.works(t)
}
