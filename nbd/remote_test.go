package nbd

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/internal/testtool/certtest"
	"kubevirt.io/disk/serving"
)

// remote connects to a disk of a server in this process.
func (v *served) remote(t testing.TB, export string) *Remote {
	t.Helper()
	return openRemote(t, RemoteOptions{Address: serving.SocketPrefix + v.socket, Export: export})
}

func openRemote(t testing.TB, opt RemoteOptions) *Remote {
	t.Helper()
	opt.Log = zaptest.NewLogger(t)
	opt.ReconnectDelay = -1 // tests break many connections
	r := testtool.Must(OpenRemote(t.Context(), opt))(t)
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// plainDisk is a disk without what only distant disks have.
type plainDisk struct {
	disk.Disk
	disk.Discarder
	disk.Zeroer
}

// plain is a remote disk that has memory for writes that are kept, as in the long run.
func plain(t *testing.T, r *Remote) disk.Disk {
	t.Helper()
	zeros := make([]byte, 4<<10)
	for range 512 {
		require.NoError(t, testtool.Err(r.WriteAt(t.Context(), zeros, 0)))
	}
	require.NoError(t, r.Flush())
	return plainDisk{r, r, r}
}

// TestRemoteByTLS: a disk is used by the name of a certificate.
func TestRemoteByTLS(t *testing.T) {
	v, a := serve(t, 1, nil), newAuthority(t)
	address := "127.0.0.1:" + v.serveTLS(t, a, zaptest.NewLogger(t))
	client := a.issue("vm", certtest.Client("vm.example"))
	config := &tls.Config{RootCAs: a.pool, ServerName: "localhost",
		Certificates: []tls.Certificate{client}}
	opt := RemoteOptions{Address: address, Export: "disk1.raw",
		TLS: func() (*tls.Config, error) { return config, nil }}
	r := openRemote(t, opt)
	want := bytes.Repeat([]byte{7}, 3<<20)
	require.NoError(t, testtool.Err(r.WriteAt(t.Context(), want, 512)))
	got := make([]byte, len(want))
	require.NoError(t, testtool.Err(r.ReadAt(t.Context(), got, 512)))
	require.Equal(t, want, got)
	require.Equal(t, "cert:vm.example", v.Sessions()[0].Initiator)

	opt.TLS = nil
	require.ErrorContains(t, testtool.Err(OpenRemote(t.Context(), opt)), "this server needs TLS")
	config = &tls.Config{ServerName: "localhost"}
	opt.TLS = func() (*tls.Config, error) { return config, nil }
	require.ErrorContains(t, testtool.Err(OpenRemote(t.Context(), opt)), "unknown authority")
}

// TestRemoteThatIsNone: what cannot be used is an error at once.
func TestRemoteThatIsNone(t *testing.T) {
	v := serve(t, 2, nil)
	_, err := OpenRemote(t.Context(), RemoteOptions{Address: serving.SocketPrefix + v.socket,
		Export: "other"})
	require.ErrorContains(t, err, `there is no disk "other"`)
	_, err = OpenRemote(t.Context(), RemoteOptions{Address: serving.SocketPrefix + v.socket})
	require.ErrorContains(t, err, `this one has "disk1.raw" "disk2.raw"`)
	_, err = OpenRemote(t.Context(), RemoteOptions{Address: serving.SocketPrefix + "/missing"})
	require.ErrorContains(t, err, "no such file")
	require.ErrorContains(t, err, "the NBD server unix:/missing")
}

// TestUnreachable: a server that is not there yet is told from one that refuses. A proxy may take
// connections for one that is not there.
func TestUnreachable(t *testing.T) {
	try := func(ctx context.Context, address string) error {
		return testtool.Err(OpenRemote(ctx, RemoteOptions{Address: address, Export: "other"}))
	}
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	short, stop := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer stop()
	err := try(short, l.Addr().String())
	require.True(t, Unreachable(err), "it takes no connection off the queue: %v", err)
	hello := binary.BigEndian.AppendUint64(nil, magicInit)
	hello = append(binary.BigEndian.AppendUint64(hello, magicOption), 0,
		flagFixedNewstyle|flagNoZeroes)
	cut := atomic.Int32{} // how much it says before it ends a connection
	go func() {
		for nc, err := l.Accept(); err == nil; nc, err = l.Accept() {
			n := int(cut.Load())
			if _, err := nc.Write(hello[:n]); err == nil && n == len(hello) {
				_, _ = io.CopyN(io.Discard, nc, 4+16) // flags, and the beginning of an option
			}
			_ = nc.Close()
		}
	}()
	for _, n := range []int{0, 1, len(hello)} {
		cut.Store(int32(n))
		err = try(t.Context(), l.Addr().String())
		require.True(t, Unreachable(err), "it closes them after %d bytes: %v", n, err)
	}
	require.NoError(t, l.Close())
	err = try(t.Context(), l.Addr().String())
	require.True(t, Unreachable(err), "%v", err)
	err = try(t.Context(), serving.SocketPrefix+serve(t, 1, nil).socket)
	require.ErrorContains(t, err, "there is no disk")
	require.False(t, Unreachable(err))
}

// TestRemoteHeals: connections break in the middle of requests and replies, and nobody sees it.
func TestRemoteHeals(t *testing.T) {
	n := relay(t, serve(t, 1, nil))
	heals(t, n, n.remote(t))
}

// heals uses the disk of a server while the network to it breaks.
func heals(t *testing.T, n *relayed, r *Remote) {
	stop := make(chan struct{})
	var cutting sync.WaitGroup
	cutting.Go(func() {
		for cuts := 1; ; cuts++ { // later and later: on a slow machine something must get through
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(20+cuts) * time.Millisecond):
				n.set(false, 1000+rand.IntN(200_000*(1+cuts/50)))
				n.cut()
			}
		}
	})
	const users, area = 4, diskSize / 4
	model := make([]byte, diskSize)
	var using sync.WaitGroup
	for i := range users {
		using.Go(func() {
			mine := model[i*area : (i+1)*area]
			buf := make([]byte, 64<<10)
			for step := range 100 {
				off := rand.IntN(area-len(buf)) &^ 511
				p := buf[:512+rand.IntN(len(buf)-512)&^511]
				switch rand.IntN(8) {
				case 0:
					clear(mine[off : off+len(p)])
					if err := r.Zero(t.Context(), int64(i*area+off), int64(len(p))); err != nil {
						t.Error(err)
					}
				case 1:
					if err := r.Flush(); err != nil {
						t.Error(err)
					}
				case 2, 3, 4:
					for j := range p {
						p[j] = byte(step + j)
					}
					copy(mine[off:], p)
					if _, err := r.WriteAt(t.Context(), p, int64(i*area+off)); err != nil {
						t.Error(err)
					}
				default:
					if _, err := r.ReadAt(t.Context(), p, int64(i*area+off)); err != nil {
						t.Error(err)
					}
					if !bytes.Equal(mine[off:off+len(p)], p) {
						t.Errorf("other content at %d", i*area+off)
					}
				}
			}
		})
	}
	using.Wait()
	close(stop)
	cutting.Wait()
	n.set(false, 0)
	n.cut()
	require.NoError(t, r.Flush())
	got := make([]byte, diskSize)
	require.NoError(t, testtool.Err(n.disks[0].ReadAt(t.Context(), got, 0)))
	require.True(t, bytes.Equal(model, got))
}

// volatile is a disk whose machine can lose what was not flushed.
type volatile struct {
	*disktest.Memory
	mu      sync.Mutex
	durable []byte
	flushes int
}

func (v *volatile) Flush() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.flushes++
	_, err := v.ReadAt(context.Background(), v.durable, 0)
	return err
}

func (v *volatile) crash() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	_, err := v.WriteAt(context.Background(), v.durable, 0)
	return err
}

func (v *volatile) flushed() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.flushes
}

// TestRemoteCrash: the server's machine crashes and loses what was not flushed. The guest, which
// goes on, loses nothing that was acknowledged.
func TestRemoteCrash(t *testing.T) {
	v := &volatile{Memory: disktest.NewMemory(diskSize), durable: make([]byte, diskSize)}
	store := &kept{data: map[string][]byte{}}
	n := relay(t, serve(t, 1, func(o *serving.Options) { o.Disk, o.Store = v, store }))
	r := n.remote(t)
	want := make([]byte, diskSize)
	change := func(off int, p []byte) {
		t.Helper()
		copy(want[off:], p)
		require.NoError(t, testtool.Err(r.WriteAt(t.Context(), p, int64(off))))
	}
	crash := func() {
		t.Helper()
		n.set(true, 0)
		n.cut()
		testtool.Eventually(t, func() bool { return len(n.Sessions()) == 0 })
		require.NoError(t, v.crash())
		n.restart(t, 1, nil)
		n.set(false, 0)
		got := make([]byte, diskSize)
		require.NoError(t, testtool.Err(r.ReadAt(t.Context(), got, 0)))
		require.True(t, bytes.Equal(want, got))
	}
	change(0, bytes.Repeat([]byte{1}, 64<<10))
	change(4096, bytes.Repeat([]byte{2}, 4096)) // over the first one
	require.NoError(t, r.Zero(t.Context(), 512, 512))
	clear(want[512:1024])
	crash()
	require.NoError(t, r.Flush())
	change(8192, bytes.Repeat([]byte{3}, 512))
	crash()
	crash() // what was repeated may be lost again
	change(1<<20, bytes.Repeat([]byte{4}, 1<<20+512))
	require.NotZero(t, v.flushed())
	crash()

	before := v.flushed()
	for i := range 3 * maxUnflushed / (512 << 10) {
		change(i*(512<<10)%diskSize, bytes.Repeat([]byte{byte(i)}, 512<<10))
	}
	require.Greater(t, v.flushed(), before, "what is kept is bounded")
	crash()
}

// TestRemoteLateWrite: a write that the server still executes when its connection breaks does not
// come after a later one.
func TestRemoteLateWrite(t *testing.T) {
	v := serve(t, 1, nil)
	n := relay(t, v)
	r := n.remote(t)
	finish := make(chan struct{})
	defer v.disks[0].Inject(disktest.Rule{Op: disktest.OpWrite, Block: finish, Times: 1})()
	first := testtool.Go(func() error {
		return testtool.Err(r.WriteAt(t.Context(), bytes.Repeat([]byte{1}, 4096), 0))
	})
	testtool.Eventually(t, func() bool { return v.disks[0].Calls(disktest.OpWrite) == 1 })
	n.cut()
	second := testtool.Go(func() error {
		err := <-first
		if err == nil {
			_, err = r.WriteAt(t.Context(), bytes.Repeat([]byte{2}, 4096), 0)
		}
		return err
	})
	testtool.Waits(t, second,
		"a later write was acknowledged while the former one could still come")
	close(finish)
	require.NoError(t, <-second)
	got := make([]byte, 4096)
	require.NoError(t, testtool.Err(v.disks[0].ReadAt(t.Context(), got, 0)))
	require.Equal(t, bytes.Repeat([]byte{2}, 4096), got)
}

// TestRemoteOtherDisk: a disk that was replaced at its server is not shown to the guest.
func TestRemoteOtherDisk(t *testing.T) {
	v := serve(t, 2, nil)
	n := relay(t, v)
	r := n.remote(t)
	n.set(true, 0)
	n.cut()
	testtool.Eventually(t, func() bool { return len(n.Sessions()) == 0 })
	other := serve(t, 1, func(o *serving.Options) { o.Identity.NAA[7] = 9 })
	n.mu.Lock()
	n.served = other
	n.mu.Unlock()
	n.set(false, 0)
	_, err := r.ReadAt(t.Context(), make([]byte, 512), 0)
	require.ErrorIs(t, err, disk.ErrFailed)
	require.ErrorContains(t, err, "it is another disk than before")
	require.NotContains(t, err.Error(), "flush", "none has failed")
}

// TestRemoteWaits: while the server is away, requests are held, and can be given up.
func TestRemoteWaits(t *testing.T) {
	n := relay(t, serve(t, 1, nil))
	r := n.remote(t)
	n.set(true, 0)
	n.cut()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 2)
	go func() {
		_, err := r.ReadAt(ctx, make([]byte, 512), 0)
		done <- err
	}()
	go func() {
		_, err := r.WriteAt(ctx, make([]byte, 512), 0)
		done <- err
	}()
	testtool.Eventually(t, func() bool { return len(n.Sessions()) == 0 })
	require.Empty(t, done)
	cancel()
	require.ErrorIs(t, <-done, disk.ErrNotNow)
	require.ErrorIs(t, <-done, disk.ErrNotNow)
	n.set(false, 0)
	require.NoError(t, testtool.Err(r.ReadAt(t.Context(), make([]byte, 512), 0)))
}

// TestRemoteErrors: what the server's storage says arrives.
func TestRemoteErrors(t *testing.T) {
	v := serve(t, 1, nil)
	r := v.remote(t, "")
	remove := v.disks[0].Inject(disktest.Rule{Op: disktest.OpRead,
		Err: &disk.MediumError{Op: "read", Off: 0, Length: 512, Err: io.ErrUnexpectedEOF}})
	_, err := r.ReadAt(t.Context(), make([]byte, 512), 0)
	var medium *disk.MediumError
	require.ErrorAs(t, err, &medium)
	require.Equal(t, int64(512), medium.Length)
	remove()
	remove = v.disks[0].Inject(disktest.Rule{Op: disktest.OpWrite, Err: disk.ErrNoSpace})
	require.ErrorIs(t, testtool.Err(r.WriteAt(t.Context(), make([]byte, 512), 0)), disk.ErrNoSpace)
	remove()
	require.NoError(t, testtool.Err(r.WriteAt(t.Context(), make([]byte, 512), 0)))
	v.disks[0].Inject(disktest.Rule{Op: disktest.OpFlush, Err: disk.ErrFailed})
	require.NoError(t, testtool.Err(r.WriteAt(t.Context(), nil, 0)))
	require.ErrorIs(t, r.Flush(), disk.ErrFailed)
	_, err = r.WriteAt(t.Context(), make([]byte, 512), 0)
	require.ErrorIs(t, err, disk.ErrFailed, "a failed flush is for good")
	require.ErrorIs(t, testtool.Err(r.WriteAt(t.Context(), nil, 0)), disk.ErrFailed)
}

// TestAbandonedReadHasNoResult: a read is abandoned while its data come. If it succeeds all the
// same, it has them.
func TestAbandonedReadHasNoResult(t *testing.T) {
	want := bytes.Repeat([]byte{1}, 512)
	r := &request{cookie: 1}
	var h head
	h.chunk(r, false, replyFlagDone, chunkData, 8+512)
	h.put64(0)
	reply := append(h.b[:h.n], want...)
	var wrong atomic.Int32
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for range 20000 { // few meet the moment in which it matters
				l := &link{calls: map[uint64]*call{}, in: bufio.NewReader(bytes.NewReader(reply))}
				c := newCall(cmdRead, 0, 0, 512, make([]byte, 512))
				_ = l.post(c)
				came := testtool.Go(l.next)
				if l.abandon(c) == nil && !bytes.Equal(c.data, want) {
					wrong.Add(1)
				}
				<-came
			}
		})
	}
	all.Wait()
	require.Zero(t, wrong.Load())
}

// TestRemoteOwnedByAnother: while another client owns the disk, requests wait for a handover.
func TestRemoteOwnedByAnother(t *testing.T) {
	v := serve(t, 1, func(o *serving.Options) { o.Access = serving.AccessWriteExclusive })
	other := filepath.Join(t.TempDir(), "other.sock")
	l := testtool.Must(net.Listen("unix", other))(t)
	go func() { _ = v.Serve(l, Portal{Name: serving.SocketPrefix + other}) }()
	owner := v.remote(t, "")
	require.NoError(t, testtool.Err(owner.WriteAt(t.Context(), bytes.Repeat([]byte{1}, 512), 0)))
	next := openRemote(t, RemoteOptions{Address: serving.SocketPrefix + other})
	done := make(chan error, 1)
	_, err := next.WriteAt(disk.AtHand, make([]byte, 512), 0)
	require.ErrorIs(t, err, disk.ErrNotNow)
	_, err = next.WriteAt(t.Context(), make([]byte, 512), 0)
	require.ErrorIs(t, err, disk.ErrNotNow, "the caller tries again")
	require.ErrorContains(t, err, "unix:"+v.socket, "it says who owns the disk")
	require.NoError(t, owner.Close())
	testtool.Eventually(t, func() bool {
		_, err = next.WriteAt(t.Context(), make([]byte, 512), 0)
		done <- err
		return <-done == nil
	})
}

// FuzzRemote: whatever a server sends, its client ends without harm.
func FuzzRemote(f *testing.F) {
	hello := join(u64(magicInit), u64(magicOption), u16(flagFixedNewstyle|flagNoZeroes))
	answer := func(option, kind uint32, data []byte) []byte {
		return join(u64(magicReply), u32(option), u32(kind), u32(uint32(len(data))), data)
	}
	export := join(u16(infoExport), u64(1<<20), u16(flagHasFlags|flagSendFlush|flagSendFUA))
	chosen := join(hello, answer(optStructuredReply, repAck, nil),
		answer(optSetMeta, repMetaContext,
			join(u32(3), []byte(diskContext+"3000000000000001,b,g,,x"))),
		answer(optSetMeta, repAck, nil), answer(optGo, repInfo, export), answer(optGo, repAck, nil))
	chunk := func(flags, kind uint16, cookie uint64, p []byte) []byte {
		return join(u32(magicStructured), u16(flags), u16(kind), u64(cookie),
			u32(uint32(len(p))), p)
	}
	f.Add(hello)
	f.Add(chosen)
	f.Add(join(chosen, chunk(replyFlagDone, chunkData, 1, join(u64(512), make([]byte, 1024)))))
	f.Add(join(chosen, chunk(0, chunkHole, 1, join(u64(512), u32(512))),
		chunk(replyFlagDone, chunkData, 1, join(u64(1024), make([]byte, 512)))))
	f.Add(join(chosen, chunk(replyFlagDone, chunkData, 1, join(u64(1024), make([]byte, 512)))))
	f.Add(join(chosen, chunk(replyFlagDone, chunkError, 1, appendError(nil, eIO, "no", -1))))
	f.Add(join(chosen, u32(magicSimple), u32(0), u64(1)))
	allocation := join(hello, answer(optStructuredReply, repAck, nil),
		answer(optSetMeta, repMetaContext,
			join(u32(3), []byte(diskContext+"3000000000000001,b,g,,x"))),
		answer(optSetMeta, repMetaContext, join(u32(1), []byte(allocationContext))),
		answer(optSetMeta, repAck, nil), answer(optGo, repInfo, export), answer(optGo, repAck, nil),
		chunk(replyFlagDone, chunkError, 1, appendError(nil, eIO, "no", -1)))
	f.Add(join(allocation, chunk(replyFlagDone, chunkStatus, 2,
		join(u32(1), u32(512), u32(stateHole|stateZero), u32(512), u32(0)))))
	f.Add(join(allocation, chunk(replyFlagDone, chunkStatus, 2, join(u32(1), u32(0), u32(0)))))
	f.Add(join(allocation, chunk(replyFlagDone, chunkStatus, 2, join(u32(2), u32(1), u32(0)))))
	f.Add(join(allocation, u32(magicSimple), u32(0), u64(2)))
	f.Fuzz(func(t *testing.T, sent []byte) {
		client, server := net.Pipe()
		go func() {
			go func() { _, _ = io.Copy(io.Discard, server) }()
			_, _ = server.Write(sent)
			_ = server.Close()
		}()
		n := &negotiation{nc: client, in: bufio.NewReader(client),
			dialer: &dialer{session: "x", RemoteOptions: RemoteOptions{Once: true}}}
		if n.run(t.Context()) != nil {
			_ = client.Close()
			return
		}
		l := newLink(n)
		go l.receive()
		guarded := bytes.Repeat([]byte{1}, 3*1024)
		c := newCall(cmdRead, 0, 512, 1024, guarded[1024:2048:2048])
		_ = l.do(t.Context(), c)
		require.Equal(t, bytes.Repeat([]byte{1}, 1024), guarded[:1024])
		require.Equal(t, bytes.Repeat([]byte{1}, 1024), guarded[2048:])
		status := newCall(cmdBlockStatus, 0, 0, 1<<20, nil)
		if l.do(t.Context(), status) == nil {
			for _, e := range status.extents {
				require.NotZero(t, e.length)
			}
		}
		l.fail(io.EOF)
		<-l.ended
	})
}
