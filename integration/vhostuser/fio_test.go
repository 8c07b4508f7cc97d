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
