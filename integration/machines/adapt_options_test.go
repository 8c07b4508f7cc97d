package machines

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/adapter"
	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// TestInitSystemIsProcessOne: an init system is process 1 of a namespace. Ctrl-Alt-Del is its stop
// signal, and the machine ends when the init system switches it off.
func TestInitSystemIsProcessOne(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	dir := adapted(t, t.TempDir(), "--user=0", "--stop-signal=USR1", "--entrypoint=/sbin/init",
		"--", "init")
	m := bootAdapted(t, dir, machineConfig{noNet: true})
	m.says("the init system is process 1, and has a keyboard\n")
	m.ctrlAltDel()
	require.Equal(t, "0", m.exited())
	require.Contains(t, m.console(), "the init system switches off\n")
}

// TestReadOnlyMachine: an image FROM scratch has no directories as mount points, so it cannot be
// run from a read-only disk: that is status 125. After one start on a writable disk it has them. If
// the disk is read-only, /run and /tmp are in memory. Host name and terminal come from the kernel's
// command line.
func TestReadOnlyMachine(t *testing.T) {
	testtool.NeedNightly(t)
	t.Parallel()
	dir := adapted(t, t.TempDir(), "--hostname=other", "--", "about")
	cmdline := machine.ParamHostname + "=box " + machine.ParamTTY + "=1"
	boot := func(options string) *containerMachine {
		return bootMachine(t, machineConfig{noNet: true, cmdline: cmdline,
			disk: "format=qcow2," + options + "file=" + filepath.Join(dir, "disk.qcow2")})
	}
	m := boot("readonly=on,")
	require.Contains(t, m.word(machine.WordFailed), "cannot be mounted on /proc of the image")
	require.Equal(t, "125", m.exited())
	for _, options := range []string{"", "readonly=on,"} {
		m := boot(options)
		require.Equal(t, "0", m.exited())
		a := aboutOn(t, m.console())
		require.True(t, a.Terminal)
		require.Equal(t, "box", a.Hostname)
		require.Contains(t, a.Hosts, "\tbox\n")
		inMemory := ""
		if options != "" {
			inMemory = "tmpfs"
		}
		require.Equal(t, "ext4", a.Mounts["/"])
		require.Equal(t, []string{inMemory, inMemory},
			[]string{a.Mounts["/run"], a.Mounts["/tmp"]})
	}
}

// TestAdaptFromARegistry: an image in a registry becomes the same levels, byte for byte, as the
// layout that was pushed there.
func TestAdaptFromARegistry(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "skopeo")
	ref, boot := requireContainerImage(t), requireBootFiles(t)
	address := rig.Registry(t)
	remote := address + "/vm/web:1"
	rig.OK(t, "skopeo", "--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false", ref,
		"docker://"+remote)
	local := adapted(t, t.TempDir())
	fetched := adaptedFrom(t, remote, boot, t.TempDir(), "--insecure-registry="+address)
	files, err := os.ReadDir(local)
	require.NoError(t, err)
	levels := 0
	for _, f := range files {
		if adapter.IsLevel(f.Name()) {
			levels++
			rig.SameFile(t, filepath.Join(local, f.Name()), filepath.Join(fetched, f.Name()))
		}
	}
	require.Greater(t, levels, 2)
}
