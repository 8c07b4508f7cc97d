package vhostuser

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// fioJobs write and verify for a time, small requests in any order and large ones in turn.
const fioJobs = `[global]
filename=/dev/vda
direct=1
ioengine=libaio
verify=crc32c
verify_fatal=1
time_based
runtime=%d

[small]
rw=randwrite
bs=4k
iodepth=32
size=32m

[large]
rw=write
bs=256k
iodepth=8
offset=32m
size=96m
`

// TestFio has fio in a guest write and verify for two minutes, nightly for an hour, while the
// daemon is killed now and then.
func TestFio(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-system-x86_64", "apt-get", "dpkg-deb")
	s := serve(t, rig.DiskDir(t, 128<<20))
	const memory = 1536 // fio needs many libraries
	opt := machine(rig.Installed)
	opt.Memory, opt.Args = memory, devices(rig.Installed, memory, s.socket("disk.raw"))
	opt.Guest.Packages = append(opt.Guest.Packages, "zlib1g", "fio")
	opt.Guest.Files = map[string]string{"/root/jobs": fmt.Sprintf(fioJobs,
		testtool.Rounds(120, 3600))}
	g, _ := rig.Boot(t, opt)
	g.OK(t, "(set +e; fio /root/jobs; echo $? >/tmp/status) >/tmp/fio.log 2>&1 &")
	for kills := 0; ; kills++ {
		g.OK(t, "for i in $(seq 100); do sleep 0.1; ! test -e /tmp/status || break; done")
		if _, status := g.RunScript(t, "test -e /tmp/status", nil); status == 0 {
			t.Logf("%d kills", kills)
			break
		}
		s.Crash()
		s.start(t)
	}
	require.Equal(t, "0\n", g.OK(t, "cat /tmp/status"), g.OK(t, "cat /tmp/fio.log"))
	require.Empty(t, g.Warnings(t))
}

// TestLibblkio has the driver of libblkio, in QEMU's block layer, use disks: an implementation of
// vhost-user's front end that is not QEMU's own.
func TestLibblkio(t *testing.T) {
	t.Parallel()
	later := rig.Later(t)
	s := serve(t, rig.DiskDir(t, 64<<20))
	raw := rig.DiskDir(t, 64<<20) + "/disk.raw"
	disk := "driver=virtio-blk-vhost-user,cache.direct=on,path=" + s.socket("disk.raw")
	local := "driver=file,filename=" + raw
	rig.OK(t, later.Client("qemu-img"), "compare", "--image-opts", local, disk)
	s.UntilFree()
	args := []string{"--image-opts"}
	for _, command := range []string{"write -P 7 4k 132k", "write -f -P 8 1M 512", "write -z 2M 1M",
		"discard 8M 4M", "aio_write -P 9 16M 3M", "aio_write -P 10 20M 3M", "aio_flush", "flush",
		"read -P 7 4k 132k", "read -P 8 1M 512", "read -P 0 2M 1M", "read -P 9 16M 3M",
		"read -P 10 20M 3M"} {
		args = append(args, "-c", command)
	}
	require.NotContains(t, rig.OK(t, later.Client("qemu-io"), append(args, disk)...), "failed")
	s.UntilFree()
	rig.Pattern(t, raw, 64<<20, 0x42)
	rig.OK(t, later.Client("qemu-img"), "convert", "-n", "-W", "-m", "16", "--image-opts",
		"--target-image-opts", local, disk)
	s.UntilFree()
	rig.OK(t, later.Client("qemu-img"), "compare", "--image-opts", local, disk)
	s.Stop()
	require.NotContains(t, s.Output(), "protocol_error")
}
