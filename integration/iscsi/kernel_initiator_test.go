package iscsi

import (
	"crypto/md5"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// The credentials in examples/iscsiadm.md.
var kernelCHAP = map[string]string{
	"CHAP_USERNAME": "vm", "CHAP_PASSWORD": "a-secret-of-the-vm",
	"CHAP_MUTUAL_USERNAME": "wrapper", "CHAP_MUTUAL_PASSWORD": "a-secret-of-the-target",
}

// blank makes a directory with empty raw images of 256 MiB.
func blank(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range names {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o644))
		require.NoError(t, os.Truncate(filepath.Join(dir, name), 256<<20))
	}
	return dir
}

// TestKernelInitiator follows examples/iscsiadm.md in a guest with Debian's kernel. It checks how
// the kernel sees the LUNs, and kills the daemon while the guest uses them.
func TestKernelInitiator(t *testing.T) {
	t.Parallel() // a guest has one processor
	rig.AgainNightly(t)
	rig.Need(t, "e2fsck", "debugfs")
	k := &kernelTest{all: t, KernelGuest: rig.StartKernelGuest(t), doc: rig.ReadDocument(t,
		"iscsiadm.md")}
	// Each part builds on the one before.
	parts := []struct {
		name string
		run  func(*kernelTest, *testing.T)
	}{
		{"a file system without CHAP", (*kernelTest).fileSystem},
		{"what the kernel detects", (*kernelTest).detected},
		{"blocks of 4096 bytes", (*kernelTest).longBlocks},
		{"a second initiator", (*kernelTest).second},
		{"a volume of Kubernetes", (*kernelTest).kubernetesVolume},
		{"CHAP", (*kernelTest).chap},
		{"restarts", (*kernelTest).restarts},
		{"two LUNs at once", (*kernelTest).twoLUNs},
	}
	ran := 0
	for _, part := range parts {
		if !t.Run(part.name, func(t *testing.T) { ran++; part.run(k, t) }) {
			t.Logf("the guest's kernel printed last:\n%s", rig.LastLines(k.OK(t, "dmesg"), 40))
			t.FailNow()
		}
	}
	if ran == len(parts) {
		require.Empty(t, k.doc.Unused, "no part follows these sections of the document")
	}
}

// kernelTest has the common parts of TestKernelInitiator.
type kernelTest struct {
	*rig.KernelGuest
	all    *testing.T // daemons and their files outlive a part
	doc    *rig.Document
	d      *rig.Daemon
	config rig.Config
}

// serve starts a daemon, and sets the guest's variables for it.
func (k *kernelTest) serve(t *testing.T, c rig.Config) {
	t.Helper()
	if c.StateDir == "" {
		c.StateDir = k.all.TempDir()
	}
	k.d, k.config = rig.Start(k.all, c), c
	const portal = "PORTAL=127.0.0.1:3260\n"
	variables := k.doc.Section(t, "", 0)
	require.Contains(t, variables, portal)
	k.Prelude = strings.Replace(variables, portal, "PORTAL="+k.d.Portals[0]+"\n", 1)
}

// follow runs the blocks of a section and returns their outputs.
func (k *kernelTest) follow(t *testing.T, heading string) []string {
	t.Helper()
	var out []string
	for n := range k.doc.Blocks[heading] {
		out = append(out, k.OK(t, k.doc.Section(t, heading, n)))
	}
	require.NotEmpty(t, out, "the document has no commands under %q", heading)
	return out
}

// disk is the file in which the daemon keeps the disk of an image.
func (k *kernelTest) disk(image string) string {
	return filepath.Join(k.config.StateDir, "work", image, "disk.raw")
}

// fileSystem partitions a LUN and uses it, as the document says.
func (k *kernelTest) fileSystem(t *testing.T) {
	k.serve(t, rig.Config{DiskDir: blank(k.all, "disk.raw")})
	require.Contains(t, k.follow(t, "Log in")[0],
		k.d.Portals[0]+",1 iqn.2017-01.io.kubevirt:wrapper\n")
	look := k.follow(t, "Look at it")[0]
	require.Regexp(t, `(?m)^sda +256M disk +512 +4096 +4K +512M iscsi +0x3[0-9a-f]{15}$`, look)
	require.Contains(t, look, "\nwrite back\n")
	require.Contains(t, look, "iSCSI Session State: LOGGED_IN")
	require.Contains(t, look, "Attached scsi disk sda\t\tState: running")

	written := k.OK(t, k.doc.Section(t, "Use it", 0))
	full := allocated(t, k.disk("disk.raw"))
	require.Greater(t, full, int64(8<<20), written)
	require.Contains(t, k.OK(t, k.doc.Section(t, "Use it", 1)), "trimmed")
	require.Less(t, allocated(t, k.disk("disk.raw")), full+4<<20,
		"trimmed space is still allocated")

	require.Contains(t, k.follow(t, "Look for changes")[0], "Rescanning session")
	again := k.follow(t, "Log out, and log in again")
	require.Contains(t, again[0], "/mnt/data: OK")
	require.Empty(t, k.Warnings(t))
	k.d.Stop()
	e2fsck(t, k.disk("disk.raw")+"?offset=1048576", "-fn")
}

// detected checks the kernel's view of a LUN, and the commands that it therefore uses.
func (k *kernelTest) detected(t *testing.T) {
	k.serve(t, rig.Config{DiskDir: blank(k.all, "disk.raw")})
	k.follow(t, "Log in")
	require.Equal(t, `alignment_offset:0
device/queue_depth:32
device/scsi_disk/FUA:1
device/scsi_disk/cache_type:write back
device/scsi_disk/max_write_same_blocks:524288
device/scsi_disk/protection_type:0
device/scsi_disk/provisioning_mode:unmap
device/scsi_disk/thin_provisioning:1
device/scsi_disk/zeroing_mode:writesame_16_unmap
device/state:running
device/vendor:KUBEVIRT
queue/discard_granularity:4096
queue/discard_max_bytes:536870912
queue/fua:1
queue/logical_block_size:512
queue/minimum_io_size:4096
queue/optimal_io_size:1048576
queue/physical_block_size:4096
queue/rotational:0
queue/write_cache:write back
queue/write_zeroes_max_bytes:268435456
removable:0
ro:0
`, k.OK(t, `cd /sys/block/$(basename $(readlink -f $DISK))
grep . ro removable alignment_offset device/vendor device/state device/queue_depth \
	device/scsi_disk/*/cache_type device/scsi_disk/*/FUA device/scsi_disk/*/thin_provisioning device/scsi_disk/*/protection_type \
	device/scsi_disk/*/provisioning_mode device/scsi_disk/*/zeroing_mode device/scsi_disk/*/max_write_same_blocks \
	queue/*_block_size queue/*_io_size queue/rotational queue/write_cache queue/fua queue/discard_granularity \
	queue/discard_max_bytes queue/write_zeroes_max_bytes | sed 's,scsi_disk/[^/]*,scsi_disk,; s/ *$//' | grep -v hw_ | LC_ALL=C sort`))

	// The kernel can turn the write cache off and on. It sends no flushes while the cache is off.
	k.OK(t, `cd /sys/block/$(basename $(readlink -f $DISK))
echo "write through" | tee device/scsi_disk/*/cache_type
test "$(cat queue/write_cache)" = "write through"
dd if=/dev/zero of=$DISK bs=4k count=1 conv=fsync
echo "write back" | tee device/scsi_disk/*/cache_type
test "$(cat queue/write_cache)" = "write back"`)

	// Direct writes, discards and zeroing in ranges of all sizes must read back correctly.
	k.OK(t, `dd if=/dev/urandom of=/tmp/want bs=1M count=8
dd if=/tmp/want of=$DISK bs=8M oflag=direct
dd if=/tmp/want of=/tmp/odd bs=512 count=77
dd if=/tmp/odd of=$DISK bs=512 seek=13001 oflag=direct
blkdiscard -o 1M -l 1M $DISK
blkdiscard -z -o 2560K -l 1049088 $DISK
fallocate --punch-hole -o 4M -l 1536K $DISK
dd if=/tmp/odd of=/tmp/want bs=512 seek=13001 conv=notrunc
dd if=/dev/zero of=/tmp/want bs=1M seek=1 count=1 conv=notrunc
dd if=/dev/zero of=/tmp/want bs=512 seek=5120 count=2049 conv=notrunc
dd if=/dev/zero of=/tmp/want bs=512K seek=8 count=3 conv=notrunc
test "$(dd if=$DISK bs=32k count=256 iflag=direct | md5sum)" = "$(md5sum </tmp/want)"`)
	sent := strings.Join(k.Commands(t), "\n")
	for what, pattern := range map[string]string{
		"capacity beyond 2 TiB":      `SERVICE_ACTION_IN_16 READ_CAPACITY_16`,
		"supported operation codes":  `REPORT_SUPPORTED_OPERATION_CODES`,
		"a write with FUA":           `WRITE_10 .* raw=2a 08`,
		"a flush":                    `SYNCHRONIZE_CACHE`,
		"a discard":                  `UNMAP regions=`,
		"zeroing":                    `WRITE_SAME_16 .* unmap=0`,
		"zeroing that frees storage": `WRITE_SAME_16 .* unmap=1`,
	} {
		require.True(t, regexp.MustCompile(pattern).MatchString(sent),
			"the kernel has not sent %s: %s", what, pattern)
	}
	k.OK(t, "iscsiadm -m node -T $TARGET -p $PORTAL --logout; iscsiadm -m node -o delete")
	require.Empty(t, k.Warnings(t))
}

// longBlocks uses a LUN with logical blocks of 4096 bytes.
func (k *kernelTest) longBlocks(t *testing.T) {
	k.serve(t, rig.Config{DiskDir: blank(k.all, "disk.raw"),
		Env: map[string]string{"BLOCK_SIZE": "4096"}})
	k.follow(t, "Log in")
	require.Equal(t, "4096\n4096\n268435456\n",
		k.OK(t, `blockdev --getss --getpbsz --getsize64 $DISK`))
	k.OK(t, `dd if=/dev/urandom of=/tmp/want bs=1M count=4
dd if=/tmp/want of=$DISK bs=4M seek=3 oflag=direct
dd if=/tmp/want of=$DISK bs=4k count=77 skip=9 seek=3080 oflag=direct
blkdiscard -o 13M -l 1M $DISK
blkdiscard -z -o 14684160 -l 12288 $DISK
dd if=/tmp/want of=/tmp/odd bs=4k count=77 skip=9
dd if=/tmp/odd of=/tmp/want bs=4k seek=8 conv=notrunc
dd if=/dev/zero of=/tmp/want bs=1M seek=1 count=1 conv=notrunc
dd if=/dev/zero of=/tmp/want bs=4k seek=513 count=3 conv=notrunc
test "$(dd if=$DISK bs=4M skip=3 count=1 iflag=direct | md5sum)" = "$(md5sum </tmp/want)"
mkfs.ext4 -q -F $DISK; mkdir -p /mnt/long; mount $DISK /mnt/long
dd if=/dev/urandom of=/mnt/long/data bs=64k count=80 conv=fsync; md5sum /mnt/long/data >/tmp/sum
umount /mnt/long; mount -o ro $DISK /mnt/long; md5sum -c /tmp/sum; umount /mnt/long
iscsiadm -m node -T $TARGET -p $PORTAL --logout; iscsiadm -m node -o delete`)
	require.Empty(t, k.Warnings(t))
	k.d.Stop()
	e2fsck(t, k.disk("disk.raw"), "-fn")
}

// second logs another initiator in while the first owns the LUN, like the destination of a
// migration. The second may not use the medium, but it learns about the write cache. So it flushes
// once the first has left and it owns the LUN.
func (k *kernelTest) second(t *testing.T) {
	k.serve(t, rig.Config{DiskDir: blank(k.all, "disk.raw")})
	k.follow(t, "Log in")
	k.OK(t, `dd if=/dev/urandom of=$DISK bs=4k count=1 conv=fsync
iscsiadm -m iface -I other -o new
iscsiadm -m iface -I other -o update -n iface.transport_name -v tcp
iscsiadm -m iface -I other -o update -n iface.initiatorname -v iqn.2026-01.test:other
iscsiadm -m node -o new -T $TARGET -p $PORTAL -I other
iscsiadm -m node -T $TARGET -p $PORTAL -I other --login
udevadm wait --settle --timeout=300 /sys/block/sdb`)
	require.Equal(t, "write back\n", k.OK(t, "cat /sys/block/sdb/device/scsi_disk/*/cache_type"))
	require.Contains(t, k.Refused(t, "dd if=/dev/sdb bs=4k count=1 iflag=direct"),
		"Invalid exchange")
	k.OK(t, "iscsiadm -m node -T $TARGET -p $PORTAL -I default --logout")
	k.Commands(t)
	k.OK(t, "dd if=/dev/urandom of=/dev/sdb bs=4k count=1 conv=fsync")
	require.Contains(t, strings.Join(k.Commands(t), "\n"), "SYNCHRONIZE_CACHE")
	k.OK(t, `iscsiadm -m node -T $TARGET -p $PORTAL -I other --logout
iscsiadm -m node -o delete
iscsiadm -m iface -I other -o delete`)
	require.Contains(t, k.OK(t, "dmesg; dmesg -C"), "reservation conflict")
}

// chap logs in with and without credentials, with right and wrong ones. It leaves the guest logged
// in to LUN 1 and 2, with mutual CHAP and digests.
func (k *kernelTest) chap(t *testing.T) {
	k.serve(t, rig.Config{DiskDir: blank(k.all, "disk1.raw", "disk2.raw"),
		Env: with(kernelCHAP, "LISTEN", rig.FreePortal(t))})
	discover := "iscsiadm -m discovery -t sendtargets -p $PORTAL"
	require.Contains(t, k.Refused(t, discover), "initiator failed authorization")
	k.OK(t, "iscsiadm -m node -o new -T $TARGET -p $PORTAL")
	login := "iscsiadm -m node -T $TARGET -p $PORTAL --login"
	require.Contains(t, k.Refused(t, login), "(24 - iSCSI login failed due to authorization "+
		"failure)")
	k.OK(t, "cp -p /etc/iscsi/iscsid.conf /tmp/iscsid.conf")
	oneWay, mutual := k.doc.Section(t, "With CHAP", 0), k.doc.Section(t, "With mutual CHAP", 0)
	require.Contains(t, k.Refused(t,
		strings.ReplaceAll(oneWay, kernelCHAP["CHAP_PASSWORD"], "not-the-password")),
		"initiator failed authorization")
	k.OK(t, "cp -p /tmp/iscsid.conf /etc/iscsi/iscsid.conf")

	k.OK(t, oneWay)
	require.Contains(t, k.session(t), "username_in: <empty>")
	require.Equal(t, "600\n", k.OK(t, "stat -c %a /etc/iscsi/nodes/$TARGET/*/default"),
		"other users can read the secret")

	k.OK(t, "cp -p /etc/iscsi/iscsid.conf /tmp/iscsid.conf")
	wrong := strings.ReplaceAll(mutual, kernelCHAP["CHAP_MUTUAL_PASSWORD"], "not-the-target")
	require.Contains(t, k.Refused(t, wrong), "received incorrect CHAP response from target",
		"the initiator must refuse a target that cannot prove itself")
	k.OK(t, "cp -p /tmp/iscsid.conf /etc/iscsi/iscsid.conf; "+login)
	k.OK(t, mutual)
	require.Contains(t, k.session(t), "username_in: wrapper")

	require.Regexp(t, `HeaderDigest: CRC32C\s+DataDigest: CRC32C`, k.follow(t, "With digests")[0])
	forwarded := k.doc.Section(t, "Through a Service, a port-forward or other address translation",
		0)
	require.Contains(t, forwarded, "FORWARDED=127.0.0.1:3260\n")
	out := k.OK(t, strings.Replace(forwarded, "127.0.0.1:3260", "10.0.2.2:"+k.d.Port(), 1))
	require.Contains(t, out, "tcp: [")
	for _, secret := range []string{kernelCHAP["CHAP_PASSWORD"],
		kernelCHAP["CHAP_MUTUAL_PASSWORD"]} {
		require.Contains(t, k.doc.Text, "= "+secret+"\n")
		require.NotContains(t, k.d.Output(), secret)
	}
	k.onlyLostConnections(t)
}

// onlyLostConnections checks that the kernel complained only about connections that the target
// closed, and about udev's reads of a disk that a logout removed. The kernel does not print all of
// those.
func (k *kernelTest) onlyLostConnections(t *testing.T) {
	t.Helper()
	warnings := k.Warnings(t)
	for _, warning := range warnings {
		require.Regexp(t,
			`^\w+: \d+ callbacks suppressed$|^ *connection\d+:0: detected conn error \(1020\)|^device offline error, dev \w+, sector \d+ op 0x0:\(READ\)|^Buffer I/O error on dev \w+, logical block \d+, async page read|^scsi [\d:]+: rejecting I/O to dead device$`, warning,
			"the kernel's warnings:\n%s", strings.Join(warnings, "\n"))
	}
}

func (k *kernelTest) session(t *testing.T) string { return k.OK(t, "iscsiadm -m session -P 2") }

// writer writes files, and syncs each before it prints the file's name and sum. It also rewrites
// another file all the time, so that writes are under way whenever the daemon goes.
const writer = `
mkfs.ext4 -q -F $DISK
mount $DISK /mnt
touch /tmp/load
while [ -e /tmp/load ]; do dd if=/dev/zero of=/mnt/load bs=64k count=16 oflag=direct 2>/dev/null; done &
n=0
while [ $n -lt 48 ]; do
	n=$((n+1))
	dd if=/dev/urandom of=/tmp/file bs=16k count=3 2>/dev/null
	dd if=/tmp/file of=/mnt/file$n bs=16k conv=fsync 2>/dev/null
	echo "synced file$n $(md5sum </tmp/file | cut -d' ' -f1)"
done
rm /tmp/load
wait
`

// restarts kills and stops the daemon while the guest writes. When the daemon dies, the file system
// on its disk is sound, and has every file that was synced before. So has the file system at the
// end.
func (k *kernelTest) restarts(t *testing.T) {
	k.follow(t, "When the daemon restarts")
	copied := filepath.Join(t.TempDir(), "copy.raw")
	var synced, before []string
	restart := func() {
		k.serve(t, rig.Config{DiskDir: k.config.DiskDir, StateDir: k.config.StateDir,
			Env: k.config.Env})
	}
	output, status := k.RunScript(t, writer, func(line string) {
		sum, ok := strings.CutPrefix(line, "synced ")
		if !ok {
			return
		}
		synced = append(synced, sum)
		switch len(synced) {
		case 12:
			k.d.Crash()
			before = synced[:12:12]
			require.NoError(t,
				exec.Command("cp", "--sparse=always", k.disk("disk1.raw"), copied).Run())
			restart()
		case 24:
			k.d.Stop()
			restart()
		case 36:
			k.d.Crash()
			restart()
		}
	})
	require.Zero(t, status, output)
	require.Len(t, synced, 48)
	e2fsck(t, copied, "-y", "-E", "journal_only")
	e2fsck(t, copied, "-fn")
	hasFiles(t, copied, before)

	sums := k.OK(t, "umount /mnt\ne2fsck -fn $DISK\nmount -o ro $DISK /mnt\nmd5sum "+
		"/mnt/file*\numount /mnt")
	for _, sum := range synced {
		name, want, _ := strings.Cut(sum, " ")
		require.Contains(t, sums, want+"  /mnt/"+name+"\n")
	}
	e2fsck(t, k.disk("disk1.raw"), "-fn")
	hasFiles(t, k.disk("disk1.raw"), synced)
	k.onlyLostConnections(t)
}

// twoLUNs writes to two LUNs at once.
func (k *kernelTest) twoLUNs(t *testing.T) {
	k.OK(t, `DISK2=${DISK%1}2
both() { # both COMMAND: at once, with each disk as $1 and its number as $2
	sh -ec "$1" sh $DISK 1 & first=$!
	sh -ec "$1" sh $DISK2 2
	wait $first
}
mkdir /mnt/1 /mnt/2
both 'mkfs.ext4 -q -F $1'
both 'mount $1 /mnt/$2'
both 'dd if=/dev/urandom of=/mnt/$2/data bs=64k count=80 conv=fsync; md5sum /mnt/$2/data >/tmp/sum$2'
both 'fstrim /mnt/$2'
both 'umount /mnt/$2'
both 'mount -o ro $1 /mnt/$2'
both 'md5sum -c /tmp/sum$2'
both 'umount /mnt/$2'
test "$(cut -d" " -f1 /tmp/sum1)" != "$(cut -d" " -f1 /tmp/sum2)"
iscsiadm -m node -T $TARGET -p $PORTAL --logout`)
	require.Empty(t, k.Warnings(t))
	k.d.Stop()
	e2fsck(t, k.disk("disk1.raw"), "-fn")
	e2fsck(t, k.disk("disk2.raw"), "-fn")
}

// e2fsck checks a file system. Anything that it would repair fails the test; replaying the journal
// is not a repair.
func e2fsck(t *testing.T, device string, args ...string) {
	t.Helper()
	rig.OK(t, "e2fsck", append(args, device)...)
}

// hasFiles checks files of an ext4 file system without mounting it. Each sum is a name and an MD5
// sum.
func hasFiles(t *testing.T, device string, sums []string) {
	t.Helper()
	for _, sum := range sums {
		name, want, _ := strings.Cut(sum, " ")
		cmd := exec.Command("debugfs", "-R", "cat "+name, device)
		cmd.Env = rig.ClientEnv()
		require.Equal(t, want, fmt.Sprintf("%x", md5.Sum(testtool.Must(cmd.Output())(t))), name)
	}
}
