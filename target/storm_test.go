package target_test

import (
	"bytes"
	"fmt"
	"math/rand"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/pdu"
	tt "kubevirt.io/disk/target/targettest"
)

// TestTaskManagementStorm aborts commands in every state, while the disk is slow and other sessions
// abort too. Once a task is reported aborted, nothing more is sent for it.
func TestTaskManagementStorm(t *testing.T) {
	s := start(t)
	s.disks[0].Inject(disktest.Rule{Op: disktest.OpRead, Delay: 12 * time.Millisecond})
	s.disks[0].Inject(disktest.Rule{Op: disktest.OpWrite, Delay: time.Millisecond})
	// All log in before the first one resets a LUN, which would abort the first commands of the
	// others, too.
	var sessions [3]*tt.Session
	for i := range sessions {
		sessions[i] = tt.MustLogin(t, s.addr,
			tt.LoginOptions{Initiator: fmt.Sprintf("iqn.2026-01.test:storm-%d", i)}, 1, 2)
	}
	var wg sync.WaitGroup
	for i, c := range sessions {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := storm(c, rand.New(rand.NewSource(int64(i)))); err != nil {
				t.Errorf("session %d: %v", i, err)
			}
		}()
	}
	wg.Wait()
	require.Zero(t, s.seen.count("panic"))
}

// storm keeps commands in flight and aborts them, one by one or all commands of a LUN.
func storm(c *tt.Session, r *rand.Rand) error {
	var flying []*tt.Task
	for range 80 {
		for len(flying) < 8 {
			lun := uint16(1 + r.Intn(2))
			cmd := tt.Read10(lun, uint32(r.Intn(1000)), 1+r.Intn(1200))
			switch r.Intn(3) {
			case 0:
				cmd = tt.Write10(lun, uint32(r.Intn(1000)), make([]byte, 512<<r.Intn(10)))
			case 1:
				cmd = tt.Read10(lun, uint32(r.Intn(1000)), 8)
			}
			task, err := c.Start(cmd)
			if err != nil {
				return err
			}
			flying = append(flying, task)
		}
		function := []pdu.TMFunction{pdu.TMAbortTask, pdu.TMAbortTask, pdu.TMAbortTask,
			pdu.TMAbortTaskSet, pdu.TMLogicalUnitReset}[r.Intn(5)]
		if function == pdu.TMAbortTask {
			i := r.Intn(len(flying))
			task := flying[i]
			// The task is forgotten, so everything that comes for it from now on is a stray.
			if _, err := c.AbortTask(task); err != nil {
				return err
			}
			flying = append(flying[:i], flying[i+1:]...)
		} else {
			got, err := c.TaskManagement(pdu.TaskManagementRequest{Immediate: true,
				Function: function, LUN: tt.LUN(1)})
			if err != nil || got != pdu.TMComplete {
				return fmt.Errorf("%v: %v, %w", function, got, err)
			}
		}
		// A session may have aborted the others of this LUN; those of LUN 2 are never aborted.
		var left []*tt.Task
		for _, task := range flying {
			switch {
			case task.Done():
				c.Forget(task)
			case function != pdu.TMAbortTask && task.LUN() == 1:
				c.Forget(task)
			default:
				left = append(left, task)
			}
		}
		flying = left
		if stray := c.Inbox(); len(stray) > 0 {
			return fmt.Errorf("%v of task %#x came after it was reported aborted",
				stray[0].Header.Opcode(), stray[0].Header.TaskTag())
		}
		if _, err := c.Ping(nil); err != nil {
			return err
		}
	}
	for _, task := range flying {
		if task.LUN() != 2 {
			c.Forget(task) // another session may have reset the LUN
			continue
		}
		if _, err := task.Finish(); err != nil {
			return err
		}
	}
	return nil
}

// descriptors returns how many files this process has open.
func descriptors(t *testing.T) int {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skipf("counts descriptors: %v", err)
	}
	return len(list)
}

// TestChurn logs in and out thousands of times and ends sessions in every way. Nothing is left
// behind.
func TestChurn(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
	goroutines, files := runtime.NumGoroutine(), descriptors(t)
	const workers, each = 4, 600
	var wg sync.WaitGroup
	for w := range workers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range each {
				// Every fourth ISID is shared, so that sessions reinstate each other.
				o := tt.LoginOptions{Initiator: "iqn.2026-01.test:churn",
					ISID: [6]byte{0x80, byte(w), byte(i)}, Discovery: i%5 == 4}
				if i%4 == 0 {
					o.ISID = [6]byte{0x80, 0xff}
				}
				sess, err := tt.Login(s.addr, o)
				if err != nil {
					if i%4 != 0 {
						t.Errorf("login: %v", err)
					}
					continue
				}
				if !o.Discovery && i%3 == 0 {
					_, _ = sess.Start(tt.Read10(2, 0, 64))
				}
				switch i % 7 {
				case 0:
					_ = sess.Reset()
				case 1:
					_ = sess.Close()
				default:
					_, _ = sess.Logout(pdu.LogoutCloseSession)
					_ = sess.Close()
				}
			}
		}()
	}
	wg.Wait()
	testtool.Eventually(t, func() bool { return len(s.Sessions()) == 1 }, "the sessions end")
	testtool.Eventually(t,
		func() bool { all, _ := s.Connections(); return all == 1 }, "the connections end")
	testtool.Eventually(t, func() bool { return runtime.NumGoroutine() <= goroutines },
		"goroutines end: there were %d", goroutines)
	testtool.Eventually(t, func() bool { return descriptors(t) <= files },
		"descriptors are closed: there were %d", files)
	c.MustGood(t, tt.TestUnitReady(1))
}

// TestDeadPeerFreesItsClaim checks that an initiator that owns a LUN and goes silent loses its
// claim.
func TestDeadPeerFreesItsClaim(t *testing.T) {
	s := start(t, func(o *options) {
		o.Limits.NOPInterval, o.Limits.NOPTimeout = 300*time.Millisecond, 5*time.Second
		o.LUNs[0].Access = serving.AccessWriteExclusive
	})
	// Nobody may be silent before everybody has logged in, which may take a while on a busy
	// machine.
	other := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: "iqn.2026-01.test:other"}, 1, 2)
	silent := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: "iqn.2026-01.test:silent"}, 1)
	silent.MustGood(t, tt.Write10(1, 0, make([]byte, 512)))
	require.False(t, other.MustDo(t, tt.Write10(1, 0, make([]byte, 512))).Good(),
		"the other initiator owns the LUN")
	testtool.Eventually(t, func() bool {
		r, err := other.Do(tt.Write10(1, 0, bytes.Repeat([]byte{1}, 512)))
		require.NoError(t, err)
		return r.Good()
	}, "the claim is free")
	// the claim ends before the session
	testtool.Eventually(t,
		func() bool { return s.seen.count("ended") == 1 }, "the session has ended")
	require.Equal(t, []string{"timeout"}, s.seen.reasons())
}

// TestRefusedLoginHoldsNothing refuses an initiator's last login because of a limit, and ends its
// session. Nothing is left that keeps the LUN from others.
func TestRefusedLoginHoldsNothing(t *testing.T) {
	s := start(t, func(o *options) {
		o.Limits.MaxPerAddress = 2
		o.LUNs[0].Access = serving.AccessWriteExclusive
	})
	owner := tt.LoginOptions{Initiator: "iqn.2026-01.test:owner"}
	first := tt.MustLogin(t, s.addr, owner, 1)
	first.MustGood(t, tt.Write10(1, 0, make([]byte, 512)))
	other := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: "iqn.2026-01.test:other"}, 1, 2)
	owner.ISID = [6]byte{0x80, 7}
	_, err := tt.Login(s.addr, owner)
	var refused *tt.LoginError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, uint16(0x0302), refused.Status)
	require.False(t, other.MustDo(t, tt.Write10(1, 0, make([]byte, 512))).Good(),
		"the owner has the LUN")
	_, err = first.Logout(pdu.LogoutCloseSession)
	require.NoError(t, err)
	other.MustGood(t, tt.Write10(1, 0, make([]byte, 512)))
}

// TestPeersThatStay has peers that do not close ended connections, in every case in which the
// target lets the peer close first.
func TestPeersThatStay(t *testing.T) {
	s := start(t)
	for name, end := range map[string]func(c *tt.Session) error{
		"logout": func(c *tt.Session) error {
			_, err := c.Logout(pdu.LogoutCloseSession)
			return err
		},
		"an unexpected PDU": func(c *tt.Session) error {
			return c.Send(&pdu.LoginRequest{TaskTag: 1, CmdSN: c.CmdSN}, nil)
		},
	} {
		c := tt.MustLogin(t, s.addr, tt.LoginOptions{}, 1)
		require.NoError(t, end(c), name)
		testtool.Eventually(t, func() bool { all, _ := s.Connections(); return all == 0 },
			name+": the connection is given up")
		_, err := c.ExpectClosedAfter()
		require.NoError(t, err, name)
	}
	c := tt.MustDial(t, s.addr)
	_, err := c.Login(tt.LoginOptions{Target: "iqn.2026-01.test:another"})
	require.Error(t, err)
	testtool.Eventually(t, func() bool { all, _ := s.Connections(); return all == 0 },
		"a refused login: the connection is given up")
}

// TestAFailedBurstIsNotKept sends bursts that lack one of their PDUs. Their memory must become free
// again.
func TestAFailedBurstIsNotKept(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr,
		tt.LoginOptions{Keys: tt.KV("InitialR2T", "Yes", "ImmediateData", "No")}, 1)
	before := s.DataInUse()
	for range 4 {
		write := tt.Write10(1, 0, make([]byte, 64<<10))
		write.OnR2T = tt.HoldR2T
		task := c.MustStart(t, write)
		r2t, err := task.AwaitR2T()
		require.NoError(t, err)
		const part = 1024
		for i, dataSN := range []uint32{0, 2, 3} { // 1 is missing
			require.NoError(t,
				c.Send(&pdu.DataOut{Final: i == 2, LUN: tt.LUN(1), TaskTag: task.Tag(),
					TransferTag: r2t.TransferTag,
					ExpStatSN:   c.ExpStatSN, DataSN: dataSN, BufferOffset: dataSN * part},
					make([]byte, part)))
		}
		require.False(t, task.MustFinish(t).Good())
	}
	testtool.Eventually(t, func() bool { return s.DataInUse() <= before }, "nothing more is held")
}

// TestABurstThatBreaksOffIsNotKept breaks connections within a PDU of a burst, also of a burst that
// has already failed. Their memory must become free again.
func TestABurstThatBreaksOffIsNotKept(t *testing.T) {
	s := start(t)
	before := s.DataInUse()
	for _, last := range []pdu.DataOut{{DataSN: 1}, {DataSN: 1, Final: true}, {DataSN: 7},
		{DataSN: 7, Final: true}} {
		c := tt.MustLogin(t, s.addr,
			tt.LoginOptions{Keys: tt.KV("InitialR2T", "Yes", "ImmediateData", "No")}, 1)
		write := tt.Write10(1, 0, make([]byte, 64<<10))
		write.OnR2T = tt.HoldR2T
		task := c.MustStart(t, write)
		r2t, err := task.AwaitR2T()
		require.NoError(t, err)
		first := pdu.DataOut{LUN: tt.LUN(1), TaskTag: task.Tag(), TransferTag: r2t.TransferTag,
			ExpStatSN: c.ExpStatSN}
		require.NoError(t, c.Send(&first, make([]byte, 32<<10)))
		last.LUN, last.TaskTag, last.TransferTag, last.ExpStatSN, last.BufferOffset = first.LUN,
			first.TaskTag, first.TransferTag, c.ExpStatSN, 32<<10
		whole := c.Bytes(&last, make([]byte, 32<<10))
		require.NoError(t, c.SendRaw(whole[:len(whole)/2]))
		require.NoError(t, c.Close())
		testtool.Eventually(t, func() bool { return s.DataInUse() <= before }, "nothing is held")
	}
}
