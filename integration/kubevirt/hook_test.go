package kubevirt

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// kubevirtClient calls a socket with KubeVirt's own clients. It returns what the program prints,
// and its exit status.
func kubevirtClient(t *testing.T, args ...string) rig.Result {
	t.Helper()
	return rig.Client(t, nil, filepath.Join(launcherPrograms(t), "client"), args...)
}

// hook waits until the sidecar answers at its socket.
func (p *launcherPod) hook(s *process) string {
	p.t.Helper()
	testtool.Eventually(p.t, func() bool {
		require.True(p.t, s.running(), "%s has ended:\n%s", s.name, s.output.String())
		for _, socket := range p.sockets() { // one that was killed has left its socket
			if c, err := net.Dial("unix", socket); err == nil {
				return c.Close() == nil
			}
		}
		return false
	}, "the sidecar has a hook socket")
	require.Len(p.t, p.sockets(), 1, "the launcher takes every socket for a hook")
	return p.sockets()[0]
}

// smallDisk starts a sidecar with a disk that boots nothing.
func (p *launcherPod) smallDisk() *process {
	p.t.Helper()
	dir := rig.SharedDir(p.t)
	rig.MakeRaw(p.t, filepath.Join(dir, "data.raw"), 1<<20)
	return p.sidecar([]string{"DISK_DIR=" + dir, "WORK_DIR=" + rig.SharedDir(p.t)})
}

// TestKubeVirtClients: KubeVirt's clients of each version of the hooks get the same domain from us.
// When the machine has ended, the daemon ends.
func TestKubeVirtClients(t *testing.T) {
	t.Parallel()
	p := newLauncherPod(t)
	launcherPrograms(t)
	s := p.smallDisk()
	hook := p.hook(s)
	r := kubevirtClient(t, "info", hook)
	require.Zero(t, r.Status, r)
	var info struct {
		Versions   []string
		HookPoints []struct{ Name string }
	}
	require.NoError(t, json.Unmarshal([]byte(r.Output), &info))
	require.ElementsMatch(t, []string{"v1alpha1", "v1alpha2", "v1alpha3"}, info.Versions)

	domain, vmi := filepath.Join(t.TempDir(), "domain.xml"), vmiFile(t, vmiOf(nil))
	require.NoError(t, os.WriteFile(domain, []byte(`<domain type="qemu"><name>vm</name>
<devices><emulator>/usr/bin/qemu</emulator></devices></domain>`), 0o644))
	answers := map[string]bool{}
	for _, version := range info.Versions {
		r := kubevirtClient(t, "define", hook, version, domain, vmi)
		require.Zero(t, r.Status, "%s: %s", version, r)
		require.Contains(t, r.Output, `protocol="nbd"`, version)
		answers[r.Output] = true
	}
	require.Len(t, answers, 1, "each version gives the same domain")

	require.Zero(t, kubevirtClient(t, "shutdown", hook).Status)
	require.Zero(t, s.wait())
	require.Empty(t, p.sockets())
}

// TestKubeVirtMigrationIsRefused: a disk that lives in the pod does not move. The launcher of the
// migration's target refuses, and says what can be done. When the launcher has ended, so do the
// hook that has refused, also started again, and another one that was not asked any more.
func TestKubeVirtMigrationIsRefused(t *testing.T) {
	t.Parallel()
	p := newLauncherPod(t)
	launcherPrograms(t)
	p.shareNetwork()
	asked, another := p.smallDisk(), p.withSidecar(1)
	notAsked := another.smallDisk()
	l := p.launch(nil)
	vmi := vmiOf(nil)
	vmi["status"] = map[string]any{"migrationState": map[string]any{
		"migrationUid": "3c5f2f3e-0000-4000-8000-000000000002", "sourceNode": "node1",
		"targetNode": "node2", "targetPod": "virt-launcher-vm-2"}}
	r := l.handler("target", vmi)
	require.NotZero(t, r.Status)
	require.Contains(t, r.Output, "migrat")
	require.Contains(t, l.output.String(), "migrat")

	require.NotContains(t, notAsked.output.String(), "is refused")
	asked.kill()
	asked = p.smallDisk()
	p.hook(asked)
	for _, s := range []*process{asked, notAsked} {
		s.says("launcher is there")
		require.True(t, s.running())
	}
	l.kill()
	require.Zero(t, asked.wait())
	require.Zero(t, notAsked.wait())
	require.Empty(t, append(p.sockets(), another.sockets()...))
}

// handler asks the launcher as virt-handler does.
func (l *launcher) handler(command string, vmi map[string]any, more ...string) rig.Result {
	l.t.Helper()
	socket := l.file("kubevirt/sockets/launcher-sock")
	testtool.Eventually(l.t, func() bool {
		require.True(l.t, l.running(), "the launcher has ended:\n%s",
			rig.LastLines(l.output.String(), 30))
		_, err := os.Stat(socket)
		return err == nil
	}, "the launcher listens for virt-handler")
	return kubevirtClient(l.t, append([]string{command, socket, vmiFile(l.t, vmi)}, more...)...)
}

// vmiFile writes an instance into a file.
func vmiFile(t *testing.T, vmi map[string]any) string {
	t.Helper()
	text := testtool.Must(json.Marshal(vmi))(t)
	file := filepath.Join(t.TempDir(), "vmi.json")
	require.NoError(t, os.WriteFile(file, text, 0o644))
	return file
}
