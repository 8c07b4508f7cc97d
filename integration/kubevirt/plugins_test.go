package kubevirt

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// newPod19 is the pod of a launcher of KubeVirt 1.9, whose containers share a network.
func newPod19(t *testing.T) *launcherPod {
	t.Helper()
	testtool.NeedNightly(t)
	p := newLauncherPod(t)
	p.module = "launcher19"
	programsOf(t, p.module)
	p.shareNetwork()
	return p
}

// sidecarWithImage starts the sidecar with a disk from which a guest boots, also again.
func (p *launcherPod) sidecarWithImage() (start func() *process) {
	p.t.Helper()
	dir, work := rig.SharedDir(p.t), rig.SharedDir(p.t)
	require.NoError(p.t, os.Rename(bootableDisk(p.t), filepath.Join(dir, "guest.raw")))
	return func() *process {
		p.t.Helper()
		return p.sidecar([]string{"DISK_DIR=" + dir, "WORK_DIR=" + work})
	}
}

// handle19 does what virt-handler of KubeVirt 1.9 does in a cluster with plugins.
func (l *launcher) handle19(command string, vmi map[string]any, plugins ...any) rig.Result {
	l.t.Helper()
	socket, file := l.file("kubevirt/sockets/launcher-sock"), os.DevNull
	testtool.Eventually(l.t, func() bool {
		require.True(l.t, l.running(), "the launcher has ended:\n%s",
			rig.LastLines(l.output.String(), 30))
		_, err := os.Stat(socket)
		return err == nil
	}, "the launcher listens for virt-handler")
	if len(plugins) > 0 {
		text := testtool.Must(json.Marshal(plugins))(l.t)
		file = filepath.Join(l.t.TempDir(), "plugins.json")
		require.NoError(l.t, os.WriteFile(file, text, 0o644))
	}
	return rig.Client(l.t, nil, filepath.Join(programsOf(l.t, "launcher19"), "client"), command,
		socket, vmiFile(l.t, vmi), file)
}

// pluginOf is an object of kind Plugin.
func pluginOf(name string, spec map[string]any) map[string]any {
	return map[string]any{"apiVersion": "plugin.kubevirt.io/v1alpha1", "kind": "Plugin",
		"metadata": map[string]any{"name": name}, "spec": spec}
}

// strangePlugin is of somebody else, and does not select our machine.
func strangePlugin() map[string]any {
	return pluginOf("strange", map[string]any{"condition": "false",
		"domainHooks": []any{map[string]any{"cel": map[string]any{"expression": "Domain{}"}}}})
}

// TestKubeVirt19 starts a machine with KubeVirt 1.9 in a cluster without plugins.
func TestKubeVirt19(t *testing.T) {
	t.Parallel()
	p := newPod19(t)
	s := p.sidecarWithImage()()
	l := p.launch(nil)
	vmi := vmiOf(nil)
	r := l.handle19("sync", vmi)
	require.Zero(t, r.Status, r)
	g := l.console()
	require.Equal(t, hooksDir+"/hook-sidecar-0/disk/nbd.sock",
		onlyDisk(t, l).Source.Network.Hosts[0].Socket)
	require.NotContains(t, s.output.String(), "kind Plugin")
	g.run(t, writeLast("n"))
	require.Equal(t, "nnnnnnnn", g.run(t, readLast()))
}

// TestKubeVirt19DropsTheSocket: there is an object of kind Plugin that has nothing to do with the
// machine. The launcher writes the domain again, and the guest has its disk all the same, also
// after the daemon was killed and started again. Other users of the pod cannot use the address.
func TestKubeVirt19DropsTheSocket(t *testing.T) {
	t.Parallel()
	rig.Need(t, "nbdinfo")
	p := newPod19(t)
	start := p.sidecarWithImage()
	s := start()
	l := p.launch(nil)
	vmi := vmiOf(nil)
	sync := func() {
		r := l.handle19("sync", vmi, strangePlugin())
		require.Zero(t, r.Status, r)
	}
	sync()
	g := l.console()
	host := onlyDisk(t, l).Source.Network.Hosts[0]
	require.Equal(t, "127.107.0.1", host.Name)
	require.Empty(t, host.Socket)
	s.says("has come to the address of its disks")
	g.run(t, writeLast("p"))
	require.Equal(t, "pppppppp", g.run(t, readLast()))

	stranger := rig.Client(t, nil, "nsenter", p.inNetwork("setpriv", "--reuid", "1000", "--regid",
		"1000", "--clear-groups", "/usr/bin/nbdinfo", "nbd://127.107.0.1/guest.raw")[1:]...)
	require.NotZero(t, stranger.Status, stranger)
	s.says("only user 107 may connect here")

	s.kill()
	require.NoError(t, testtool.Err(g.Conn.Write([]byte(readLast()+"\n"))))
	l.untilPaused()
	p.hook(start())
	testtool.Eventually(t, func() bool {
		sync()
		return strings.Contains(g.log(), "pppppppp")
	}, "the guest goes on")
}

// TestKubeVirt19WithVhostUser: what cannot survive that way is refused by libvirt, and the hook's
// log says what can be done.
func TestKubeVirt19WithVhostUser(t *testing.T) {
	t.Parallel()
	p := newPod19(t)
	s := p.smallDisk()
	l := p.launch(nil)
	vmi := vmiOf(map[string]string{"disk.kubevirt.io/transport": "vhost-user"})
	for range 2 {
		r := l.handle19("sync", vmi, strangePlugin())
		require.NotZero(t, r.Status, r)
		require.Contains(t, r.Output, "missing source information for device vdz")
	}
	s.says("be a plugin")
}

// TestKubeVirt19AsPlugin: the container is a plugin. What it answers is defined as it is, with the
// socket, by NBD and by vhost-user, also if another plugin comes behind it.
func TestKubeVirt19AsPlugin(t *testing.T) {
	t.Parallel()
	for _, transport := range []string{"nbd", "vhost-user"} {
		t.Run(transport, func(t *testing.T) {
			p := newPod19(t)
			require.NoError(t, os.Remove(p.own()), "there is no hook sidecar")
			p.plugins, p.name = rig.SharedDir(t), "disks"
			require.NoError(t, os.Mkdir(p.own(), 0o777))
			require.NoError(t, os.Chmod(p.own(), 0o777))
			p.sidecarWithImage()()
			l := p.launch(nil)
			vmi := vmiOf(map[string]string{"disk.kubevirt.io/transport": transport})
			const dir = "/var/run/kubevirt-plugin/disks/"
			r := l.handle19("sync", vmi, pluginOf("disks", map[string]any{"domainHooks": []any{
				map[string]any{"sidecar": map[string]any{"socketPath": dir + "hook.sock"}}}}),
				strangePlugin())
			require.Zero(t, r.Status, r)
			g := l.console()
			source := onlyDisk(t, l).Source
			if transport == "nbd" {
				require.Equal(t, dir+"disk/nbd.sock", source.Network.Hosts[0].Socket)
			} else {
				require.Equal(t, dir+"disk/vhost-user/guest.raw.sock", source.VHostUser.UNIX.Path)
			}
			g.run(t, writeLast("q"))
			require.Equal(t, "qqqqqqqq", g.run(t, readLast()))
		})
	}
}
