package rig

import (
	"bufio"
	"context"
	"net"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/internal/testtool"
)

// Time limits for the guest, several times what it needs on a busy machine.
const (
	GuestBoot    = 8 * time.Minute
	GuestCommand = 8 * time.Minute
)

// KernelGuest is a running guest with the kernel's initiator, udev and debugging tools. It reaches
// the host's loopback addresses under their own names. So an address that the daemon reports in a
// discovery works in the guest.
type KernelGuest struct {
	*guest.Machine
	Prelude string // variables, put before every script
}

// kernelGuestInit runs in the guest before the first command.
const kernelGuestInit = `
mount -t tracefs tracefs /sys/kernel/tracing
echo 1 >/sys/kernel/tracing/events/scsi/scsi_dispatch_cmd_start/enable
# 127.0.0.0/8 is the host's: without "lo" it is not this machine's own.
ip route add 127.0.0.0/8 via 10.0.2.2
echo 1 >/proc/sys/net/ipv4/conf/eth0/route_localnet
dmesg -C
`

// StartKernelGuest boots the guest.
func StartKernelGuest(t *testing.T) *KernelGuest {
	t.Helper()
	Need(t, "qemu-system-x86_64", "apt-get", "dpkg-deb")
	ctx, cancel := context.WithTimeout(t.Context(), GuestBoot)
	defer cancel()
	opt := guest.Initiator(kernelInitiator)
	opt.Init += kernelGuestInit
	m, err := guest.Start(ctx, InGuest(t, guest.MachineOptions{Dir: t.TempDir(), Guest: opt}))
	guest.Made(t, err)
	t.Cleanup(m.Close)
	return &KernelGuest{Machine: m}
}

// RunScript executes a script up to the first command that fails. It returns the output and the
// status.
func (g *KernelGuest) RunScript(t *testing.T, script string, line func(string)) (string, int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), GuestCommand)
	defer cancel()
	r, err := g.Run(ctx, "set -e\n"+g.Prelude+script, line)
	require.NoError(t, err, "%s\n%s", script, r.Output)
	return r.Output, r.Status
}

// OK executes a script that must succeed, and returns its output.
func (g *KernelGuest) OK(t *testing.T, script string) string {
	t.Helper()
	output, status := g.RunScript(t, script, nil)
	require.Zero(t, status, "%s\n%s", script, output)
	return output
}

// Refused executes a script that must fail, and returns its output.
func (g *KernelGuest) Refused(t *testing.T, script string) string {
	t.Helper()
	output, status := g.RunScript(t, script, nil)
	require.NotZero(t, status, "%s\n%s", script, output)
	return output
}

// Commands returns the SCSI commands that the guest's kernel has sent since the last call, as the
// kernel's trace point prints them, for example "UNMAP regions=1 raw=42 00 ...".
func (g *KernelGuest) Commands(t *testing.T) []string {
	t.Helper()
	var list []string
	for _, m := range regexp.MustCompile(`cmnd=\((.*)\)`).FindAllStringSubmatch(
		g.OK(t, "cat /sys/kernel/tracing/trace; : >/sys/kernel/tracing/trace"), -1) {
		list = append(list, m[1])
	}
	return list
}

// about matches the start of kernel messages about disks, file systems and iSCSI. Other warnings
// are about the kernel itself, or about an emulated machine that waits for its processor.
var about = regexp.MustCompile(
	`^ *(sd|scsi|iscsi|virtio|connection|session|EXT4|JBD2|Buffer I/O|I/O|blk|critical|device offline|Aborting)`)

// frame matches a line of a stack. The kernel prints one for a task that waits long, too. A stack
// that is about disks follows a message that is.
var frame = regexp.MustCompile(`^ *\S+\+0x[0-9a-f]+/0x[0-9a-f]+`)

// usual is a harmless message: the unit attention that a target establishes for each new session.
const usual = "Power-on or device reset occurred"

// Warnings returns the complaints of the guest's kernel since the last call.
func (g *KernelGuest) Warnings(t *testing.T) []string {
	t.Helper()
	var list []string
	for line := range strings.Lines(g.OK(t, "dmesg --level=emerg,alert,crit,err,warn --notime; "+
		"dmesg -C")) {
		if about.MatchString(line) && !frame.MatchString(line) && !strings.Contains(line, usual) {
			list = append(list, strings.TrimSpace(line))
		}
	}
	return list
}

const kernelInitiator = "iqn.2026-01.test:kernel"

// InGuest has a guest made of the release of the clients: its kernel and its open-iscsi are then of
// that generation, too.
func InGuest(t *testing.T, opt guest.MachineOptions) guest.MachineOptions {
	t.Helper()
	opt.Guest.CacheDir = filepath.Join("..", "..", "cache", "guest")
	if Clients != Installed {
		mirror := OK(t, filepath.Join("..", "..", "scripts", "debian-mirror.sh"))
		opt.Guest.Release = &guest.Release{Suite: Clients.Name, Mirror: strings.TrimSpace(mirror)}
	}
	return opt
}

// BootDisk makes a disk of 64 MiB from which a PC boots by itself.
func BootDisk(t *testing.T) (raw string) {
	t.Helper()
	Need(t, "apt-get", "dpkg-deb", "mke2fs")
	raw = filepath.Join(t.TempDir(), "guest.raw")
	err := guest.BootDisk(raw, 64<<20, guest.Options{Modules: []string{"virtio_blk"},
		CacheDir: filepath.Join("..", "..", "cache", "guest")})
	guest.Made(t, err)
	return raw
}

// BootFrom boots a machine from a disk called "disk", which the arguments make, and returns the
// machine and QEMU's monitor.
func BootFrom(t *testing.T, disk ...string) (*KernelGuest, *Monitor) {
	t.Helper()
	return Boot(t, guest.MachineOptions{FromDisk: true,
		Args: append(disk, "-device", "virtio-blk-pci,drive=disk,bootindex=1")})
}

// Boot boots a machine in a directory of its own, and returns it and QEMU's monitor.
func Boot(t *testing.T, opt guest.MachineOptions) (*KernelGuest, *Monitor) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), GuestBoot)
	defer cancel()
	opt.Dir = t.TempDir()
	opt = InGuest(t, opt)
	qmp := filepath.Join(opt.Dir, "qmp")
	opt.Args = append(opt.Args, "-qmp", "unix:"+qmp+",server=on,wait=off")
	m, err := guest.Start(ctx, opt)
	guest.Made(t, err)
	t.Cleanup(m.Close)
	var conn net.Conn
	testtool.Within(t, Timeout, func() bool {
		conn, err = net.Dial("unix", qmp)
		return err == nil
	}, "QEMU has a monitor: %v", func() any { return err })
	t.Cleanup(func() { conn.Close() })
	control := &Monitor{t: t, in: conn, out: bufio.NewScanner(conn)}
	require.True(t, control.out.Scan(), "the greeting")
	control.Good("qmp_capabilities", nil)
	return &KernelGuest{Machine: m}, control
}
