// Package vhostuser has the tests of guests that use disks by vhost-user: the kernel's driver in
// QEMU, and libblkio.
package vhostuser

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

func TestMain(m *testing.M) { rig.Main(m) }

// server is a daemon that serves volumes and images by vhost-user. It can be started again.
type server struct {
	*rig.Daemon
	conf    rig.Config
	sockets string // directory
}

// serve starts a daemon with further arguments.
func serve(t *testing.T, images string, args ...string) *server {
	t.Helper()
	// The path of a socket is short.
	sockets := testtool.Must(os.MkdirTemp("", "vhost-"))(t)
	t.Cleanup(func() { os.RemoveAll(sockets) })
	state := t.TempDir()
	s := &server{sockets: sockets, conf: rig.Config{DiskDir: images, StateDir: state,
		Args: append([]string{"--vhost-user=" + sockets,
			"--persistent-dir=" + rig.NewVolume(t, state)}, args...)}}
	s.start(t)
	return s
}

func (s *server) start(t *testing.T) {
	t.Helper()
	s.Daemon = rig.Start(t, s.conf)
}

func (s *server) socket(disk string) string { return filepath.Join(s.sockets, disk+".sock") }

// put makes or changes a volume.
func (s *server) put(t *testing.T, name, what string) {
	t.Helper()
	var address string
	for _, entry := range s.Log() {
		if entry["msg"] == "volumes" {
			address, _ = entry["address"].(string)
		}
	}
	testtool.Within(t, rig.Timeout, func() bool {
		r := testtool.Must(http.NewRequestWithContext(t.Context(), http.MethodPut,
			"http://"+address+"/volume/"+name, strings.NewReader(what)))(t)
		answer := testtool.Must(http.DefaultClient.Do(r))(t)
		defer answer.Body.Close()
		var text bytes.Buffer
		_, _ = text.ReadFrom(answer.Body)
		require.Less(t, answer.StatusCode, 300, text.String())
		return answer.StatusCode != http.StatusAccepted
	}, "the volume %s is ready", name)
}

// serial is the serial number of a disk.
func (s *server) serial(t *testing.T, name string) string {
	t.Helper()
	for _, l := range s.Status().LUNs {
		if l.Volume == name {
			return l.Serial
		}
	}
	require.Fail(t, "no such disk", name)
	return ""
}

// reconnect makes QEMU connect again every second, or more often where it can.
func reconnect(g rig.Generation) string {
	if g.Name == rig.Installed.Name {
		return "reconnect=1"
	}
	return "reconnect-ms=100"
}

// devices are QEMU's arguments for disks at sockets, vda first, and the memory that they share.
func devices(g rig.Generation, memory int, sockets ...string) []string {
	args := []string{"-smp", "2", "-m", guest.MemorySize(memory) + ",slots=2,maxmem=2G", "-object",
		"memory-backend-memfd,share=on,id=ram,size=" + guest.MemorySize(memory),
		"-numa", "node,memdev=ram"}
	for i, socket := range sockets {
		args = append(args, "-chardev", fmt.Sprintf("socket,id=d%d,path=%s,%s", i, socket,
			reconnect(g)), "-device", fmt.Sprintf("vhost-user-blk-pci,id=disk%d,chardev=d%[1]d,"+
			"num-queues=2,addr=%x", i, 0x10+i))
	}
	return args
}

// boot starts a guest whose disks are at sockets.
func boot(t *testing.T, g rig.Generation, sockets ...string) (*rig.KernelGuest, *rig.Monitor) {
	t.Helper()
	return rig.Boot(t, machine(g, sockets...))
}

func machine(g rig.Generation, sockets ...string) guest.MachineOptions {
	const memory = 512
	return guest.MachineOptions{QEMU: g.Client("qemu-system-x86_64"), Memory: memory,
		Args: devices(g, memory, sockets...), Guest: guest.Options{
			Modules:  []string{"crc32c_intel", "ext4", "virtio_blk"},
			Packages: []string{"base-passwd", "e2fsprogs", "util-linux"}}}
}
