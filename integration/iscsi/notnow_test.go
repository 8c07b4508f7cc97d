package iscsi

import (
	"bytes"
	"fmt"
	"os/exec"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target"
)

// farTarget is a target in this process. LUN 1 has its content far away, where every byte is
// farByte. LUN 2 has its content here.
type farTarget struct {
	far    *disktest.Distant
	portal string
	busy   atomic.Int64 // commands that ended with BUSY
}

const farByte = 90

// startFarTarget serves the LUNs until the test ends. Commands are held for this long.
func startFarTarget(t *testing.T, hold time.Duration) *farTarget {
	t.Helper()
	near := disktest.NewMemory(rig.RunningSize)
	_, err := near.WriteAt(t.Context(), bytes.Repeat([]byte{farByte}, rig.RunningSize), 0)
	require.NoError(t, err)
	f := &farTarget{far: disktest.NewDistant(near)}
	one, _ := rig.RunningLUN(1, 1)
	two, _ := rig.RunningLUN(2, 2)
	one.Disk = f.far
	f.portal = startTarget(t, serving.Config{HoldTimeout: hold, Observer: f}, one, two).Portal
	return f
}

func (f *farTarget) LoginAccepted(serving.LoginEvent)  {}
func (f *farTarget) LoginRefused(serving.LoginEvent)   {}
func (f *farTarget) SessionEnded(serving.SessionEvent) {}
func (f *farTarget) MessageRejected(string)            {}
func (f *farTarget) PanicCaught()                      {}

func (f *farTarget) RequestDone(e serving.RequestEvent) {
	if e.Status == 8 {
		f.busy.Add(1)
	}
}

// outage makes the content available again after this many commands have ended with BUSY.
func (f *farTarget) outage(t *testing.T, answers int64) {
	t.Helper()
	testtool.Within(t, 2*time.Minute, func() bool { return f.busy.Load() >= answers },
		"%d commands have ended with BUSY: %d", answers, func() any { return f.busy.Load() })
	f.far.Restore()
}

// TestNotNowQEMU: QEMU repeats a command whose content is not available now, whether the target has
// waited in vain or answers at once. For one read, a part was sent before.
func TestNotNowQEMU(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-io", rig.QEMUISCSI)
	for name, cut := range map[string]func(*disktest.Distant){
		"no answer": (*disktest.Distant).Cut, "refused": (*disktest.Distant).Refuse,
	} {
		t.Run(name, func(t *testing.T) {
			f := startFarTarget(t, 300*time.Millisecond)
			_, err := f.far.ReadAt(t.Context(), make([]byte, 256<<10), 768<<10)
			require.NoError(t, err)
			cut(f.far)
			qemu := exec.CommandContext(t.Context(), "qemu-io", "-f", "raw",
				"-c", fmt.Sprintf("read -P %d 768k 512k", farByte),
				"-c", "write -P 7 4608 512", "-c", "read -P 7 4608 512",
				"iscsi://"+f.portal+"/"+target.DefaultTargetName+"/1")
			var out bytes.Buffer
			qemu.Stdout, qemu.Stderr = &out, &out
			require.NoError(t, qemu.Start())
			f.outage(t, 3)
			require.NoError(t, qemu.Wait(), "%s", &out)
			require.Contains(t, out.String(), "read 524288/524288 bytes")
			require.NotContains(t, out.String(), "failed")
		})
	}
}

// TestNotNowKernel: the Linux kernel repeats commands, too: reads, and writes of a part of a block.
// The session's other disk goes on meanwhile, and the kernel does not complain.
func TestNotNowKernel(t *testing.T) {
	testtool.NeedNightly(t)
	t.Parallel() // a guest has one processor
	f := startFarTarget(t, time.Second)
	g := rig.StartKernelGuest(t)
	g.Prelude = fmt.Sprintf(`PORTAL=%s TARGET=%s
disk() { readlink -f /dev/disk/by-path/ip-$PORTAL-iscsi-$TARGET-lun-$1; }
`, f.portal, target.DefaultTargetName)
	g.OK(t, `iscsiadm -m discovery -t sendtargets -p $PORTAL
iscsiadm -m node -T $TARGET -p $PORTAL --login
udevadm settle
test -b $(disk 1)
test -b $(disk 2)`)
	g.Warnings(t)
	f.far.Forget()
	f.far.Cut()
	g.OK(t, `cat >/tmp/far.sh <<'END'
dd if=$1 of=/tmp/read bs=64k skip=100 count=16 iflag=direct &
READ=$!
dd if=/dev/zero of=$1 bs=512 seek=24577 count=1 oflag=direct &
wait $! && wait $READ
echo $? >/tmp/result
END
setsid sh /tmp/far.sh $(disk 1) >/tmp/far.log 2>&1 </dev/null &`)
	written := g.OK(t, `dd if=/dev/urandom of=/tmp/two bs=64k count=64
dd if=/tmp/two of=$(disk 2) bs=64k oflag=direct
dd if=$(disk 2) bs=64k count=64 iflag=direct | cmp - /tmp/two
test ! -e /tmp/result`)
	f.outage(t, 3)
	g.OK(t, `for i in $(seq 3000); do test -e /tmp/result && break; sleep 0.1; done
cat /tmp/far.log
test "$(cat /tmp/result)" = 0
test "$(tr -d Z </tmp/read | wc -c)" = 0
test "$(wc -c </tmp/read)" = 1048576
dd if=$(disk 1) of=/tmp/block bs=4k skip=3072 count=1 iflag=direct
test "$(tr -d Z </tmp/block | wc -c)" = 512
test "$(cat /sys/block/$(basename $(disk 1))/device/state)" = running`)
	require.Empty(t, g.Warnings(t), written)
	g.OK(t, "iscsiadm -m node -T $TARGET -p $PORTAL --logout")
}
