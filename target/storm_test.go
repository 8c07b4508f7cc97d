package target_test

import (
	"os"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/pdu"
	tt "kubevirt.io/disk/target/targettest"
)

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
		wg.Go(func() {
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
		})
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
	s.refused(t, owner, 0x0302)
	require.False(t, other.MustDo(t, tt.Write10(1, 0, make([]byte, 512))).Good(),
		"the owner has the LUN")
	require.NoError(t, testtool.Err(first.Logout(pdu.LogoutCloseSession)))
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
		require.NoError(t, testtool.Err(c.ExpectClosedAfter()), name)
	}
	c := tt.MustDial(t, s.addr)
	require.Error(t, testtool.Err(c.Login(tt.LoginOptions{Target: "iqn.2026-01.test:another"})))
	testtool.Eventually(t, func() bool { all, _ := s.Connections(); return all == 0 },
		"a refused login: the connection is given up")
}

// TestAFailedBurstIsNotKept sends bursts that lack one of their PDUs. Their memory must become free
// again.
func TestAFailedBurstIsNotKept(t *testing.T) {
	s := start(t)
	c := tt.MustLogin(t, s.addr, solicited, 1)
	before := s.DataInUse()
	for range 4 {
		task, r2t := waiting(t, c, 1, 0, make([]byte, 64<<10))
		const part = 1024
		for i, dataSN := range []uint32{0, 2, 3} { // 1 is missing
			require.NoError(t,
				c.Send(&pdu.DataOut{Final: i == 2, LUN: tt.LUN(1), TaskTag: task.Tag(),
					TransferTag: r2t.TransferTag, ExpStatSN: c.ExpStatSN, DataSN: dataSN,
					BufferOffset: dataSN * part}, make([]byte, part)))
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
		c := tt.MustLogin(t, s.addr, solicited, 1)
		task, r2t := waiting(t, c, 1, 0, make([]byte, 64<<10))
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
