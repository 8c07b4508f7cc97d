package vhostuser

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/vhostuser/vhosttest"
)

const diskSize = 8 << 20

// served is a server with one disk, LUN 1, called a.
type served struct {
	*Server
	disks  *serving.Disks
	logs   *observer.ObservedLogs
	socket string
}

// serve serves a disk, made by opt if it changes the options.
func serve(t testing.TB, d disk.Disk, opt ...func(*serving.Options)) *served {
	t.Helper()
	return serveFor(t, stopTimeout, d, opt...)
}

// serveFor serves a disk whose rings wait so long for far content when they stop.
func serveFor(t testing.TB, timeout time.Duration, d disk.Disk,
	opt ...func(*serving.Options)) *served {
	t.Helper()
	core, logs := observer.New(zap.DebugLevel)
	disks := serving.New(serving.Config{Log: zap.New(core)})
	dir := t.TempDir()
	s, err := New(Options{Disks: disks, Dir: dir, Log: zap.New(core), ReconnectDelay: -1})
	require.NoError(t, err)
	s.stopTimeout = timeout
	v := &served{s, disks, logs, filepath.Join(dir, "a.sock")}
	v.add(t, d, opt...)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, s.Shutdown(ctx))
	})
	return v
}

func (v *served) add(t testing.TB, d disk.Disk, opt ...func(*serving.Options)) {
	t.Helper()
	o := serving.Options{Number: 1, Name: "a", Disk: d,
		Identity: disk.IdentityOf([18]byte{1, 2, 3})}
	for _, change := range opt {
		change(&o)
	}
	require.NoError(t, v.disks.Add(o))
}

func (v *served) dial(t testing.TB, o vhosttest.Options) *vhosttest.Driver {
	t.Helper()
	d := testtool.Must(vhosttest.Dial(v.socket, o))(t)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// said returns how many lines of the log have that message.
func (v *served) said(message string) int { return v.logs.FilterMessage(message).Len() }

func random(n int, seed uint64) []byte {
	p := make([]byte, n)
	disktest.Fill(p, rand.New(rand.NewPCG(seed, 1)))
	return p
}

// TestRequests: what a driver may ask for, cut into descriptors in every way, with and without
// sealed memory.
func TestRequests(t *testing.T) {
	layouts := map[string]vhosttest.Layout{
		"plain":    {},
		"indirect": {Indirect: true},
		"cut":      {Header: []int{1, 14, 1}, Data: []int{512, 1, 511, 3000}, Indirect: true},
		"joined":   {JoinHeader: true, JoinStatus: true, Data: []int{1000}, Indirect: true},
		"pages":    {Data: []int{4096}, Indirect: true},
		"regions":  {Data: []int{4096}, Regions: true},
	}
	for _, unsealed := range []bool{false, true} {
		for name, layout := range layouts {
			t.Run(fmt.Sprintf("%s, unsealed %v", name, unsealed), func(t *testing.T) {
				v := serve(t, disktest.NewMemory(diskSize))
				exercise(t, v.dial(t, vhosttest.Options{Layout: layout, Queues: 2,
					Regions: []vhosttest.RegionOptions{
						{Addr: 1 << 30, Size: 16 << 20, Unsealed: unsealed},
						{Addr: 1 << 32, Size: 16 << 20, Unsealed: unsealed}}}))
			})
		}
	}
}

// exercise compares a disk with what was written to it.
func exercise(t *testing.T, d *vhosttest.Driver) {
	t.Helper()
	want, last := random(1<<18, 7), d.Queues()-1
	for off := 0; off < len(want); {
		n := min(512*(1+off/512%150), len(want)-off)
		require.NoError(t, d.Write(off/512%d.Queues(), int64(off), want[off:off+n]))
		off += n
	}
	require.NoError(t, d.Flush(last))
	require.NoError(t, d.Discard(0, vhosttest.Range{Sector: 16, Count: 8}))
	require.NoError(t, d.WriteZeroes(last, vhosttest.Range{Sector: 64, Count: 16, Unmap: true},
		vhosttest.Range{Sector: 101, Count: 3}))
	for _, r := range [][2]int{{16, 8}, {64, 16}, {101, 3}} {
		clear(want[r[0]*512 : (r[0]+r[1])*512])
	}
	for _, size := range []int{512, 65536, 1 << 18} {
		got := make([]byte, size)
		for off := 0; off < len(want); off += size {
			require.NoError(t, d.Read(0, int64(off), got))
			require.True(t, bytes.Equal(want[off:off+size], got), "%d bytes at %d", size, off)
		}
	}
	id := testtool.Must(d.ID(0))(t)
	require.Equal(t, disk.IdentityOf([18]byte{1, 2, 3}).Serial, id)
}

// TestRefusals: requests that the disk cannot execute get an error, and the ring goes on.
func TestRefusals(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	d := v.dial(t, vhosttest.Options{})
	const last = diskSize / 512
	for name, c := range map[string]vhosttest.Command{
		"beyond the end":   {Type: vhosttest.TypeRead, Sector: last, In: 512},
		"over the end":     {Type: vhosttest.TypeRead, Sector: last - 1, In: 1024},
		"sector overflows": {Type: vhosttest.TypeRead, Sector: 1 << 55, In: 512},
		"sector is negative": {Type: vhosttest.TypeWrite, Sector: 1<<64 - 1,
			Out: make([]byte, 512)},
		"half a sector": {Type: vhosttest.TypeWrite, Out: make([]byte, 700)},
		"short serial":  {Type: vhosttest.TypeGetID, In: 19},
		"range too long": {Type: vhosttest.TypeDiscard,
			Out: vhosttest.Ranges(vhosttest.Range{Count: 1 << 31})},
		"range outside": {Type: vhosttest.TypeWriteZeroes,
			Out: vhosttest.Ranges(vhosttest.Range{Sector: last, Count: 1})},
		"half a range": {Type: vhosttest.TypeDiscard, Out: make([]byte, 15)},
	} {
		_, err := d.Do(0, c)
		var status *vhosttest.StatusError
		require.ErrorAs(t, err, &status, name)
	}
	_, err := d.Do(0, vhosttest.Command{Type: 99})
	var status *vhosttest.StatusError
	require.ErrorAs(t, err, &status)
	require.EqualValues(t, vhosttest.StatusUnsupported, status.Status)
	exercise(t, d)
}

// TestConfiguration: what the guest sees of the disk.
func TestConfiguration(t *testing.T) {
	for _, block := range []int{512, 4096} {
		v := serve(t, disktest.NewMemory(diskSize),
			func(o *serving.Options) { o.BlockSize = block })
		d := v.dial(t, vhosttest.Options{})
		c := testtool.Must(d.Config())(t)
		require.EqualValues(t, diskSize/512, c.Capacity)
		require.EqualValues(t, block, c.BlockSize)
		require.EqualValues(t, 4096, block<<c.PhysicalExponent)
		require.True(t, c.WriteBack)
		require.NotZero(t, d.Features&featureFlush)
		require.Zero(t, d.Features&featureReadOnly)
		require.EqualValues(t, maxQueues, d.MaxQueues)
		all := testtool.Must(d.ConfigBytes(0, configSize))(t)
		also, err := d.ConfigBytes(0x100, configSize) // Cloud Hypervisor
		require.NoError(t, err)
		require.Equal(t, all, also)
	}
}

// TestWriteCache: a guest that has turned the write cache off, or that cannot flush, has its writes
// durable when they end.
func TestWriteCache(t *testing.T) {
	fault := disktest.NewFault(disktest.NewMemory(diskSize))
	v := serve(t, fault)
	d := v.dial(t, vhosttest.Options{})
	write := func() (flushes int) {
		before := fault.Calls(disktest.OpFlush)
		require.NoError(t, d.Write(0, 0, make([]byte, 512)))
		return fault.Calls(disktest.OpFlush) - before
	}
	require.Zero(t, write())
	require.NoError(t, d.SetWriteCache(false))
	require.Equal(t, 1, write())
	require.NoError(t, d.WriteZeroes(0, vhosttest.Range{Count: 1, Unmap: true}))
	require.Equal(t, 2, fault.Calls(disktest.OpFlush))
	require.NoError(t, d.SetWriteCache(true))
	require.Zero(t, write())
	require.NoError(t, d.Close())
	d = v.dial(t, vhosttest.Options{Features: ^uint64(featureFlush)})
	require.Equal(t, 1, write())
}

// TestReadOnly: a disk that cannot be written says so, and refuses writes of who does not listen.
func TestReadOnly(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize), func(o *serving.Options) { o.ReadOnly = true })
	d := v.dial(t, vhosttest.Options{})
	require.NotZero(t, d.Offered&featureReadOnly)
	require.Error(t, d.Write(0, 0, make([]byte, 512)))
	require.NoError(t, d.Read(0, 0, make([]byte, 512)))
}

// TestOneConnection: a second client is refused while the first one is there, and the next one is
// not.
func TestOneConnection(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	d := v.dial(t, vhosttest.Options{})
	require.Error(t, testtool.Err(vhosttest.Dial(v.socket, vhosttest.Options{})))
	require.NoError(t, d.Write(0, 0, random(512, 1)))
	for range 20 {
		require.NoError(t, d.Close())
		d = v.dial(t, vhosttest.Options{})
		require.NoError(t, d.Read(0, 0, make([]byte, 512)))
	}
}

// TestGrow: a guest sees at once that its disk has grown.
func TestGrow(t *testing.T) {
	m := &growing{Memory: disktest.NewMemory(2 * diskSize)}
	m.size = diskSize
	v := serve(t, m)
	d := v.dial(t, vhosttest.Options{})
	require.Error(t, d.Read(0, diskSize, make([]byte, 512)))
	m.mu.Lock()
	m.size = 2 * diskSize
	m.mu.Unlock()
	require.NoError(t, v.disks.Resize(1))
	<-d.ConfigChanges()
	c := testtool.Must(d.Config())(t)
	require.EqualValues(t, 2*diskSize/512, c.Capacity)
	require.NoError(t, d.Read(0, diskSize, make([]byte, 512)))
}

// TestGrowUnseen: a disk has grown while the front end was not connected, or could not be told. The
// guest sees it when its rings begin again.
func TestGrowUnseen(t *testing.T) {
	m := &growing{Memory: disktest.NewMemory(4 * diskSize)}
	m.size = diskSize
	v := serve(t, m)
	d := v.dial(t, vhosttest.Options{NoStart: true})
	size := func() int64 {
		c := testtool.Must(d.Config())(t)
		return int64(c.Capacity) * 512
	}
	require.EqualValues(t, diskSize, size())
	require.NoError(t, d.Start())
	require.Empty(t, d.ConfigChanges())
	for i := range 2 {
		v.EndSessions(func(status.Session) bool { return true })
		require.NoError(t, d.Conn().WaitClosed())
		testtool.Eventually(t, func() bool {
			return len(v.conns.All(func(*conn) bool { return true })) == 0
		})
		m.mu.Lock()
		m.size *= 2
		m.mu.Unlock()
		require.NoError(t, v.disks.Resize(1))
		require.NoError(t, d.Reconnect(v.socket))
		<-d.ConfigChanges()
		require.EqualValues(t, diskSize<<(i+1), size())
	}
}

type growing struct {
	*disktest.Memory
	mu   sync.Mutex
	size int64
}

func (g *growing) Size() int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.size
}

// TestEnds: an operator ends a session, a disk is removed, the disks are refused.
func TestEnds(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	d := v.dial(t, vhosttest.Options{})
	require.NoError(t, d.Write(0, 0, make([]byte, 512)))
	all := v.Sessions()
	require.Len(t, all, 1)
	require.Equal(t, status.ProtocolVhostUser, all[0].Protocol)
	require.Equal(t, []uint16{1}, all[0].LUNs)
	require.EqualValues(t, 512, all[0].BytesWritten)
	require.Len(t, v.EndSessions(func(status.Session) bool { return true }), 1)
	require.NoError(t, d.Conn().WaitClosed())

	d = v.dial(t, vhosttest.Options{})
	v.disks.Refuse(os.ErrPermission)
	require.NoError(t, d.Conn().WaitClosed())
	require.Error(t, testtool.Err(vhosttest.Dial(v.socket, vhosttest.Options{})))
	v.disks.Refuse(nil)

	d = v.dial(t, vhosttest.Options{})
	released := testtool.Must(v.disks.Remove(1))(t)
	<-released
	require.NoError(t, d.Conn().WaitClosed())
	require.NoFileExists(t, v.socket)
	v.add(t, disktest.NewMemory(diskSize), func(o *serving.Options) {
		o.Identity = disk.IdentityOf([18]byte{10: 9})
	})
	require.Error(t, d.Reconnect(v.socket), "the guest goes on with another disk")
	d = v.dial(t, vhosttest.Options{})
	require.NoError(t, d.Read(0, 0, make([]byte, 512)))
}

// TestRevertedMeanwhile: a guest that was away while its disk was reverted does not go on, and one
// whose disk was only gone for a while does.
func TestRevertedMeanwhile(t *testing.T) {
	store := durable.NewStore(filepath.Join(t.TempDir(), "disk"), true)
	kept := func(o *serving.Options) { o.Store = store }
	content := disktest.NewMemory(diskSize)
	v := serve(t, content, kept)
	d := v.dial(t, vhosttest.Options{})
	again := func() error {
		<-testtool.Must(v.disks.Remove(1))(t)
		require.NoError(t, d.Conn().WaitClosed())
		v.add(t, content, kept)
		return d.Reconnect(v.socket)
	}
	require.NoError(t, again())
	require.NoError(t, d.Read(0, 0, make([]byte, 512)))
	<-testtool.Must(v.disks.Remove(1))(t)
	require.NoError(t, serving.EndGeneration(store))
	v.add(t, content, kept)
	require.Error(t, d.Reconnect(v.socket), "the guest goes on with another content")
	testtool.Eventually(t, func() bool {
		return v.logs.Filter(func(e observer.LoggedEntry) bool {
			return e.ContextMap()["error"] == errAnotherContent.Error()
		}).Len() == 1
	}, "the log says why: %v", func() any { return v.logs.All() })
	d = v.dial(t, vhosttest.Options{})
	require.NoError(t, d.Read(0, 0, make([]byte, 512)))
}

// TestNames: two disks with one name have two sockets, no name leads out of the directory, and each
// path can be a socket's.
func TestNames(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	long := strings.Repeat("n", 100)
	for i, one := range []struct{ name, clientDir, want string }{
		{"3", "/d", "2"}, {"a", "/d", "3"}, {"../../b", "/d", "4"}, {"c d", "/d", "5"},
		{"..", "/d", "6"}, {"\xff", "/d", "7"}, {long[:60], "/" + long[:41], "8"},
		{long[:60], "/" + long[:40], long[:60]},
	} {
		v.clientDir = one.clientDir
		v.add(t, disktest.NewMemory(diskSize), func(o *serving.Options) {
			o.Number, o.Name = uint16(i+2), one.name
			o.Identity = disk.IdentityOf([18]byte{10: 9, 11: byte(i)})
		})
		require.Equal(t, filepath.Join(v.dir, one.want+".sock"), v.Socket(uint16(i+2)))
	}
	info := testtool.Must(os.Stat(v.socket))(t)
	require.EqualValues(t, 0o600, info.Mode().Perm())
}

// TestHandover: requests of a fenced guest fail, and those of the next one do not.
func TestHandover(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	d := v.dial(t, vhosttest.Options{})
	require.NoError(t, d.Write(0, 0, make([]byte, 512)))
	const next = "iqn.2026-01.example:next"
	defer v.disks.Attach(next).Detach()
	require.NoError(t, v.disks.Admit(1, next, time.Now().Add(time.Minute)))
	require.NoError(t, testtool.Err(v.disks.HandOver(1)))
	require.Error(t, d.Write(0, 0, random(512, 1)))
	require.Error(t, d.Read(0, 0, make([]byte, 512)))
}

// TestFarContent: requests that wait for far content do not hold up others of the ring. When the
// connection ends, they stay in flight, and the next one executes them.
func TestFarContent(t *testing.T) {
	inner := disktest.NewMemory(diskSize)
	want := random(diskSize, 3)
	require.NoError(t, testtool.Err(inner.WriteAt(t.Context(), want, 0)))
	far := disktest.NewDistant(inner)
	v := serve(t, far)
	d := v.dial(t, vhosttest.Options{})
	got := make([]byte, 4096)
	require.NoError(t, d.Read(0, 1<<20, got))
	far.Cut()
	const waiting = 20
	var tickets []*vhosttest.Ticket
	for i := range waiting {
		ticket := testtool.Must(d.Begin(0, vhosttest.Command{Type: vhosttest.TypeRead,
			Sector: uint64(i) * disktest.DistantBlock / 512, In: 4096}))(t)
		tickets = append(tickets, ticket)
	}
	testtool.Eventually(t, func() bool { return far.Waiting() == waiting })
	require.NoError(t, d.Read(0, 1<<20, got))
	require.Equal(t, want[1<<20:1<<20+4096], got)

	v.EndSessions(func(status.Session) bool { return true })
	require.NoError(t, d.Conn().WaitClosed())
	require.Len(t, d.Inflight().Taken(0), waiting)
	require.NoError(t, d.Reconnect(v.socket))
	testtool.Eventually(t, func() bool { return far.Waiting() == waiting })
	far.Restore()
	for i, ticket := range tickets {
		require.Equal(t, want[i*disktest.DistantBlock:][:4096], testtool.Must(ticket.Wait())(t))
	}
	require.Empty(t, d.Inflight().Taken(0))
}

// TestDirtyLog: while a guest migrates, each page that a request has filled is in the log, and so
// is the page of the used ring.
func TestDirtyLog(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	for _, layout := range []vhosttest.Layout{{}, {Data: []int{4096}, Indirect: true}} {
		d := v.dial(t, vhosttest.Options{Layout: layout})
		log := testtool.Must(unix.MemfdCreate("log", unix.MFD_CLOEXEC))(t)
		require.NoError(t, unix.Ftruncate(log, vhosttest.LogPage))
		about := vhosttest.U64(vhosttest.LogPage, 0)
		reply := testtool.Must(d.Conn().Ask(vhosttest.SetLogBase, about, log))(t)
		require.NoError(t, unix.Close(log))
		require.Equal(t, about, reply.Payload, "Cloud Hypervisor waits for as many bytes")
		require.NoError(t, d.StartLog())
		require.NoError(t, d.Read(0, 0, make([]byte, 1<<16)))
		require.GreaterOrEqual(t, len(d.Dirty()), 16+1)
		require.NoError(t, d.StopLog())
		require.NoError(t, d.Close())
	}
}

// TestMemoryComesAndGoes: memory is plugged in and out while the ring runs.
func TestMemoryComesAndGoes(t *testing.T) {
	v := serve(t, disktest.NewMemory(diskSize))
	d := v.dial(t, vhosttest.Options{})
	for i := range 3 {
		r, err := d.AddRegion(vhosttest.RegionOptions{Addr: uint64(4+i) << 30, Size: 4 << 20})
		require.NoError(t, err)
		exercise(t, d)
		require.NoError(t, d.RemoveRegion(r))
		exercise(t, d)
	}
	require.NoError(t, d.SetMemTable())
	exercise(t, d)
}

// TestStorageThatWaits: a read that waits for storage does not hold up others of its ring, and a
// ring that stops waits for it.
func TestStorageThatWaits(t *testing.T) {
	m := disktest.NewStorage(disktest.NewMemory(diskSize))
	v := serve(t, m)
	d := v.dial(t, vhosttest.Options{})
	require.NoError(t, d.Read(0, diskSize/2-4096, make([]byte, 4096)),
		"told, though nothing follows")
	var late []*vhosttest.Ticket
	for i := range 10 {
		ticket := testtool.Must(d.Begin(0, vhosttest.Command{Type: vhosttest.TypeRead,
			Sector: uint64(i) * 8, In: 4096}))(t)
		late = append(late, ticket)
	}
	require.NoError(t, d.Read(0, diskSize/2, make([]byte, 4096)))
	require.Len(t, d.Inflight().Taken(0), len(late))
	m.Arrive()
	for _, ticket := range late {
		require.NoError(t, testtool.Err(ticket.Wait()))
	}
	require.Empty(t, d.Inflight().Taken(0))
}
