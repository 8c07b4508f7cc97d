package nbd

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// reserving is a front end of another protocol, by which somebody may reserve every disk.
type reserving struct {
	writes, reads atomic.Bool // for others
}

func (*reserving) Added(*serving.Disk) error      { return nil }
func (*reserving) Removed(*serving.Disk)          {}
func (*reserving) Resized(*serving.Disk)          {}
func (*reserving) Protected(*serving.Disk)        {}
func (*reserving) Shared(*serving.Disk)           {}
func (*reserving) Holders(*serving.Disk) []string { return nil }
func (*reserving) Fence(*serving.Disk, func(string) bool) (serving.Fencing, error) {
	return nil, errors.New("nobody is fenced here")
}

func (r *reserving) Bars(_ *serving.Disk, write bool) error {
	if r.reads.Load() || write && r.writes.Load() {
		return errors.New("it is reserved")
	}
	return nil
}

// TestReservationBindsBegunRequests: a reservation that is made while a request is under way binds
// what is left of it. The client may be in the middle of a write's data, for as long as it likes.
func TestReservationBindsBegunRequests(t *testing.T) {
	other := &reserving{}
	content := disktest.NewFault(disktest.NewMemory(2 * stretch))
	v := serveBeside(t, serving.Config{}, other, "", 1,
		func(o *serving.Options) { o.Disk, o.Access = content, serving.AccessWriteShared })
	gate := func(op disktest.Op) (open func()) {
		closed := make(chan struct{})
		heal := content.Inject(disktest.Rule{Op: op, Length: 512, Block: closed})
		return func() {
			heal()
			close(closed)
		}
	}
	for name, test := range map[string]struct {
		command uint16
		flags   uint16
		op      disktest.Op
		blocks  *atomic.Bool
	}{
		"trim":           {cmdTrim, 0, disktest.OpDiscard, &other.writes},
		"zeroes":         {cmdWriteZeroes, 0, disktest.OpZero, &other.writes},
		"written zeroes": {cmdWriteZeroes, cmdFlagNoHole, disktest.OpWrite, &other.writes},
		"cache":          {cmdCache, 0, disktest.OpRead, &other.reads},
	} {
		t.Run(name, func(t *testing.T) {
			c := v.open(t, "", extended)
			open := gate(test.op)
			before := content.Calls(test.op)
			c.send(c.request(test.command, test.flags, 0, 2*stretch, nil))
			testtool.Eventually(t, func() bool { return content.Calls(test.op) > before },
				"its first piece is in the disk")
			test.blocks.Store(true)
			defer test.blocks.Store(false)
			open()
			_, a := c.answer(func(uint64) (uint16, uint64) { return test.command, 0 })
			require.Equal(t, uint32(ePerm), a.code)
			require.Contains(t, a.text, "it is reserved")
			require.Equal(t, before+1, content.Calls(test.op), "the other pieces")
		})
	}
	t.Run("write", func(t *testing.T) {
		c := v.open(t, "", extended)
		const pieces = 8
		request := c.request(cmdWrite, 0, 0, pieces*chunk, make([]byte, pieces*chunk))
		before := content.Calls(disktest.OpWrite)
		rest := request[len(request)-pieces*chunk+chunk+1:]
		c.send(request[:len(request)-len(rest)])
		testtool.Eventually(t, func() bool { return content.Calls(disktest.OpWrite) == before+1 },
			"its first piece is written")
		other.writes.Store(true)
		defer other.writes.Store(false)
		c.send(rest)
		_, a := c.answer(func(uint64) (uint16, uint64) { return cmdWrite, 0 })
		require.Equal(t, uint32(ePerm), a.code)
		require.Contains(t, a.text, "it is reserved")
		require.Equal(t, before+1, content.Calls(disktest.OpWrite), "the other pieces")
		other.writes.Store(false)
		c.alive()
	})
}

// TestRelaySaysWhyItWaits: people read what the server says, and that it is there.
func TestRelaySaysWhyItWaits(t *testing.T) {
	other := &reserving{}
	v := serveBeside(t, serving.Config{}, other, "", 1, nil)
	r := v.remote(t, "disk1.raw")
	far := handOn(t, r)
	c := far.open(t, "", structured)
	why := func() string {
		all := far.Server.disks.At(1).Troubles(time.Now().Add(serving.LongWait))
		require.Len(t, all, 1)
		require.Equal(t, status.TroubleServer, all[0].Kind)
		return all[0].Error
	}
	closed := make(chan struct{})
	open := sync.OnceFunc(func() { close(closed) })
	t.Cleanup(open)
	heal := v.disks[0].Inject(disktest.Rule{Op: disktest.OpRead, Block: closed})
	calls := v.disks[0].Calls(disktest.OpRead)
	c.send(c.request(cmdRead, 0, 0, 512, nil))
	testtool.Eventually(t, func() bool { return v.disks[0].Calls(disktest.OpRead) > calls },
		"the server has it")
	require.Equal(t, "it is connected, and has not answered yet", why())
	heal()
	open()
	_, a := c.answer(func(uint64) (uint16, uint64) { return cmdRead, 512 })
	c.good(a)

	other.reads.Store(true)
	require.ErrorIs(t, testtool.Err(r.ReadAt(t.Context(), make([]byte, 512), 0)), disk.ErrNotNow)
	text, _ := r.Why()
	require.Contains(t, text, "it is reserved")
}
