package machines

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
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
	files := testtool.Must(os.ReadDir(local))(t)
	levels := 0
	for _, f := range files {
		if adapter.IsLevel(f.Name()) {
			levels++
			rig.SameFile(t, filepath.Join(local, f.Name()), filepath.Join(fetched, f.Name()))
		}
	}
	require.Greater(t, levels, 2)
}

// TestLibvirtRunsAContainerImage: libvirt accepts the domain that adapt writes, and runs it. The
// entry point has the console as its terminal, and IPv4 and IPv6 addresses. "virsh shutdown" sends
// the image's stop signal.
func TestLibvirtRunsAContainerImage(t *testing.T) {
	testtool.NeedNightly(t) // QEMU alone runs such a machine each time
	t.Parallel()
	rig.Need(t, libvirtTools...)
	l := startLibvirtd(t)
	dir := adapted(t, filepath.Join(l.dir, "web"), "--tty", "--name=web", "--hostname=box",
		"--", "about", "web")
	for _, file := range []string{"kernel", "initrd"} { // even if boot files are links
		require.FileExists(t, filepath.Join(dir, file))
	}
	// The terminal alone is not enough: when QEMU ends, the kernel throws away unread output.
	log := filepath.Join(l.dir, "console")
	const pty = `<console type="pty">`
	written := rig.ReadFile(t, filepath.Join(dir, "domain.xml"))
	require.Contains(t, written, pty)
	logged := l.file("domain.xml", strings.Replace(written, pty,
		pty+fmt.Sprintf(`<log file=%q append="off"/>`, log), 1))
	l.own()
	l.virsh("create", logged)
	require.FileExists(t, l.virsh("ttyconsole", "web"))
	console := func() string {
		text, err := os.ReadFile(log)
		if err != nil {
			return err.Error()
		}
		return strings.ReplaceAll(string(text), "\r\n", "\n")
	}
	says := func(text string) {
		t.Helper()
		testtool.Within(t, rig.MachineTime, func() bool {
			return strings.Contains(console(),
				text)
		},
			"the console says %q", text)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the console ends:\n%s", rig.LastLines(console(), 40))
		}
	})
	says(`"Addresses":[`)
	says("serving\n") // by now it handles its stop signal
	a := aboutOn(t, console())
	require.True(t, a.Terminal)
	require.Equal(t, "box", a.Hostname, "it has another name than DHCP gives")
	require.Contains(t, a.Hosts, "\tbox\n")
	four, six := false, false
	for _, at := range a.Addresses {
		four = four || at.Is4() && at.IsGlobalUnicast()
		six = six || at.Is6() && at.IsGlobalUnicast()
	}
	require.True(t, four && six, "%v", a.Addresses)

	l.virsh("shutdown", "web", "--mode", "acpi")
	says("stopped by its stop signal\n")
	testtool.Within(t, rig.MachineTime, func() bool {
		names, err := l.tryVirsh("list", "--all", "--name")
		return err == nil && names == ""
	}, "the domain has ended")
	says("the entry point has ended with status 42\n")
	requireClean(t, rawOf(t, filepath.Join(dir, "disk.qcow2")))
}
