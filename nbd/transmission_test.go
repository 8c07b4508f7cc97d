package nbd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

var modes = map[string]int{"compact": compact, "structured": structured, "extended": extended,
	"extended without PAYLOAD_LEN": extendedBare}

// inModes runs a test with each kind of replies.
func inModes(t *testing.T, test func(t *testing.T, mode int)) {
	for name, mode := range modes {
		t.Run(name, func(t *testing.T) { test(t, mode) })
	}
}

// TestFlags sends every command with every flag. One that a command cannot have is EINVAL, and the
// connection lives on.
func TestFlags(t *testing.T) {
	v := serve(t, 1, nil)
	inModes(t, func(t *testing.T, mode int) {
		c := v.open(t, "", mode)
		for command := range uint16(12) {
			if command == cmdDisconnect {
				continue
			}
			for bit := range 17 {
				flags := uint16(1 << bit)
				if bit == 16 {
					flags = 0
				}
				if flags == cmdFlagPayloadLen && mode >= extended {
					continue // the framing is another one
				}
				var payload []byte
				if command == cmdWrite {
					payload = make([]byte, 4096)
				}
				want := uint32(eInval)
				if int(command) < len(allowed) && flags&^allowed[command] == 0 {
					want = 0
				}
				switch {
				case command == cmdRead && flags == cmdFlagDF && mode == compact,
					command == cmdBlockStatus && mode == compact:
					want = eInval
				case command == cmdWriteZeroes && flags == cmdFlagFastZero:
					want = 0
				}
				a := c.do(command, flags, 4096, 4096, payload)
				require.Equal(t, want, a.code, "command %d flags %#x: %s", command, flags, a.text)
			}
		}
		require.Equal(t, uint32(eNotSup),
			c.do(cmdWriteZeroes, cmdFlagFastZero|cmdFlagNoHole, 0, 4096, nil).code)
		c.alive()
	})
}

// TestPayloadLen: with extended headers a write has its length as payload, whether it says so or
// not (QEMU does not). Other commands may say that a payload follows, which is skipped.
func TestPayloadLen(t *testing.T) {
	v := serve(t, 1, nil)
	c := v.open(t, "", extended)
	data := bytes.Repeat([]byte("QEMU"), 1024)
	for _, bare := range []bool{true, false} {
		c.bare = bare
		require.Zero(t, c.do(cmdWrite, 0, 512, 0, data).code)
		require.Equal(t, data, c.do(cmdRead, 0, 512, 4096, nil).data[512])
		require.Equal(t, uint32(eNoSpace), c.do(cmdWrite, 0, diskSize-512, 0, data).code)
		require.Equal(t, uint32(eInval), c.do(cmdWrite, cmdFlagDF, 0, 0, data).code)
		c.alive()
		require.Zero(t, c.do(cmdTrim, 0, 0, 8192, nil).code)
	}
	for _, command := range []uint16{cmdRead, cmdFlush, cmdTrim, cmdCache, cmdWriteZeroes, 8, 999} {
		for _, n := range []int{1, 4096, 3 << 20} {
			a := c.do(command, 0, 0, 4096, make([]byte, n))
			require.Equal(t, uint32(eInval), a.code, "command %d", command)
		}
	}
	good := join(u64(4096), u32(contextAllocation))
	a := c.do(cmdBlockStatus, 0, 0, 0, good)
	require.Equal(t, []extent{{4096, stateHole | stateZero}}, a.status[contextAllocation])
	for name, p := range map[string][]byte{
		"short":     good[:7],
		"odd":       good[:11],
		"twice":     append(good, u32(contextAllocation)...),
		"unknown":   join(u64(4096), u32(7)),
		"huge id":   join(u64(4096), u32(1<<32-1)),
		"none":      u64(4096),
		"too many":  make([]byte, 8+4*1000),
		"3 MiB":     make([]byte, 3<<20),
		"beyond":    join(u64(diskSize+1), u32(contextAllocation)),
		"zero":      join(u64(0), u32(contextAllocation)),
		"wraps":     join(u64(1<<64-1), u32(contextAllocation)),
		"one short": good[:len(good)-1],
	} {
		require.Equal(t, uint32(eInval), c.do(cmdBlockStatus, 0, 512, 0, p).code, name)
	}
	c.alive()
	// what can be no payload of anybody ends the connection
	for _, flags := range []uint16{0, cmdFlagPayloadLen} {
		c := v.open(t, "", extended)
		c.send(c.request(cmdWrite, flags, 0, 1<<40, nil))
		c.ended()
	}
}

// TestRanges: what lies beyond the end is refused with the errors of the specification, and so is
// what is too long, while the connection lives on.
func TestRanges(t *testing.T) {
	v := serve(t, 1, nil)
	inModes(t, func(t *testing.T, mode int) {
		c := v.open(t, "", mode)
		long := uint64(1<<32 - 1)
		if mode >= extended {
			long = 1<<64 - 1
		}
		for _, r := range [][2]uint64{{diskSize, 1}, {diskSize - 1, 2}, {0, diskSize + 1},
			{1<<64 - 1, 1}, {1<<64 - 512, 512}, {1 << 63, 4096}, {4096, long}} {
			for command := range uint16(8) {
				want := uint32(eInval)
				switch command {
				case cmdDisconnect, cmdFlush:
					continue
				case cmdWriteZeroes:
					want = eNoSpace
				case cmdWrite:
					if want = eNoSpace; r[1] > 1<<20 {
						continue
					}
					a := c.do(command, 0, r[0], r[1], make([]byte, r[1]))
					require.Equal(t, want, a.code, "write %d", r)
					continue
				}
				a := c.do(command, 0, r[0], r[1], nil)
				require.Equal(t, want, a.code, "command %d %d: %s", command, r, a.text)
			}
		}
		// too long by itself, whatever the disk's size
		a := c.do(cmdWrite, 0, 0, maxBlock+1, make([]byte, maxBlock+1))
		require.Equal(t, uint32(eInval), a.code)
		// no bytes at all
		for _, off := range []uint64{0, 511, diskSize} {
			for _, command := range []uint16{cmdRead, cmdTrim, cmdCache, cmdWriteZeroes} {
				c.good(c.do(command, 0, off, 0, nil))
			}
			c.good(c.do(cmdWrite, 0, off, 0, []byte{}))
		}
		require.Equal(t, uint32(eInval), c.do(cmdBlockStatus, 0, 0, 0, nil).code)
		c.alive()
	})
	require.Zero(t, v.disks[0].Calls(disktest.OpWrite)+v.disks[0].Calls(disktest.OpRead))
}

// TestReads: holes are chunks of their own, unless the client wants one piece.
func TestReads(t *testing.T) {
	v := serve(t, 1, nil)
	data := bytes.Repeat([]byte{7}, 64<<10)
	for mode := range 3 {
		c := v.open(t, "", mode)
		c.writeAt(1<<20, data)
		for _, r := range [][2]uint64{{1 << 20, 64 << 10}, {1<<20 - 4096, 128 << 10},
			{0, 4 << 20}, {0, diskSize}, {1<<20 + 3, 7}, {0, 256<<10 + 1}} {
			want := make([]byte, r[1])
			for i := range want {
				if at := r[0] + uint64(i); at >= 1<<20 && at < 1<<20+64<<10 {
					want[i] = 7
				}
			}
			require.True(t, bytes.Equal(want, c.readAt(r[0], r[1])), "%d %d", mode, r)
			if mode == compact {
				continue
			}
			a := c.do(cmdRead, cmdFlagDF, r[0], r[1], nil)
			require.Equal(t, []uint16{chunkData}, a.chunks)
			require.True(t, bytes.Equal(want, a.data[r[0]]), "%d %d", mode, r)
		}
		if mode == compact {
			continue
		}
		a := c.do(cmdRead, 0, 1<<20-4096, 128<<10, nil)
		require.Equal(t, []uint16{chunkHole, chunkData, chunkHole}, a.chunks)
		require.Equal(t, map[uint64]uint64{1<<20 - 4096: 4096, 1<<20 + 64<<10: 60 << 10}, a.holes)
	}
}

// TestLongReads: one piece of more than 32 MiB is refused, chunks have no such limit.
func TestLongReads(t *testing.T) {
	big := disktest.NewMemory(80 << 20)
	v := serve(t, 1, func(o *serving.Options) { o.Disk = big })
	inModes(t, func(t *testing.T, mode int) {
		c := v.open(t, "", mode)
		flags := uint16(0)
		if mode != compact {
			c.readAt(0, 80<<20)
			flags = cmdFlagDF
		}
		require.Equal(t, uint32(eOverflow), c.do(cmdRead, flags, 0, maxBlock+1, nil).code)
		a := c.do(cmdRead, flags, 0, maxBlock, nil)
		require.Zero(t, a.code)
		require.Len(t, a.data[0], maxBlock)
	})
}

func TestErrorsOfTheDisk(t *testing.T) {
	v := serve(t, 1, nil)
	f := v.disks[0]
	errs := map[error]uint32{errors.New("x"): eIO, disk.ErrNoSpace: eNoSpace,
		disk.ErrReadOnly: ePerm, fmt.Errorf("%w: %w", disk.ErrFailed, syscall.ENOSPC): eIO}
	inModes(t, func(t *testing.T, mode int) {
		c := v.open(t, "", mode)
		c.writeAt(0, bytes.Repeat([]byte{1}, 1<<20))
		for err, want := range errs {
			remove := f.Inject(disktest.Rule{Err: err, Off: 512 << 10, Length: 4096})
			for _, command := range []uint16{cmdRead, cmdTrim, cmdWriteZeroes, cmdCache} {
				a := c.do(command, 0, 0, 1<<20, nil)
				require.Equal(t, want, a.code, "command %d", command)
			}
			require.Equal(t, want, c.do(cmdWrite, 0, 0, 1<<20, make([]byte, 1<<20)).code)
			require.Equal(t, want, c.do(cmdWrite, 0, 0, 2<<20, make([]byte, 2<<20)).code)
			require.Equal(t, want, c.do(cmdWrite, 0, 512<<10+1, 2, make([]byte, 2)).code)
			remove()
			remove = f.Inject(disktest.Rule{Op: disktest.OpFlush, Err: err})
			require.Equal(t, want, c.do(cmdFlush, 0, 0, 0, nil).code)
			for _, command := range []uint16{cmdTrim, cmdWriteZeroes} {
				c.good(c.do(command, 0, 0, 4096, nil))
				require.Equal(t, want, c.do(command, cmdFlagFUA, 0, 4096, nil).code)
			}
			for _, n := range []int{4096, 2 << 20} {
				a := c.do(cmdWrite, cmdFlagFUA, 0, uint64(n), make([]byte, n))
				require.Equal(t, want, a.code)
			}
			remove()
			c.writeAt(0, bytes.Repeat([]byte{1}, 1<<20))
		}
		if mode != compact {
			remove := f.Inject(disktest.Rule{Op: disktest.OpRead, Off: 300 << 10, Length: 512,
				Err: &disk.MediumError{Op: "read", Off: 300 << 10, Length: 512,
					Err: disk.ErrFailed}})
			a := c.do(cmdRead, 0, 0, 1<<20, nil)
			require.Equal(t, []uint16{chunkData, chunkErrorOffset}, a.chunks)
			require.Equal(t, uint64(300<<10), a.off)
			remove()
		}
		c.alive()
	})
}

func TestReadOnly(t *testing.T) {
	v := serve(t, 1, func(o *serving.Options) { o.ReadOnly = true })
	inModes(t, func(t *testing.T, mode int) {
		c := v.open(t, "", mode)
		require.NotZero(t, c.flags&flagReadOnly)
		for _, command := range []uint16{cmdTrim, cmdWriteZeroes} {
			require.Equal(t, uint32(ePerm), c.do(command, 0, 0, 4096, nil).code)
		}
		for _, n := range []int{3, 4096, 3 << 20} {
			require.Equal(t, uint32(ePerm), c.do(cmdWrite, 0, 0, uint64(n), make([]byte, n)).code)
		}
		c.readAt(0, 4096)
		c.alive()
	})
}

// TestFlushes: FUA and FLUSH reach the disk, and nothing else does.
func TestFlushes(t *testing.T) {
	v := serve(t, 1, nil)
	c, other := v.open(t, "", structured), v.open(t, "", structured)
	require.NotZero(t, c.flags&flagMultiConn)
	flushes := func() int { return v.disks[0].Calls(disktest.OpFlush) }
	c.writeAt(0, make([]byte, 4096))
	require.Equal(t, 0, flushes())
	other.alive() // a FLUSH of any connection holds for all
	require.Equal(t, 1, flushes())
	for i, command := range []uint16{cmdWrite, cmdTrim, cmdWriteZeroes} {
		var p []byte
		if command == cmdWrite {
			p = make([]byte, 4096)
		}
		c.good(c.do(command, cmdFlagFUA, 0, 4096, p))
		require.Equal(t, 2+i, flushes())
	}
	c.good(c.do(cmdRead, cmdFlagFUA, 0, 4096, nil))
	require.Equal(t, 4, flushes())
}

func TestBlockStatus(t *testing.T) {
	v := serve(t, 1, nil)
	for _, mode := range []int{structured, extended} {
		c := v.open(t, "", mode)
		c.good(c.do(cmdTrim, 0, 0, diskSize, nil))
		c.writeAt(8192, make([]byte, 4096))
		hole := uint32(stateHole | stateZero)
		for _, want := range []struct {
			off, length uint64
			flags       uint16
			extents     []extent
		}{
			{0, diskSize, 0, []extent{{8192, hole}, {4096, 0}, {diskSize - 12288, hole}}},
			{0, diskSize, cmdFlagReqOne, []extent{{8192, hole}}},
			{0, 100, 0, []extent{{100, hole}}},
			{8191, 3, 0, []extent{{1, hole}, {2, 0}}},
			{8192, 4096, cmdFlagReqOne, []extent{{4096, 0}}},
		} {
			a := c.do(cmdBlockStatus, want.flags, want.off, want.length, nil)
			c.good(a)
			require.Equal(t, map[uint32][]extent{contextAllocation: want.extents}, a.status)
		}
		for off := uint64(0); off < diskSize; off += 8192 { // more extents than one reply has
			c.writeAt(off, make([]byte, 4096))
		}
		a := c.do(cmdBlockStatus, 0, 0, diskSize, nil)
		require.Len(t, a.status[contextAllocation], maxExtents)
	}
}

// layers is a disk over an image with stored content in the first MiB. What the disk has is the
// disk's own, and so is what was discarded in that MiB.
type layers struct {
	*disktest.Memory
	own map[int64]bool // by page
}

const layerPage = 4096

func (l *layers) WriteAt(ctx context.Context, p []byte, off int64) (int, error) {
	for at := off; at < off+int64(len(p)); at += layerPage {
		l.own[at/layerPage] = true
	}
	return l.Memory.WriteAt(context.Background(), p, off)
}

func (l *layers) Depth(ctx context.Context, off, length int64) (depth int, n int64, err error) {
	depth = disk.DepthNone
	if off < 1<<20 {
		depth = disk.DepthImage
	}
	if l.own[off/layerPage] {
		depth = disk.DepthOwn
	}
	return depth, min(length, layerPage-off%layerPage), nil
}

// TestDepths: both contexts are answered with one chunk each, or the one that a payload names.
func TestDepths(t *testing.T) {
	v := serve(t, 1, func(o *serving.Options) {
		o.Disk = &layers{disktest.NewMemory(diskSize), map[int64]bool{}}
	})
	plain := serve(t, 1, nil)
	for _, mode := range []int{structured, extended} {
		c := v.openWith(t, "", mode, "base:allocation", "qemu:allocation-depth")
		c.writeAt(8192, make([]byte, 4096))
		hole := uint32(stateHole | stateZero)
		allocation := []extent{{8192, hole}, {4096, 0}, {diskSize - 12288, hole}}
		depth := []extent{{8192, disk.DepthImage}, {4096, disk.DepthOwn},
			{1<<20 - 12288, disk.DepthImage}, {diskSize - 1<<20, disk.DepthNone}}
		kind := map[int]uint16{structured: chunkStatus, extended: chunkStatusExt}[mode]
		a := c.do(cmdBlockStatus, 0, 0, diskSize, nil)
		require.Equal(t, []uint16{kind, kind}, a.chunks)
		require.Equal(t, map[uint32][]extent{contextAllocation: allocation, contextDepth: depth},
			a.status)
		a = c.do(cmdBlockStatus, cmdFlagReqOne, 4096, diskSize-4096, nil)
		require.Equal(t, map[uint32][]extent{contextAllocation: {{4096, hole}},
			contextDepth: {{4096, disk.DepthImage}}}, a.status)
		if mode >= extended {
			a = c.do(cmdBlockStatus, 0, 0, 0, join(u64(8192), u32(contextDepth)))
			require.Equal(t, map[uint32][]extent{contextDepth: depth[:1]}, a.status)
		}
		c = v.openWith(t, "", mode, "qemu:allocation-depth")
		a = c.do(cmdBlockStatus, 0, 8192, diskSize-8192, nil)
		require.Equal(t, map[uint32][]extent{contextDepth: depth[1:]}, a.status)

		c = plain.openWith(t, "", mode, "qemu:allocation-depth")
		a = c.do(cmdBlockStatus, 0, 0, diskSize, nil)
		require.Equal(t, []extent{{diskSize, disk.DepthOwn}}, a.status[contextDepth])
	}
}

func TestEndOfTransmission(t *testing.T) {
	v := serve(t, 1, nil)
	inModes(t, func(t *testing.T, mode int) {
		c := v.open(t, "", mode)
		c.send(c.request(cmdWrite, 0, 0, 5, []byte("hello")),
			c.request(cmdDisconnect, 0, 0, 0, nil))
		_, a := c.answer(func(uint64) (uint16, uint64) { return cmdWrite, 5 })
		c.good(a)
		c.ended()
		c = v.open(t, "", mode)
		p := c.request(cmdRead, 0, 0, 512, nil)
		p[0]++
		c.send(p)
		c.ended()
	})
}

// TestModel compares random requests of several connections with a model. Each connection has a
// part of the disk to itself, with borders inside sectors.
func TestModel(t *testing.T) {
	v := serve(t, 1, nil)
	const conns, part = 6, 1<<20 + 77
	rounds := testtool.Rounds(150, 2000)
	var wg sync.WaitGroup
	for i := range conns {
		c := v.open(t, "", i%3)
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 3))
			model, base := make([]byte, part), uint64(i*part)
			for range rounds {
				off := r.IntN(part)
				n := 1 + r.IntN(min(part-off, []int{100, 5000, 300 << 10, part}[r.IntN(4)]))
				if r.IntN(2) == 0 {
					n = min(n, 8192)
				}
				p, at := model[off:off+n], base+uint64(off)
				switch r.IntN(6) {
				case 0, 1:
					for j := range p {
						p[j] = byte(r.Uint32())
					}
					c.good(c.do(cmdWrite, uint16(r.IntN(2)), at, uint64(n), bytes.Clone(p)))
				case 2:
					clear(p)
					c.good(c.do(cmdWriteZeroes, uint16(r.IntN(4)), at, uint64(n), nil))
				case 3:
					c.good(c.do(cmdTrim, 0, at, uint64(n), nil))
					first, last := (at+511)/512*512, (at+uint64(n))/512*512
					if first < last {
						clear(model[first-base : last-base])
					}
				default:
					if got := c.readAt(at, uint64(n)); !bytes.Equal(p, got) {
						t.Errorf("connection %d: wrong data at %d, %d bytes", i, at, n)
						return
					}
				}
			}
		})
	}
	wg.Wait()
}
