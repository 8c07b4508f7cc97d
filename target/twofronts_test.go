package target_test

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/rangelock"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	tt "kubevirt.io/disk/target/targettest"
)

var errToyConflict = errors.New("another peer has the disk")

// toy is a session of a second protocol: calls of functions.
type toy struct {
	disks *serving.Disks
	*serving.Client
}

// begin precedes each request, as in a front end.
func (c toy) begin(d *serving.Disk, write bool) error {
	if d == nil {
		return serving.ErrRemoved
	}
	err := c.Begin(d, write)
	if err != nil && errors.As(err, new(*serving.Refusal)) {
		return errToyConflict
	}
	return err
}

// read reads a block as a front end does.
func (c toy) read(number uint16) error {
	d := c.disks.At(number)
	if err := c.begin(d, false); err != nil {
		return err
	}
	defer d.End()
	var r serving.Request
	_, err := r.ReadAt(d, make([]byte, 512), 0)
	return err
}

// write writes as a front end does: begin, hold the range, look again, write.
func (c toy) write(number uint16, p []byte, off int64) error {
	d := c.disks.At(number)
	if err := c.begin(d, true); err != nil {
		return err
	}
	defer d.End()
	var r serving.Request
	r.Hold.Set(rangelock.Write, c.Name(), off, int64(len(p)))
	if err := r.Lock(d); err != nil {
		return err
	}
	defer d.Ranges.Unlock(&r.Hold)
	if !c.Admitted(d) { // whoever fences waits for this range
		return errToyConflict
	}
	_, err := r.WriteAt(d, p, off)
	return err
}

const (
	initiator = "iqn.2026-01.test:initiator"
	socket    = "socket:/run/toy.sock"
)

// newFronts serves a write-exclusive LUN 1 by iSCSI and by the toy.
func newFronts(t *testing.T) (*server, *disktest.Fault, *serving.Disks, toy) {
	t.Helper()
	s := start(t, func(opt *options) { opt.LUNs[0].Access = serving.AccessWriteExclusive })
	return s, s.disks[0], s.inUse, toy{s.inUse, s.inUse.Attach(socket)}
}

// TestOneOwnerOfTwoProtocols: whoever comes first owns a write-exclusive disk, whatever it speaks.
func TestOneOwnerOfTwoProtocols(t *testing.T) {
	s, content, disks, other := newFronts(t)
	block := bytes.Repeat([]byte{1}, 512)
	sess := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: initiator}, 1)
	sess.MustGood(t, tt.Write10(1, 0, block))
	require.ErrorIs(t, other.write(1, block, 512), errToyConflict)
	require.Equal(t, initiator, disks.Holders(1).Owner)
	_ = sess.Conn.Close()
	testtool.Eventually(t,
		func() bool { return other.write(1, block, 512) == nil }, "the owner is gone")
	require.Equal(t, socket, s.inUse.Holders(1).Owner)

	sess = tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: initiator}, 1)
	sess.MustFail(t, tt.Write10(1, 2, block), "status 0x18")
	other.Detach()
	sess.MustGood(t, tt.Write10(1, 2, block))
	_ = sess.Conn.Close()
	require.ErrorIs(t, other.write(1, block, 0), errToyConflict, "its session has ended")
	got := make([]byte, 3*512)
	_, err := content.ReadAt(t.Context(), got, 0)
	require.NoError(t, err)
	require.Equal(t, bytes.Repeat(block, 3), got)
}

// TestHandOverBetweenProtocols hands a disk from an initiator to a client of the other protocol,
// and back. The former owner is fenced, and its writes have ended.
func TestHandOverBetweenProtocols(t *testing.T) {
	s, content, disks, other := newFronts(t)
	block := bytes.Repeat([]byte{1}, 512)
	sess := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: initiator}, 1)
	sess.MustGood(t, tt.Write10(1, 0, block))
	require.NoError(t, disks.Admit(1, socket, time.Time{}))
	require.NoError(t, other.write(1, block, 0), "both may write meanwhile")
	sess.MustGood(t, tt.Write10(1, 0, block))
	former, err := disks.HandOver(1)
	require.NoError(t, err)
	require.Equal(t, initiator, former)
	sess.MustFail(t, tt.Write10(1, 0, block), "status 0x18")
	require.NoError(t, other.write(1, block, 0))

	require.NoError(t, s.inUse.Admit(1, initiator, time.Time{}))
	sess.MustGood(t, tt.Read10(1, 0, 1))
	gate, calls := make(chan struct{}), content.Calls(disktest.OpWrite)
	defer content.Inject(disktest.Rule{Op: disktest.OpWrite, Block: gate})()
	wrote, handed := make(chan error, 1), make(chan error, 1)
	go func() { wrote <- other.write(1, block, 4096) }()
	testtool.Eventually(t, func() bool {
		return content.Calls(disktest.OpWrite) > calls
	}, "the write is under way")
	go func() {
		_, err := s.inUse.HandOver(1)
		handed <- err
	}()
	testtool.Eventually(t, func() bool { return other.Fenced(disks.At(1)) }, "it is fenced")
	select {
	case err := <-handed:
		t.Fatalf("handed over while a write of the former owner is under way: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	close(gate)
	require.NoError(t, <-wrote)
	require.NoError(t, <-handed)
	require.ErrorIs(t, other.write(1, block, 0), errToyConflict)
	sess.MustGood(t, tt.Write10(1, 0, block))
}

// TestRemovalFromTwoProtocols: a disk that one protocol uses is not unused, and one that is removed
// is released when neither uses it.
func TestRemovalFromTwoProtocols(t *testing.T) {
	s, content, disks, other := newFronts(t)
	block := bytes.Repeat([]byte{1}, 512)
	require.NoError(t, other.write(1, block, 0))
	_, err := s.inUse.RemoveUnused(1)
	var used *serving.InUseError
	require.ErrorAs(t, err, &used)
	require.Equal(t, []string{socket}, used.Initiators)

	gate, calls := make(chan struct{}), content.Calls(disktest.OpWrite)
	defer content.Inject(disktest.Rule{Op: disktest.OpWrite, Block: gate})()
	wrote := make(chan error, 1)
	go func() { wrote <- other.write(1, block, 0) }()
	testtool.Eventually(t, func() bool {
		return content.Calls(disktest.OpWrite) > calls
	}, "the write is under way")
	released, err := disks.Remove(1)
	require.NoError(t, err)
	sess := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: initiator})
	sess.MustFail(t, tt.Read10(1, 0, 1), "05/25/00")
	require.ErrorIs(t, other.write(1, block, 0), serving.ErrRemoved)
	select {
	case <-released:
		t.Fatal("released while a write is under way")
	default:
	}
	close(gate)
	require.NoError(t, <-wrote)
	<-released
}

// TestReservationsBindOtherProtocols: an initiator that has reserved a disk keeps the other
// protocol's clients out, as far as its reservation goes. Without one, a request allocates nothing.
func TestReservationsBindOtherProtocols(t *testing.T) {
	s := start(t)
	other := toy{s.inUse, s.inUse.Attach(socket)}
	d, block := s.inUse.At(1), make([]byte, 512)
	sess := tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: initiator}, 1)
	register := func(key, next uint64) {
		sess.MustGood(t, tt.PersistOut(1, tt.Persist{Action: tt.PersistRegister, Key: key,
			ActionKey: next}))
	}
	may := func(reads, writes bool) {
		t.Helper()
		for _, c := range []struct {
			may bool
			err error
		}{{reads, other.read(1)}, {writes, other.write(1, block, 0)}} {
			if c.may {
				require.NoError(t, c.err)
			} else {
				require.ErrorIs(t, c.err, errToyConflict)
			}
		}
	}
	may(true, true)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if other.begin(d, true) == nil {
			d.End()
		}
	}))
	register(0, 1)
	may(true, true)
	for kind, reads := range map[byte]bool{1: true, 3: false, 5: true, 6: false, 7: true,
		8: false} {
		sess.MustGood(t, tt.PersistOut(1, tt.Persist{Action: tt.PersistReserve, Key: 1,
			Type: kind}))
		may(reads, false)
		sess.MustGood(t, tt.PersistOut(1, tt.Persist{Action: tt.PersistRelease, Key: 1,
			Type: kind}))
		may(true, true)
	}
	register(1, 0)
	sess.MustGood(t, tt.Command{LUN: 1, CDB: []byte{0x16, 0, 0, 0, 0, 0}}) // RESERVE(6)
	may(false, false)
	_ = sess.Conn.Close()
	testtool.Eventually(t, func() bool { return other.write(1, block, 0) == nil },
		"the session's reservation ends")
}
