package kubevirt

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/internal/testtool"
)

// movingMachine is an instance whose disk is outside of its pods. It moves between them.
type movingMachine struct {
	t          *testing.T
	dir        string // certificates
	port       string // of the disk's server
	served     rig.Config
	server     *rig.Daemon
	migrations int
	transport  string // of the disk, as an annotation says; "": it does not
}

// node is a pod of the instance: the launcher, and our sidecar, which hands the disk on.
type node struct {
	*launcher
	pod   *launcherPod
	relay *process
}

// newMovingMachine serves a disk with the content of an image.
func newMovingMachine(t *testing.T, image string) *movingMachine {
	t.Helper()
	m := &movingMachine{t: t, dir: rig.SharedDir(t), port: rig.FreePort(t)}
	state, disks := t.TempDir(), t.TempDir()
	require.NoError(t, os.Rename(image, filepath.Join(disks, "guest.raw")))
	ca, key := filepath.Join(m.dir, "server.crt"), filepath.Join(m.dir, "server.key")
	rig.MakeCertificate(t, ca, key)
	cert, own := rig.MakeClientCertificate(t, m.dir, "vm.example")
	for _, file := range []string{ca, cert, own} {
		require.NoError(t, os.Chmod(file, 0o644)) // the sidecars are not root
	}
	m.served = rig.Config{DiskDir: disks, StateDir: state, Args: []string{
		"--persistent-dir=" + rig.NewVolume(t, state), "--nbd=127.0.0.1:" + m.port,
		"--nbd-tls-cert=" + ca, "--nbd-tls-key=" + key, "--nbd-client-ca=" + ca}}
	m.server = rig.Start(t, m.served)
	return m
}

// pod starts a pod of the instance; without one, it is the target of a migration.
func (m *movingMachine) pod(vmi map[string]any) *node {
	m.t.Helper()
	n := m.sidecar()
	n.launcher = n.pod.launch(vmi)
	m.t.Cleanup(func() {
		if !m.t.Failed() {
			return
		}
		for line := range strings.Lines(n.output.String()) { // the rest is about virt-handler
			if strings.Contains(strings.ToLower(line), "migrat") {
				m.t.Log(line)
			}
		}
	})
	return n
}

// sidecar starts a pod without its launcher.
func (m *movingMachine) sidecar() *node {
	m.t.Helper()
	p := newLauncherPod(m.t)
	file := func(name string) string { return filepath.Join(m.dir, name) }
	relay := p.sidecar([]string{"DISK_DIR=" + rig.SharedDir(m.t)},
		"--disk=nbds://127.0.0.1:"+m.port+"/guest.raw", "--disk-tls-cert="+file("vm.example.crt"),
		"--disk-tls-key="+file("vm.example.key"), "--disk-server-ca="+file("server.crt"))
	return &node{pod: p, relay: relay}
}

// define calls the sidecar's hook as the launcher does.
func (n *node) define(vmi map[string]any) rig.Result {
	n.pod.t.Helper()
	domain := filepath.Join(n.pod.t.TempDir(), "domain.xml")
	require.NoError(n.pod.t, os.WriteFile(domain, []byte(`<domain type="qemu"><name>vm</name>
<devices><emulator>/usr/bin/qemu</emulator></devices></domain>`), 0o644))
	return kubevirtClient(n.pod.t, "define", n.pod.hook(n.relay), "v1alpha3", domain,
		vmiFile(n.pod.t, vmi))
}

// vmi is the instance as virt-handler sees it at the n-th migration.
func (m *movingMachine) vmi(n int) map[string]any {
	annotations := map[string]string{}
	if m.transport != "" {
		annotations["disk.kubevirt.io/transport"] = m.transport
	}
	vmi := vmiOf(annotations)
	status := map[string]any{"runtimeUser": 107, "migrationTransport": "Unix"}
	if n > 0 {
		status["migrationState"] = map[string]any{
			"migrationUid": fmt.Sprintf("3c5f2f3e-0000-4000-8000-1%011d", n),
			"sourceNode":   "node1", "targetNode": "node2",
			"targetPod": fmt.Sprintf("virt-launcher-vm-%d", n)}
	}
	vmi["status"] = status
	return vmi
}

// begin does what virt-handler does at the beginning of a migration: it prepares the new pod, and
// connects the two. Bandwidth is in bytes for each second; 0: no limit.
func (m *movingMachine) begin(from *node, bandwidth string) (to *node, vmi map[string]any) {
	m.t.Helper()
	m.migrations++
	vmi = m.vmi(m.migrations)
	to = m.pod(nil)
	r := to.handler("target", vmi)
	require.Zero(m.t, r.Status, r)
	to.relay.says("its first write takes the disk over")
	const direct = "-49152-source.sock"
	proxies := "kubevirt/migrationproxy/" + vmiUID
	m.proxy(from.file(proxies+"-source.sock"), to.file("libvirt/libvirt-sock"))
	m.proxy(from.file(proxies+direct), to.file(proxies+direct))
	r = from.handler("migrate", vmi, bandwidth)
	require.Zero(m.t, r.Status, r)
	return to, vmi
}

// proxy carries what comes at a socket to another one, as virt-handler does between nodes.
func (m *movingMachine) proxy(from, to string) {
	m.t.Helper()
	_ = os.Remove(from) // of an earlier migration
	l := testtool.Must(socket.ListenUnix(from))(m.t)
	m.t.Cleanup(func() { _ = l.Close() })
	for _, path := range []string{filepath.Dir(from), from} {
		require.NoError(m.t, os.Chmod(path, 0o777))
	}
	go func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			go carry(m.t, near, to)
		}
	}()
}

func carry(t *testing.T, near net.Conn, to string) {
	defer near.Close()
	far, err := socket.DialUnix(t.Context(), to)
	if err != nil {
		return
	}
	defer far.Close()
	go func() {
		_, _ = io.Copy(far, near)
		_ = far.(*net.UnixConn).CloseWrite()
	}()
	_, _ = io.Copy(near, far)
}

// wrote waits until the guest has written n blocks in a pod.
func (n *node) wrote(count int) {
	n.t.Helper()
	testtool.Within(n.t, rig.MachineTime, func() bool {
		require.True(n.t, n.running(), "the launcher has ended:\n%s",
			rig.LastLines(n.output.String(), 30))
		return len(rig.BlocksSaid(n.consoleLog(), "wrote")) >= count
	}, "the guest writes")
}

// io has qemu-io use the disk as the pod's QEMU does.
func (n *node) io(command string) rig.Result {
	n.pod.t.Helper()
	return rig.Client(n.pod.t, nil, "qemu-io", "-f", "raw", "-c", command,
		"nbd+unix:///guest.raw?socket="+filepath.Join(n.pod.own(), "disk", "nbd.sock"))
}

// fenced checks that nothing that comes through a pod changes the disk any more.
func (n *node) fenced() {
	n.pod.t.Helper()
	require.Contains(n.pod.t, n.io("write -P 7 0 4k").Output, "write failed")
}

// TestKubeVirtDiskFollows has the sidecars of two pods hand on one disk. Once the hook of the
// second one was told that a machine arrives, it reads beside the first one, and its first write
// takes the disk over, for good: the first one is refused, also after the server was killed.
func TestKubeVirtDiskFollows(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-io")
	newLauncherPod(t)
	launcherPrograms(t)
	raw := filepath.Join(t.TempDir(), "raw")
	rig.MakeRaw(t, raw, 4<<20)
	m := newMovingMachine(t, raw)
	does := func(n *node, command string) {
		t.Helper()
		r := n.io(command)
		require.Zero(t, r.Status, r)
		require.NotContains(t, r.Output, "failed", "%s: %s", command, r)
	}
	source, target := m.sidecar(), m.sidecar()
	for _, n := range []*node{source, target} {
		vmi := m.vmi(0)
		if n == target {
			vmi = m.vmi(1)
		}
		r := n.define(vmi)
		require.Zero(t, r.Status, r)
		require.Contains(t, r.Output, `name="guest.raw"`)
	}
	does(source, "write -P 1 0 4k")
	does(target, "read -P 1 0 4k")
	m.server.Crash()
	m.server = rig.Start(t, m.served)
	does(source, "write -P 2 0 4k")
	does(target, "read -P 2 0 4k")
	does(target, "write -P 3 4k 4k")
	source.fenced()
	m.server.Crash()
	m.server = rig.Start(t, m.served)
	source.fenced()
	does(target, "read -P 2 0 4k")
	does(target, "read -P 3 4k 4k")
	source.relay.says("belongs to another client now")

	source.relay.signal(syscall.SIGTERM)
	require.Zero(t, source.relay.wait(), "it has lost nothing")
	target.relay.signal(syscall.SIGTERM)
	require.Zero(t, target.relay.wait())
}

// The guest writes these blocks of the last MiB again and again.
const (
	movedBlocks = 64
	firstBlock  = 63 << 20 / 512
)

// keepWriting runs in the guest. Most writes are not flushed.
const keepWriting = `(i=0; until [ -e /run/stop ]; do sync=; [ $((i%%16)) != 0 ] || sync=,fsync; ` +
	`if printf '%%-512s' "block $i" | dd of=/dev/vda bs=512 count=1 seek=$((%d+i%%%d)) ` +
	`iflag=fullblock oflag=direct conv=notrunc$sync 2>/dev/null; then echo wrote $i; ` +
	`else echo refused $i; fi; i=$((i+1)); done; echo stopped) &`

// TestKubeVirtMigratesADisk: a guest that writes all the time moves to another pod, by KubeVirt's
// own code. A first migration is cancelled, and the guest goes on. After the second one, the
// sidecar of the first pod ends, and the server is killed. No write is lost.
func TestKubeVirtMigratesADisk(t *testing.T) {
	for _, transport := range []string{"nbd", "vhost-user"} {
		t.Run(transport, func(t *testing.T) {
			if transport != "nbd" {
				testtool.NeedNightly(t)
			}
			migratesADisk(t, transport)
		})
	}
}

func migratesADisk(t *testing.T, transport string) {
	t.Parallel()
	newLauncherPod(t) // skips the test where there can be none
	launcherPrograms(t)
	m := newMovingMachine(t, bootableDisk(t))
	m.transport = transport
	source := m.pod(m.vmi(0))
	g := source.console()
	g.run(t, fmt.Sprintf(keepWriting, firstBlock, movedBlocks))
	require.NoError(t, g.Conn.Close())
	source.wrote(10)

	cancelled, vmi := m.begin(source, "64Ki")
	var job string
	testtool.Within(t, rig.MachineTime, func() bool {
		job, _ = source.virsh("domjobinfo", "default_vm")
		return strings.Contains(job, "Memory processed")
	}, "the guest's memory moves: %s", func() any { return job })
	r := source.handler("cancel", vmi)
	require.Zero(t, r.Status, r)
	testtool.Within(t, rig.MachineTime, func() bool {
		out, err := source.virsh("domjobinfo", "default_vm")
		return err == nil && strings.Contains(out, "None")
	}, "the migration is cancelled")
	cancelled.kill()
	// The launcher says in its end that the machine has ended, or does not get to it.
	if err := cancelled.relay.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		require.ErrorIs(t, err, os.ErrProcessDone)
	}
	cancelled.relay.wait()
	require.Contains(t, cancelled.relay.output.String(), `"stopped"`)
	source.wrote(len(rig.BlocksSaid(source.consoleLog(), "wrote")) + 10)

	target, moved := m.begin(source, "0")
	target.wrote(10)
	require.Zero(t, source.relay.wait(), "the launcher has said that the machine has ended here")
	m.server.Crash()
	m.server = rig.Start(t, m.served)
	target.wrote(len(rig.BlocksSaid(target.consoleLog(), "wrote")) + 10)

	g = target.connectConsole()
	g.run(t, "touch /run/stop")
	testtool.Eventually(t, func() bool {
		return strings.Contains(target.consoleLog(), "stopped")
	}, "the guest stops writing")
	said := source.consoleLog() + target.consoleLog()
	require.Empty(t, rig.BlocksSaid(said, "refused"))
	wrote := rig.BlocksSaid(said, "wrote")
	want := map[int]int{}
	for i, n := range wrote {
		require.Equal(t, i, n, "the guest lost a block, or wrote one twice")
		want[n%movedBlocks] = n
	}
	require.NoError(t, g.Conn.Close())
	target.vmi = moved
	target.stop()
	require.Zero(t, target.relay.wait(), "the sidecar ends")
	m.server.Stop()
	content := testtool.Must(os.ReadFile(filepath.Join(m.served.StateDir, "volume", "disk.img")))(t)
	for i, n := range want {
		at := (firstBlock + i) * 512
		require.Equal(t, fmt.Sprintf("%-512s", fmt.Sprintf("block %d", n)),
			string(content[at:at+512]))
	}
}
