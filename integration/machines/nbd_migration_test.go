package machines

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/integration/internal/rig"
)

// nbdMigration is a guest that writes to an export, and moves between QEMUs of this machine.
type nbdMigration struct {
	t              *testing.T
	dir            string
	kernel, initrd string
}

// machine starts a QEMU whose disk is an export at a socket, and connects to its monitor.
func (m *nbdMigration) machine(name, socket string, more ...string) *qmp {
	m.t.Helper()
	at := filepath.Join(m.dir, name)
	cmd := exec.Command("qemu-system-x86_64", append([]string{"-accel", "tcg", "-m",
		guest.MemorySize(256), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-kernel", m.kernel, "-initrd", m.initrd, "-append", "console=ttyS0",
		"-serial", "file:" + at + ".console",
		"-qmp", "unix:" + at + ".qmp,server=on,wait=off", "-device", "virtio-scsi-pci",
		"-blockdev", "driver=nbd,node-name=disk,export=vm.raw,reconnect-delay=60," +
			"server.type=unix,server.path=" + socket, "-device", "scsi-hd,drive=disk"}, more...)...)
	return startQEMU(m.t, cmd, m.dir, name)
}

// move migrates the guest from one QEMU to another one, which waits for it.
func (m *nbdMigration) move(source, destination *qmp) {
	m.t.Helper()
	source.ask(`{"execute": "migrate", "arguments": {"uri": "unix:` + m.incoming() + `"}}`)
	source.until("completed", func() bool {
		status := source.ask(`{"execute": "query-migrate"}`)["status"]
		require.NotEqual(m.t, "failed", status)
		return status == "completed"
	})
	destination.until("running", func() bool {
		return destination.ask(`{"execute": "query-status"}`)["status"] == "running"
	})
}

func (m *nbdMigration) incoming() string { return filepath.Join(m.dir, "incoming") }

// TestNBDMigration moves a guest that writes from one QEMU to another. With a socket each, the disk
// is handed over, and the first QEMU is fenced. At one socket, both have one name, so the second
// QEMU is refused until the first one has ended.
func TestNBDMigration(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-system-x86_64", "apt-get", "dpkg-deb")
	dir := t.TempDir()
	m := &nbdMigration{t: t, dir: dir}
	m.kernel, m.initrd = buildWriter(t, dir)
	image, state := writerDisk(t), t.TempDir()
	first, second := filepath.Join(dir, "first.sock"), filepath.Join(dir, "second.sock")
	d := rig.Start(t, rig.Config{DiskDir: filepath.Dir(image), StateDir: state,
		Env:  map[string]string{"COPY_MODE": "none"},
		Args: []string{"--nbd=unix:" + first, "--nbd=unix:" + second}})
	incoming := []string{"-incoming", "unix:" + m.incoming()}

	source := m.machine("source", first)
	source.says("wrote", 10)
	rig.Handover(t, state, 0, "--to=unix:"+second, "--for=30m")
	destination := m.machine("destination", second, incoming...)
	before := len(rig.BlocksSaid(source.said(), "wrote"))
	source.says("wrote", before+10)
	m.move(source, destination)
	require.Contains(t, rig.Handover(t, state, 0, "--finish"), "unix:"+first+", is fenced")
	destination.says("wrote", 10)
	require.Empty(t, rig.BlocksSaid(destination.said(), "refused"))

	// The first QEMU resumes what it still has of the guest, which writes nothing any more.
	said := source.said()
	source.ask(`{"execute": "cont"}`)
	source.says("refused", 3)
	require.LessOrEqual(t, len(rig.BlocksSaid(source.said(), "wrote")),
		len(rig.BlocksSaid(said, "wrote"))+1, "the first machine has written after the handover")
	source.ask(`{"execute": "quit"}`)
	<-source.ended
	wrote := append(rig.BlocksSaid(said, "wrote"), rig.BlocksSaid(destination.said(), "wrote")...)
	for i, n := range wrote {
		require.Equal(t, i, n, "the guest lost a block, or wrote one twice")
	}

	third := m.machine("third", second, incoming...)
	m.move(destination, third)
	third.says("refused", 1)
	// The write that was under way, the former QEMU has made, and the guest says so here.
	require.LessOrEqual(t, len(rig.BlocksSaid(third.said(), "wrote")), 1,
		"the former QEMU has the disk")
	destination.ask(`{"execute": "quit"}`)
	<-destination.ended
	third.says("wrote", 10)
	third.ask(`{"execute": "quit"}`)
	<-third.ended
	d.Stop()
	requireBlocks(t, image, len(rig.BlocksSaid(said+destination.said(), "wrote")))
}
