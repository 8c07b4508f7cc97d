package target_test

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	logs "go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

const (
	farBlock  = disktest.DistantBlock / BlockSize // logical blocks
	farWindow = 8                                 // commands

	statusBusy = "status 0x8"
)

// preemptFirst is how the second initiator, of key 2, fences the first off.
var preemptFirst = Persist{Action: PersistPreemptAndAbort, Type: WriteExclusiveRO, Key: 2,
	ActionKey: 1}

// farServer is a target whose LUN 1 has its content far away. That content is farContent at first.
type farServer struct {
	*server
	far *disktest.Distant
	log *logs.ObservedLogs
}

var farContent = pattern(64*disktest.DistantBlock, 3)

// startFar serves it. hold is how long a command may wait for content.
func startFar(t *testing.T, hold time.Duration, change ...func(*options)) *farServer {
	t.Helper()
	near := disktest.NewMemory(diskSize)
	require.NoError(t, testtool.Err(near.WriteAt(t.Context(), farContent, 0)))
	core, log := logs.New(zapcore.WarnLevel)
	s := &farServer{far: disktest.NewDistant(near), log: log}
	change = append([]func(*options){func(o *options) {
		o.LUNs[0].Disk, o.LUNs[0].Store = s.far, disktest.NewStore(t.TempDir(), false)
		o.Shared.HoldTimeout, o.Limits.CommandWindow = hold, farWindow
		o.Log = zap.New(core)
	}}, change...)
	s.server = start(t, change...)
	return s
}

// waits returns when that many commands wait for content.
func (s *farServer) waits(t *testing.T, commands int) {
	t.Helper()
	testtool.Eventually(t,
		func() bool { return s.far.Waiting() == commands }, "commands wait for content")
}

// content is what a part of LUN 1 has.
func (s *farServer) content(t *testing.T, sess *Session, lba uint32, blocks int) []byte {
	t.Helper()
	r := testtool.Must(insist(sess, Read10(1, lba, blocks)))(t)
	require.True(t, r.Good(), r.Failed())
	return r.Data
}

// insist sends a command until it ends with something else than BUSY. If processors are short,
// content that is on its way may come too late.
func insist(sess *Session, c Command) (*Result, error) {
	for {
		if r, err := sess.Do(c); err != nil || r.Failed() != statusBusy {
			return r, err
		}
	}
}

// rooms waits until every place in the command window is free.
func rooms(t *testing.T, sess *Session) {
	t.Helper()
	testtool.Eventually(t, func() bool {
		require.NoError(t, testtool.Err(sess.Ping(nil)))
		return sess.MaxCmdSN == sess.CmdSN-1+farWindow
	}, "the command window is open")
}

// unaligned is a write of a part of a block, for which the rest has to come.
func unaligned(lba uint32, blocks int) Command {
	return Write10(1, lba*farBlock+1, pattern(blocks*BlockSize, 9))
}

// farCommands need content of block 4 of LUN 1.
func farCommands() map[string]Command {
	old := farContent[4*disktest.DistantBlock:][:disktest.DistantBlock]
	cdb16 := func(op, b1 byte, blocks byte) []byte {
		return []byte{op, b1, 9: 4 * farBlock, 13: blocks, 15: 0}
	}
	unmap := []byte{0, 22, 0, 16, 15: 4*farBlock + 1, 19: 2, 23: 0}
	return map[string]Command{
		"READ(10)":          Read10(1, 4*farBlock, 1),
		"WRITE(10)":         unaligned(4, 1),
		"WRITE(10), 2 ends": unaligned(4, 3*farBlock-2),
		"VERIFY(10)":        {LUN: 1, CDB: []byte{0x2f, 0, 0, 0, 0, 4 * farBlock, 0, 0, 1, 0}},
		"VERIFY(16), data":  {LUN: 1, CDB: cdb16(0x8f, 2, 1), Write: old[:BlockSize]},
		"PRE-FETCH(16)":     {LUN: 1, CDB: cdb16(0x90, 0, 1)},
		"WRITE AND VERIFY":  {LUN: 1, CDB: cdb16(0x8e, 2, 1), Write: pattern(BlockSize, 9)},
		"WRITE SAME(16)":    {LUN: 1, CDB: cdb16(0x93, 0, 1), Write: pattern(BlockSize, 9)},
		"WRITE SAME, zeros": {LUN: 1, CDB: cdb16(0x93, 0, 1), Write: make([]byte, BlockSize)},
		"WRITE SAME, UNMAP": {LUN: 1, CDB: cdb16(0x93, 8, 1), Write: make([]byte, BlockSize)},
		"UNMAP":             {LUN: 1, CDB: []byte{0x42, 8: 24, 9: 0}, Write: unmap},
		"COMPARE AND WRITE": {LUN: 1, CDB: cdb16(0x89, 0, 1),
			Write: append(old[:BlockSize:BlockSize], pattern(BlockSize, 9)...)},
		"WRITE ATOMIC(16)": {LUN: 1, CDB: cdb16(0x9c, 0, farBlock),
			Write: pattern(farBlock*BlockSize, 9)},
		"GET LBA STATUS": {LUN: 1, CDB: cdb16(0x9e, 0x12, 24), Read: 24},
	}
}

// TestNotNow sends commands of all kinds that need content which does not come. Each ends with
// BUSY, nothing has changed, and it can be sent again.
func TestNotNow(t *testing.T) {
	for name, c := range farCommands() {
		t.Run(name, func(t *testing.T) {
			s := startFar(t, 20*time.Millisecond)
			sess := s.login(t, LoginOptions{})
			s.far.Cut()
			for range 3 {
				sess.MustFail(t, c, statusBusy)
			}
			s.far.Restore()
			// Whole blocks of a write may have been stored before it came to one that is not.
			if name != "WRITE(10), 2 ends" {
				require.True(t, bytes.Equal(farContent, s.content(t, sess, 0, 64*farBlock)))
			}
			s.far.Forget()
			s.far.Slow(time.Millisecond)
			r := testtool.Must(insist(sess, c))(t)
			require.Contains(t, []uint8{0, 4}, r.Status, "GOOD or CONDITION MET")
			require.Len(t, s.log.All(), 1, "the log tells once of what is tried again and again")
			require.Contains(t, s.log.All()[0].Message, "asked to try again")
		})
	}
}

// TestNotNowWithoutNeed sends commands that need no content from afar, while none can be had.
func TestNotNowWithoutNeed(t *testing.T) {
	s := startFar(t, time.Hour)
	sess := s.login(t, LoginOptions{})
	s.far.Cut()
	data := pattern(2*disktest.DistantBlock, 5)
	sess.MustGood(t, Write10(1, 8*farBlock, data))
	require.Equal(t, data, s.content(t, sess, 8*farBlock, 2*farBlock))
	sess.MustGood(t, Write10(1, 8*farBlock+1, data[:BlockSize]))
	sess.MustGood(t, SynchronizeCache10(1))
	sess.MustGood(t, TestUnitReady(1))
	sess.MustGood(t, Inquiry(1, 96))
	sess.MustGood(t, ReadCapacity10(1))
	require.Zero(t, s.far.Waiting())

	// A waiting command does not delay others, not even of its kind.
	atomic := farCommands()["WRITE ATOMIC(16)"]
	held := sess.MustStart(t, atomic)
	s.waits(t, 1)
	atomic.CDB = append([]byte(nil), atomic.CDB...)
	atomic.CDB[9] = 8 * farBlock
	sess.MustGood(t, atomic)
	s.far.Restore()
	require.True(t, held.MustFinish(t).Good())
}

// TestNotNowInTheMiddle reads a long range whose second part does not come. Its first part was sent
// already.
func TestNotNowInTheMiddle(t *testing.T) {
	const blocks, part = 1 << 20 / BlockSize, 256 << 10 / BlockSize
	s := startFar(t, 20*time.Millisecond)
	sess := s.login(t, LoginOptions{})
	s.content(t, sess, 0, part)
	s.far.Cut()
	r := sess.MustFail(t, Read10(1, 0, blocks), statusBusy)
	require.Len(t, r.Data, part*BlockSize)
	require.True(t, r.Underflow)
	require.EqualValues(t, (blocks-part)*BlockSize, r.Residual)
	s.far.Restore()
	require.True(t, bytes.HasPrefix(s.content(t, sess, 0, blocks), farContent))
}

// TestNotNowQualifier tells when to try again, where the session has negotiated that there is room
// for it. The initiator of these tests refuses a qualifier of a session that has not.
func TestNotNowQualifier(t *testing.T) {
	s := startFar(t, 20*time.Millisecond)
	sess := s.login(t, LoginOptions{Keys: KV("iSCSIProtocolLevel", "2")})
	s.far.Cut()
	require.EqualValues(t, 1, sess.MustFail(t, Read10(1, 0, 1), statusBusy).Qualifier)
	require.Zero(t, sess.MustFail(t, Read10(1, diskSize/BlockSize, 1), "05/21/00").Qualifier)
}

// TestNotNowAtOnce has a disk that says many times, at once, that its content is not here. The
// command is held all the same.
func TestNotNowAtOnce(t *testing.T) {
	s := startFar(t, time.Hour)
	sess := s.login(t, LoginOptions{})
	s.far.Refuse()
	read, write := sess.MustStart(t, Read10(1, 0, 1)), sess.MustStart(t, unaligned(4, 1))
	testtool.Eventually(t,
		func() bool { return s.far.Refused() >= 6 }, "the disk has said so several times")
	require.NoError(t, sess.ExpectOnlyPing())
	s.far.Restore()
	require.Equal(t, farContent[:BlockSize], read.MustFinish(t).Data)
	require.True(t, write.MustFinish(t).Good())
	require.Equal(t, pattern(BlockSize, 9), s.content(t, sess, 4*farBlock+1, 1))
	require.Empty(t, s.log.All())
}

// TestNotNowAborted ends waiting commands in every possible way. They stop waiting, get no answer
// and leave their places in the command window. Nothing of them is carried out later.
func TestNotNowAborted(t *testing.T) {
	const tag = 0xabcd
	lun := func(f pdu.TMFunction) func(*testing.T, *farServer, *Session, *Session) {
		return func(t *testing.T, _ *farServer, sess, _ *Session) {
			manageAll(t, sess, pdu.TMComplete, f)
		}
	}
	for _, c := range []struct {
		name string
		end  func(t *testing.T, s *farServer, sess, second *Session)
	}{
		{"ABORT TASK", func(t *testing.T, _ *farServer, sess, _ *Session) {
			for i := range uint32(3) {
				abortTask(t, sess, pdu.TMComplete, 1, tag+i, 0)
			}
		}},
		{"ABORT TASK SET", lun(pdu.TMAbortTaskSet)},
		{"CLEAR TASK SET", lun(pdu.TMClearTaskSet)},
		{"LOGICAL UNIT RESET", lun(pdu.TMLogicalUnitReset)},
		{"TARGET WARM RESET", lun(pdu.TMTargetWarmReset)},
		{"CLEAR TASK SET by another", func(t *testing.T, s *farServer, _, second *Session) {
			lun(pdu.TMClearTaskSet)(t, s, second, nil)
		}},
		{"PREEMPT AND ABORT", func(t *testing.T, _ *farServer, sess, second *Session) {
			second.MustGood(t, PersistOut(1, preemptFirst))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := startFar(t, time.Hour)
			sess, second := s.login(t, LoginOptions{}), s.login(t, other)
			register(t, sess, 1, 0)
			register(t, second, 2, 0)
			reserve := Persist{Action: PersistReserve, Type: WriteExclusiveRO, Key: 1}
			sess.MustGood(t, PersistOut(1, reserve))
			s.far.Cut()
			commands := []Command{Read10(1, 2*farBlock, 1), unaligned(4, 1), unaligned(6, 1)}
			var tasks []*Task
			for i, cmd := range commands {
				cmd.Edit = func(p *pdu.SCSICommand) { p.TaskTag = tag + uint32(i) }
				tasks = append(tasks, sess.MustStart(t, cmd))
			}
			s.waits(t, len(tasks))
			c.end(t, s, sess, second)
			for _, task := range tasks {
				sess.Forget(task)
			}
			s.waits(t, 0)
			rooms(t, sess)
			require.NoError(t, sess.ExpectOnlyPing(), "no answer to what was aborted")
			s.far.Restore()
			require.NoError(t, testtool.Err(second.ClearAttention(1)))
			require.True(t, bytes.Equal(farContent, s.content(t, second, 0, 64*farBlock)))
			require.Empty(t, s.log.All())
		})
	}
}

// TestNotNowImpatient aborts a command that is held. From then on its initiator gets such answers
// earlier. Other initiators do not.
func TestNotNowImpatient(t *testing.T) {
	for name, f := range map[string]pdu.TMFunction{"task": pdu.TMAbortTask,
		"task set": pdu.TMAbortTaskSet, "unit": pdu.TMLogicalUnitReset,
		"target": pdu.TMTargetWarmReset} {
		t.Run(name, func(t *testing.T) {
			s := startFar(t, time.Hour, func(o *options) {
				o.Shared.LeastHoldTimeout = 20 * time.Millisecond
			})
			sess, second := s.login(t, LoginOptions{}), s.login(t, other)
			s.far.Cut()
			// An abort of a command that is not held changes nothing.
			manageAll(t, sess, pdu.TMComplete, pdu.TMLogicalUnitReset)
			attentions(t, sess, 1)
			attentions(t, second, 1)
			held := sess.MustStart(t, Read10(1, 0, 1))
			s.waits(t, 1)
			manage(t, sess, pdu.TMComplete, pdu.TaskManagementRequest{
				Function: f, LUN: LUN(1), RefTaskTag: held.Tag()})
			sess.Forget(held)
			s.waits(t, 0)
			attentions(t, sess, 1)
			attentions(t, second, 1)
			sess.MustFail(t, Read10(1, 0, 1), statusBusy)
			patient := second.MustStart(t, Read10(1, 0, 1))
			s.waits(t, 1)
			sess.MustFail(t, Read10(1, 0, 1), statusBusy)
			s.far.Restore()
			require.True(t, patient.MustFinish(t).Good())
		})
	}
}

// TestNotNowBehindAnother has writes that wait for another initiator's write, which waits for
// content. They can be aborted, and fencing their initiator does not wait for the first write.
func TestNotNowBehindAnother(t *testing.T) {
	s := startFar(t, time.Hour)
	sess, second := s.login(t, LoginOptions{}), s.login(t, other)
	register(t, sess, 1, 0)
	register(t, second, 2, 0)
	s.far.Cut()
	first := second.MustStart(t, unaligned(4, 1))
	s.waits(t, 1)
	behind := sess.MustStart(t, unaligned(4, 1))
	require.NoError(t, testtool.Err(sess.Ping(nil)))
	aborts(t, sess, behind)
	rooms(t, sess)
	behind = sess.MustStart(t, unaligned(4, 1))
	require.NoError(t, testtool.Err(sess.Ping(nil)))
	second.MustGood(t, PersistOut(1, preemptFirst))
	sess.Forget(behind)
	s.far.Restore()
	require.True(t, first.MustFinish(t).Good())
}

// TestNotNowSessionEnds ends a session whose commands wait, and the server: at once, and after the
// time that it has for commands under way.
func TestNotNowSessionEnds(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(*testing.T, *farServer, *Session)
	}{
		{"closed", func(t *testing.T, _ *farServer, sess *Session) {
			require.NoError(t, sess.Close())
		}},
		{"logout", func(t *testing.T, _ *farServer, sess *Session) {
			require.NoError(t, testtool.Err(sess.Logout(pdu.LogoutCloseSession)))
		}},
		{"reinstated", func(t *testing.T, s *farServer, _ *Session) { s.login(t, LoginOptions{}) }},
		{"kicked", func(_ *testing.T, s *farServer, _ *Session) {
			s.EndSessions(func(status.Session) bool { return true })
		}},
		{"the server", func(t *testing.T, s *farServer, _ *Session) {
			require.NoError(t, s.Close())
		}},
		{"the server, later", func(t *testing.T, s *farServer, _ *Session) {
			require.ErrorIs(t, <-s.shutdown(50*time.Millisecond), context.DeadlineExceeded)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := startFar(t, time.Hour)
			sess := s.login(t, LoginOptions{})
			s.far.Cut()
			for i := range uint32(4) {
				sess.MustStart(t, Read10(1, i*farBlock, 1))
				sess.MustStart(t, unaligned(8+i, 1))
			}
			s.waits(t, 8)
			c.end(t, s, sess)
			s.waits(t, 0)
			if !strings.HasPrefix(c.name, "the server") {
				s.works(t)
			}
		})
	}
}

// TestNotNowDrained stops the server while commands wait whose content comes in time.
func TestNotNowDrained(t *testing.T) {
	s := startFar(t, time.Hour)
	sess := s.login(t, LoginOptions{})
	s.far.Cut()
	read := sess.MustStart(t, Read10(1, 0, 1))
	s.waits(t, 1)
	done := s.shutdown(time.Minute)
	require.NoError(t, testtool.Err(sess.AwaitAsync()))
	s.far.Restore()
	require.True(t, read.MustFinish(t).Good())
	require.NoError(t, testtool.Err(sess.Logout(pdu.LogoutCloseSession)))
	require.NoError(t, <-done)
}

// TestNotNowRemoved removes the LUN of commands that wait.
func TestNotNowRemoved(t *testing.T) {
	s := startFar(t, time.Hour)
	sess := s.login(t, LoginOptions{})
	s.far.Cut()
	var tasks []*Task
	for i := range uint32(4) {
		tasks = append(tasks, sess.MustStart(t, Read10(1, i*farBlock, 1)),
			sess.MustStart(t, unaligned(8+i, 1)))
	}
	s.waits(t, len(tasks))
	released := testtool.Must(s.inUse.Remove(1))(t)
	for _, task := range tasks {
		require.Equal(t, "05/25/00", task.MustFinish(t).Failed())
	}
	<-released
	require.Zero(t, s.far.Waiting())
	rooms(t, sess)
	require.Empty(t, s.log.All())
}

// TestNotNowCopy copies from and to a LUN whose content does not come. The copy fails as for any
// failure of one of its LUNs, so that an initiator copies by itself.
func TestNotNowCopy(t *testing.T) {
	s := startFar(t, 20*time.Millisecond)
	sess := s.login(t, LoginOptions{})
	units := [][8]byte{identity(1).NAA, identity(2).NAA}
	from := ExtendedCopy(2, CopyList(1, units, CopySegment{Source: 0, Dest: 1, Blocks: farBlock}))
	into := ExtendedCopy(2, CopyList(2, units, CopySegment{Source: 1, Dest: 0, To: 1, Blocks: 1}))
	s.far.Cut()
	sess.MustFail(t, from, "0A/0D/01")
	sess.MustFail(t, into, "0A/0D/01")
	s.far.Restore()
	s.content(t, sess, 0, farBlock)
	sess.MustGood(t, from)
	copied := sess.MustGood(t, Read10(2, 0, farBlock)).Data
	require.Equal(t, farContent[:disktest.DistantBlock], copied)
	sess.MustGood(t, into)

	held := startFar(t, time.Hour)
	sess = held.login(t, LoginOptions{})
	held.far.Cut()
	task := sess.MustStart(t, from)
	held.waits(t, 1)
	aborts(t, sess, task)
	held.waits(t, 0)
	rooms(t, sess)
}
