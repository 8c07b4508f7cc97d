package machines

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/status"
)

// TestLibvirtSchema validates the output of the library and the command against libvirt's own
// schemas: each disk within a domain, and the secrets.
func TestLibvirtSchema(t *testing.T) {
	t.Parallel()
	rig.Need(t, "virt-xml-validate", "xmllint")
	lun := libvirt.LUN{
		Portals:    []libvirt.Portal{{Host: "10.0.0.5"}},
		TargetName: "iqn.2017-01.io.kubevirt:wrapper", Number: 1,
		Credential: libvirt.Credential{Username: "vm", SecretUsage: "vm-disk"},
		Serial:     "0123456789abcdef0123",
	}
	shared, named, identified := lun, lun, lun
	shared.AccessMode, shared.Portals = libvirt.ReadShared,
		[]libvirt.Portal{{Host: "fd00::5", Port: 3261}}
	named.AccessMode, named.Portals = libvirt.WriteShared,
		[]libvirt.Portal{{Host: "disk.example.com"}}
	named.Credential = libvirt.Credential{Username: "vm",
		SecretUUID: "01234567-89ab-cdef-0123-456789abcdef"}
	identified.WWN, identified.Credential = "3c0ffee000000001", libvirt.Credential{}
	passed := identified
	passed.Serial, passed.WWN = "", ""
	var domain libvirtxml.Domain
	domain.Type, domain.Name = "qemu", "guest"
	domain.Memory = &libvirtxml.DomainMemory{Value: 256, Unit: "MiB"}
	domain.OS = &libvirtxml.DomainOS{Type: &libvirtxml.DomainOSType{Arch: "x86_64", Type: "hvm"}}
	domain.Devices = &libvirtxml.DomainDeviceList{}
	for _, c := range []struct {
		lun    libvirt.LUN
		device libvirt.Device
	}{
		{lun, libvirt.Device{}},
		{lun, libvirt.Device{Bus: libvirt.BusSATA, BootOrder: 1, IO: libvirt.IOThreads,
			Cache: libvirt.CacheUnsafe}},
		{shared, libvirt.Device{Dev: "vdb", Cache: libvirt.CacheWritethrough, IO: libvirt.IOUring,
			Discard: libvirt.DiscardIgnore}},
		{named, libvirt.Device{Dev: "vdc", Cache: libvirt.CacheDirectsync, IO: libvirt.IONative,
			DetectZeroes: libvirt.ZeroesUnmap}},
		{identified, libvirt.Device{Dev: "sdb", ErrorPolicy: libvirt.ErrorNoSpace,
			ReadErrorPolicy: libvirt.ErrorReport, BootOrder: 2}},
		{passed, libvirt.Device{Dev: "sdc", Kind: libvirt.KindLUN,
			Initiator: "iqn.2020-01.org.example:vm", Cache: libvirt.CacheDefault}},
	} {
		disk := testtool.Must(libvirt.Disk(c.lun, c.device))(t)
		domain.Devices.Disks = append(domain.Devices.Disks, *disk)
	}
	for i, e := range []libvirt.Export{
		// without Reconnect, which is younger than Debian's schema
		{Name: "fedora.qcow2", Socket: "/run/disk/nbd.sock"},
		{Name: "1", Portal: libvirt.Portal{Host: "disk.example.com"}, TLS: true, Serial: "DATA-1"},
	} {
		disk := testtool.Must(e.Disk(libvirt.Device{Dev: "vd" + string(rune('x'+i))}))(t)
		domain.Devices.Disks = append(domain.Devices.Disks, *disk)
	}
	path := rig.Program(t)
	var printed libvirtxml.DomainDisk
	require.NoError(t, printed.Unmarshal(rig.OK(t, path, "xml", "--host=10.0.0.5", "--lun=300",
		"--target-dev=sdd", "--chap-username=vm")))
	domain.Devices.Disks = append(domain.Devices.Disks, printed)
	var byNBD libvirtxml.DomainDisk
	require.NoError(t, byNBD.Unmarshal(rig.OK(t, path, "xml", "--nbd=unix:/run/disk/nbd.sock",
		"--export=a.qcow2", "--target-dev=vde", "--reconnect=0")))
	domain.Devices.Disks = append(domain.Devices.Disks, byNBD)
	document := testtool.Must(domain.Marshal())(t)
	rig.Validate(t, document, "domain")

	for _, c := range []libvirt.Credential{lun.Credential, named.Credential} {
		rig.Validate(t, testtool.Must(libvirt.SecretXML(c))(t), "secret")
	}
	rig.Validate(t, rig.OK(t, path, "xml", "--secret"), "secret")
	bad := filepath.Join(t.TempDir(), "bad.xml")
	require.NoError(t, os.WriteFile(bad,
		[]byte(strings.Replace(document, `bus="sata"`, `bus="none"`, 1)), 0o644))
	require.NotZero(t, rig.Client(t, nil, "virt-xml-validate", bad, "domain").Status,
		"the schema must refuse a wrong disk")
}

// A credential in KubeVirt's form: each part is 32 random bytes in base64url.
const (
	kubevirtUser     = "kGd2w9-1pV_7hJtq0YbNzR4cXlA6sE8uTfMiOoWvQ3I="
	kubevirtPassword = "Zx7-qT_b2LrWm0nUe9KsAaHc4VdYpJ6fXgQ1iB8oR5E="
)

// guestScript uses /dev/sda, then /dev/sdb, which comes and goes while the script runs. It prints
// one line for each finding.
const guestScript = `
await() { # await TEST...: until it holds
	until "$@"; do sleep 0.1; done
}
identity() {
	echo $1 identity: $(cat /sys/block/$1/device/vendor) $(tail -c +5 /sys/block/$1/device/vpd_pg80) $(cat /sys/block/$1/device/wwid)
}
sum() { # sum DISK SKIP COUNT: of MiB
	dd if=/dev/$1 bs=1M skip=$2 count=$3 iflag=direct 2>/dev/null | sha256sum | cut -d' ' -f1
}
use() {
	await test -b /dev/$1
	identity $1
	echo "$1 read: $(sum $1 0 4)"
	dd if=/pattern of=/dev/$1 bs=1M seek=5 oflag=direct conv=fsync 2>/dev/null && echo "$1 wrote: $(sum $1 5 1)"
	blkdiscard -o 1M -l 2M /dev/$1 && echo "$1 discarded: $(sum $1 1 2)"
}
use sda
echo 'waiting for sdb'
use sdb
echo 'sdb may go'
await test ! -e /sys/block/sdb
echo 'sdb is gone'
read -r answer
echo "sda again: $(sum sda 5 1)"
`

// TestLibvirtDomain runs a virtual machine in a real libvirtd. It uses one LUN over virtio-scsi
// with CHAP. A second LUN is attached and detached while it runs, and passed through to the guest,
// over IPv6 if the machine has it. The guest, the daemon and the images must agree.
func TestLibvirtDomain(t *testing.T) {
	t.Parallel()
	rig.Need(t, libvirtTools...)
	const mib = 1 << 20
	pattern := bytes.Repeat([]byte("kubevirt-disk in libvirt, line.\n"), mib/32)
	l := startLibvirtd(t)
	kernel, initrd, err := guest.Build(l.dir, guest.Options{
		Init: guestScript, Modules: []string{"virtio_pci", "virtio_scsi", "sd_mod"},
		Files:    map[string]string{"/pattern": string(pattern)},
		CacheDir: filepath.Join("..", "..", "cache", "guest"),
	})
	guest.Made(t, err)

	// Serve in place, so that the images show the guest's writes.
	images := filepath.Join(t.TempDir(), "disk")
	image := func(n int) string { return filepath.Join(images, fmt.Sprintf("%d.raw", n)) }
	for n := 1; n <= 2; n++ {
		rig.MakeRawSeed(t, image(n), 8*mib, uint64(n))
	}
	sum := func(n, from, size int) string {
		content := testtool.Must(os.ReadFile(image(n)))(t)
		hash := sha256.Sum256(content[from*mib : (from+size)*mib])
		return hex.EncodeToString(hash[:])
	}
	before := map[int]string{1: sum(1, 0, 4), 2: sum(2, 0, 4)}
	d := rig.Start(t, rig.Config{DiskDir: images, Env: map[string]string{
		"node.session.auth.username": kubevirtUser, "node.session.auth.password": kubevirtPassword,
		"LISTEN": "127.0.0.1:0," + rig.SecondLoopback(), "COPY_MODE": "none",
	}})
	kubevirtDisk := rig.Program(t)
	xml := func(args ...string) string {
		return rig.OK(t, kubevirtDisk,
			append([]string{"xml", "--status-url=http://" + d.Metrics}, args...)...)
	}
	const uuid, initiator = "01234567-89ab-cdef-0123-456789abcdef", "iqn.2020-01.org.example:vm"
	l.defineSecret(xml("--secret"), kubevirtPassword)
	l.defineSecret(xml("--secret", "--secret-uuid="+uuid), kubevirtPassword)

	console := l.listen("console")
	disk := xml("--lun=1", "--target-dev=sda", "--chap-username="+kubevirtUser,
		"--initiator-name="+initiator, "--error-policy=stop")
	l.virsh("define", l.file("domain.xml",
		domainXML(t, disk, kernel, initrd, console.Addr().String())))
	t.Cleanup(func() { _, _ = l.tryVirsh("destroy", "guest") }) // it outlives its libvirtd
	l.virsh("start", "guest")
	lines := readConsole(t, console)
	said := func(what string) string { return lines.Until(t, what) }

	status := d.Get("/status")
	require.Equal(t, "QEMU "+serialAndWWN(t, status, 1), said("sda identity: "))
	require.Equal(t, before[1], said("sda read: "))
	require.Equal(t, rig.SHA256(pattern), said("sda wrote: "))
	require.Equal(t, rig.SHA256(make([]byte, 2*mib)), said("sda discarded: "))

	said("waiting for sdb")
	portal := d.Portals[1]
	hot := l.file("sdb.xml", xml("--lun=2", "--target-dev=sdb", "--device=lun", "--host="+portal,
		"--chap-username="+kubevirtUser, "--secret-uuid="+uuid))
	l.virsh("attach-device", "guest", hot, "--live")
	serial, _, _ := strings.Cut(serialAndWWN(t, status, 2), " ")
	// Linux prefers the designator with vendor and serial number to a locally assigned NAA.
	require.Equal(t, "KUBEVIRT "+serial+" t10.KUBEVIRTDISK "+serial, said("sdb identity: "),
		"the guest must see the target's own identity")
	require.Equal(t, before[2], said("sdb read: "))
	require.Equal(t, rig.SHA256(pattern), said("sdb wrote: "))
	require.Equal(t, rig.SHA256(make([]byte, 2*mib)), said("sdb discarded: "))
	attached := l.virsh("dumpxml", "guest")
	said("sdb may go")
	l.virsh("detach-device", "guest", hot, "--live")
	said("sdb is gone")
	// If the domain ended now, that would also end the detaching.
	lines.Answer(t)
	require.Equal(t, rig.SHA256(pattern), said("sda again: "))
	require.Equal(t, "0", said(guest.Ended+" "))

	for n := 1; n <= 2; n++ {
		content := testtool.Must(os.ReadFile(image(n)))(t)
		require.True(t, bytes.Equal(pattern, content[5*mib:6*mib]),
			"LUN %d must have what the guest wrote", n)
		require.Equal(t, rig.SHA256(make([]byte, 2*mib)), sum(n, 1, 2))
		require.EqualValues(t, 4*mib, nextData(t, image(n), mib),
			"what the guest discarded, and the MiB after it, must be a hole")
		require.EqualValues(t, mib, d.Sample("kubevirt_disk_transferred_bytes_total", n, "write"),
			"LUN %d: the guest must have written 1 MiB and nothing else", n)
		require.GreaterOrEqual(t, d.Sample("kubevirt_disk_transferred_bytes_total", n, "read"),
			float64(4*mib))
		require.Positive(t, d.Sample("kubevirt_disk_operations_total", n, "discard"))
		require.Positive(t, d.Sample("kubevirt_disk_operations_total", n, "flush"))
		for _, operation := range []string{"read", "write", "flush", "discard"} {
			require.Zero(t, d.Sample("kubevirt_disk_operation_errors_total", n, operation),
				operation)
		}
	}
	require.Contains(t, d.Get("/metrics"), `initiator="`+initiator+`"`)

	// libvirt must show the disks that we made.
	var domain libvirtxml.Domain
	require.NoError(t, domain.Unmarshal(attached))
	require.Len(t, domain.Devices.Disks, 2)
	for i, made := range []string{disk, rig.ReadFile(t, hot)} {
		wantLUN, wantDevice := testtool.Must2(libvirt.ParseDisk(made))(t)
		gotLUN, gotDevice := testtool.Must2(libvirt.FromDisk(&domain.Devices.Disks[i]))(t)
		require.Equal(t, wantLUN, gotLUN)
		require.Equal(t, wantDevice, gotDevice)
	}
	require.NotContains(t, attached+l.virsh("secret-list"), kubevirtPassword)
}

// domainXML is a domain with one disk, which boots the guest and has its console on a Unix socket.
func domainXML(t *testing.T, disk, kernel, initrd, console string) string {
	t.Helper()
	var d libvirtxml.DomainDisk
	require.NoError(t, d.Unmarshal(disk))
	controller := uint(0)
	domain := libvirtxml.Domain{
		Type: "qemu", Name: "guest", Memory: &libvirtxml.DomainMemory{Value: 256, Unit: "MiB"},
		VCPU: &libvirtxml.DomainVCPU{Value: 1},
		OS: &libvirtxml.DomainOS{
			Type:   &libvirtxml.DomainOSType{Arch: "x86_64", Machine: "pc", Type: "hvm"},
			Kernel: kernel, Initrd: initrd,
			Cmdline: "console=ttyS0 quiet panic=-1",
		},
		// without ACPI the guest cannot power off
		Features: &libvirtxml.DomainFeatureList{ACPI: &libvirtxml.DomainFeature{}},
		Devices: &libvirtxml.DomainDeviceList{
			Controllers: []libvirtxml.DomainController{{Type: "scsi", Index: &controller,
				Model: "virtio-scsi"}},
			Disks: []libvirtxml.DomainDisk{d},
			Serials: []libvirtxml.DomainSerial{{Source: &libvirtxml.DomainChardevSource{
				UNIX: &libvirtxml.DomainChardevSourceUNIX{Mode: "connect", Path: console},
			}}},
			MemBalloon: &libvirtxml.DomainMemBalloon{Model: "none"},
		},
	}
	return testtool.Must(domain.Marshal())(t)
}

// listen listens on a socket that the domain can connect to.
func (l *libvirtd) listen(name string) net.Listener {
	l.t.Helper()
	listener := testtool.Must(net.Listen("unix", filepath.Join(l.dir, name)))(l.t)
	l.t.Cleanup(func() { listener.Close() })
	l.own()
	return listener
}

// readConsole collects the lines of the first connection.
func readConsole(t *testing.T, listener net.Listener) *rig.ConsoleLines {
	t.Helper()
	return rig.NewConsole(t, testtool.Must(listener.Accept())(t))
}

// serialAndWWN returns a LUN's serial number and NAA identifier from a status page, in the form
// that a guest prints.
func serialAndWWN(t *testing.T, page string, lun uint16) string {
	t.Helper()
	var status status.Status
	require.NoError(t, json.Unmarshal([]byte(page), &status))
	for _, one := range status.LUNs {
		if one.LUN == lun {
			return one.Serial + " naa." + one.NAA
		}
	}
	require.Fail(t, "no such LUN", page)
	return ""
}

// nextData returns the offset of a file's first data at or after an offset.
func nextData(t *testing.T, path string, from int64) int64 {
	t.Helper()
	file := testtool.Must(os.Open(path))(t)
	defer file.Close()
	return testtool.Must(unix.Seek(int(file.Fd()), from, unix.SEEK_DATA))(t)
}

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
	document := testtool.Must(domain.Marshal())(t)
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
