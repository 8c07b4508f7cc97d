package nbd

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// randomFile writes a file of that many random bytes.
func randomFile(t *testing.T, path string, size int) string {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	content := make([]byte, size)
	disktest.Fill(content, rand.New(rand.NewPCG(uint64(size), 11)))
	require.NoError(t, os.WriteFile(path, content, 0o644))
	return path
}

// nbdBytes is how much clients of NBD have written, of the sessions that there are now.
func nbdBytes(d *rig.Daemon) (sum uint64) {
	for _, s := range d.Status().Sessions {
		if s.Protocol == "nbd" {
			sum += s.BytesWritten
		}
	}
	return sum
}

// startNbdkit runs nbdkit at a socket, which it returns.
func startNbdkit(t *testing.T, args ...string) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "nbdkit.sock")
	cmd := exec.Command("nbdkit", append([]string{"--foreground", "--unix=" + socket}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(out.String())
		}
	})
	testtool.Within(t, rig.Timeout, func() bool {
		nc, err := net.Dial("unix", socket)
		if err == nil {
			_ = nc.Close()
		}
		return err == nil
	}, "nbdkit listens")
	return socket
}

// TestNBDThroughNbdkit has nbdkit between a client and the daemon. Its error filter makes requests
// fail on the way, and the daemon is killed and started again. Its retry filter connects again each
// time, and nothing is missing in the end.
func TestNBDThroughNbdkit(t *testing.T) {
	t.Parallel()
	rig.Need(t, "nbdkit", "qemu-img")
	dir := t.TempDir()
	source := randomFile(t, filepath.Join(dir, "source.raw"), 48<<20)
	socket := filepath.Join(dir, "nbd.sock")
	conf := rig.Config{DiskDir: rig.DiskDir(t, 48<<20), StateDir: t.TempDir(),
		Args: []string{"--nbd=unix:" + socket}}
	d := rig.Start(t, conf)
	between := startNbdkit(t, "--filter=retry", "--filter=error", "--filter=delay", "nbd",
		"socket="+socket, "export=disk.raw", "retries=1000", "retry-delay=1",
		"retry-exponential=no", "error-pwrite-rate=10%", "error-pread-rate=10%", "wdelay=50ms")
	copied := make(chan rig.Result, 1)
	go func() {
		copied <- rig.Client(t, nil, "qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", source,
			"nbd+unix:///?socket="+between)
	}()
	d.Until("a part is written", func() bool { return nbdBytes(d) >= 4<<20 })
	d.Crash()
	d = rig.Start(t, conf)
	r := <-copied
	require.Zero(t, r.Status, "%s", r)
	rig.Same(t, source, "nbd+unix:///?socket="+between)
	d.Stop()
}

// TestNBDByFio has fio write and verify with its own engine, by several connections.
func TestNBDByFio(t *testing.T) {
	t.Parallel()
	rig.Need(t, "fio")
	socket := filepath.Join(t.TempDir(), "nbd.sock")
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 64<<20), StateDir: t.TempDir(),
		Args: []string{"--nbd=unix:" + socket}})
	defer d.Stop()
	for _, block := range []string{"4k-4k", "512-64k", "256k-256k"} {
		rig.OK(t, "fio", "--name=verify", "--ioengine=nbd", "--uri=nbd+unix:///?socket="+socket,
			"--rw=randrw", "--bsrange="+block, "--iodepth=32", "--size=24m", "--numjobs=2",
			"--offset_increment=32m", "--verify=crc32c", "--verify_fatal=1", "--fsync=64",
			"--thread", "--randrepeat=1", "--verify_state_save=0")
	}
}

// nbdNode describes an export for QEMU, which holds requests while the daemon is away.
func nbdNode(name, socket, export string) map[string]any {
	return map[string]any{"driver": "nbd", "node-name": name, "export": export,
		"reconnect-delay": 600, "server": map[string]any{"type": "unix", "path": socket}}
}

// writesOn are scripts for a guest that overwrites a part of its disk again and again, until a file
// is there, and compares what it has written last.
const (
	writesOn = `
(
	n=0
	until test -e /tmp/stop; do
		head -c 2097152 /dev/urandom >/tmp/want
		dd if=/tmp/want of=/dev/vda bs=65536 seek=768 conv=notrunc,fsync 2>>/tmp/dd || touch /tmp/broken
		n=$((n + 1))
		echo $n >/tmp/rounds
	done
	touch /tmp/stopped
) >/dev/null 2>&1 &
`
	writesTwiceMore = `
n=$(cat /tmp/rounds 2>/dev/null || echo 0)
until test "$(cat /tmp/rounds 2>/dev/null || echo 0)" -ge $((n + 2)); do sleep 0.1; done
test ! -e /tmp/broken
`
	comparesWrites = `
touch /tmp/stop
until test -e /tmp/stopped; do sleep 0.1; done
test ! -e /tmp/broken
echo 3 >/proc/sys/vm/drop_caches
dd if=/dev/vda of=/tmp/got bs=65536 skip=768 count=32 2>/dev/null
cmp /tmp/want /tmp/got
! dmesg | grep -iE 'I/O error|vda.*(error|fail)'
`
)

// TestNBDBoots: a machine boots from an export and writes to it all the time. The daemon is killed
// and started again below it, and the disk is mirrored to another export, on which the machine
// goes on. The guest sees no error, and no write is missing.
func TestNBDBoots(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	rig.Need(t, "qemu-system-x86_64", "qemu-img", "qemu-io")
	images := filepath.Join(t.TempDir(), "disk")
	require.NoError(t, os.MkdirAll(images, 0o755))
	require.NoError(t, os.Rename(rig.BootDisk(t), filepath.Join(images, "1-boot.raw")))
	rig.MakeRaw(t, filepath.Join(images, "2-mirror.raw"), 64<<20)
	socket := filepath.Join(t.TempDir(), "nbd.sock")
	conf := rig.Config{DiskDir: images, StateDir: t.TempDir(),
		Args: []string{"--nbd=unix:" + socket}}
	d := rig.Start(t, conf)
	g, control := rig.BootFrom(t, "-blockdev", "driver=nbd,node-name=disk,"+
		"reconnect-delay=600,export=1-boot.raw,server.type=unix,server.path="+socket)
	g.OK(t, `test "$(cat /sys/block/vda/size)" = 131072`)
	g.OK(t, writesOn+writesTwiceMore)

	d.Crash()
	d = rig.Start(t, conf)
	g.OK(t, writesTwiceMore)

	control.Good("blockdev-add", nbdNode("mirror", socket, "2-mirror.raw"))
	control.Good("blockdev-mirror", map[string]any{"job-id": "job", "device": "disk",
		"target": "mirror", "sync": "full", "copy-mode": "write-blocking"})
	control.Until("job", `"ready"`)
	control.Good("job-complete", map[string]any{"id": "job"})
	control.Until("job", `"concluded"`)
	g.OK(t, writesTwiceMore)
	g.OK(t, comparesWrites)
	g.Close()
	d.UntilFree()
	result := rig.Client(t, nil, "qemu-img", "compare", "-f", "raw", "-F", "raw",
		"nbd+unix:///1-boot.raw?socket="+socket, "nbd+unix:///2-mirror.raw?socket="+socket)
	require.Equal(t, 1, result.Status, "the machine has written to the mirror only: %s", result)
	require.Contains(t, result.Output, fmt.Sprintf("mismatch at offset %d", 768<<16))
	d.Stop()
}

// depthRun is a part of a disk as nbdinfo lists it.
type depthRun struct {
	Offset, Length int64
	Type           int
}

// TestNBDAllocationDepth: clients see what the guest has written over an image, what the image
// stores, and where nobody has anything.
func TestNBDAllocationDepth(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", "qemu-io", "nbdinfo")
	dir := t.TempDir()
	image := filepath.Join(dir, "disk", "disk.qcow2")
	require.NoError(t, os.MkdirAll(filepath.Dir(image), 0o755))
	rig.OK(t, "qemu-img", "create", "-q", "-f", "qcow2", image, "8M")
	rig.OK(t, "qemu-io", "-c", "write -P 7 1M 2M", image)
	socket := filepath.Join(dir, "nbd.sock")
	d := rig.Start(t, rig.Config{DiskDir: filepath.Dir(image), StateDir: t.TempDir(),
		Args: []string{"--nbd=unix:" + socket, "--copy-mode=copy-on-write"}})
	defer d.Stop()
	uri := "nbd+unix:///?socket=" + socket
	rig.OK(t, "qemu-io", "-f", "raw", "-d", "unmap", "-c", "write -P 8 1M 64k", "-c",
		"discard 2M 64k", "-c", "write -P 9 4M 64k", "-c", "discard 6M 64k", uri)

	var got []depthRun
	out := rig.OK(t, "nbdinfo", "--json", "--map=qemu:allocation-depth", uri)
	require.NoError(t, json.Unmarshal([]byte(out), &got), "%s", out)
	const k, m = 1 << 10, 1 << 20
	want := []depthRun{{0, m, 0}, {m, 64 * k, 1}, {m + 64*k, m - 64*k, 2}, {2 * m, 64 * k, 1},
		{2*m + 64*k, m - 64*k, 2}, {3 * m, m, 0}, {4 * m, 64 * k, 1}, {4*m + 64*k, 4*m - 64*k, 0}}
	require.Equal(t, want, got)
	require.Contains(t, rig.OK(t, "nbdinfo", "--list", uri), "qemu:allocation-depth")

	// QEMU shows a context of another kind as if it were base:allocation: 1 is a hole, 2 is zeros.
	out = rig.OK(t, "qemu-img", "map", "--output=json", "--image-opts", fmt.Sprintf("driver=nbd,"+
		"server.type=unix,server.path=%s,x-dirty-bitmap=qemu:allocation-depth", socket))
	var runs []struct {
		Start, Length int64
		Zero, Data    bool
	}
	require.NoError(t, json.Unmarshal([]byte(out), &runs), "%s", out)
	require.Len(t, runs, len(want), "%s", out)
	for i, r := range runs {
		depth := map[[2]bool]int{{false, true}: 0, {false, false}: 1, {true, true}: 2}
		require.Equal(t, want[i], depthRun{r.Start, r.Length, depth[[2]bool{r.Zero, r.Data}]})
	}
}
