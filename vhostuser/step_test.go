//go:build !race

package vhostuser // The race detector cannot let an atomic access fault.

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"runtime/debug"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// Where a mortal's memory is in its file: the table of descriptors, the rings, and a request.
const (
	mortalNum   = 512 // descriptors
	mortalAvail = descSize * mortalNum
	mortalUsed  = mortalAvail + 4096
	mortalData  = mortalUsed + 8192
	mortalSize  = mortalData + 4096
	// mortalHeads is the first head: their states lie behind the first page of the region.
	mortalHeads = mortalNum / 2
)

// mortal is a ring whose device dies now and then, and what its driver knows.
type mortal struct {
	t                   *testing.T
	memory, region, log []byte
	table               *table
	r                   *rand.Rand

	given map[uint16]bool // heads that have not come back
	seen  uint16          // the used index
	avail uint16

	q     *queue
	taken []*request
}

func newMortal(t *testing.T, seed uint64) *mortal {
	t.Helper()
	pages := func(n int) []byte {
		b := testtool.Must(unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_ANON|unix.MAP_PRIVATE))(t)
		t.Cleanup(func() { require.NoError(t, unix.Munmap(b)) })
		return b
	}
	m := &mortal{t: t, memory: pages(mortalSize), log: pages(4096), given: map[uint16]bool{},
		region: pages(int(inflightSize(mortalNum)+4095) &^ 4095), r: rand.New(rand.NewPCG(seed, 1))}
	mapped := &mapping{all: m.memory}
	mapped.refs.Store(2) // the last one is not released: it is ours
	m.table = testtool.Must(newTable([]region{{guest: fuzzGuest, user: fuzzUser, size: mortalSize,
		sealed: true, mapping: mapped}}))(t)
	for head := uint16(mortalHeads); head < mortalNum; head++ { // a header, and a status
		for at, d := range map[uint16]descriptor{
			head:               {fuzzGuest + mortalData, blkHeader, descNext, head - mortalHeads},
			head - mortalHeads: {fuzzGuest + mortalData + blkHeader, 1, descWrite, 0},
		} {
			b := m.memory[descSize*int(at):]
			binary.LittleEndian.PutUint64(b, d.addr)
			binary.LittleEndian.PutUint32(b[8:], d.len)
			binary.LittleEndian.PutUint16(b[12:], d.flags)
			binary.LittleEndian.PutUint16(b[14:], d.next)
		}
	}
	m.restart()
	return m
}

// restart is what the next daemon does.
func (m *mortal) restart() {
	m.t.Helper()
	c := &conn{since: time.Now(), known: true,
		region: &inflightRegion{m.region[:inflightSize(mortalNum)], 1, mortalNum}}
	c.dirty.wanted.Store(true)
	c.dirty.bits = m.log
	m.q = &queue{c: c, table: m.table, sleeper: sleeper{epoll: -1, wake: -1}}
	m.q.ring = ring{num: mortalNum, descUser: fuzzUser, availUser: fuzzUser + mortalAvail,
		usedUser: fuzzUser + mortalUsed, usedGuest: fuzzGuest + mortalUsed, logged: true}
	require.NoError(m.t, m.q.ring.locate(m.table))
	require.NoError(m.t, m.q.begin())
	m.taken = nil
}

// give makes requests of the driver.
func (m *mortal) give(n int) {
	for ; n > 0; n-- {
		head := uint16(mortalHeads + m.r.IntN(mortalNum-mortalHeads))
		if m.given[head] {
			continue
		}
		m.given[head] = true
		at := mortalAvail + 4 + 2*int(m.avail%mortalNum)
		binary.LittleEndian.PutUint16(m.memory[at:], head)
		m.avail++
		binary.LittleEndian.PutUint16(m.memory[mortalAvail+2:], m.avail)
	}
}

// reap takes what the device has given back: each request once.
func (m *mortal) reap() {
	m.t.Helper()
	for index := load16(m.memory[mortalUsed:], 2); m.seen != index; m.seen++ {
		at := mortalUsed + 4 + 8*int(m.seen%mortalNum)
		head := uint16(binary.LittleEndian.Uint32(m.memory[at:]))
		require.True(m.t, m.given[head], "request %d came back that nobody had made", head)
		delete(m.given, head)
	}
}

// dies does something until it writes that memory, and reports whether it did.
func (m *mortal) dies(memory []byte, do func()) (died bool) {
	require.NoError(m.t, unix.Mprotect(memory, unix.PROT_READ))
	defer func() {
		died = recover() != nil
		require.NoError(m.t, unix.Mprotect(memory, unix.PROT_READ|unix.PROT_WRITE))
	}()
	do()
	return false
}

func (m *mortal) take() {
	req, err := m.q.take()
	require.NoError(m.t, err)
	if req != nil {
		m.taken = append(m.taken, req)
	}
}

// put gives one of the requests back, whichever.
func (m *mortal) put() {
	i := m.r.IntN(len(m.taken))
	req := m.taken[i]
	m.taken = append(m.taken[:i], m.taken[i+1:]...)
	m.q.show(req.chain.head, 1, true)
	m.q.recycle(req)
}

// TestKilledAtEachStep: the daemon dies between any two things that it writes: when a request was
// taken and is not noted as in flight, when it is, when half of its end is noted, before and after
// the driver can see the end, before that is noted. The next daemon ends each request once.
func TestKilledAtEachStep(t *testing.T) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	var deaths [5]int
	for seed := range uint64(testtool.Rounds(200, 5000)) {
		m := newMortal(t, seed)
		for range 200 {
			m.give(m.r.IntN(4))
			died, step := false, m.r.IntN(2*len(deaths))
			switch {
			case len(m.taken) < 8 && m.r.IntN(2) == 0:
				if step = 0; m.r.IntN(8) == 0 {
					died = m.dies(m.region[4096:], m.take)
				} else {
					m.take()
				}
			case len(m.taken) == 0:
			case step == 1:
				died = true
			case step == 2:
				died = m.dies(m.region[:4096], m.put)
			case step == 3:
				died = m.dies(m.memory[mortalUsed:mortalData], m.put)
			case step == 4:
				died = m.dies(m.log, m.put)
			default:
				m.put()
			}
			if m.r.IntN(2) == 0 {
				m.reap()
			}
			if died {
				deaths[step]++
				m.restart()
			}
		}
		for m.restart(); len(m.given) > 0; m.reap() {
			m.take()
			require.NotEmpty(t, m.taken, "requests are lost: %v", m.given)
			m.put()
		}
	}
	for step, n := range deaths {
		require.Positive(t, n, "step %d", step)
	}
}

// TestReaderBeginsOthersFirst: a reader begins with all that the ring has, and then waits for the
// oldest. If the ring stops, or is never empty, another goroutine does the rest.
func TestReaderBeginsOthersFirst(t *testing.T) {
	for name, full := range map[string]bool{"it stops": false, "it is never empty": true} {
		t.Run(name, func(t *testing.T) { beginOthersFirst(t, full) })
	}
}

func beginOthersFirst(t *testing.T, full bool) {
	v := serve(t, disktest.NewMemory(diskSize))
	m := newMortal(t, 1)
	q, c := m.q, m.q.c
	c.share = v.disks.Memory.Join("guest")
	defer c.share.Part()
	began := make(chan struct{})
	q.late = serving.NewLate[*request](v.disks, &c.Conn, math.MaxInt,
		func(*serving.Turn) { close(began) }, func() {})
	defer q.late.Close()
	run := &run{Turn: &serving.Turn{Reading: true}, q: q}
	next := func() *request {
		require.True(t, testtool.Must(q.next(run))(t))
		return run.req
	}
	var given []*request
	give := func(n int) {
		for len(m.given) < len(given)+n { // it may choose one that is given
			m.give(1)
		}
		for range n {
			given = append(given, next())
			require.Equal(t, serving.ErrLater, run.Blocks(), "it is new")
			run.postpone(run.req)
		}
	}
	give(3)
	for i := range 2 {
		give(1)
		require.Same(t, given[i], next())
		require.NoError(t, run.Blocks())
		run.Blocked(0)
	}
	for i := 0; full && i < turnLength; i++ {
		for waits := len(m.given); len(m.given) == waits; {
			m.give(1)
		}
		other := next()
		q.show(other.chain.head, 1, true)
		q.recycle(other)
		m.reap()
	}
	if !full {
		q.stop.Store(true)
		require.False(t, testtool.Must(q.next(run))(t))
	}
	testtool.Await(t, began)
}
