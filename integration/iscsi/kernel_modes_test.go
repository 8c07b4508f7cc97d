package iscsi

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// kernelModes are the LUNs of TestKernelOnEveryMode, in order.
var kernelModes = []string{"copy-on-write", "copy-on-read", "clone", "none"}

// TestKernelOnEveryMode: Linux runs programs from root file systems on LUNs of all copy modes at
// once, and writes to them. It finds everything after the daemon was killed and started again.
func TestKernelOnEveryMode(t *testing.T) {
	testtool.NeedNightly(t)
	t.Parallel() // a guest has one processor
	rig.Need(t, "mke2fs", "e2fsck", "qemu-img")
	k := &kernelTest{all: t, KernelGuest: rig.StartKernelGuest(t), doc: rig.ReadDocument(t,
		"iscsiadm.md")}
	root, dir := t.TempDir(), t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(root, "bin"), 0o755))
	busybox := k.OK(t, "md5sum /bin/busybox | cut -d' ' -f1")
	rig.MakeRawSeed(t, filepath.Join(root, "data"), 24<<20, 7)
	raw := filepath.Join(t.TempDir(), "root.raw")
	rig.OK(t, "mke2fs", "-q", "-t", "ext4", "-d", root, raw, "128M")
	text := "disks:\n"
	for i, mode := range kernelModes {
		name := string(rune('1'+i)) + "-" + mode
		if mode == "none" {
			name += ".raw"
			rig.OK(t, "cp", "--sparse=always", raw, filepath.Join(dir, name))
		} else {
			name += ".qcow2"
			rig.MakeQcow2(t, raw, filepath.Join(dir, name), "", true)
		}
		text += "  " + name + ": {copy-mode: " + mode + "}\n"
	}
	settings := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(settings, []byte(text), 0o644))
	k.serve(t, configOf(dir, settings, "", "LISTEN="+rig.FreePortal(t)))
	k.follow(t, "Log in")

	// Run a program from the file system itself. First the guest copies its own busybox there,
	// which is static.
	each := func(script string) string {
		return `for n in 1 2 3 4; do D=${DISK%1}$n; M=/mnt/$n; ` + script + `; done
`
	}
	sum := strings.Fields(rig.OK(t, "md5sum", filepath.Join(root, "data")))[0]
	out := k.OK(t,
		each(
			`udevadm wait --timeout=300 $D; mkdir -p $M; mount $D $M; cp /bin/busybox $M/bin/; chroot $M /bin/busybox md5sum /data`))
	require.Equal(t, len(kernelModes), strings.Count(out, sum), out)
	k.OK(t, each(`chroot $M /bin/busybox sh -c 'echo written in '$n' >/note; sync'`))
	state := k.config.StateDir
	k.d.Crash()
	k.serve(t, configOf(dir, settings, state, "LISTEN="+k.d.Portals[0]))
	out = k.OK(t,
		each(
			`chroot $M /bin/busybox md5sum /bin/busybox; chroot $M /bin/busybox cat /note; dd if=/dev/zero of=$M/more bs=64k count=16 conv=fsync 2>/dev/null; rm $M/more; fstrim $M; umount $M`)+
			"iscsiadm -m node -T $TARGET -p $PORTAL --logout\n")
	require.Equal(t, len(kernelModes), strings.Count(out, strings.TrimSpace(busybox)), out)
	for n := range kernelModes {
		require.Contains(t, out, "written in "+string(rune('1'+n)))
	}
	// Now look on the host, without the daemon, at the disks that need no image.
	k.d.Until("the clone is complete", func() bool { return k.d.Complete(3) })
	k.d.Stop()
	e2fsck(t, filepath.Join(state, "work", "3-clone.qcow2", "disk.raw"), "-fn")
	e2fsck(t, filepath.Join(dir, "4-none.raw"), "-fn")
	require.NoError(t, exec.Command("cmp", filepath.Join(dir, "1-copy-on-write.qcow2"),
		filepath.Join(dir, "2-copy-on-read.qcow2")).Run(), "images must never be written")
}

func configOf(diskDir, settings, stateDir string, env ...string) rig.Config {
	c := rig.Config{DiskDir: diskDir, StateDir: stateDir,
		Env: map[string]string{"KUBEVIRT_DISK_CONFIG": settings}}
	for _, e := range env {
		name, value, _ := strings.Cut(e, "=")
		c.Env[name] = value
	}
	return c
}
