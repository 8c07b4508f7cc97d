package iscsi

import (
	"fmt"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target"
)

// startTarget serves disks until the test ends.
func startTarget(t *testing.T, c serving.Config, disks ...serving.Options) *rig.RunningTarget {
	t.Helper()
	all := serving.New(c)
	s := testtool.Must(target.New(target.Options{Disks: all}))(t)
	for _, d := range disks {
		require.NoError(t, all.Add(d))
	}
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	served := testtool.Go(func() error { return s.Serve(l) })
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		require.ErrorIs(t, <-served, target.ErrServerClosed)
	})
	return &rig.RunningTarget{Server: s, InUse: all, Portal: l.Addr().String()}
}

// TestKernelLUNsComeAndGo: the kernel finds a disk, sees it grow and loses it, while it uses
// another disk in the same session.
func TestKernelLUNsComeAndGo(t *testing.T) {
	testtool.NeedNightly(t)
	t.Parallel() // a guest has one processor
	one, _ := rig.RunningLUN(1, 1)
	s := startTarget(t, serving.Config{}, one)
	g := rig.StartKernelGuest(t)
	g.Prelude = fmt.Sprintf(`PORTAL=%s TARGET=%s
# disk is the name of the kernel's disk of a LUN, once udev has made its link.
disk() {
	LINK=/dev/disk/by-path/ip-$PORTAL-iscsi-$TARGET-lun-$1
	test -e $LINK && basename $(readlink -f $LINK)
}
# await waits until a command succeeds.
await() {
	for i in $(seq 3000); do if "$@"; then return 0; fi; sleep 0.1; done
	echo "never: $*"
	dmesg | tail -20
	return 1
}
size() { test "$(blockdev --getsize64 /dev/$1)" = $2; }
`, s.Portal, target.DefaultTargetName)
	g.OK(t, `iscsiadm -m discovery -t sendtargets -p $PORTAL
iscsiadm -m node -T $TARGET -p $PORTAL --login
await disk 1
BUSY=$(disk 1)
cat >/tmp/busy.sh <<'END'
n=0
while test ! -e /tmp/stop; do
	dd if=/dev/urandom of=/tmp/want bs=64k count=16 2>/tmp/dd.log &&
	dd if=/tmp/want of=/dev/$1 bs=64k seek=$((n % 32 * 16)) oflag=direct 2>/tmp/dd.log &&
	dd if=/dev/$1 bs=64k skip=$((n % 32 * 16)) count=16 iflag=direct of=/tmp/got 2>/tmp/dd.log &&
	cmp /tmp/want /tmp/got || { cat /tmp/dd.log; echo failed >/tmp/result; exit 1; }
	n=$((n + 1))
	echo $n >/tmp/rounds
done
echo good >/tmp/result
END
setsid sh /tmp/busy.sh $BUSY >/tmp/busy.log 2>&1 </dev/null &
await test -s /tmp/rounds`)

	// The asynchronous message alone makes iscsid look for LUNs.
	d := s.Add(t, 2, 2)
	g.OK(t, fmt.Sprintf(`await disk 2
D=$(disk 2)
size $D %d
dd if=/dev/urandom of=/tmp/two bs=64k count=16
dd if=/tmp/two of=/dev/$D bs=64k oflag=direct
dd if=/dev/$D bs=64k count=16 iflag=direct | cmp - /tmp/two`, rig.RunningSize))

	// The kernel notices that a disk has grown when it looks again, without a new session.
	d.Now.Store(2 * rig.RunningSize)
	require.NoError(t, s.InUse.Resize(2))
	g.OK(t, fmt.Sprintf(`D=$(disk 2)
dd if=/dev/$D bs=64k count=1 iflag=direct of=/dev/null
dmesg | grep -q "Capacity data has changed"
iscsiadm -m session --rescan
await size $D %d
dd if=/tmp/two of=/dev/$D bs=64k seek=%d oflag=direct`, 2*rig.RunningSize, (2*rig.RunningSize>>16)-16))

	// A removed disk fails. The kernel's name for it also fails when another disk gets its number.
	// The other disk stays untouched.
	s.Remove(t, 2)
	g.OK(t, `! dd if=/tmp/two of=/dev/$(disk 2) bs=64k count=1 oflag=direct`)
	another := s.Add(t, 2, 3)
	g.OK(t, `D=$(disk 2)
! dd if=/tmp/two of=/dev/$D bs=64k count=1 oflag=direct
iscsiadm -m session --rescan
udevadm settle
! dd if=/tmp/two of=/dev/$D bs=64k count=1 oflag=direct`)
	require.Zero(t, another.Allocated(), "a write for the removed disk reached the other one")
	g.OK(t, `D=$(disk 2)
echo 1 >/sys/block/$D/device/delete
await test ! -e /sys/block/$D
iscsiadm -m session --rescan
await disk 2
D=$(disk 2)
cat /sys/block/$D/device/wwid
grep -q running-3 /sys/block/$D/device/wwid
dd if=/tmp/two of=/dev/$D bs=64k oflag=direct
dd if=/dev/$D bs=64k count=16 iflag=direct | cmp - /tmp/two`)
	require.Positive(t, another.Allocated())

	// Several at once, found by a rescan.
	for n := range uint16(5) {
		s.Add(t, 30+n, 30+uint64(n))
	}
	g.OK(t, `iscsiadm -m session --rescan
for n in 30 31 32 33 34; do await disk $n; done
ROUNDS=$(cat /tmp/rounds)
more() { test $(cat /tmp/rounds) -gt $ROUNDS; }
await more
touch /tmp/stop
await test -e /tmp/result
cat /tmp/busy.log
grep good /tmp/result
iscsiadm -m node -T $TARGET -p $PORTAL --logout`)
}

// TestQEMULUNsComeAndGo plugs LUNs into a running QEMU that were added after it started. QEMU sees
// one grow, and they are unplugged again.
func TestQEMULUNsComeAndGo(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-system-x86_64", "qemu-io", rig.QEMUISCSI)
	one, _ := rig.RunningLUN(1, 1)
	s := startTarget(t, serving.Config{}, one)
	m := rig.StartMonitor(t)
	m.Plug(s, 1)
	m.Works(1, 1, 0)
	_, err := m.Do("blockdev-add", rig.ISCSINode(s, 2))
	require.Error(t, err, "there must be no LUN 2 yet")

	d := s.Add(t, 2, 2)
	m.Plug(s, 2)
	m.Works(2, 2, 0)
	m.Works(1, 3, 0)
	d.Now.Store(2 * rig.RunningSize)
	require.NoError(t, s.InUse.Resize(2))
	m.Withdraw(2)
	m.Good("block_resize", map[string]any{"node-name": "node2", "size": 2 * rig.RunningSize})
	m.Export(2)
	m.Works(2, 4, 2*rig.RunningSize-64<<10)

	s.Remove(t, 2)
	output, _ := m.IO(2, "read 0 512")
	require.Contains(t, output, "failed")
	another := s.Add(t, 2, 3)
	output, _ = m.IO(2, "write -P 5 0 64k")
	require.Contains(t, output, "failed")
	require.Zero(t, another.Allocated(), "a write for the removed disk reached the other one")
	m.Works(1, 6, 0)
	m.Unplug(2)
	m.Plug(s, 2)
	m.Works(2, 7, 0)
	require.Positive(t, another.Allocated())
	m.Works(1, 8, 0)
}
