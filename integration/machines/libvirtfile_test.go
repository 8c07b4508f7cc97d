package machines

import (
	"encoding/xml"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/integration/internal/rig"
)

// TestLibvirtFile: libvirt and QEMU open files that the command provides, with the elements that
// the command prints: the file itself, and overlays over another file.
func TestLibvirtFile(t *testing.T) {
	t.Parallel()
	rig.Need(t, "virt-xml-validate", "xmllint", "qemu-img")
	rig.Need(t, libvirtTools...)
	path := rig.Program(t)
	l := startLibvirtd(t)
	source := filepath.Join(t.TempDir(), "source.raw")
	rig.MakeRaw(t, source, 8<<20)
	require.NoError(t, os.Mkdir(filepath.Join(l.dir, "vm"), 0o755))
	at := func(name string) string { return filepath.Join(l.dir, "vm", name) }
	rig.OK(t, "qemu-img", "convert", "-O", "qcow2", source, at("own.qcow2"))
	rig.OK(t, "qemu-img", "convert", "-O", "raw", source, at("base.raw"))
	rig.OK(t, "qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", at("base.raw"),
		at("write.qcow2"))
	rig.OK(t, "qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", at("base.raw"),
		at("read.qcow2"))
	l.own()

	domain := libvirtxml.Domain{Type: "qemu", Name: "files",
		Memory: &libvirtxml.DomainMemory{Value: 64, Unit: "MiB"},
		OS: &libvirtxml.DomainOS{Type: &libvirtxml.DomainOSType{Arch: "x86_64", Machine: "q35",
			Type: "hvm"}},
		Devices: &libvirtxml.DomainDeviceList{Emulator: "/usr/bin/qemu-system-x86_64"}}
	for _, args := range [][]string{
		{"--file=" + at("own.qcow2"), "--target-dev=vda", "--serial=OWN"},
		{"--file=" + at("base.raw"), "--overlay=" + at("write.qcow2"), "--target-dev=vdb"},
		{"--file=" + at("base.raw"), "--overlay=" + at("read.qcow2"), "--copy-mode=copy-on-read",
			"--target-dev=vdc"},
	} {
		// The directory may be in memory, where QEMU cannot pass the page cache.
		args = append([]string{"xml", "--cache=writeback"}, args...)
		var disk libvirtxml.DomainDisk
		require.NoError(t, xml.Unmarshal([]byte(rig.OK(t, path, args...)), &disk))
		domain.Devices.Disks = append(domain.Devices.Disks, disk)
	}
	document, err := domain.Marshal()
	require.NoError(t, err)
	rig.Validate(t, document, "domain")
	l.virsh("create", l.file("files.xml", document), "--paused")
	t.Cleanup(func() { _, _ = l.tryVirsh("destroy", "files") })
	blocks := l.virsh("domblklist", "files")
	for _, name := range []string{"own.qcow2", "write.qcow2", "read.qcow2"} {
		require.Contains(t, blocks, at(name))
	}
	require.Contains(t, l.virsh("dumpxml", "files"), at("base.raw"))
	require.Contains(t, l.virsh("domblkinfo", "files", "vdb"), "8388608")
}
