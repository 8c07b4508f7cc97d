package images

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/integration/objects"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/libvirt"
)

// launcherBinary builds the stand-in for KubeVirt's program, in a directory of its own.
func launcherBinary(t *testing.T) (dir string) {
	t.Helper()
	dir = rig.SharedDir(t)
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-o",
		filepath.Join(dir, "container-disk"), "./integration/containerdisk")
	cmd.Dir, cmd.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return dir
}

// TestImageAsContainerDisk runs a user's image as today's KubeVirt runs a containerDisk volume: as
// user 107 without capabilities, with a volume with KubeVirt's program over /usr/bin; that program
// runs instead of the image's entry point. The node's agent finds the process by a socket, and the
// only file in /disk by the process. QEMU's user opens the file as the backing file of an overlay.
func TestImageAsContainerDisk(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img", "qemu-io")
	image, source := oneDisk(t, e)
	programs, shared := launcherBinary(t), rig.SharedDir(t)
	const inside = "/var/run/kubevirt/container-disks"
	options := func(args string) []string {
		return append([]string{"--network=none", "--user=107:107",
			`--entrypoint=["/usr/bin/container-disk",` + args + `]`,
			"--volume=" + programs + ":/usr/bin:ro", "--volume=" + shared + ":" + inside},
			rig.Hardened...)
	}
	first := e.NewContainer(t, image, options(`"--no-op"`))
	first.Start(t)
	require.Zero(t, first.Wait(t), first.Log(t))

	c := e.NewContainer(t, image, options(`"--copy-path","`+inside+`/disk_0"`))
	c.Start(t)
	socket := filepath.Join(shared, "disk_0.sock")
	pid := 0
	testtool.Within(t, rig.Timeout, func() bool {
		pid = peerOf(socket)
		return pid != 0
	}, "a process listens at the socket: %s", func() any { return c.Log(t) })
	require.Equal(t, c.PID(t), strconv.Itoa(pid))

	dir := filepath.Join("/proc", strconv.Itoa(pid), "root", "disk")
	entries := testtool.Must(os.ReadDir(dir))(t)
	require.Len(t, entries, 1, "KubeVirt takes an image with one file")
	file := filepath.Join(dir, entries[0].Name())
	overlay := filepath.Join(shared, "overlay.qcow2")
	for _, args := range [][]string{
		{"qemu-img", "info", file},
		{"qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", file, overlay},
		{"qemu-io", "-f", "qcow2", "-c", "write -P 0x5a 0 64k", overlay},
		{"qemu-io", "-r", "-f", "qcow2", "-c", "read -P 0x5a 0 64k", overlay},
	} {
		out, err := rig.AsQEMU(t, args[0], args[1:]...)
		require.NoError(t, err, "%v: %s", args, out)
	}
	require.Contains(t, rig.OK(t, "qemu-img", "compare", "-f", "raw", "-F", "qcow2", source, file),
		"identical", "the image is as it was")
	_, err := rig.AsQEMU(t, "qemu-io", "-f", "qcow2", "-c", "write 0 64k", file)
	require.Error(t, err, "nobody can write to the image itself")

	require.NoError(t, os.Remove(socket))
	require.Zero(t, c.Wait(t))
}

// peerOf returns the process that listens on a socket, or 0.
func peerOf(socket string) int {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return 0
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0
	}
	pid := 0
	_ = raw.Control(func(fd uintptr) {
		peer, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err == nil {
			pid = int(peer.Pid)
		}
	})
	return pid
}

// TestImageProvidesAFile runs a user's image like the controller whose wrapper made a file: with
// the entry point without arguments, COPY_PATH on a shared directory of the host, and `cat
// /tmp/healthy` as readiness probe.
func TestImageProvidesAFile(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img", "qemu-io")
	image, source := oneDisk(t, e)
	shared := rig.SharedDir(t)
	options := append(rig.WithEnv("COPY_PATH=/shared/vm/disk-image"), "--network=none",
		`--entrypoint=["/entry-point.sh"]`, "--volume="+shared+":/shared", "--cap-drop=all")
	c := e.NewContainer(t, image, options)
	c.Start(t)
	// A container that starts again in place still has the file of its first start.
	ready := func(c *rig.Container, starts int) {
		t.Helper()
		testtool.Within(t, rig.Timeout, func() bool {
			return c.Exec(t, "cat", "/tmp/healthy").Status == 0 &&
				strings.Count(c.Log(t), `"msg":"the disk `) == starts // is ready, or is kept
		}, "it is healthy: %s", func() any { return c.Log(t) })
	}
	ready(c, 1)
	file := filepath.Join(shared, "vm", "disk-image.qcow2")
	require.Contains(t, rig.OK(t, "qemu-img", "compare", "-f", "raw", "-F", "qcow2", source, file),
		"identical")
	out, err := rig.AsQEMU(t, "qemu-io", "-f", "qcow2", "-c", "write -P 0x5a 0 64k", file)
	require.NoError(t, err, out)
	require.Zero(t, c.Exec(t, "kubevirt-disk", "healthcheck").Status)

	// The container is killed, and started again in place.
	e.OK(t, "podman", "kill", "--signal=KILL", c.Name)
	c.Wait(t)
	c.Start(t)
	ready(c, 2)
	out, err = rig.AsQEMU(t, "qemu-io", "-r", "-f", "qcow2", "-c", "read -P 0x5a 0 64k", file)
	require.NoError(t, err, out)
	require.Zero(t, c.Stop(t))
	require.NoFileExists(t, file)

	// The file is removed.
	c.Start(t)
	ready(c, 3)
	require.NoError(t, os.Remove(file))
	require.Zero(t, c.Wait(t))
}

// TestVMDisks treats two disks of a VM specification like a kubelet and a libvirtd, with what
// package vmdisk makes of them: the containers run as the pod says, and the LUNs in the domain
// exist, with the pod's credential.
func TestVMDisks(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-io", "ip", rig.QEMUISCSI, "virt-xml-validate")
	image, _ := oneDisk(t, e)
	n := rig.Namespace(t)
	text := strings.ReplaceAll(rig.ReadFile(t, rig.HandlerMade+"domain.xml"), "192.0.2.1", n.Host)
	rig.Validate(t, text, "domain")

	domain := &libvirtxml.Domain{}
	require.NoError(t, domain.Unmarshal(text))
	made := testtool.Must(objects.Read(rig.HandlerMade + "pod.yaml"))(t)
	pod := made[0].PodOf()
	require.Len(t, pod.Spec.InitContainers, 2)

	secrets := map[string]map[string]string{"chap": {
		"node.session.auth.username": "vm", "node.session.auth.password": "0123456789abcdef"}}
	for i, c := range pod.Spec.InitContainers {
		one := *pod
		c.Name = "disk" // as runPod looks for
		one.Spec.InitContainers = []objects.Container{c}
		running, places := runPod(t, e, image, n, &one, secrets)
		lun, _ := testtool.Must2(libvirt.FromDisk(&domain.Devices.Disks[i]))(t)
		url := fmt.Sprintf("iscsi://vm%%%s@%s/%s/%d", "0123456789abcdef",
			lun.Portals[0], lun.TargetName, lun.Number)
		var last rig.Result
		testtool.Within(t, rig.Timeout, func() bool {
			last = rig.Client(t, nil, "qemu-io", "-f", "raw", "-c", "write -P 5 0 64k", "-c",
				"read -P 5 0 64k", url)
			return last.Status == 0 || !running.Running(t)
		}, "the disk is served: %s", func() any { return last })
		require.True(t, running.Running(t))
		require.NotZero(t, rig.Client(t, nil, "qemu-io", "-f", "raw", "-c", "read 0 64k",
			strings.Replace(url, "0123456789abcdef", "wrong-password", 1)).Status)
		if domain.Devices.Disks[i].Target.Dev == "vdb" {
			require.FileExists(t, filepath.Join(places["disk-vdb-data"], "disk.img"))
		}
		require.Zero(t, running.Stop(t))
	}
}
