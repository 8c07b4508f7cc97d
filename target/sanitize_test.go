package target_test

import (
	"bytes"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

const (
	inProgress     = "02/04/1B"
	sanitizeFailed = "03/31/03"
)

// overwrite is a SANITIZE with OVERWRITE by a pattern of one byte. bits are the bits of byte 1
// other than the service action.
func overwrite(lun uint16, bits, value byte) Command {
	return Command{LUN: lun, CDB: []byte{0x48, 0x01 | bits, 0, 0, 0, 0, 0, 0, 5, 0},
		Write: []byte{1, 0, 0, 1, value}}
}

func blockErase(lun uint16) Command {
	return Command{LUN: lun, CDB: []byte{0x48, 0x02, 0, 0, 0, 0, 0, 0, 0, 0}}
}

func cryptoErase(lun uint16) Command {
	return Command{LUN: lun, CDB: []byte{0x48, 0x03, 0, 0, 0, 0, 0, 0, 0, 0}}
}

func exitFailureMode(lun uint16) Command {
	return Command{LUN: lun, CDB: []byte{0x48, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0}}
}

func TestSanitize(t *testing.T) {
	s := start(t)
	sess := s.login(t, LoginOptions{})
	last := uint32(diskSize/BlockSize - 8)
	t.Run("SBC-4 5.30.2/OVERWRITE", func(t *testing.T) {
		sess.MustGood(t, Write10(1, 0, pattern(8*BlockSize, 1)))
		sess.MustGood(t, overwrite(1, 0, 0xaa))
		for _, lba := range []uint32{0, 1000, last} {
			require.Equal(t, bytes.Repeat([]byte{0xaa}, 8*BlockSize),
				sess.MustGood(t, Read10(1, lba, 8)).Data)
		}
	})
	t.Run("SBC-4 5.30.3/BLOCK ERASE", func(t *testing.T) {
		sess.MustGood(t, blockErase(1))
		for _, lba := range []uint32{0, 1000, last} {
			require.Equal(t, make([]byte, 8*BlockSize), sess.MustGood(t, Read10(1, lba, 8)).Data)
		}
		status := sess.MustGood(t,
			Command{LUN: 1, CDB: []byte{0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 24, 0, 0},
				Read: 24}).Data
		require.EqualValues(t, 1, status[20], "deallocated")
	})
	t.Run("SBC-4 5.30.4/CRYPTOGRAPHIC ERASE", func(t *testing.T) {
		sess.MustGood(t, Write10(1, 1000, pattern(8*BlockSize, 3)))
		writes, flushes := s.disks[0].Calls(disktest.OpWrite), s.disks[0].Calls(disktest.OpFlush)
		sess.MustGood(t, cryptoErase(1))
		require.Equal(t, 1, s.disks[0].Calls(disktest.OpWrite)-writes,
			"allocated blocks are overwritten")
		require.Equal(t, 2, s.disks[0].Calls(disktest.OpFlush)-flushes,
			"flushed before and after the space is given back")
		for _, lba := range []uint32{0, 1000, last} {
			require.Equal(t, make([]byte, 8*BlockSize), sess.MustGood(t, Read10(1, lba, 8)).Data)
		}
		status := sess.MustGood(t,
			Command{LUN: 1, CDB: []byte{0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 24, 0, 0},
				Read: 24}).Data
		require.EqualValues(t, 1, status[20], "deallocated")
	})
	for _, tt := range []struct {
		name    string
		command Command
		want    string
	}{
		{"5.30.2/no passes", Command{CDB: overwrite(1, 0, 0).CDB, Write: []byte{0, 0, 0, 1, 0}},
			"05/26/00"},
		{"5.30.2/no pattern", Command{CDB: overwrite(1, 0, 0).CDB, Write: []byte{1, 0, 0, 0, 0}},
			"05/26/00"},
		{"5.30.2/no parameter list", Command{CDB: []byte{0x48, 1, 0, 0, 0, 0, 0, 0, 0, 0}},
			"05/24/00"},
		{"5.30.2/a parameter list of more than a block",
			Command{CDB: []byte{0x48, 1, 0, 0, 0, 0, 0, 2, 5, 0}, Write: make([]byte, 0x205)},
			"05/24/00"},
		{"5.30.2/a parameter list without data", Command{CDB: overwrite(1, 0, 0).CDB},
			"05/0E/03"},
		{"5.30.3/BLOCK ERASE with a parameter list",
			Command{CDB: []byte{0x48, 2, 0, 0, 0, 0, 0, 0, 8, 0}, Write: make([]byte, 8)},
			"05/24/00"},
		{"5.30.4/CRYPTOGRAPHIC ERASE with a parameter list",
			Command{CDB: []byte{0x48, 3, 0, 0, 0, 0, 0, 0, 8, 0}, Write: make([]byte, 8)},
			"05/24/00"},
		{"5.30.1/unknown service action", Command{CDB: []byte{0x48, 4, 0, 0, 0, 0, 0, 0, 0, 0}},
			"05/24/00"},
	} {
		t.Run("SBC-4 "+tt.name, func(t *testing.T) {
			tt.command.LUN = 1
			sess.MustGood(t, Write10(1, 0, pattern(8*BlockSize, 1)))
			sess.MustFail(t, tt.command, tt.want)
			require.Equal(t, pattern(8*BlockSize, 1), sess.MustGood(t, Read10(1, 0, 8)).Data)
		})
	}
	t.Run("SBC-4 5.30/a write-protected unit", func(t *testing.T) {
		protected := start(t, func(o *options) { o.LUNs[0].ReadOnly = true })
		sess := protected.login(t, LoginOptions{})
		sess.MustFail(t, overwrite(1, 0, 0), "07/27/00")
		sess.MustFail(t, blockErase(1), "07/27/00")
		sess.MustFail(t, cryptoErase(1), "07/27/00")
	})
}

// TestSanitizeInProgress makes a sanitize operation hang in the disk. No request of an initiator
// stops it, and it delays nobody.
func TestSanitizeInProgress(t *testing.T) {
	s := start(t)
	gate := make(chan struct{})
	release := sync.OnceFunc(func() { close(gate) })
	defer release()
	s.disks[0].Inject(disktest.Rule{Op: disktest.OpWrite, Block: gate})
	sess, second := s.login(t, LoginOptions{}),
		s.login(t, LoginOptions{Initiator: other.Initiator, ISID: other.ISID, Keys: solicited.Keys})

	waits, r2t := waiting(t, second, 1, 0, pattern(8*BlockSize, 2))
	task := sess.MustStart(t, overwrite(1, 0, 0xaa))
	testtool.Eventually(t,
		func() bool { return s.disks[0].Calls(disktest.OpWrite) > 0 }, "the operation writes")

	t.Run("SBC-4 4.11.2/other commands", func(t *testing.T) {
		for _, c := range []Command{TestUnitReady(1), Read10(1, 0, 1),
			Write10(1, 0, pattern(BlockSize, 1)), ReadCapacity10(1), overwrite(1, 0, 1),
			blockErase(1), cryptoErase(1)} {
			second.MustFail(t, c, inProgress)
		}
		second.MustGood(t, Inquiry(1, 96))
		second.MustGood(t, ReportLUNs(64))
	})
	t.Run("SBC-4 4.11.2/REQUEST SENSE reports the progress", func(t *testing.T) {
		sense := second.MustGood(t,
			Command{LUN: 1, CDB: []byte{0x03, 0, 0, 0, 252, 0}, Read: 252}).Data
		require.Equal(t, []byte{0x02, 0x04, 0x1b}, []byte{sense[2], sense[12], sense[13]})
		require.EqualValues(t, 0x80, sense[15]&0x80, "SKSV")
	})
	t.Run("SBC-4 4.11.2/a write whose data comes later", func(t *testing.T) {
		require.NoError(t, waits.Answer(r2t))
		require.Equal(t, inProgress, waits.MustFinish(t).Failed())
	})
	t.Run("11.18/pings and other LUNs of the same connection go on", func(t *testing.T) {
		require.NoError(t, sess.ExpectOnlyPing())
		sess.MustGood(t, Write10(2, 0, pattern(8*BlockSize, 3)))
	})
	t.Run("SBC-4 4.11.2/resets, ABORT TASK and logout do not stop it", func(t *testing.T) {
		r, err := sess.AbortTask(task)
		require.NoError(t, err)
		require.Equal(t, pdu.TMComplete, r)
		sess.Forget(task)
		manage(t, sess, pdu.TMComplete,
			pdu.TaskManagementRequest{Function: pdu.TMLogicalUnitReset, LUN: LUN(1)})
		manage(t, sess, pdu.TMComplete, pdu.TaskManagementRequest{Function: pdu.TMTargetWarmReset})
		require.NoError(t, sess.Close())
		attentions(t, second, 1)
		second.MustFail(t, TestUnitReady(1), inProgress)
	})
	release()
	testtool.Eventually(t,
		func() bool { return second.MustDo(t, TestUnitReady(1)).Good() }, "the operation ends")
	require.Equal(t, bytes.Repeat([]byte{0xaa}, 8*BlockSize),
		second.MustGood(t, Read10(1, 0, 8)).Data)
	s.works(t)
}

func TestSanitizeFailure(t *testing.T) {
	for _, tt := range []struct {
		name string
		bits byte
		exit string
	}{
		{"restricted", 0, "05/24/00"},
		{"unrestricted", 0x20, ""},
	} {
		t.Run("SBC-4 4.11.4/"+tt.name, func(t *testing.T) {
			s := start(t)
			sess := s.login(t, LoginOptions{})
			sess.MustGood(t, exitFailureMode(1))
			remove := s.disks[0].Inject(disktest.Rule{Op: disktest.OpWrite, Off: 1 << 20,
				Length: 1 << 20, Err: errors.New("bad sectors")})
			sess.MustFail(t, overwrite(1, tt.bits, 0xaa), sanitizeFailed)
			remove()
			for _, c := range []Command{TestUnitReady(1), Read10(1, 0, 1),
				Write10(1, 0, pattern(BlockSize, 1)), ReadCapacity10(1)} {
				sess.MustFail(t, c, sanitizeFailed)
			}
			sess.MustGood(t, Inquiry(1, 96))
			if tt.exit != "" {
				sess.MustFail(t, exitFailureMode(1), tt.exit)
				sess.MustFail(t, TestUnitReady(1), sanitizeFailed)
				sess.MustGood(t, blockErase(1))
			} else {
				sess.MustGood(t, exitFailureMode(1))
			}
			sess.MustGood(t, TestUnitReady(1))
		})
	}
}

// TestSanitizeAndShutdown stops a server during an operation. It waits only for the disk call that
// is under way.
func TestSanitizeAndShutdown(t *testing.T) {
	store := disktest.NewStore(t.TempDir(), true)
	kept := func(o *options) { o.LUNs[0].Store = store }
	s := start(t, kept)
	gate := make(chan struct{})
	release := sync.OnceFunc(func() { close(gate) })
	defer release()
	s.disks[0].Inject(disktest.Rule{Op: disktest.OpWrite, Block: gate})
	sess := s.login(t, LoginOptions{})
	sess.MustGood(t, overwrite(1, 0x80, 0xaa)) // IMMED
	testtool.Eventually(t,
		func() bool { return s.disks[0].Calls(disktest.OpWrite) > 0 }, "the operation writes")
	require.NoError(t, sess.Close())
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	testtool.Eventually(t, func() bool {
		_, err := Dial(s.addr)
		return err != nil
	}, "the server stops")
	release()
	require.NoError(t, <-closed)
	require.Less(t, s.disks[0].Calls(disktest.OpWrite), diskSize/(256<<10),
		"it did not go on to the end")

	again := start(t, kept).login(t, LoginOptions{})
	again.MustFail(t, TestUnitReady(1), sanitizeFailed)
	again.MustGood(t, blockErase(1))
	start(t, kept).login(t, LoginOptions{}).MustGood(t, Read10(1, 0, 8))
}
