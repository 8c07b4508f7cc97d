package kubevirt

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// lastMiB is where the guest's disk has no file: in MiB.
const lastMiB = 63

// writeLast has the guest write a MiB of a letter, and readLast read it past its cache.
func writeLast(letter string) string {
	return fmt.Sprintf("tr '\\0' %s </dev/zero | dd of=/dev/vda bs=1M count=1 seek=%d "+
		"iflag=fullblock oflag=direct conv=fsync 2>/dev/null", letter, lastMiB)
}

func readLast() string {
	return fmt.Sprintf("dd if=/dev/vda bs=1M count=1 skip=%d iflag=direct 2>/dev/null | "+
		"tr -d '\\n' | head -c 8", lastMiB)
}

// onlyDisk is the domain's disk. There must be one.
func onlyDisk(t *testing.T, l *launcher) libvirtxml.DomainDisk {
	t.Helper()
	return disksOf(t, l, 1)[0]
}

func disksOf(t *testing.T, l *launcher, count int) []libvirtxml.DomainDisk {
	t.Helper()
	var domain libvirtxml.Domain
	require.NoError(t, domain.Unmarshal(l.domain()))
	require.Len(t, domain.Devices.Disks, count)
	return domain.Devices.Disks
}

// TestKubeVirtBootsAnImage: an image with two disks is named as hook sidecar of an instance, and
// KubeVirt's launcher boots a guest from the first. The container has no network, no rights, and
// the memory that KubeVirt gives a sidecar. When the instance is stopped, the container ends, too.
func TestKubeVirtBootsAnImage(t *testing.T) {
	t.Parallel()
	p := newLauncherPod(t)
	launcherPrograms(t)
	e := rig.NeedImages(t)
	raw := bootableDisk(t)
	context := t.TempDir()
	rig.MakeQcow2(t, raw, filepath.Join(context, "guest.qcow2"), "", true)
	more := strings.Repeat("second\n", 4<<20/7)
	require.NoError(t, os.WriteFile(filepath.Join(context, "more.raw"), []byte(more), 0o644))
	require.NoError(t, os.Truncate(filepath.Join(context, "more.raw"), 8<<20))
	image := e.BuildFrom(t, context, "ADD guest.qcow2 more.raw /disk/")
	s := e.NewContainer(t, image, append([]string{"--network=none", "--user=107:107",
		"--env=CONTAINER_NAME=" + p.name, "--volume=" + p.own() + ":" + hooksDir}, rig.Hardened...))
	s.Start(t)
	l := p.launch(vmiOf(nil))
	g := l.console()
	require.Equal(t, "131072", g.run(t, "cat /sys/block/vda/size"))
	g.run(t, writeLast("k"))
	require.Equal(t, "kkkkkkkk", g.run(t, readLast()))
	require.Equal(t, "16384", g.run(t, "cat /sys/block/vdb/size"))
	require.Equal(t, "second", g.run(t, "dd if=/dev/vdb bs=7 count=1 2>/dev/null"))
	for i, disk := range disksOf(t, l, 2) {
		name := []string{"vda", "vdb"}[i]
		require.Equal(t, "nbd", disk.Source.Network.Protocol)
		require.Equal(t, "virtio", disk.Target.Bus)
		require.Contains(t, g.run(t, "cat /sys/block/"+name+"/serial"), disk.Serial)
	}

	l.stop()
	require.Zero(t, s.Wait(t), s.Log(t))
	require.Empty(t, p.sockets())
	require.Zero(t, l.wait(), "the pod finishes")
}

// TestKubeVirtKeepsADisk: the disk of an instance is streamed from a registry, and kept in a claim.
// The next instance with the claim has what the guest wrote, without the registry. Kubernetes may
// stop the sidecar before the launcher: the disk is served until QEMU has ended.
func TestKubeVirtKeepsADisk(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry")
	p := newLauncherPod(t)
	launcherPrograms(t)
	raw := bootableDisk(t)
	w := rig.NewWatchedRegistry(t)
	rig.Push(t, w.Address, raw)
	claim := rig.SharedDir(t)
	args := []string{"--image=" + w.Proxy + "/vm/fedora:42", "--insecure-registry=" + w.Proxy,
		"--persistent-dir=" + claim}
	s := p.sidecar(nil, args...)
	l := p.launch(vmiOf(nil))
	g := l.console()
	g.run(t, writeLast("c"))

	s.signal(syscall.SIGTERM)
	s.says("stopping when the machine has ended")
	g.run(t, writeLast("d"))
	require.Equal(t, "dddddddd", g.run(t, readLast()))
	require.True(t, s.running())
	l.stop()
	require.Zero(t, s.wait(), "the sidecar ends")

	s = p.sidecar(nil, args...)
	l = p.launch(vmiOf(nil))
	g = l.console()
	require.Equal(t, "dddddddd", g.run(t, readLast()))
	l.stop()
	require.Zero(t, s.wait(), "the sidecar ends")
}

// TestKubeVirtReplacesADisk: a disk that the instance declares has our content, and KubeVirt's
// target, serial and boot order. Then the daemon is killed and started again: the guest waits, and
// goes on.
func TestKubeVirtReplacesADisk(t *testing.T) {
	t.Parallel()
	p := newLauncherPod(t)
	launcherPrograms(t)
	dir, work := rig.SharedDir(t), rig.SharedDir(t)
	require.NoError(t, os.Rename(bootableDisk(t), filepath.Join(dir, "guest.raw")))
	settings := []string{"DISK_DIR=" + dir, "WORK_DIR=" + work}
	s := p.sidecar(settings)
	vmi := vmiOf(map[string]string{"disk.kubevirt.io/replace": "root"})
	withDisk(vmi, map[string]any{"name": "root", "bootOrder": 1, "serial": "ROOT-1",
		"disk": map[string]any{"bus": "virtio"}},
		map[string]any{"name": "root", "emptyDisk": map[string]any{"capacity": "1Mi"}})
	l := p.launch(vmi)
	g := l.console()
	require.Equal(t, "ROOT-1", g.run(t, "cat /sys/block/vda/serial"))
	disk := onlyDisk(t, l)
	require.EqualValues(t, 1, disk.Boot.Order)
	require.Equal(t, "ua-root", disk.Alias.Name)
	g.run(t, writeLast("m"))

	// libvirt 9.0, as Debian 12 has it, tells QEMU no time to wait: the guest is paused. It goes on
	// with virt-handler, which asks for a running machine again and again: QEMU connects beside the
	// first request after that, which still fails.
	s.kill()
	require.NoError(t, testtool.Err(g.Conn.Write([]byte(readLast()+"\n"))))
	l.untilPaused()
	s = p.sidecar(settings)
	p.hook(s)
	testtool.Eventually(t, func() bool {
		r := l.handler("sync", vmi)
		require.Zero(t, r.Status, r)
		return strings.Contains(g.log(), "mmmmmmmm")
	}, "the guest goes on")
	require.Equal(t, "0", g.Until(t, "status "))
	l.stop()
	require.Zero(t, s.wait(), "the sidecar ends")
}

// withDisk adds a disk and its volume to an instance.
func withDisk(vmi, disk, volume map[string]any) {
	spec := vmi["spec"].(map[string]any)
	spec["volumes"] = append(spec["volumes"].([]any), volume)
	devices := spec["domain"].(map[string]any)["devices"].(map[string]any)
	devices["disks"] = append(devices["disks"].([]any), disk)
}

// TestKubeVirtByVhostUser: an instance asks for vhost-user. KubeVirt's launcher defines the domain
// twice and starts it, and the guest boots. The daemon is killed and started again: the guest waits
// for it, and is not paused.
func TestKubeVirtByVhostUser(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	p := newLauncherPod(t)
	launcherPrograms(t)
	dir, work := rig.SharedDir(t), rig.SharedDir(t)
	require.NoError(t, os.Rename(bootableDisk(t), filepath.Join(dir, "guest.raw")))
	settings := []string{"DISK_DIR=" + dir, "WORK_DIR=" + work}
	s := p.sidecar(settings)
	l := p.launch(vmiOf(map[string]string{"disk.kubevirt.io/transport": "vhost-user"}))
	g := l.console()
	disk := onlyDisk(t, l)
	require.Equal(t, hooksDir+"/hook-sidecar-0/disk/vhost-user/guest.raw.sock",
		disk.Source.VHostUser.UNIX.Path)
	require.Contains(t, l.domain(), "<access mode='shared'/>")
	require.Equal(t, "131072", g.run(t, "cat /sys/block/vda/size"))
	require.NotEmpty(t, g.run(t, "cat /sys/block/vda/serial"))
	g.run(t, writeLast("v"))

	s.kill()
	from := len(g.Seen)
	require.NoError(t, testtool.Err(g.Conn.Write([]byte(readLast()+"\n"))))
	s = p.sidecar(settings)
	require.Equal(t, "0", g.Until(t, "status "))
	require.Contains(t, strings.Join(g.Seen[from:], "\n"), "vvvvvvvv")
	require.Equal(t, "vvvvvvvv", g.run(t, readLast()))
	l.stop()
	require.Zero(t, s.wait(), "the sidecar ends")
	require.Empty(t, p.sockets())
}

// TestKubeVirtSaysWhatIsWrong: a disk that cannot be served ends the launcher. Its log says why.
func TestKubeVirtSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	p := newLauncherPod(t)
	launcherPrograms(t)
	dir := rig.SharedDir(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "broken.qcow2"), []byte("QFI\xfb no"),
		0o644))
	s := p.sidecar([]string{"DISK_DIR=" + dir, "WORK_DIR=" + rig.SharedDir(t)})
	l := p.launch(vmiOf(nil))
	require.NotZero(t, l.wait())
	require.Contains(t, l.output.String(), "broken.qcow2")
	s.signal(syscall.SIGTERM) // Kubernetes ends the others when it removes the pod
	require.Equal(t, 1, s.wait())
}

// TestKubeVirtTwoSidecars: an instance names two hook sidecars, and has the disks of both, in their
// order.
func TestKubeVirtTwoSidecars(t *testing.T) {
	t.Parallel()
	p := newLauncherPod(t)
	launcherPrograms(t)
	p.smallDisk()
	p.withSidecar(1).smallDisk()
	l := p.launch(vmiOf(nil))
	testtool.Within(t, rig.MachineTime, func() bool {
		require.True(t, l.running(), "the launcher has ended:\n%s",
			rig.LastLines(l.output.String(), 30))
		out, err := l.virsh("domstate", "default_vm")
		return err == nil && strings.Contains(out, "running")
	}, "the machine runs")
	var domain libvirtxml.Domain
	require.NoError(t, domain.Unmarshal(l.domain()))
	var sockets []string
	for _, d := range domain.Devices.Disks {
		sockets = append(sockets, d.Source.Network.Hosts[0].Socket)
	}
	require.Equal(t, []string{hooksDir + "/hook-sidecar-0/disk/nbd.sock",
		hooksDir + "/hook-sidecar-1/disk/nbd.sock"}, sockets)
}
