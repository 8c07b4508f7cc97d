package target_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
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
