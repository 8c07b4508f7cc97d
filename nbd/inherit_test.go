package nbd

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
)

// kept is a serving.Store in memory.
type kept struct {
	mu   sync.Mutex
	data map[string][]byte
}

func (k *kept) Load(name string) ([]byte, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.data[name], nil
}

func (k *kept) Save(name string, data []byte) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.data[name] = data
	return nil
}

func (k *kept) Where(name string) string { return name }

// migration is a disk with two relays that have one name.
type migration struct {
	t              *testing.T
	disk           *volatile
	store          *kept
	at             *relayed // what both are connected to
	source, target *Remote
	cut            *relayed // the network of the source
}

func newMigration(t *testing.T) *migration {
	m := &migration{t: t, store: &kept{data: map[string][]byte{}},
		disk: &volatile{Memory: disktest.NewMemory(diskSize), durable: make([]byte, diskSize)}}
	m.at = relay(t, m.server())
	m.cut = relay(t, &served{socket: m.at.socket})
	m.source, m.target = m.cut.remote(t), m.at.remote(t)
	return m
}

// server is one run of the server.
func (m *migration) server() *served {
	m.t.Helper()
	// All runs know the clients by one name, as they do by a certificate.
	return serveAs(m.t, "unix:/disk.sock", 1, func(o *serving.Options) {
		o.Disk, o.Store = m.disk, m.store
	})
}

// restart has another run of the server take the place of the one that is there.
func (m *migration) restart() {
	m.t.Helper()
	next := m.server()
	m.at.mu.Lock()
	m.at.served = next
	m.at.mu.Unlock()
	m.at.cut()
}

// crash has the server's machine lose what is not durable. It stays away.
func (m *migration) crash() {
	m.t.Helper()
	m.at.set(true, 0)
	m.at.cut()
	testtool.Eventually(m.t, func() bool { return len(m.at.Sessions()) == 0 })
	require.NoError(m.t, m.disk.crash())
	m.at.restart(m.t, 1, nil)
}

func (m *migration) write(r *Remote, b byte) error {
	_, err := r.WriteAt(m.t.Context(), bytes.Repeat([]byte{b}, 512), 0)
	return err
}

func (m *migration) requireReads(r *Remote, b byte) {
	m.t.Helper()
	got := make([]byte, 512)
	require.NoError(m.t, testtool.Err(r.ReadAt(m.t.Context(), got, 0)))
	require.Equal(m.t, bytes.Repeat([]byte{b}, 512), got)
}

// requireOver checks that a relay has lost the disk for good.
func (m *migration) requireOver(r *Remote) {
	m.t.Helper()
	err := m.write(r, 99)
	require.ErrorIs(m.t, err, disk.ErrFailed)
	require.ErrorContains(m.t, err, "another session of this name has taken the disk over")
	_, err = r.ReadAt(m.t.Context(), make([]byte, 512), 0)
	require.ErrorIs(m.t, err, disk.ErrFailed)
	require.ErrorIs(m.t, testtool.Err(r.WriteAt(m.t.Context(), nil, 0)), disk.ErrMoved)
}

// TestInherit: the target of a migration reads beside the source, and takes the disk over with its
// first write. The server may be started anew at any time.
func TestInherit(t *testing.T) {
	for name, restart := range map[string]bool{"one run": false, "restarts between": true} {
		t.Run(name, func(t *testing.T) {
			m := newMigration(t)
			between := func() {
				if restart {
					m.restart()
				}
			}
			require.NoError(t, m.write(m.source, 1))
			_, err := m.target.ReadAt(disk.AtHand, make([]byte, 512), 0)
			require.ErrorIs(t, err, disk.ErrNotNow)
			_, err = m.target.ReadAt(t.Context(), make([]byte, 512), 0)
			require.ErrorContains(t, err, "in use by another client that is called unix:")

			for range 2 {
				require.NoError(t, m.target.Inherit(t.Context()))
				m.requireReads(m.target, 1)
			}
			between()
			require.NoError(t, m.write(m.source, 2))
			m.requireReads(m.target, 2)
			require.NoError(t, m.target.Flush())
			require.NoError(t, m.source.Flush())
			between()
			m.requireReads(m.source, 2)
			require.NoError(t, m.write(m.target, 3))
			between()
			m.requireOver(m.source)
			require.NoError(t, m.source.Flush(), "nothing is lost")
			m.requireReads(m.target, 3)
			require.NoError(t, m.write(m.target, 4))
			between()
			m.requireReads(m.target, 4)
		})
	}
}

// TestInheritWaitsForItsServer: a server that is started anew when the target arrives is waited
// for.
func TestInheritWaitsForItsServer(t *testing.T) {
	m := newMigration(t)
	require.NoError(t, m.write(m.source, 1))
	m.at.set(true, 0)
	done := testtool.Go(func() error { return m.target.Inherit(t.Context()) })
	testtool.Eventually(t, func() bool {
		why, _ := m.target.Why()
		return why != ""
	}, "it has tried")
	require.Empty(t, done)
	m.at.set(false, 0)
	require.NoError(t, <-done)
	m.requireReads(m.target, 1)
}

// TestInheritCancelled: if the target goes without a write, the source never notices.
func TestInheritCancelled(t *testing.T) {
	m := newMigration(t)
	require.NoError(t, m.write(m.source, 1))
	require.NoError(t, m.target.Inherit(t.Context()))
	m.requireReads(m.target, 1)
	require.NoError(t, m.target.Close())
	require.NoError(t, m.write(m.source, 2))
	m.cut.cut()
	require.NoError(t, m.write(m.source, 3))
	m.requireReads(m.source, 3)

	next := m.at.remote(t)
	require.NoError(t, next.Inherit(t.Context()))
	m.requireReads(next, 3)
	require.NoError(t, m.write(next, 4))
	m.requireOver(m.source)
}

// TestInheritLosesNothing: the server's machine crashes while the source flushes for the last time,
// and loses what was not durable. QEMU goes to the target only when that flush is done, and it is
// done only when what was lost has been written again.
func TestInheritLosesNothing(t *testing.T) {
	m := newMigration(t)
	require.NoError(t, m.target.Inherit(t.Context()))
	require.NoError(t, m.write(m.source, 1))
	m.crash()
	flushed := testtool.Go(m.source.Flush)
	m.cut.set(true, 0) // the target is back first
	m.cut.cut()
	m.at.set(false, 0)
	m.requireReads(m.target, 0)
	require.Empty(t, flushed, "a flush that waits for its server")
	m.cut.set(false, 0)
	require.NoError(t, <-flushed)
	m.crash()
	m.at.set(false, 0)
	m.requireReads(m.target, 1)
	require.NoError(t, m.write(m.target, 2))
	m.requireOver(m.source)
	m.requireReads(m.target, 2)
}

// TestInheritFencesReplays: a source that was cut off with writes that it would repeat cannot do so
// once the target has written. What it was told is written is durable by then.
func TestInheritFencesReplays(t *testing.T) {
	m := newMigration(t)
	require.NoError(t, m.target.Inherit(t.Context()))
	require.NoError(t, m.write(m.source, 1))
	_, err := m.source.WriteAt(t.Context(), bytes.Repeat([]byte{5}, 512), 4096)
	require.NoError(t, err)
	m.cut.set(true, 0)
	m.cut.cut()
	require.NoError(t, m.write(m.target, 2))
	m.crash()
	m.at.set(false, 0)
	m.cut.set(false, 0)
	m.requireOver(m.source)
	require.ErrorIs(t, m.source.Flush(), disk.ErrFailed, "it cannot know that nothing is lost")
	got := make([]byte, 512)
	require.NoError(t, testtool.Err(m.target.ReadAt(t.Context(), got, 4096)))
	require.Equal(t, bytes.Repeat([]byte{5}, 512), got)
	m.requireReads(m.target, 2)
}

// TestInheritWaitsForLateWrites: a write of the source that the server still executes comes before
// the first write of the target, and not after it.
func TestInheritWaitsForLateWrites(t *testing.T) {
	v := serve(t, 1, nil)
	m := &migration{t: t, source: v.remote(t, ""), target: v.remote(t, "")}
	require.NoError(t, m.target.Inherit(t.Context()))
	m.requireReads(m.source, 0)
	finish := make(chan struct{})
	v.disks[0].Inject(disktest.Rule{Op: disktest.OpWrite, Block: finish, Times: 1})
	late := testtool.Go(func() error { return m.write(m.source, 1) })
	testtool.Eventually(t, func() bool { return v.disks[0].Calls(disktest.OpWrite) == 1 })
	first := testtool.Go(func() error {
		return testtool.Err(m.target.WriteAt(t.Context(), bytes.Repeat([]byte{2}, 512), 8192))
	})
	require.ErrorIs(t, <-late, disk.ErrFailed)
	testtool.Waits(t, first, "the target writes while a write of the source can still come")
	close(finish)
	require.NoError(t, <-first)
	require.Equal(t, 2, v.disks[0].Calls(disktest.OpWrite))
}

// TestInheritOfAnOldServer: a server of an earlier version would not fence the source.
func TestInheritOfAnOldServer(t *testing.T) {
	answer := func(option, kind uint32, data []byte) []byte {
		return join(u64(magicReply), u32(option), u32(kind), u32(uint32(len(data))), data)
	}
	client, server := net.Pipe()
	defer client.Close()
	go func() {
		go func() { _, _ = io.Copy(io.Discard, server) }()
		_, _ = server.Write(join(u64(magicInit), u64(magicOption),
			u16(flagFixedNewstyle|flagNoZeroes), answer(optStructuredReply, repAck, nil),
			answer(optSetMeta, repMetaContext,
				join(u32(3), []byte(diskContext+"3000000000000001,b,g,,x"))),
			answer(optSetMeta, repAck, nil)))
	}()
	n := &negotiation{dialer: &dialer{session: "x", migrationTarget: true}, nc: client,
		in: bufio.NewReader(client)}
	require.ErrorContains(t, n.run(t.Context()), "too old for a live migration")
}
