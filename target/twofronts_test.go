package target_test

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/rangelock"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target"
	tt "kubevirt.io/disk/target/targettest"
)

var errToyConflict = errors.New("another peer has the disk")

// toy is a session of a second protocol: calls of functions.
type toy struct {
	disks *serving.Disks
	*serving.Client
}

// write writes as a front end does: claim, begin, hold the range, look again, write.
func (c toy) write(number uint16, p []byte, off int64) error {
	d := c.disks.At(number)
	switch {
	case d == nil:
		return serving.ErrRemoved
	case !c.Claim(d):
		return errToyConflict
	case !c.FirstUse(d) || !d.Begin():
		return serving.ErrRemoved
	}
	defer d.End()
	c.disks.KeepOwner(d)
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
	disks := serving.New(nil)
	s := newServer(t, func(opt *target.Options) {
		opt.Disks = disks
		opt.LUNs[0].Access = target.AccessWriteExclusive
	})
	return s, s.disks[0], disks, toy{disks, disks.Attach(socket)}
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
	eventually(t, "the owner is gone", func() bool { return other.write(1, block, 512) == nil })
	require.Equal(t, socket, s.Holders(1).Owner)

	sess = tt.MustLogin(t, s.addr, tt.LoginOptions{Initiator: initiator}, 1)
	sess.MustFail(t, tt.Write10(1, 2, block), "status 0x18")
	other.Detach()
	sess.MustGood(t, tt.Write10(1, 2, block))
	_ = sess.Conn.Close()
	require.ErrorIs(t, other.write(1, block, 0), errToyConflict, "its session has ended")
	got := make([]byte, 3*512)
	_, err := content.ReadAt(got, 0)
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

	require.NoError(t, s.Admit(1, initiator, time.Time{}))
	sess.MustGood(t, tt.Read10(1, 0, 1))
	gate, calls := make(chan struct{}), content.Calls(disktest.OpWrite)
	defer content.Inject(disktest.Rule{Op: disktest.OpWrite, Block: gate})()
	wrote, handed := make(chan error, 1), make(chan error, 1)
	go func() { wrote <- other.write(1, block, 4096) }()
	eventually(t, "the write is under way", func() bool {
		return content.Calls(disktest.OpWrite) > calls
	})
	go func() {
		_, err := s.HandOver(1)
		handed <- err
	}()
	eventually(t, "it is fenced", func() bool { return other.Fenced(disks.At(1)) })
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
	_, err := s.RemoveUnusedLUN(1)
	var used *target.InUseError
	require.ErrorAs(t, err, &used)
	require.Equal(t, []string{socket}, used.Initiators)

	gate, calls := make(chan struct{}), content.Calls(disktest.OpWrite)
	defer content.Inject(disktest.Rule{Op: disktest.OpWrite, Block: gate})()
	wrote := make(chan error, 1)
	go func() { wrote <- other.write(1, block, 0) }()
	eventually(t, "the write is under way", func() bool {
		return content.Calls(disktest.OpWrite) > calls
	})
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
