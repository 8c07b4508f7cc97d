package vhosttest

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

const diskSize = 16 << 20

// peer is qemu-storage-daemon, an independent back end, over a raw file of random bytes.
type peer struct {
	socket, raw string
	options     string // of the export, further ones
	content     []byte
	stop        func()
	start       func()
}

// startPeer starts it with further options of the export.
func startPeer(t *testing.T, options string) *peer {
	t.Helper()
	testtool.Need(t, "qemu-storage-daemon")
	p := &peer{raw: filepath.Join(t.TempDir(), "disk.raw"), options: options}
	for i := range diskSize {
		p.content = append(p.content, byte(i>>9*7+i))
	}
	require.NoError(t, os.WriteFile(p.raw, p.content, 0o600))
	p.serve(t)
	return p
}

// twin starts another one over the same file.
func (p *peer) twin(t *testing.T) *peer {
	t.Helper()
	other := &peer{raw: p.raw, content: p.content, options: p.options}
	other.serve(t)
	return other
}

func (p *peer) serve(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	p.socket = filepath.Join(dir, "disk.sock")
	pidFile := filepath.Join(dir, "pid")
	p.start = func() {
		var log bytes.Buffer
		cmd := exec.Command("qemu-storage-daemon", "--object", "iothread,id=t", "--pidfile",
			pidFile, "--blockdev", "driver=file,node-name=f,discard=unmap,filename="+p.raw,
			"--export", "type=vhost-user-blk,id=e,node-name=f,writable=on,iothread=t,addr.type="+
				"unix,addr.path="+p.socket+p.options)
		cmd.Stdout, cmd.Stderr = &log, &log
		require.NoError(t, cmd.Start())
		p.stop = func() {
			p.stop = func() {}
			_ = cmd.Process.Kill()
			_ = cmd.Wait() // it was killed
			_, _ = os.Remove(pidFile), os.Remove(p.socket)
		}
		testtool.Eventually(t, func() bool {
			_, err := os.Stat(pidFile)
			return err == nil
		}, func() any { return log.String() })
	}
	p.start()
	t.Cleanup(func() { p.stop() })
}

// same compares data without printing it.
func same(t *testing.T, want, got []byte) {
	t.Helper()
	require.True(t, bytes.Equal(want, got), "%d bytes differ from %d", len(got), len(want))
}

func dial(t *testing.T, p *peer, o Options) *Driver {
	t.Helper()
	d := testtool.Must(Dial(p.socket, o))(t)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

// TestRequests: every request of virtio-blk, however it is cut into descriptors.
func TestRequests(t *testing.T) {
	p := startPeer(t, ",num-queues=2")
	for name, o := range map[string]Options{
		"all":          {Queues: 2},
		"small ring":   {QueueSize: 4},
		"no events":    {Features: ^FeatureEventIndex},
		"old protocol": {ProtocolFeatures: ProtocolConfig},
		"table": {Memory: 8 << 20, ProtocolFeatures: ^ProtocolMemSlots, Unsealed: true,
			Regions: []RegionOptions{{Addr: 0, Size: 4 << 20}, {Addr: 4 << 20, Size: 4 << 20,
				Offset: 1 << 20}}},
		"indirect":    {Layout: Layout{Indirect: true}},
		"many pieces": {Layout: Layout{Header: []int{1, 7}, Data: []int{512, 1024}}},
		"joined": {Layout: Layout{JoinHeader: true, JoinStatus: true, Indirect: true,
			Data: []int{5, 700}}},
		"regions": {Layout: Layout{Regions: true, Data: []int{1000}},
			Regions: []RegionOptions{{Addr: 1 << 32, Size: 4 << 20}, {Addr: 1 << 20,
				Size: 4 << 20}}},
	} {
		t.Run(name, func(t *testing.T) {
			d := dial(t, p, o)
			queue := d.Queues() - 1
			require.NotZero(t, d.Protocol&ProtocolConfig)
			c := testtool.Must(d.Config())(t)
			require.EqualValues(t, diskSize/512, c.Capacity)
			require.EqualValues(t, 512, c.BlockSize)

			got := make([]byte, 8<<10)
			require.NoError(t, d.Read(queue, 1<<20, got))
			same(t, p.content[1<<20:][:len(got)], got)
			written := bytes.Repeat([]byte("written "), 512)
			require.NoError(t, d.Write(queue, 4096, written))
			require.NoError(t, d.Flush(queue))
			require.NoError(t, d.Read(queue, 2048, got))
			same(t, written, got[2048:][:len(written)])
			require.Equal(t, "vhost_user_blk", testtool.Must(d.ID(queue))(t))

			var status *StatusError
			require.ErrorAs(t, d.Read(queue, diskSize, got), &status)
			require.Equal(t, StatusIOErr, status.Status)
			if d.Features&FeatureWriteZeroes != 0 {
				require.NoError(t, d.WriteZeroes(queue, Range{Sector: 8, Count: 4}))
				require.NoError(t, d.Read(queue, 4096, got[:4096]))
				same(t, make([]byte, 2048), got[:2048])
				same(t, written[2048:], got[2048:4096])
				require.NoError(t, d.Discard(queue, Range{Sector: 8, Count: 8}))
			}
			require.NoError(t, d.BackChannelError())
			base := testtool.Must(d.Queue(queue).Stop())(t)
			require.Equal(t, d.Queue(queue).AvailIndex(), base)
			require.NoError(t, d.Queue(queue).Resume(base))
			require.NoError(t, d.Read(queue, 0, got[:512]))
		})
	}
}
