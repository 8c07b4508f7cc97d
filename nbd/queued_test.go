package nbd

import (
	"bytes"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/memory"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// TestRelaySendsWhatIsQueued: what a relay's reader has queued for the server is sent, however the
// reader leaves. The next connection finds the range free, and what came before its end written.
func TestRelaySendsWhatIsQueued(t *testing.T) {
	for name, last := range map[string]func(c *client) []byte{
		"disconnects":   func(c *client) []byte { return c.request(cmdDisconnect, 0, 0, 0, nil) },
		"sends rubbish": func(*client) []byte { return make([]byte, requestLen) },
		"announces too much": func(c *client) []byte {
			return c.request(cmdWrite, 0, 0, 1<<40, nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			v := serve(t, 1, nil)
			far := handOn(t, v.remote(t, "disk1.raw"))
			mode := structured
			if name == "announces too much" {
				mode = extended
			}
			c := far.open(t, "", mode)
			data := bytes.Repeat([]byte{7}, 4096)
			_, err := c.Write(append(c.request(cmdWrite, 0, 4096, 4096, data), last(c)...))
			require.NoError(t, err)
			testtool.Eventually(t, func() bool { return len(far.Sessions()) == 0 })
			next := far.open(t, "", structured)
			next.writeAt(4096, bytes.Repeat([]byte{8}, 512))
			require.Equal(t, append(bytes.Repeat([]byte{8}, 512), data[512:]...),
				next.readAt(4096, 4096))
		})
	}
}

// slowFront lets one request wait before it begins.
type slowFront struct {
	reserving
	next atomic.Pointer[chan struct{}] // the request waits for it
}

func (f *slowFront) Bars(*serving.Disk, bool) error {
	if wait := f.next.Swap(nil); wait != nil {
		<-*wait
	}
	return nil
}

// TestRelaySendsForAFormerReader: a request waits so long before it is queued that another
// goroutine reads from the client by then. It is sent all the same.
func TestRelaySendsForAFormerReader(t *testing.T) {
	front, begins := &slowFront{}, make(chan struct{})
	r := serve(t, 1, nil).remote(t, "disk1.raw")
	c := serveBeside(t, serving.Config{}, front, "", 1, func(o *serving.Options) {
		o.Disk = r
	}).open(t, "", structured)
	front.next.Store(&begins)
	c.send(c.request(cmdRead, 0, 0, 4096, nil))
	require.Equal(t, make([]byte, 4096), c.readAt(4096, 4096))
	close(begins)
	_, a := c.answer(func(uint64) (uint16, uint64) { return cmdRead, 4096 })
	c.good(a)
}

// TestRelayWaitsForNothingOfItsOwn: a request that is not forwarded, and overlaps a queued one, is
// answered.
func TestRelayWaitsForNothingOfItsOwn(t *testing.T) {
	far := handOn(t, serve(t, 1, nil).remote(t, "disk1.raw"))
	all := far.Server.disks.Memory
	for name, second := range map[string]struct {
		command uint16
		length  int
		scarce  bool
	}{
		"a write while memory is scarce": {cmdWrite, 64 << 10, true},
		"a write of a part of a sector":  {cmdWrite, 100, false},
		"a long write":                   {cmdWrite, 2 << 20, false},
		"zeroes":                         {cmdWriteZeroes, 64 << 10, false},
		"a trim":                         {cmdTrim, 64 << 10, false},
		"a flush":                        {cmdFlush, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			c := far.open(t, "", structured)
			if second.scarce {
				const taken = 48 << 20 // of 64 MiB
				for range taken / memory.Max {
					b := all.Get(memory.Max)
					require.NotNil(t, b)
					defer b.Release()
				}
			}
			var data []byte
			if second.command == cmdWrite {
				data = bytes.Repeat([]byte{2}, second.length)
			}
			_, err := c.Write(append(c.request(cmdWrite, 0, 0, 4096, make([]byte, 4096)),
				c.request(second.command, 0, 0, uint64(second.length), data)...))
			require.NoError(t, err)
			for range 2 {
				_, a := c.answer(func(uint64) (uint16, uint64) { return second.command, 0 })
				c.good(a)
			}
		})
	}
}
