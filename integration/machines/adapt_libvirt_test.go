package machines

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

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
