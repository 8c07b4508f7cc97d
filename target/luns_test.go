package target_test

import (
	"encoding/binary"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

// newLUN returns a LUN with a new empty disk, and the disk.
func newLUN(number uint16, id byte) (serving.Options, *disktest.Fault) {
	d := disktest.NewFault(disktest.NewMemory(diskSize))
	return serving.Options{Number: number, Name: "later.raw", Disk: d, Identity: identity(id),
		Access: serving.AccessWriteShared}, d
}

// luns reads the LUN inventory at a LUN.
func luns(t *testing.T, sess *Session, at uint16, selects byte) (list []uint64) {
	t.Helper()
	c := ReportLUNs(1024)
	c.LUN, c.CDB[2] = at, selects
	data := sess.MustGood(t, c).Data
	require.Len(t, data, 8+int(binary.BigEndian.Uint32(data)))
	for data = data[8:]; len(data) > 0; data = data[8:] {
		list = append(list, binary.BigEndian.Uint64(data))
	}
	return list
}

// mustHear receives the asynchronous message about a changed list of LUNs.
func mustHear(t *testing.T, sess *Session, lun uint16) {
	t.Helper()
	async := testtool.Must(sess.AwaitAsync())(t)
	require.Equal(t, pdu.AsyncSCSI, async.Event)
	require.Equal(t, LUN(lun), async.LUN)
	require.Positive(t, async.DataLen)
}

// isReleased reports whether nothing uses a removed disk any more.
func isReleased(released <-chan struct{}) bool {
	select {
	case <-released:
		return true
	default:
		return false
	}
}

const (
	lunsChanged     = "06/3F/0E"
	notSupported    = "05/25/00"
	powerOn         = "06/29/00"
	capacityChanged = "06/2A/09"
)

// TestAddLUN checks that initiators learn of a new LUN, find it, and use it.
func TestAddLUN(t *testing.T) {
	s := start(t)
	sess := s.login(t, LoginOptions{})
	second := s.login(t, LoginOptions{Initiator: "iqn.2026-01.test:b"})
	lun, _ := newLUN(300, 3)
	sess.MustFail(t, TestUnitReady(300), notSupported)
	require.NoError(t, s.inUse.Add(lun))
	for _, c := range []*Session{sess, second} {
		mustHear(t, c, 300)
		require.Equal(t, []string{lunsChanged}, attentions(t, c, 1))
		require.Equal(t, []string{powerOn, lunsChanged}, attentions(t, c, 300))
		c.MustFail(t, TestUnitReady(2), lunsChanged)
		c.MustGood(t, TestUnitReady(2))
	}
	another, _ := newLUN(7, 4)
	require.NoError(t, s.inUse.Add(another))
	require.NoError(t, sess.ExpectOnlyPing(), "no second message before it reads the list")
	require.Equal(t, []uint64{LUN(1), LUN(2), LUN(7), LUN(300)}, luns(t, sess, 0, 0))
	require.Equal(t, []uint64{LUN(1), LUN(2), LUN(7), LUN(300)}, luns(t, sess, 300, 2), "all")
	require.Empty(t, luns(t, sess, 1, 1), "well-known")
	for _, n := range []uint16{1, 2, 300} {
		require.Empty(t, attentions(t, sess, n),
			"an initiator that has read the list needs no unit attention")
	}
	require.Equal(t, []string{powerOn}, attentions(t, sess, 7))
	data := pattern(8*BlockSize, 5)
	sess.MustGood(t, Write10(300, 16, data))
	require.Equal(t, []string{lunsChanged}, attentions(t, second, 300))
	require.Equal(t, data, second.MustGood(t, Read10(300, 16, 8)).Data)
	require.NotEqual(t, data, sess.MustGood(t, Read10(7, 16, 8)).Data)
	require.NoError(t, testtool.Err(s.inUse.Remove(7)))
	mustHear(t, sess, 7)
	require.NoError(t, second.ExpectOnlyPing(), "it still has not read the list")
	s.works(t)
}

// TestServerWithoutLUNs starts a server without LUNs, adds one and removes it.
func TestServerWithoutLUNs(t *testing.T) {
	s := start(t, func(o *options) { o.LUNs = nil })
	sess := MustLogin(t, s.addr, LoginOptions{})
	require.Empty(t, luns(t, sess, 0, 0))
	lun, d := newLUN(1, 1)
	for range 3 {
		require.NoError(t, s.inUse.Add(lun))
		mustHear(t, sess, 1)
		require.Equal(t, []uint64{LUN(1)}, luns(t, sess, 0, 0))
		require.Equal(t, []string{powerOn}, attentions(t, sess, 1))
		require.EqualValues(t, 0x00, sess.MustGood(t, Inquiry(1, 36)).Data[0])
		sess.MustGood(t, Write10(1, 0, pattern(8*BlockSize, 1)))
		require.True(t, isReleased(testtool.Must(s.inUse.Remove(1))(t)), "nothing uses the disk")
		mustHear(t, sess, 1)
		require.Empty(t, luns(t, sess, 0, 0))
		require.EqualValues(t, 0x3f, sess.MustGood(t, Inquiry(0, 36)).Data[0])
		require.EqualValues(t, 0x7f, sess.MustGood(t, Inquiry(1, 36)).Data[0])
		calls := d.Calls(disktest.OpAny)
		sess.MustFail(t, Read10(1, 0, 1), notSupported)
		sess.MustFail(t, Write10(1, 0, make([]byte, BlockSize)), notSupported)
		manageAll(t, sess, pdu.TMLUNNotExist, pdu.TMLogicalUnitReset)
		require.Equal(t, calls, d.Calls(disktest.OpAny))
	}
}

// TestRemoveLUNThatHangs removes a LUN whose commands hang in the disk. The commands are answered
// at once, and everything else goes on. The disk is released when its calls have returned.
// Meanwhile another disk has the number.
func TestRemoveLUNThatHangs(t *testing.T) {
	s := start(t)
	sess := s.login(t, LoginOptions{})
	second := s.login(t, LoginOptions{Initiator: "iqn.2026-01.test:b"})
	release, hangs := s.stall(t, disktest.OpAny)
	data := pattern(8*BlockSize, 9)
	stuck := []*Task{sess.MustStart(t, Read10(1, 0, 8)), sess.MustStart(t, Write10(1, 0, data)),
		sess.MustStart(t, Write10(1, 0, data)), // waits for the first one
		sess.MustStart(t, SynchronizeCache10(1)), second.MustStart(t, Write10(1, 100, data))}
	hangs(4)
	released := testtool.Must(s.inUse.Remove(1))(t)
	for _, task := range stuck {
		require.Equal(t, notSupported, task.MustFinish(t).Failed())
	}
	require.False(t, isReleased(released))
	sess.MustFail(t, TestUnitReady(2), lunsChanged)
	sess.MustGood(t, Write10(2, 0, data))

	same, _ := newLUN(8, 1)
	require.ErrorContains(t, s.inUse.Add(same), "still used by commands to LUN 1")
	lun, fresh := newLUN(1, 3)
	require.NoError(t, s.inUse.Add(lun))
	sess.MustGood(t, Inquiry(1, 36))
	require.Equal(t, []string{powerOn, lunsChanged}, attentions(t, sess, 1))
	require.Equal(t, make([]byte, len(data)), sess.MustGood(t, Read10(1, 0, 8)).Data)
	manageAll(t, sess, pdu.TMComplete, pdu.TMLogicalUnitReset)

	release()
	<-released
	require.Zero(t, fresh.Calls(disktest.OpWrite),
		"a command for the old disk has reached the new one")
	mustHear(t, sess, 1)
	require.NoError(t, sess.ExpectOnlyPing(), "no second answer")
	require.NoError(t, s.inUse.Add(same))
	s.works(t)
}

// TestRemoveLUNWithDataPending removes a LUN while data of WRITEs is under way. The target receives
// and drops the data.
func TestRemoveLUNWithDataPending(t *testing.T) {
	s := start(t)
	sess := s.login(t, LoginOptions{Keys: KV("InitialR2T", "No")})
	data := pattern(600<<10, 3)
	solicited := Write10(1, 0, data)
	solicited.NoImmediate, solicited.NoUnsolicited, solicited.OnR2T = true, true, HoldR2T
	write := sess.MustStart(t, solicited)
	r2t := testtool.Must(write.AwaitR2T())(t)
	aborted := sess.MustStart(t, solicited)
	require.NoError(t, testtool.Err(aborted.AwaitR2T()))

	released := testtool.Must(s.inUse.Remove(1))(t)
	require.True(t, isReleased(released), "the commands wait for the initiator, not for the disk")
	lun, fresh := newLUN(1, 3)
	require.NoError(t, s.inUse.Add(lun))
	mustHear(t, sess, 1)
	require.NoError(t, sess.ExpectOnlyPing(), "no answer before the data (RFC 7143 11.4.2)")
	aborts(t, sess, aborted)
	manageAll(t, sess, pdu.TMComplete, pdu.TMAbortTaskSet) // of the new disk
	require.NoError(t, write.Answer(r2t))
	r := write.MustFinish(t)
	require.Equal(t, notSupported, r.Failed())
	require.Len(t, r.R2Ts, 1, "no R2T for refused data")
	require.Zero(t, fresh.Calls(disktest.OpWrite))
	require.Zero(t, s.disks[0].Calls(disktest.OpWrite))
	s.works(t)
}

// TestNumberOfAnotherDisk gives the number of a LUN to another disk. An initiator that used the
// first disk must not take the second for it: its commands are refused, in later sessions too,
// until it has looked.
func TestNumberOfAnotherDisk(t *testing.T) {
	s := start(t)
	replace := func(id byte) *disktest.Fault {
		require.NoError(t, testtool.Err(s.inUse.Remove(1)))
		lun, d := newLUN(1, id)
		require.NoError(t, s.inUse.Add(lun))
		return d
	}
	user, looker := LoginOptions{}, LoginOptions{Initiator: "iqn.2026-01.test:b"}
	sess, other := s.login(t, user), s.login(t, looker)
	before := sess.MustGood(t, vpd(1, 0x83)).Data
	sess.MustGood(t, Write10(1, 0, pattern(BlockSize, 1)))
	d := replace(3)
	write := Write10(1, 0, pattern(BlockSize, 2))
	for range 3 {
		sess.MustFail(t, write, notSupported)
		sess.MustFail(t, TestUnitReady(1), notSupported)
		sess.MustGood(t, Inquiry(1, 254)) // as udev does for known disks
	}
	news := attentions(t, other, 1)
	require.Equal(t, []string{powerOn, lunsChanged}, news, "it has not used the first disk")
	other.MustGood(t, Read10(1, 0, 1))
	require.NoError(t, sess.Close())
	testtool.Eventually(t, func() bool { return len(s.Sessions()) == 1 }, "the session ends")
	sess = MustLogin(t, s.addr, user)
	sess.MustFail(t, write, notSupported)
	after := sess.MustGood(t, vpd(1, 0x83)).Data
	require.NotEqual(t, before, after)
	sess.MustFail(t, write, notSupported)
	require.Zero(t, d.Calls(disktest.OpWrite))

	require.EqualValues(t, 0, sess.MustGood(t, Inquiry(1, 96)).Data[0])
	require.Contains(t, attentions(t, sess, 1), "06/29/07")
	sess.MustGood(t, write)
	require.NoError(t, sess.Close())
	testtool.Eventually(t, func() bool { return len(s.Sessions()) == 1 }, "the session ends")
	sess = s.login(t, user)
	sess.MustGood(t, write)

	// The same disk again is not another disk.
	require.NoError(t, testtool.Err(s.inUse.Remove(1)))
	lun, _ := newLUN(1, 3)
	require.NoError(t, s.inUse.Add(lun))
	require.Equal(t, []string{powerOn, lunsChanged}, attentions(t, sess, 1))
	sess.MustGood(t, write)
}

// growingDisk is a disk whose size can change, up to that of its memory.
type growingDisk struct {
	*disktest.Memory
	size atomic.Int64
}

func (d *growingDisk) Size() int64 { return d.size.Load() }

func TestResizeLUN(t *testing.T) {
	d := &growingDisk{Memory: disktest.NewMemory(diskSize)}
	d.size.Store(diskSize / 2)
	s := start(t, func(o *options) { o.LUNs[0].Disk = d })
	user := LoginOptions{Initiator: "iqn.2026-01.test:b"}
	sess, other := s.login(t, LoginOptions{}), s.login(t, user)
	const last = diskSize/BlockSize - 1
	require.NoError(t, s.inUse.Resize(1))
	sess.MustFail(t, Read10(1, last, 1), "05/21/00")
	require.NoError(t, other.Close())
	testtool.Eventually(t, func() bool { return len(s.Sessions()) == 1 }, "the session ends")
	d.size.Store(diskSize)
	sess.MustFail(t, Read10(1, last, 1), "05/21/00")
	require.NoError(t, s.inUse.Resize(1))
	require.Equal(t, []string{capacityChanged}, attentions(t, sess, 1))
	require.Empty(t, attentions(t, sess, 2))
	require.EqualValues(t, last, binary.BigEndian.Uint32(sess.MustGood(t, ReadCapacity10(1)).Data))
	sess.MustGood(t, Write10(1, last, pattern(BlockSize, 1)))
	other = MustLogin(t, s.addr, user)
	require.Contains(t, attentions(t, other, 1), capacityChanged, "it was not there")
	require.NotContains(t, attentions(t, other, 2), capacityChanged)
	d.size.Store(diskSize / 2)
	require.ErrorContains(t, s.inUse.Resize(1), "can only grow")
	require.ErrorContains(t, s.inUse.Resize(9), "no LUN 9")
	d.size.Store(diskSize)
	sess.MustGood(t, Read10(1, last, 1))
}

// TestRemoveLUNOfACopy removes a LUN that an EXTENDED COPY reads, writes or was sent to.
func TestRemoveLUNOfACopy(t *testing.T) {
	for _, c := range []struct {
		name     string
		at       uint16 // gets the command
		from, to int    // index of units
		remove   uint16
		want     string
	}{
		{"source", 2, 0, 1, 1, "0A/0D/01"},
		{"destination", 1, 0, 1, 2, "0A/0D/01"},
		{"the one that it was sent to", 1, 0, 1, 1, notSupported},
		{"only sent to", 3, 0, 1, 3, notSupported},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := start(t)
			third, _ := newLUN(3, 3)
			require.NoError(t, s.inUse.Add(third))
			sess := MustLogin(t, s.addr, LoginOptions{}, 1, 2, 3)
			sess.MustGood(t, Write10(1, 0, pattern(1<<20, 1)))
			reads := s.disks[0].Calls(disktest.OpRead)
			goOn, hangs := s.stall(t, disktest.OpRead)
			list := CopyList(1, units, segment(c.from, c.to, 2048, 0, 4096))
			copying := sess.MustStart(t, ExtendedCopy(c.at, list))
			hangs(1)
			released := testtool.Must(s.inUse.Remove(c.remove))(t)
			require.False(t, isReleased(released), "a step of the copy is under way")
			if c.want == notSupported {
				require.Equal(t, notSupported, copying.MustFinish(t).Failed(), "at once")
				goOn()
				<-released
				return
			}
			goOn()
			<-released
			r := copying.MustFinish(t)
			require.Equal(t, c.want, r.Failed())
			require.Less(t, s.disks[0].Calls(disktest.OpRead)-reads, 4, "it did not go on")
		})
	}
}

// TestRemoveLUNStopsLongWork checks that a command of many disk calls ends after the call that is
// under way.
func TestRemoveLUNStopsLongWork(t *testing.T) {
	for name, command := range map[string]Command{
		"WRITE SAME":            writeSame(1, 0, 0, diskSize/BlockSize, pattern(BlockSize, 1)),
		"VERIFY with two sides": {LUN: 1, CDB: cdb16(0x8f, 0, 0, diskSize/BlockSize/2)},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t)
			sess := s.login(t, LoginOptions{})
			goOn, hangs := s.stall(t, disktest.OpAny)
			task := sess.MustStart(t, command)
			hangs(1)
			released := testtool.Must(s.inUse.Remove(1))(t)
			if !task.Done() {
				require.Equal(t, notSupported, task.MustFinish(t).Failed())
			}
			require.False(t, isReleased(released))
			goOn()
			<-released
			require.Less(t, s.disks[0].Calls(disktest.OpAny), 4, "it did not go on")
			s.works(t)
		})
	}
}
