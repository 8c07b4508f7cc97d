package vhostuser

import (
	"crypto/md5"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// TestGuest has the kernel's driver in a guest use disks: what it sees of them, a file system, a
// disk that grows. The daemon is killed and ended under a guest that writes, and memory is plugged
// in and out meanwhile: there is no error, and every block is as it was written.
func TestGuest(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-system-x86_64", "apt-get", "dpkg-deb")
	testGuest(t, rig.Installed)
}

// TestGuestOfLaterQEMU is TestGuest with the QEMU of a later Debian.
func TestGuestOfLaterQEMU(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	rig.Need(t, "apt-get", "dpkg-deb")
	testGuest(t, rig.Later(t))
}

func testGuest(t *testing.T, generation rig.Generation) {
	s := serve(t, rig.DiskDir(t, 16<<20), "--volumes-listen=127.0.0.1:0")
	s.put(t, "vm", "size: 64Mi")
	s.put(t, "large", "size: 64Mi\nblock-size: 4096")
	s.put(t, "read", "from: {image: disk.raw}\naccess-mode: read-shared")
	g, control := boot(t, generation, s.socket("vm"), s.socket("large"), s.socket("read"),
		s.socket("disk.raw"))

	seesDisks(t, s, g)
	usesFileSystem(t, s, g)
	s.put(t, "vm", "size: 96Mi")
	g.OK(t, until(`test "$(cat /sys/block/vda/size)" = 196608`))
	growsUnseen(t, s, g, control)

	g.OK(t, "disks='vda vdb'\n"+writers)
	for i := range testtool.Rounds(3, 20) {
		g.OK(t, moreRounds(8))
		if i%3 == 1 {
			s.Stop()
		} else {
			s.Crash()
		}
		s.start(t)
	}
	plugsMemory(t, g, control)
	g.OK(t, moreRounds(8))
	g.OK(t, everythingWritten)
	usesNewSpace(t, g)
	resetsDevice(t, g, "vdd")
	turnsCacheOff(t, s, g)
	require.Empty(t, g.Warnings(t))
	sum := strings.Fields(g.OK(t, "sync; md5sum /dev/vda"))[0]
	g.Close()
	s.UntilFree()
	s.Stop()
	require.NotContains(t, s.Output(), "protocol_error")
	require.Equal(t, sum, fileSum(t, filepath.Join(s.conf.StateDir, "volume",
		".volumes", "vm", "disk.img")))
}

// until is a script that waits for a command to succeed. The time limit is that of the guest.
func until(command string) string {
	return "until " + command + "; do sleep 0.1; done"
}

// seesDisks checks what the guest's kernel knows of the disks.
func seesDisks(t *testing.T, s *server, g *rig.KernelGuest) {
	t.Helper()
	for disk, name := range map[string]string{"vda": "vm", "vdb": "large", "vdc": "read"} {
		serial := s.serial(t, name)
		g.OK(t, fmt.Sprintf(`cd /sys/block/%s
test "$(cat serial)" = %.20q
test "$(ls mq | wc -l)" = 2`, disk, serial))
	}
	g.OK(t, `cd /sys/block/vda
test "$(cat size ro queue/logical_block_size queue/physical_block_size | xargs)" = "131072 0 512 4096"
test "$(cat cache_type queue/write_cache | xargs)" = "write back write back"
test "$(cat queue/discard_granularity)" = 4096
test "$(cat queue/discard_max_bytes)" -gt 0
test "$(cat queue/write_zeroes_max_bytes)" -gt 0
cd /sys/block/vdb
test "$(cat size ro queue/logical_block_size queue/physical_block_size | xargs)" = "131072 0 4096 4096"
cd /sys/block/vdc
test "$(cat size ro | xargs)" = "32768 1"
! dd if=/dev/zero of=/dev/vdc bs=4096 count=1 2>/dev/null`)
}

func usesFileSystem(t *testing.T, s *server, g *rig.KernelGuest) {
	t.Helper()
	g.OK(t, `head -c 8388608 /dev/urandom >/tmp/want
for disk in vda vdb; do
	mkfs.ext4 -q /dev/$disk 16M
	mount /dev/$disk /mnt
	cp /tmp/want /mnt/gone
	sync
	rm /mnt/gone
	fstrim /mnt
	cp /tmp/want /mnt/file
	umount /mnt
	echo 3 >/proc/sys/vm/drop_caches
	mount /dev/$disk /mnt
	cmp /tmp/want /mnt/file
	umount /mnt
	e2fsck -fn /dev/$disk >/dev/null
	blkdiscard -z -o 33554432 -l 1048576 /dev/$disk
	cmp -n 1048576 /dev/zero /dev/$disk 0 33554432
done
cmp -n 65536 /dev/vdc /dev/zero && exit 1
md5sum /dev/vdc >/dev/null`)
	require.Positive(t, s.Operations("flush"))
	require.Positive(t, s.Operations("discard"))
}

// growsUnseen has disks grow while QEMU is not connected, and while it does not listen.
func growsUnseen(t *testing.T, s *server, g *rig.KernelGuest, control *rig.Monitor) {
	t.Helper()
	g.OK(t, `test "$(cat /sys/block/vdd/size)" = 32768`)
	s.Stop()
	s.conf.Args = append(s.conf.Args, "--size=24Mi")
	s.start(t)
	g.OK(t, until(`test "$(cat /sys/block/vdd/size)" = 49152`))
	control.Good("stop", nil)
	s.put(t, "large", "size: 80Mi\nblock-size: 4096")
	control.Good("cont", nil)
	g.OK(t, until(`test "$(cat /sys/block/vdb/size)" = 163840`))
}

// writers start programs that write their part of a disk again and again, past the caches, and
// compare it. Two wait for each request, and two have many under way.
const writers = `mkdir /tmp/writes
writer() {
	disk=$1 n=$2
	>/tmp/writes/$disk.$n
	while ! test -e /tmp/stop; do
		head -c 1048576 /dev/urandom >/tmp/want.$disk.$n
		dd if=/tmp/want.$disk.$n of=/dev/$disk bs=65536 seek=$((512 + n * 16)) conv=notrunc,fsync $3 &&
			dd if=/dev/$disk of=/tmp/got.$disk.$n bs=65536 skip=$((512 + n * 16)) count=16 iflag=direct &&
			cmp /tmp/want.$disk.$n /tmp/got.$disk.$n || echo "$disk $n" >>/tmp/failed
		echo "$disk $n" >>/tmp/rounds
	done
	rm /tmp/writes/$disk.$n
}
for disk in $disks; do
	for n in 0 1; do
		writer $disk $n oflag=direct >/dev/null 2>>/tmp/errors &
	done
	for n in 2 3; do
		writer $disk $n >/dev/null 2>>/tmp/errors &
	done
done`

// everythingWritten ends the writers, and compares what they wrote last.
const everythingWritten = `touch /tmp/stop
until test -z "$(ls /tmp/writes)"; do sleep 0.1; done
! grep . /tmp/failed
echo 3 >/proc/sys/vm/drop_caches
for want in /tmp/want.*; do
	n=${want##*.} disk=${want%.*}
	dd if=/dev/${disk##*.} of=/tmp/got bs=65536 skip=$((512 + n * 16)) count=16 2>/dev/null
	cmp $want /tmp/got
done`

// moreRounds waits until the writers have written n times more.
func moreRounds(n int) string {
	return fmt.Sprintf(`from=$(cat /tmp/rounds 2>/dev/null | wc -l)
`+until(`test -e /tmp/failed || test "$(cat /tmp/rounds | wc -l)" -ge $((from + %d))`)+`
test -e /tmp/failed || exit 0
cat /tmp/failed
grep -v records /tmp/errors
dmesg | tail -n 40
exit 1`, n)
}

// plugsMemory plugs memory in, which the guest uses, and out again.
func plugsMemory(t *testing.T, g *rig.KernelGuest, control *rig.Monitor) {
	t.Helper()
	const total = `$(sed -n 's/^MemTotal: *\([0-9]*\).*/\1/p' /proc/meminfo)`
	g.OK(t, "echo online_movable >/sys/devices/system/memory/auto_online_blocks\necho "+total+
		" >/tmp/total")
	control.Good("object-add", map[string]any{"qom-type": "memory-backend-memfd", "id": "more",
		"size": 256 << 20, "share": true})
	control.Good("device_add", map[string]any{"driver": "pc-dimm", "id": "dimm", "memdev": "more"})
	g.OK(t, until(`test `+total+` -ge $(($(cat /tmp/total) + 262144))`))
	g.OK(t, moreRounds(8)) // new pages come from the memory that can be moved
	testtool.Within(t, rig.GuestCommand, func() bool {
		// The guest may refuse while requests use the memory.
		_, _ = control.Do("device_del", map[string]any{"id": "dimm"})
		return !strings.Contains(control.Good("query-memory-devices", nil), `"dimm"`)
	}, "the memory is out")
	control.Good("object-del", map[string]any{"id": "more"})
	g.OK(t, `test `+total+` = "$(cat /tmp/total)"`)
}

func usesNewSpace(t *testing.T, g *rig.KernelGuest) {
	t.Helper()
	g.OK(t, `test "$(cat /sys/block/vda/size)" = 196608
dd if=/tmp/want of=/dev/vda bs=1048576 seek=88 conv=notrunc,fsync 2>/dev/null
dd if=/dev/vda of=/tmp/got bs=1048576 skip=88 iflag=direct 2>/dev/null
cmp /tmp/want /tmp/got`)
}

// resetsDevice has the guest take its driver off a disk in the middle of writes, which resets the
// device, and give it back. Requests under way may end with errors there, and nothing else does.
func resetsDevice(t *testing.T, g *rig.KernelGuest, disk string) {
	t.Helper()
	g.OK(t, "disk="+disk+`
cd /sys/bus/virtio/drivers/virtio_blk
for i in 1 2 3 4 5; do
	device=$(basename $(readlink -f /sys/block/$disk/device))
	rm -f /tmp/node
	mknod /tmp/node b $(tr : ' ' </sys/block/$disk/dev)
	for n in 0 1 2 3; do
		while dd if=/tmp/want of=/tmp/node bs=65536 seek=$((n * 64)) count=64 oflag=direct 			conv=notrunc; do :; done 2>/dev/null &
	done
	`+until(`test "$(xargs </sys/block/$disk/inflight)" != "0 0"`)+`
	echo $device >unbind
	wait
	echo $device >bind
	`+until("test -b /dev/$disk")+`
	dd if=/tmp/want of=/dev/$disk bs=1M seek=8 conv=notrunc,fsync 2>/dev/null
	dd if=/dev/$disk of=/tmp/got bs=1M skip=8 count=8 iflag=direct 2>/dev/null
	cmp /tmp/want /tmp/got
done
dmesg -C`)
}

// turnsCacheOff has the guest turn the write cache off: it flushes nothing any more.
func turnsCacheOff(t *testing.T, s *server, g *rig.KernelGuest) {
	t.Helper()
	g.OK(t, `echo "write through" >/sys/block/vda/cache_type
test "$(cat /sys/block/vda/cache_type)" = "write through"`)
	flushed := s.Operations("flush")
	g.OK(t, `dd if=/tmp/want of=/dev/vda bs=1048576 seek=80 conv=notrunc,fsync 2>/dev/null`)
	require.Equal(t, flushed, s.Operations("flush"))
}

// fileSum is the MD5 sum of a file.
func fileSum(t *testing.T, path string) string {
	t.Helper()
	return fmt.Sprintf("%x", md5.Sum([]byte(rig.ReadFile(t, path))))
}
