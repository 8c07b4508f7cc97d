package vhosttest

import (
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestAllocation: what is allocated is nobody else's, and comes back.
func TestAllocation(t *testing.T) {
	var m Memory
	r := &Region{RegionOptions: RegionOptions{Addr: 1 << 20, Size: 64 << 10},
		Bytes: make([]byte, 64<<10)}
	m.add(r)
	var all []Buffer
	for bytes := 1; ; bytes += 311 {
		b, err := m.Alloc(bytes)
		if err != nil {
			break
		}
		require.Zero(t, b.Addr%512)
		for i := range b.Bytes {
			require.Zero(t, b.Bytes[i], "nobody else has it")
			b.Bytes[i] = 1
		}
		all = append(all, b)
	}
	require.Greater(t, len(all), 15)
	for _, odd := range []int{1, 0} {
		for i := odd; i < len(all); i += 2 {
			m.Free(all[i])
		}
	}
	require.Equal(t, []span{{0, 64 << 10}}, r.free)
}

// TestShow: of a driver and a device that both show something and then look, at least one sees what
// the other shows. A ring in which neither does stands still.
func TestShow(t *testing.T) {
	r := testtool.Must(newRegion(RegionOptions{Size: 64 << 10}))(t)
	defer r.close()
	words := [2]*uint32{(*uint32)(unsafe.Pointer(&r.Bytes[0])),
		(*uint32)(unsafe.Pointer(&r.Bytes[4096]))}
	var saw, began [2]atomic.Uint32
	side := func(i int, round uint32) {
		for began[i].Store(round); began[1-i].Load() < round; {
		}
		show(words[i], round)
		saw[i].Store(atomic.LoadUint32(words[1-i]))
	}
	rounds, done := make(chan uint32), make(chan struct{})
	go func() {
		for round := range rounds {
			side(1, round)
			done <- struct{}{}
		}
	}()
	defer close(rounds)
	begun := time.Now()
	for round := uint32(1); time.Since(begun) < time.Second; round++ {
		rounds <- round
		side(0, round)
		<-done
		require.True(t, saw[0].Load() == round || saw[1].Load() == round, "round %d", round)
	}
}

// TestLog: the back end notes each page that it writes.
func TestLog(t *testing.T) {
	p := startPeer(t, "")
	d := dial(t, p, Options{})
	require.NoError(t, d.StartLog())
	b := testtool.Must(d.Memory.Alloc(5 * LogPage))(t)
	header, status := b.Addr, b.Addr+16
	page := b.Addr&^(LogPage-1) + LogPage
	pending, err := d.Queue(0).Submit([]Part{{header, 16, false}, {page + 512, LogPage, true},
		{status, 1, true}}, false)
	require.NoError(t, err)
	require.EqualValues(t, LogPage+1, testtool.Must(pending.Wait())(t))
	used := d.Queue(0).Used.Addr &^ (LogPage - 1)
	require.Subset(t, d.Dirty(), []uint64{used, page, page + LogPage, status &^ (LogPage - 1)})
	require.Empty(t, d.Dirty())
	require.NoError(t, d.StopLog())
	require.NoError(t, d.Read(0, 0, make([]byte, 4096)))
}

// TestMigrate: a guest moves from one back end to another with what it has read, and back.
func TestMigrate(t *testing.T) {
	p := startPeer(t, "")
	ends := []*peer{p.twin(t), p}
	d := dial(t, p, Options{Memory: 4 << 20})
	for range 2 {
		for _, other := range ends {
			var tickets []*Ticket
			require.NoError(t, d.Migrate(other.socket, func() error {
				for i := range 20 {
					ticket, err := d.Begin(0, Command{Sector: uint64(i) * 64, In: 32 << 10})
					if err != nil {
						return err
					}
					tickets = append(tickets, ticket)
				}
				// libvhost-user stops a ring without waiting for what is under way.
				return d.Queue(0).wait(func() bool { return d.Queue(0).waiting == 0 })
			}))
			for i, ticket := range tickets {
				data := testtool.Must(ticket.Wait())(t)
				same(t, p.content[i*32<<10:][:32<<10], data)
			}
			require.NoError(t, d.Read(0, 4096, make([]byte, 4096)))
		}
	}
	require.ErrorIs(t, dial(t, ends[0], Options{ProtocolFeatures: ^ProtocolLog}).Migrate("", nil),
		ErrUnsupported)
}
