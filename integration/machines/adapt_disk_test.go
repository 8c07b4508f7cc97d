package machines

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/adapter"
	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// rawOf writes a machine's disk into a raw file.
func rawOf(t *testing.T, disk string) string {
	t.Helper()
	raw := filepath.Join(t.TempDir(), "disk.raw")
	rig.OK(t, "qemu-img", "convert", "-O", "raw", disk, raw)
	return raw
}

// requireClean checks the file system of a raw file: e2fsck finds nothing.
func requireClean(t *testing.T, raw string) {
	t.Helper()
	out := rig.OK(t, "e2fsck", "-fn", raw)
	for _, sign := range []string{"Fix?", "IGNORED", "Clear?", "WARNING"} {
		require.NotContains(t, out, sign)
	}
}

// TestMachineLosesItsPower kills QEMU while a guest writes to a file system that has grown. The
// journal repairs it, for e2fsck as for the next start, and all synced data is there.
func TestMachineLosesItsPower(t *testing.T) {
	testtool.NeedNightly(t)
	t.Parallel()
	rig.Need(t, "e2fsck")
	dir := adapted(t, t.TempDir(), "--size=12Gi", "--", "stress")
	m := bootAdapted(t, dir, machineConfig{noNet: true})
	m.says("synced 5\n")
	m.kill()
	disk := filepath.Join(dir, "disk.qcow2")
	rig.OK(t, "qemu-img", "check", "-q", disk)
	raw := rawOf(t, disk)
	r := rig.Client(t, nil, "e2fsck", "-p", raw)
	require.Contains(t, r.Output, "recovering journal", "the machine was killed while it wrote")
	require.LessOrEqual(t, r.Status, 1, "%s", r)
	requireClean(t, raw)

	m = bootAdapted(t, dir, machineConfig{noNet: true})
	require.Equal(t, "0", m.exited(), m.console())
	found := regexp.MustCompile(`checked ([0-9]+)\n`).FindStringSubmatch(m.console())
	require.Len(t, found, 2)
	require.GreaterOrEqual(t, testtool.Must(strconv.Atoi(found[1]))(t), 3)
	requireClean(t, rawOf(t, disk))
}

// savedImage is an image as docker saves it. The test's program is in a layer above a layer with a
// file of this many bytes that nobody reads.
func savedImage(t *testing.T, program string, unread int) string {
	t.Helper()
	noise := make([]byte, unread)
	_, _ = rand.NewChaCha8([32]byte{3}).Read(noise)
	archive := func(w io.Writer, name string, mode int64, content []byte) {
		t.Helper()
		out := tar.NewWriter(w)
		require.NoError(t, out.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg,
			Mode: mode, Size: int64(len(content))}))
		require.NoError(t, testtool.Err(out.Write(content)))
		require.NoError(t, out.Flush())
	}
	var layers [2]bytes.Buffer
	archive(&layers[0], "unread", 0o644, noise)
	archive(&layers[1], "container", 0o755, []byte(rig.ReadFile(t, program)))
	var ids []string
	for i := range layers {
		layers[i].Write(make([]byte, 1024)) // the end of an archive
		ids = append(ids, fmt.Sprintf("sha256:%x", sha256.Sum256(layers[i].Bytes())))
	}
	config, err := json.Marshal(map[string]any{"os": "linux", "architecture": runtime.GOARCH,
		"config": map[string]any{"Entrypoint": []string{"/container"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": ids}})
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "saved.tar")
	f := testtool.Must(os.Create(file))(t)
	defer f.Close()
	archive(f, "config.json", 0o644, config)
	archive(f, "one.tar", 0o644, layers[0].Bytes())
	archive(f, "two.tar", 0o644, layers[1].Bytes())
	archive(f, "manifest.json", 0o644, []byte(`[{"Config":"config.json",
		"RepoTags":["saved:1"],"Layers":["one.tar","two.tar"]}]`))
	require.NoError(t, testtool.Err(f.Write(make([]byte, 1024))))
	return "docker-archive:" + file
}

// TestLevelsAreStreamed: levels are pushed like any disk. The machine then boots from a LUN whose
// content is fetched as it is read, and an image with the same lower layers shares their blobs.
func TestLevelsAreStreamed(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	rig.Need(t, "docker-registry", rig.QEMUISCSI)
	const unread = 24 << 20
	ref, boot := requireContainerImage(t), requireBootFiles(t)
	program := filepath.Join(filepath.Dir(strings.TrimPrefix(ref, "oci:")), "container")
	ref = savedImage(t, program, unread)
	w := rig.NewWatchedRegistry(t)
	var layers [2][]rig.Layer
	for i, status := range []string{"16", "17"} {
		dir := adaptedFrom(t, ref, boot, t.TempDir(), "--", "exit", status)
		tops := testtool.Must(filepath.Glob(filepath.Join(dir, "image-*.qcow2")))(t)
		require.Len(t, tops, 1)
		rig.MustRun(t, nil, "push", "--base=none", "--insecure-registry="+w.Address, tops[0],
			w.Address+"/vm/machine:"+status)
		layers[i] = w.Layers(t, "vm/machine", status)
	}
	common, largest := 0, int64(0)
	for _, l := range layers[0] {
		if slices.Contains(layers[1], l) {
			common++
		}
		largest = max(largest, l.Size)
	}
	// All levels but the index and the level with the configuration.
	require.Equal(t, len(layers[0])-2, common, "%v", layers)
	require.Positive(t, common)
	require.GreaterOrEqual(t, largest, int64(unread))

	require.Zero(t, w.Sent.Load())
	d := rig.Start(t, rig.Config{DiskDir: t.TempDir(), Args: []string{
		"--image=" + w.Proxy + "/vm/machine:17", "--insecure-registry=" + w.Proxy,
		"--copy-mode=copy-on-write"}})
	m := bootMachine(t, machineConfig{noNet: true, cmdline: machine.ParamGrace + "=1",
		disk: "format=raw,cache=none,file=" + d.URL(1)})
	require.Equal(t, "17", m.exited())
	sent := w.Sent.Load()
	t.Logf("%d KiB were fetched, the largest level has %d KiB", sent>>10, largest>>10)
	require.Positive(t, sent)
	require.Less(t, sent, largest, "a level that nobody needs was fetched")
}

// TestArm64Machine runs an image for arm64 under qemu-system-aarch64. With UEFI, which KubeVirt
// has, the power button is its stop signal; without UEFI, the word on the port is.
func TestArm64Machine(t *testing.T) {
	testtool.NeedNightly(t)
	t.Parallel()
	if testing.Short() {
		t.Skip("boots firmware by emulation")
	}
	rig.Need(t, "qemu-system-aarch64", "buildah", "apt-get", "dpkg-deb")
	const firmware = "/usr/share/qemu-efi-aarch64/QEMU_EFI.fd"
	boot := madeBootFiles(t, func() (string, error) { return makeBootFiles("arm64") })
	dir := adaptedFrom(t, testtool.Must(makeContainerImage("arm64"))(t), boot, t.TempDir())
	c := machineConfig{arm64: true, boot: boot, noNet: true}
	if _, err := os.Stat(firmware); err == nil {
		c.firmware = firmware
	} else if testtool.Required() {
		t.Fatal("needs the firmware of Debian's package qemu-efi-aarch64")
	}
	m := bootAdapted(t, dir, c)
	m.word(machine.WordRunning)
	m.says("serving\n")
	if c.firmware != "" {
		m.powerButton()
	} else {
		require.NoError(t, testtool.Err(fmt.Fprintln(m.port, machine.WordStop)))
	}
	require.Equal(t, "42", m.exited())
	requireClean(t, rawOf(t, filepath.Join(dir, "disk.qcow2")))
}

// TestInitSystemIsProcessOne: an init system is process 1 of a namespace. Ctrl-Alt-Del is its stop
// signal, and the machine ends when the init system switches it off.
func TestInitSystemIsProcessOne(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	dir := adapted(t, t.TempDir(), "--user=0", "--stop-signal=USR1", "--entrypoint=/sbin/init",
		"--", "init")
	m := bootAdapted(t, dir, machineConfig{noNet: true})
	m.says("the init system is process 1, and has a keyboard\n")
	m.ctrlAltDel()
	require.Equal(t, "0", m.exited())
	require.Contains(t, m.console(), "the init system switches off\n")
}

// TestReadOnlyMachine: an image FROM scratch has no directories as mount points, so it cannot be
// run from a read-only disk: that is status 125. After one start on a writable disk it has them. If
// the disk is read-only, /run and /tmp are in memory. Host name and terminal come from the kernel's
// command line.
func TestReadOnlyMachine(t *testing.T) {
	testtool.NeedNightly(t)
	t.Parallel()
	dir := adapted(t, t.TempDir(), "--hostname=other", "--", "about")
	cmdline := machine.ParamHostname + "=box " + machine.ParamTTY + "=1"
	boot := func(options string) *containerMachine {
		return bootMachine(t, machineConfig{noNet: true, cmdline: cmdline,
			disk: "format=qcow2," + options + "file=" + filepath.Join(dir, "disk.qcow2")})
	}
	m := boot("readonly=on,")
	require.Contains(t, m.word(machine.WordFailed), "cannot be mounted on /proc of the image")
	require.Equal(t, "125", m.exited())
	for _, options := range []string{"", "readonly=on,"} {
		m := boot(options)
		require.Equal(t, "0", m.exited())
		a := aboutOn(t, m.console())
		require.True(t, a.Terminal)
		require.Equal(t, "box", a.Hostname)
		require.Contains(t, a.Hosts, "\tbox\n")
		inMemory := ""
		if options != "" {
			inMemory = "tmpfs"
		}
		require.Equal(t, "ext4", a.Mounts["/"])
		require.Equal(t, []string{inMemory, inMemory}, []string{a.Mounts["/run"], a.Mounts["/tmp"]})
	}
}

// TestAnotherDiskIsNotChanged: a machine may have been given a disk with somebody's data. Its file
// system is neither mounted nor grown.
func TestAnotherDiskIsNotChanged(t *testing.T) {
	t.Parallel()
	rig.Need(t, "mke2fs")
	disk := filepath.Join(t.TempDir(), "data.raw")
	rig.OK(t, "mke2fs", "-q", "-F", "-t", "ext4", disk, "96M")
	require.NoError(t, os.Truncate(disk, 192<<20))
	before := sha256.Sum256(filetest.Content(t, disk))
	m := bootMachine(t, machineConfig{noNet: true, disk: "format=raw,file=" + disk})
	require.Contains(t, m.word(machine.WordFailed), "no configuration of an image")
	require.Equal(t, "125", m.exited())
	require.Equal(t, before, sha256.Sum256(filetest.Content(t, disk)))
}

// TestAdaptFromARegistry: an image in a registry becomes the same levels, byte for byte, as the
// layout that was pushed there.
func TestAdaptFromARegistry(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "skopeo")
	ref, boot := requireContainerImage(t), requireBootFiles(t)
	address := rig.Registry(t)
	remote := address + "/vm/web:1"
	rig.OK(t, "skopeo", "--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false", ref,
		"docker://"+remote)
	local := adapted(t, t.TempDir())
	fetched := adaptedFrom(t, remote, boot, t.TempDir(), "--insecure-registry="+address)
	sameLevels(t, local, fetched)
}

// sameLevels compares the levels of a machine with those in another directory, byte for byte.
func sameLevels(t *testing.T, here, there string) (names []string) {
	t.Helper()
	for _, f := range testtool.Must(os.ReadDir(here))(t) {
		if adapter.IsLevel(f.Name()) {
			names = append(names, f.Name())
			rig.SameFile(t, filepath.Join(here, f.Name()), filepath.Join(there, f.Name()))
		}
	}
	require.Greater(t, len(names), 2)
	return names
}

// TestLibvirtRunsAContainerImage: libvirt accepts the domain that adapt writes, and runs it. The
// entry point has the console as its terminal, and IPv4 and IPv6 addresses. "virsh shutdown" sends
// the image's stop signal.
func TestLibvirtRunsAContainerImage(t *testing.T) {
	testtool.NeedNightly(t) // QEMU alone runs such a machine each time
	t.Parallel()
	rig.Need(t, libvirtTools...)
	l := startLibvirtd(t)
	dir := adapted(t, filepath.Join(l.dir, "web"), "--tty", "--name=web", "--hostname=box",
		"--", "about", "web")
	for _, file := range []string{"kernel", "initrd"} { // even if boot files are links
		require.FileExists(t, filepath.Join(dir, file))
	}
	// The terminal alone is not enough: when QEMU ends, the kernel throws away unread output.
	log := filepath.Join(l.dir, "console")
	const pty = `<console type="pty">`
	written := rig.ReadFile(t, filepath.Join(dir, "domain.xml"))
	require.Contains(t, written, pty)
	logged := l.file("domain.xml", strings.Replace(written, pty,
		pty+fmt.Sprintf(`<log file=%q append="off"/>`, log), 1))
	l.own()
	l.virsh("create", logged)
	require.FileExists(t, l.virsh("ttyconsole", "web"))
	console := func() string {
		text, err := os.ReadFile(log)
		if err != nil {
			return err.Error()
		}
		return strings.ReplaceAll(string(text), "\r\n", "\n")
	}
	says := func(text string) {
		t.Helper()
		testtool.Within(t, rig.MachineTime, func() bool {
			return strings.Contains(console(), text)
		}, "the console says %q", text)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the console ends:\n%s", rig.LastLines(console(), 40))
		}
	})
	says(`"Addresses":[`)
	says("serving\n") // by now it handles its stop signal
	a := aboutOn(t, console())
	require.True(t, a.Terminal)
	require.Equal(t, "box", a.Hostname, "it has another name than DHCP gives")
	require.Contains(t, a.Hosts, "\tbox\n")
	four, six := false, false
	for _, at := range a.Addresses {
		four = four || at.Is4() && at.IsGlobalUnicast()
		six = six || at.Is6() && at.IsGlobalUnicast()
	}
	require.True(t, four && six, "%v", a.Addresses)

	l.virsh("shutdown", "web", "--mode", "acpi")
	says("stopped by its stop signal\n")
	testtool.Within(t, rig.MachineTime, func() bool {
		names, err := l.tryVirsh("list", "--all", "--name")
		return err == nil && names == ""
	}, "the domain has ended")
	says("the entry point has ended with status 42\n")
	requireClean(t, rawOf(t, filepath.Join(dir, "disk.qcow2")))
}
