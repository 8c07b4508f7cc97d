package scsi

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// another is a LUN 1 on an empty disk that is not the one of the bench.
func another(id byte, change ...func(*LUN)) (LUN, *memDisk) {
	m := newMemDisk(testBlocks * BlockSize)
	l := LUN{Number: 1, Disk: thinDisk{m}, Access: AccessWriteShared,
		Identity: disk.Identity{Serial: "another", NAA: [8]byte{0x30, 7: id}}}
	for _, c := range change {
		c(&l)
	}
	return l, m
}

func (b *bench) remove() <-chan struct{} {
	b.t.Helper()
	return testtool.Must(b.d.disks.Remove(1))(b.t)
}

func (b *bench) add(l LUN) {
	b.t.Helper()
	require.NoError(b.t, b.d.disks.Add(l))
}

func released(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// TestNothingOfARemovedUnitReachesTheNext removes a unit that has all kinds of state, and gives its
// number to another disk.
func TestNothingOfARemovedUnitReachesTheNext(t *testing.T) {
	b := newBench(t, exclusive, stored)
	second := b.attach("iqn.b", 0)
	b.good(cdb(writeOne), pattern(1, 1))
	require.NoError(t, b.admit("iqn.b"))
	require.NoError(t, b.finish()) // iqn.b owns it, and iqn.a is fenced
	require.Equal(t, "GOOD", b.writes(second))
	as := *b
	as.nexus = second
	as.register(second, 7)
	require.Equal(t, "GOOD", as.persist(second, saReserve, typeExclusiveAccess, 7, 0))
	for _, page := range []string{
		"08 12 00 00 00000000 00000000 00000000 00000000",
		"0a 0a 04 10 0800 0000 0000 0000",
	} {
		require.Equal(t, "GOOD", modeSelect6(&as, "00 00 00 00"+page).outcome())
	}
	require.NoError(t, b.admit("iqn.c"))
	b.nexus.nth(0).raise(attnModeChanged)
	late := b.prepared(second, cdb("12 00 00 00 60 00"), nil)

	require.True(t, released(b.remove()))
	fresh, m := another(9, exclusive, stored)
	b.add(fresh)
	require.NoError(t, carryOut(late, nil), "it was answered before it was removed")
	mistaken := b.runAs(second, lun1, cdb(writeOne), pattern(1, 1))
	require.Equal(t, "5/25/00", mistaken.outcome(), "it has the other disk in mind")
	b.good(cdb("12 00 00 00 60 00"), nil)
	require.Equal(t, "5/25/00", b.ready(b.nexus), "a tool has looked")
	b.good(cdb("12 00 00 00 24 00"), nil)
	require.Equal(t, []string{"2900", "3f0e"}, pending(b.nexus))
	require.Equal(t, serving.Holders{}, b.d.disks.Holders(1))
	require.Empty(t, b.d.disks.Openings())
	require.Equal(t, "0:", b.keys())
	require.Equal(t, "none", b.reservation())
	requireHex(t, "17 00 10 00"+cachingPage, b.good(cdb("1a 08 08 00 ff 00"), nil))
	b.good(cdb(writeOne), pattern(1, 1))
	require.Equal(t, 1, m.count("write"))
	require.Equal(t, "iqn.a", b.d.disks.Holders(1).Owner)
	require.Equal(t, "5/25/00", b.ready(second))
	require.Equal(t, "GOOD", b.runAs(second, lun1, cdb("12 00 00 00 24 00"), nil).outcome())
	require.Equal(t, []string{"2900", "3f0e"}, pending(second))
	owned := b.runAs(second, lun1, cdb(testReady), nil)
	require.Equal(t, conflict, owned.outcome(), "another one owns it")
}

// TestCommandOfARemovedUnit removes a unit between any two steps of a command. The later steps
// reach no disk.
func TestCommandOfARemovedUnit(t *testing.T) {
	for name, c := range map[string]struct {
		cdb  []byte
		data []byte
	}{
		"READ":        {cdb: cdb(readOne)},
		"WRITE":       {cdb: cdb(writeOne), data: pattern(1, 1)},
		"flush":       {cdb: cdb("35 00 00000000 00 0000 00")},
		"RESERVE(6)":  {cdb: cdb("16 00 00 00 00 00")},
		"MODE SELECT": {cdb: cdb("15 10 00 00 10 00"), data: unhex("00000000" + controlPage)},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, stored)
			task := b.prepared(b.nexus, c.cdb, nil)
			idle := b.remove()
			require.True(t, released(idle), "it has not begun to use the disk")
			require.True(t, task.Removed())
			fresh, m := another(9)
			b.add(fresh)
			require.False(t, task.For(lun1))
			if task.Dir == DirIn {
				require.ErrorIs(t, task.In(0, make([]byte, task.Length)), errLUNNotSupported)
			} else {
				require.ErrorIs(t, carryOut(task, c.data), errLUNNotSupported)
			}
			require.Zero(t, b.disk.count("read")+b.disk.count("write")+b.disk.count("flush"))
			require.Zero(t, m.count("read")+m.count("write")+m.count("flush"))
			require.Nil(t, b.d.nth(0).reserved.Load())
		})
	}
}

// TestRemovedUnitIsReleasedLast removes a unit whose disk and store are in use by something other
// than a command.
func TestRemovedUnitIsReleasedLast(t *testing.T) {
	t.Run("a handover that is saved", func(t *testing.T) {
		entered, gate := make(chan struct{}), make(chan struct{})
		b := newBench(t, exclusive, func(l *LUN) {
			l.Store = &keptStore{saving: func() {
				close(entered)
				<-gate
			}}
		})
		done := testtool.Go(func() error { return b.admit("iqn.b") })
		<-entered
		idle := b.remove()
		require.False(t, released(idle))
		require.ErrorContains(t, b.admit("iqn.b"), "no LUN 1")
		close(gate)
		require.NoError(t, <-done)
		<-idle
	})
}

// TestFirstUseOrRemoveUnused: of a first READ and RemoveUnused at the same time one wins, and the
// other one notices. Some initiators are logged in, and some log in at that moment.
func TestFirstUseOrRemoveUnused(t *testing.T) {
	b := newBench(t)
	_ = b.remove()
	kept := 0
	const rounds = 5000
	for i := range rounds {
		lun, _ := another(byte(i))
		b.add(lun)
		name := fmt.Sprint("iqn.", i) // one that has not used another disk under this number
		var n *Nexus
		if i%2 == 0 {
			n = b.attach(name, 0)
		}
		var all sync.WaitGroup
		var arrived atomic.Int32
		meet := func() { // more exact than a channel
			for arrived.Add(1); arrived.Load() < 2; {
				runtime.Gosched()
			}
		}
		var read result
		all.Go(func() {
			meet()
			if n == nil {
				n = b.attach(name, 0)
			}
			read = b.runAs(n, lun1, cdb("28 00 00000000 00 0001 00"), nil)
		})
		meet()
		removal, err := b.d.disks.RemoveUnused(1)
		all.Wait()
		if err == nil {
			require.Equal(t, "5/25/00", read.outcome())
			<-removal
		} else {
			kept++
			require.Equal(t, &serving.InUseError{LUN: 1, Initiators: []string{name}}, err)
			require.Equal(t, "GOOD", read.outcome())
			<-b.remove()
		}
		b.d.Detach(n)
	}
	t.Logf("%d of %d disks stayed", kept, rounds)
}

// TestRemoveUnused: a unit stays while a session that has used it lasts, or the reservation of
// somebody who has gone. What is no use, and a registration alone, keep no unit.
func TestRemoveUnused(t *testing.T) {
	b := newBench(t)
	users := func() []string {
		_, err := b.d.disks.RemoveUnused(1)
		var used *serving.InUseError
		require.ErrorAs(t, err, &used)
		return used.Initiators
	}
	second := b.attach("iqn.b", 0)
	b.register(b.nexus, 1)
	b.register(second, 2)
	require.Equal(t, "GOOD", b.reads(second))
	require.Equal(t, []string{"iqn.a", "iqn.b"}, users())
	b.mustPersist(b.nexus, saReserve, typeWriteExclusiveRO, 1, 0)
	b.d.Detach(b.nexus)
	b.d.Detach(second)
	require.Equal(t, []string{"iqn.a"}, users(), "the holder")
	second = b.attach("iqn.b", 0)
	b.mustPersist(second, saClear, 0, 2, 0)
	b.register(second, 2)
	b.d.Detach(second)
	third := b.attach("iqn.c", 0)
	require.Equal(t, "GOOD", b.ready(third))
	<-testtool.Must(b.d.disks.RemoveUnused(1))(t)
	require.ErrorContains(t, testtool.Err(b.d.disks.RemoveUnused(1)), "there is no LUN 1")
}

// TestSlotsAreUsedAgain: the tables of nexuses do not grow with units that come and go.
func TestSlotsAreUsedAgain(t *testing.T) {
	b := newBench(t)
	for i := range 1000 {
		l, _ := another(byte(i))
		l.Number = uint16(2 + i%7)
		b.add(l)
		l2, _ := another(byte(i), func(l *LUN) { l.Identity.NAA[6] = 1 })
		l2.Number = uint16(20 + i%3)
		b.add(l2)
		for _, n := range []uint16{l.Number, l2.Number} {
			require.NoError(t, testtool.Err(b.d.disks.Remove(n)))
		}
	}
	require.LessOrEqual(t, len(*b.nexus.slots.Load()), 8)
	require.Len(t, b.d.luns.Load().units, 1)
	late := b.attach("iqn.b", 0)
	require.Equal(t, "GOOD", b.ready(late))
}

// TestTenantsAreBounded checks that the first disk of initiators without a session is forgotten.
func TestTenantsAreBounded(t *testing.T) {
	b := newBench(t)
	b.good(cdb(writeOne), pattern(1, 1))
	for i := range 2 * maxTenants {
		n := b.attach(fmt.Sprintf("iqn.%d", i), 1)
		require.Equal(t, "GOOD", b.reads(n))
		b.d.Detach(n)
	}
	require.Len(t, b.d.tenants[1], maxTenants)
	b.remove()
	l, _ := another(9)
	b.add(l)
	require.Equal(t, "5/25/00", b.writes(b.nexus))
}

// TestInitiatorThatWasAway: an initiator learns about changes when it logs in again.
func TestInitiatorThatWasAway(t *testing.T) {
	b := newBench(t)
	b.d.Detach(b.nexus)
	l, _ := another(9)
	l.Number = 2
	b.add(l)
	back := b.d.Attach(InitiatorPort{Name: "iqn.a"})
	require.Equal(t, []string{"2907", "3f0e"}, pending(back))
	b.d.Detach(back)
	back = b.d.Attach(InitiatorPort{Name: "iqn.a"})
	require.Equal(t, []string{"2907"}, pending(back))
	require.Equal(t, []string{"2900"}, pending(b.d.Attach(InitiatorPort{Name: "iqn.b"})))

	// Its connection was broken, and its session had not ended yet. The next one was as short.
	require.NoError(t, testtool.Err(b.d.disks.Remove(2)))
	b.d.Detach(back)
	b.d.Detach(b.d.Attach(InitiatorPort{Name: "iqn.a"}))
	require.Equal(t, []string{"2907", "3f0e"},
		pending(b.d.Attach(InitiatorPort{Name: "iqn.a"})))
}

// TestHangingStoreHoldsUpNobody adds a LUN whose store hangs, while another one comes and goes.
func TestHangingStoreHoldsUpNobody(t *testing.T) {
	b := newBench(t)
	entered, gate := make(chan struct{}), make(chan struct{})
	slow, _ := another(9, func(l *LUN) { l.Number, l.Store = 2, loadingStore{entered, gate} })
	done := testtool.Go(func() error { return b.d.disks.Add(slow) })
	<-entered
	other, _ := another(8)
	other.Number = 2
	require.ErrorContains(t, b.d.disks.Add(other), "LUN 2 is given to two disks")
	other.Number = 3
	b.add(other)
	require.Equal(t, "6/3f/0e", b.ready(b.nexus))
	close(gate)
	require.NoError(t, <-done)
}

// TestOneDiskTwiceAtOnce adds a disk under two numbers at the same time. What an interrupted WRITE
// ATOMIC has left is put back once: the second time would undo what initiators write meanwhile.
func TestOneDiskTwiceAtOnce(t *testing.T) {
	b := newBench(t)
	store := &keptStore{kept: map[string][]byte{storedAtomic: make([]byte,
		atomicRecord+BlockSize)}}
	lun, disk := another(9, func(l *LUN) { l.Number, l.Store = 2, store })
	entered, gate := make(chan struct{}), make(chan struct{})
	disk.enter = func(method string) {
		if method == "write" {
			close(entered) // fails the second time
			<-gate
		}
	}
	done := testtool.Go(func() error { return b.d.disks.Add(lun) })
	<-entered
	twin := lun
	twin.Number = 3
	require.ErrorContains(t, b.d.disks.Add(twin), "LUN 3 has the same identifier as LUN 2")
	close(gate)
	require.NoError(t, <-done)
	require.ErrorContains(t, b.d.disks.Add(twin), "LUN 3 has the same identifier as LUN 2")
	require.Equal(t, 1, disk.count("write"))

	broken, _ := another(8, func(l *LUN) {
		l.Number = 3
		l.Store = &keptStore{fail: errors.New("it cannot be read")}
	})
	for range 2 { // the first try leaves nothing behind
		require.ErrorContains(t, b.d.disks.Add(broken), "it cannot be read")
	}
}

type loadingStore struct{ entered, gate chan struct{} }

func (s loadingStore) Load(string) ([]byte, error) {
	select {
	case s.entered <- struct{}{}:
	case <-s.gate:
	}
	<-s.gate
	return nil, nil
}
func (loadingStore) Save(string, []byte) error { return nil }
func (loadingStore) Where(string) string       { return "" }
