package nbd

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// nbdGuestInit gives the guest its address. The host's loopback is 10.0.2.2 there.
const nbdGuestInit = `
cp /usr/share/base-passwd/passwd.master /etc/passwd
cp /usr/share/base-passwd/group.master /etc/group
ip link set eth0 up
ip addr add 10.0.2.15/24 dev eth0
`

// startNBDGuest boots a guest with the kernel's client of NBD.
func startNBDGuest(t *testing.T) *rig.KernelGuest {
	t.Helper()
	rig.Need(t, "qemu-system-x86_64", "apt-get", "dpkg-deb")
	ctx, cancel := context.WithTimeout(t.Context(), rig.GuestBoot)
	defer cancel()
	m, err := guest.Start(ctx, rig.InGuest(t, guest.MachineOptions{Dir: t.TempDir(),
		Guest: guest.Options{Init: nbdGuestInit, Modules: []string{"crc32c_intel", "ext4", "nbd"},
			Packages: []string{"base-passwd", "e2fsprogs", "nbd-client", "util-linux"}}}))
	guest.Made(t, err)
	t.Cleanup(m.Close)
	return &rig.KernelGuest{Machine: m}
}

// TestNBDKernelClient has the kernel's client use a disk with a file system, by one connection and
// by several, a second device after the daemon was killed, and a disk whose server wants TLS.
func TestNBDKernelClient(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	g := startNBDGuest(t)
	require.Contains(t, g.OK(t, "uname -r"), documented(t)["Linux of the guests"]+".")
	at := rig.FreePortal(t)
	_, port := testtool.Must2(net.SplitHostPort(at))(t)
	conf := rig.Config{DiskDir: rig.DiskDir(t, 64<<20), StateDir: t.TempDir(),
		Args: []string{"--nbd=" + at}, Env: map[string]string{"ACCESS_MODE": "write-shared"}}
	d := rig.Start(t, conf)
	g.Prelude = "server='10.0.2.2 " + port + "'\n"
	require.Contains(t, g.OK(t, "nbd-client -l $server"), "disk.raw")

	g.OK(t, `nbd-client -N disk.raw $server /dev/nbd0
test "$(blockdev --getsize64 /dev/nbd0)" = 67108864
test "$(cat /sys/block/nbd0/queue/write_cache)" = 'write back'
test "$(cat /sys/block/nbd0/queue/discard_max_bytes)" != 0
mkfs.ext4 -q /dev/nbd0
mount /dev/nbd0 /mnt
head -c 8388608 /dev/urandom >/tmp/want
cp /tmp/want /mnt/file
cp /tmp/want /mnt/gone
sync
rm /mnt/gone
fstrim /mnt
umount /mnt
nbd-client -d /dev/nbd0`)
	require.Positive(t, d.Operations("flush"), "FLUSH")
	require.Positive(t, d.Operations("discard"), "TRIM")
	d.Until("it has gone", func() bool { return len(d.Status().Sessions) == 0 })

	g.OK(t, `nbd-client -N disk.raw -C 4 $server /dev/nbd0
mount /dev/nbd0 /mnt
cmp /tmp/want /mnt/file
cp /mnt/file /mnt/copy
umount /mnt`)
	require.Len(t, d.Status().Sessions, 4)
	g.OK(t, "nbd-client -d /dev/nbd0")

	// The client does not connect again by itself: the old device has only errors, a new one has
	// what was written.
	g.OK(t, `nbd-client -N 1 $server /dev/nbd1
dd if=/tmp/want of=/dev/nbd1 bs=65536 seek=896 conv=fsync 2>/dev/null`)
	d.Crash()
	d = rig.Start(t, conf)
	g.Refused(t, "dd if=/tmp/want of=/dev/nbd1 bs=65536 seek=896 conv=fsync")
	g.OK(t, `nbd-client -d /dev/nbd1 || true
nbd-client -N 1 $server /dev/nbd2
dd if=/dev/nbd2 of=/tmp/got bs=65536 skip=896 2>/dev/null
cmp /tmp/want /tmp/got
nbd-client -d /dev/nbd2`)

	out := g.Refused(t, "nbd-client -N nothing $server /dev/nbd3")
	require.Contains(t, out, `there is no disk "nothing`) // Debian 13's loses the last character
	kernelClientOverTLS(t, g)
	require.Empty(t, strings.TrimSpace(g.OK(t,
		"dmesg --level=emerg,alert,crit,err --notime | grep -i ext4 || true")))
	d.Stop()
}

// kernelClientOverTLS has the kernel's client use a disk whose server wants certificates. Debian's
// nbd-client speaks TLS 1.2, and nothing newer.
func kernelClientOverTLS(t *testing.T, g *rig.KernelGuest) {
	dir, port := t.TempDir(), rig.FreePort(t)
	ca, key := filepath.Join(dir, "server.crt"), filepath.Join(dir, "server.key")
	rig.MakeCertificate(t, ca, key)
	cert, own := rig.MakeClientCertificate(t, dir, "kernel.example")
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 64<<20),
		Args: []string{"--nbd=127.0.0.1:" + port,
			"--nbd-tls-cert=" + ca, "--nbd-tls-key=" + key, "--nbd-client-ca=" + ca}})

	files := ""
	for name, path := range map[string]string{"ca": ca, "cert": cert, "key": own} {
		text := testtool.Must(os.ReadFile(path))(t)
		files += "cat >/tmp/" + name + " <<'PEM'\n" + string(text) + "PEM\n"
	}
	const client = "nbd-client -N disk.raw --cacertfile /tmp/ca --tlshostname 127.0.0.1 "
	at := " 10.0.2.2 " + port
	g.Refused(t, files+client+"--enable-tls"+at+" /dev/nbd4") // it shows no certificate
	g.Refused(t, "nbd-client -N disk.raw"+at+" /dev/nbd4")
	const shown = client + "--enable-tls --certfile /tmp/cert --keyfile /tmp/key"
	g.OK(t, shown+at+` /dev/nbd5
dd if=/tmp/want of=/dev/nbd5 bs=65536 seek=512 conv=fsync 2>/dev/null
nbd-client -d /dev/nbd5
`+shown+at+` /dev/nbd6
dd if=/dev/nbd6 of=/tmp/got bs=65536 skip=512 count=128 2>/dev/null
cmp /tmp/want /tmp/got`)
	sessions := d.Status().Sessions
	require.NotEmpty(t, sessions)
	require.Contains(t, sessions[0].Initiator, "cert:kernel.example")
	g.OK(t, "nbd-client -d /dev/nbd6")
	d.Stop()
}
