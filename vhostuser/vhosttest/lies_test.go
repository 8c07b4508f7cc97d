package vhosttest

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestBrokenChains: chains that a back end must refuse arrive as they were made. A back end may
// end the connection or stop the ring, so each has a connection of its own.
func TestBrokenChains(t *testing.T) {
	p := startPeer(t, "")
	for name, lie := range map[string]func(d *Driver, q *Queue, good Buffer){
		"loop": func(_ *Driver, q *Queue, good Buffer) {
			q.SetDescriptor(5, Descriptor{good.Addr, 16, DescNext, 6})
			q.SetDescriptor(6, Descriptor{good.Addr + 64, 512, DescNext, 5})
			q.Push(5)
		},
		"outside": func(_ *Driver, q *Queue, _ Buffer) {
			q.SetDescriptor(5, Descriptor{1 << 50, 16, DescNext, 6})
			q.SetDescriptor(6, Descriptor{1<<50 + 16, 1, DescWrite, 0})
			q.Push(5)
		},
		"no such head": func(_ *Driver, q *Queue, _ Buffer) { q.Push(q.Size + 5) },
		"index jumps": func(_ *Driver, q *Queue, _ Buffer) {
			q.SetAvailIndex(q.AvailIndex() + q.Size + 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := dial(t, p, Options{})
			q := d.Queue(0)
			good, err := d.Memory.Alloc(4096)
			require.NoError(t, err)
			require.NoError(t, d.Read(0, 0, make([]byte, 512)))
			before := q.UsedIndex()
			lie(d, q, good)
			require.NoError(t, q.Kick())
			require.NoError(t, q.Publish())
			require.NoError(t, d.Conn().WaitClosed())
			require.Equal(t, before, q.UsedIndex())
		})
	}
}

// TestLies: what a test sends by hand arrives as it is, and it sees how the back end takes that.
func TestLies(t *testing.T) {
	p := startPeer(t, "")
	t.Run("unknown request", func(t *testing.T) {
		c, err := DialConn(p.socket, 0)
		require.NoError(t, err)
		defer c.Close()
		require.NoError(t, c.SendBytes(Header(1000, FlagVersion, 8)[:5]))
		require.NoError(t, c.SendBytes(Header(1000, FlagVersion, 8)[5:]))
		require.NoError(t, c.SendBytes(U64(1)))
		require.NoError(t, c.WaitClosed())
	})
	t.Run("too long", func(t *testing.T) {
		c, err := DialConn(p.socket, 0)
		require.NoError(t, err)
		defer c.Close()
		require.NoError(t, c.SendBytes(Header(GetFeatures, FlagVersion, 1<<31)))
		require.NoError(t, c.WaitClosed())
	})
	t.Run("not started", func(t *testing.T) {
		d := dial(t, p, Options{NoStart: true})
		flush, err := d.Begin(0, Command{Type: TypeFlush})
		require.NoError(t, err)
		features, err := d.Conn().Ask(GetFeatures, nil)
		require.NoError(t, err)
		require.Equal(t, U64(d.Offered), features.Payload)
		require.Equal(t, 1, d.Queue(0).InFlight())
		require.NoError(t, d.Start())
		_, err = flush.Wait()
		require.NoError(t, err)
	})
	t.Run("across regions", func(t *testing.T) {
		const border = 1 << 20
		d := dial(t, p, Options{Regions: []RegionOptions{{Addr: 0, Size: border},
			{Addr: border, Size: border}}})
		header, err := d.Memory.Alloc(32)
		require.NoError(t, err)
		pending, err := d.Queue(0).Submit([]Part{{header.Addr, 16, false},
			{border - 4096, 8192, true}, {header.Addr + 16, 1, true}}, false)
		require.NoError(t, err)
		_, err = pending.Wait()
		require.NoError(t, err)
		for _, half := range []int{0, 4096} {
			got, err := d.Memory.At(border-4096+uint64(half), 4096)
			require.NoError(t, err)
			same(t, p.content[half:][:4096], got)
		}
		_, err = d.Memory.At(border-4096, 8192)
		require.Error(t, err)
	})
	t.Run("a request that does not exist", func(t *testing.T) {
		d := dial(t, p, Options{})
		var status *StatusError
		_, err := d.Do(0, Command{Type: 1234, In: 16})
		require.ErrorAs(t, err, &status)
		require.Equal(t, StatusUnsupported, status.Status)
	})
}

// TestMemory: memory comes and goes while requests run, by both ways, and is cut short.
func TestMemory(t *testing.T) {
	p := startPeer(t, "")
	for name, protocol := range map[string]uint64{"slots": 0, "table": ^ProtocolMemSlots} {
		t.Run(name, func(t *testing.T) {
			d := dial(t, p, Options{ProtocolFeatures: protocol, Memory: 4 << 20})
			for range 3 {
				r, err := d.AddRegion(RegionOptions{Addr: 1 << 40, Size: 1 << 20, Offset: 1 << 16})
				require.NoError(t, err)
				for _, layout := range []Layout{{}, {Regions: true, Data: []int{1024}}} {
					got, err := d.Do(0, Command{Sector: 8, In: 64 << 10, Layout: &layout})
					require.NoError(t, err)
					same(t, p.content[4096:][:64<<10], got)
				}
				require.NoError(t, d.RemoveRegion(r))
				require.NoError(t, d.Flush(0))
			}
		})
	}
	t.Run("cut short", func(t *testing.T) {
		r, err := newRegion(RegionOptions{Size: 1 << 20, Offset: 4096, Unsealed: true})
		require.NoError(t, err)
		defer r.close()
		require.NoError(t, r.Truncate(8192))
		r.Bytes[8191] = 1
		sealed, err := newRegion(RegionOptions{Size: 1 << 20})
		require.NoError(t, err)
		defer sealed.close()
		require.ErrorIs(t, sealed.Truncate(8192), unix.EPERM)
	})
	t.Run("allocation", func(t *testing.T) {
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
	})
}

// TestLog: the back end notes each page that it writes.
func TestLog(t *testing.T) {
	p := startPeer(t, "")
	d := dial(t, p, Options{})
	require.NoError(t, d.StartLog())
	b, err := d.Memory.Alloc(5 * LogPage)
	require.NoError(t, err)
	header, status := b.Addr, b.Addr+16
	page := b.Addr&^(LogPage-1) + LogPage
	pending, err := d.Queue(0).Submit([]Part{{header, 16, false}, {page + 512, LogPage, true},
		{status, 1, true}}, false)
	require.NoError(t, err)
	written, err := pending.Wait()
	require.NoError(t, err)
	require.EqualValues(t, LogPage+1, written)
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
				data, err := ticket.Wait()
				require.NoError(t, err)
				same(t, p.content[i*32<<10:][:32<<10], data)
			}
			require.NoError(t, d.Read(0, 4096, make([]byte, 4096)))
		}
	}
	require.ErrorIs(t, dial(t, ends[0], Options{ProtocolFeatures: ^ProtocolLog}).Migrate("", nil),
		ErrUnsupported)
}

// TestReconnect: a back end that was killed goes on with the ring where it was.
func TestReconnect(t *testing.T) {
	p := startPeer(t, "")
	d := dial(t, p, Options{})
	got := make([]byte, 4096)
	for range 3 {
		require.NoError(t, d.Read(0, 0, got))
		p.stop()
		pending, err := d.Begin(0, Command{Type: TypeRead, Sector: 8, In: 4096})
		require.NoError(t, err)
		p.start()
		require.NoError(t, d.Reconnect(p.socket))
		data, err := pending.Wait()
		require.NoError(t, err)
		same(t, p.content[4096:][:4096], data)
	}
	p.stop()
	_, err := os.Stat(p.socket)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.Error(t, d.Reconnect(p.socket))
}
