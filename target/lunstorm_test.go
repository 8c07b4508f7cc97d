package target_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target/internal/pdu"
	tt "kubevirt.io/disk/target/targettest"
)

const (
	stormLUNs  = 6       // LUNs that come and go, beginning with firstStorm
	firstStorm = 10      // LUN 1 and 2 stay
	stormSize  = 1 << 20 // of a new disk; it may grow to twice that
	stormPace  = 2       // least rounds of the initiators between two changes
)

// stormDisk is a disk that knows who may use it. Its first block has its number in every 8 bytes.
// Initiators write the other blocks, with the number of the disk that they have found.
type stormDisk struct {
	*disktest.Memory
	id     uint64
	size   atomic.Int64
	closed atomic.Bool
	wrong  func(string, ...any)
}

func (d *stormDisk) Size() int64 { return d.size.Load() }

func (d *stormDisk) use() {
	if d.closed.Load() {
		d.wrong("disk %d is used after it was released", d.id)
	}
}

func (d *stormDisk) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	d.use()
	defer d.use()
	if off == 0 && len(p) >= 8 {
		n, err := d.Memory.ReadAt(ctx, p, off)
		binary.BigEndian.PutUint64(p, d.id)
		return n, err
	}
	return d.Memory.ReadAt(ctx, p, off)
}

func (d *stormDisk) WriteAt(ctx context.Context, p []byte, off int64) (int, error) {
	d.use()
	defer d.use()
	if got := binary.BigEndian.Uint64(p); got != d.id {
		d.wrong("disk %d gets a write for disk %d", d.id, got)
	}
	return d.Memory.WriteAt(ctx, p, off)
}

func (d *stormDisk) Flush() error {
	d.use()
	return d.Memory.Flush()
}

func stormIdentity(id uint64) disk.Identity {
	i := disk.Identity{Serial: fmt.Sprintf("storm-%d", id)}
	binary.BigEndian.PutUint64(i.NAA[:], 0x3000000000000000|id<<8)
	return i
}

// TestLUNsComeAndGo adds, grows and removes disks at random, ten thousand times. Meanwhile
// initiators use the disks that they find and do not always notice the changes. No disk is used
// after its release, none gets a write for another disk, and LUN 2 does not change.
func TestLUNsComeAndGo(t *testing.T) {
	changes := 10_000
	if testing.Short() {
		changes = 1000
	}
	s := start(t)
	wrong := func(format string, args ...any) { t.Errorf(format, args...) }
	ctx, stop := context.WithCancel(t.Context())
	var users sync.WaitGroup
	var sent, used, ended atomic.Int64
	for i := range 4 {
		name := fmt.Sprintf("iqn.2026-01.test:%d", i)
		sess := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: name}, 2)
		users.Go(func() {
			defer ended.Add(1)
			if err := useDisks(ctx, sess, uint64(i), &sent, &used); err != nil {
				wrong("initiator %d: %v", i, err)
			}
		})
	}
	random := rand.New(rand.NewPCG(1, 0))
	here := map[uint16]*stormDisk{}
	next := uint64(1)
	var memory, after runtime.MemStats
	for i := range changes {
		for sent.Load() < int64(i)*stormPace && ended.Load() == 0 {
			time.Sleep(time.Microsecond) // only yielding would keep Go from looking at the network
		}
		number := uint16(firstStorm + random.IntN(stormLUNs))
		d := here[number]
		switch {
		case d == nil:
			d = &stormDisk{Memory: disktest.NewMemory(2 * stormSize), id: next, wrong: wrong}
			d.size.Store(stormSize)
			next++
			require.NoError(t, s.inUse.Add(serving.Options{Number: number, Name: "storm", Disk: d,
				Identity: stormIdentity(d.id), Access: serving.AccessWriteShared}))
			here[number] = d
		case random.IntN(3) == 0 && d.Size() < 2*stormSize:
			d.size.Add(4096)
			require.NoError(t, s.inUse.Resize(number))
		default:
			released := testtool.Must(s.inUse.Remove(number))(t)
			delete(here, number)
			users.Go(func() {
				<-released
				d.closed.Store(true)
			})
		}
		switch i {
		case changes / 4:
			runtime.GC()
			runtime.ReadMemStats(&memory)
		case changes - 1:
			runtime.GC()
			runtime.ReadMemStats(&after)
		}
	}
	stop()
	users.Wait()
	require.Positive(t, used.Load())
	require.Less(t, after.HeapAlloc, memory.HeapAlloc+16<<20,
		"memory grows with the number of changes")
	t.Logf("%d of %d commands used a disk that comes and goes; heap %d and %d KiB", used.Load(),
		sent.Load(), memory.HeapAlloc>>10, after.HeapAlloc>>10)
}

// useDisks looks for disks and uses them, until ctx ends.
func useDisks(ctx context.Context, sess *tt.Session, seed uint64, sent, used *atomic.Int64) error {
	random := rand.New(rand.NewPCG(seed, 1))
	var known [stormLUNs]uint64 // the disks found last
	for n := uint64(0); ctx.Err() == nil; n++ {
		sent.Add(1)
		if r, err := sess.Do(tt.Write10(2, uint32(seed), block(n))); err != nil {
			return err
		} else if !r.Good() && r.Sense.Key != 6 {
			return fmt.Errorf("LUN 2: %s", r.Failed())
		}
		sess.Inbox()
		i := random.IntN(stormLUNs)
		lun := uint16(firstStorm + i)
		switch random.IntN(6) {
		case 0: // look
			known[i] = 0
			if _, err := sess.Do(tt.Inquiry(lun, 36)); err != nil {
				return err
			}
			if r, err := again(sess, tt.Read10(lun, 0, 1)); err != nil {
				return err
			} else if r.Good() {
				known[i] = binary.BigEndian.Uint64(r.Data)
				used.Add(1)
			}
			continue
		case 1:
			if _, err := sess.Do(tt.ReportLUNs(1024)); err != nil {
				return err
			}
			continue
		}
		if known[i] == 0 {
			continue
		}
		c := tt.Write10(lun, 1+uint32(random.IntN(1000)), block(known[i]))
		if n%2 == 0 {
			c.NoImmediate = true // so that the target sends an R2T
		}
		switch n % 16 {
		case 3:
			c = tt.SynchronizeCache10(lun)
		case 7:
			c = tt.Read10(lun, 8, 64)
		}
		r, err := again(sess, c)
		switch {
		case err != nil:
			return err
		case r.Good():
			used.Add(1)
		case r.Sense.Key != 6 && r.Failed() != "05/25/00":
			return fmt.Errorf("LUN %d: %s", lun, r.Failed())
		}
		if n%64 == 0 {
			// It has no tasks of its own. A reset would leave the tasks of others without an
			// answer.
			if _, err := sess.TaskManagement(pdu.TaskManagementRequest{Immediate: true,
				Function: pdu.TMAbortTaskSet, LUN: tt.LUN(lun)}); err != nil {
				return err
			}
		}
	}
	return nil
}

// again repeats a command until there is no unit attention, as initiators do.
func again(sess *tt.Session, c tt.Command) (r *tt.Result, err error) {
	for range 4 {
		if r, err = sess.Do(c); err != nil || r.Sense.Key != 6 {
			break
		}
	}
	return r, err
}

func block(word uint64) []byte {
	b := make([]byte, tt.BlockSize)
	binary.BigEndian.PutUint64(b, word)
	return b
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
