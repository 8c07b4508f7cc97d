package iscsi

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/libvirt"
)

// with returns env with additional variables.
func with(env map[string]string, more ...string) map[string]string {
	all := make(map[string]string)
	maps.Copy(all, env)
	for i := 0; i < len(more); i += 2 {
		all[more[i]] = more[i+1]
	}
	return all
}

// TestClientsSeeTheLUNs runs each of libiscsi's tools, over IPv4 and IPv6, with several LUNs.
func TestClientsSeeTheLUNs(t *testing.T) {
	t.Parallel()
	rig.Need(t, "iscsi-ls", "iscsi-inq", "iscsi-readcapacity16", "iscsi-perf")
	dir := t.TempDir()
	rig.MakeRaw(t, filepath.Join(dir, "disk2.raw"), 8<<20)
	rig.MakeRaw(t, filepath.Join(dir, "disk10.raw"), 16<<20)
	for _, listen := range []string{"127.0.0.1:0", rig.SecondLoopback()} {
		t.Run(listen, func(t *testing.T) {
			d := rig.Start(t, rig.Config{DiskDir: dir,
				Env: map[string]string{"LISTEN": listen, "ACCESS_MODE": "write-shared"}})
			list := rig.OK(t, "iscsi-ls", "-s", d.PortalURL())
			require.Contains(t, list, "Target:"+peers.DefaultTarget+" Portal:"+d.Portals[0]+",1")
			require.Contains(t, list, "Lun:1 ")
			require.Contains(t, list, "Lun:2 ")
			inquiry := rig.OK(t, "iscsi-inq", d.URL(1))
			require.Contains(t, inquiry, "Vendor:KUBEVIRT")
			require.Contains(t, inquiry, "DIRECT_ACCESS")
			serials := [2]string{}
			for i := range serials {
				serials[i] = rig.OK(t, "iscsi-inq", "-e", "1", "-c", "128", d.URL(i+1))
			}
			require.NotEqual(t, serials[0], serials[1])
			require.Contains(t, rig.OK(t, "iscsi-readcapacity16", d.URL(1)), "Total size:8388608",
				"disk2 must come before disk10")
			require.Contains(t, rig.OK(t, "iscsi-readcapacity16", d.URL(2)), "Total size:16777216")
			require.Contains(t,
				rig.OK(t, "iscsi-perf", "-b", "8", "-m", "32", "-r", "-t", "1", d.URL(1)),
				"iops average")
			require.NotZero(t, rig.Client(t, nil, "iscsi-inq", d.URL(3)).Status,
				"there is no LUN 3")
		})
	}
}

// TestHeaderDigest turns header digests on and off with QEMU. libiscsi's own tools do not ask for
// them, and libiscsi does not support data digests: the tests of target have those.
func TestHeaderDigest(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-io", rig.QEMUISCSI)
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 8<<20)})
	for digest, want := range map[string]bool{"crc32c": true, "none": false} {
		rig.OK(t, "qemu-io", "--image-opts", "driver=iscsi,transport=tcp,portal="+d.Portals[0]+
			",target="+peers.DefaultTarget+",lun=1,header-digest="+digest,
			"-c", "write -P 9 0 3M", "-c", "read -P 9 0 3M", "-c", "flush")
		d.Until(fmt.Sprintf("a login with header_digest %t", want), func() bool {
			return slices.ContainsFunc(d.Log(), func(e map[string]any) bool {
				return e["msg"] == "login" && e["header_digest"] ==
					want
			})
		})
	}
}

// TestImageKinds serves images of every kind together, and compares each LUN with what qemu-img
// reads.
func TestImageKinds(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", rig.QEMUISCSI)
	source := filepath.Join(t.TempDir(), "source.raw")
	rig.MakeRaw(t, source, 12<<20)
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	rig.MakeRaw(t, at("01.img"), 12<<20)
	rig.MakeQcow2(t, source, at("02.qcow2"), "compat=0.10", false)
	rig.MakeQcow2(t, source, at("03.qcow2"), "cluster_size=4k", true)
	rig.MakeQcow2(t, source, at("04.qcow2"), "compression_type=zstd", true)
	rig.MakeQcow2(t, source, at("05.qcow2"), "extended_l2=on", false)
	rig.MakeQcow2(t, source, at("base.qcow2"), "", true)
	rig.OK(t, "qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "base.qcow2",
		at("06.qcow2"))
	rig.OK(t, "qemu-io", "-f", "qcow2", "-c", "write -P 7 64k 64k", at("06.qcow2"))
	d := rig.Start(t, rig.Config{DiskDir: dir})
	for lun := 1; lun <= 6; lun++ {
		name, format := fmt.Sprintf("%02d.qcow2", lun), "qcow2"
		if lun == 1 {
			name, format = "01.img", "raw"
		}
		require.Contains(t, rig.OK(t, "qemu-img", "compare", "-f", format, "-F", "raw", at(name),
			d.URL(lun)), "identical", name)
	}
	require.NotZero(t, rig.Client(t, nil, "qemu-img", "info", d.URL(7)).Status,
		"a backing file must not be a LUN of its own")
}

// TestHighLUNs reads LUNs of both addressing methods. It uses the names that the library makes for
// QEMU, which sends the number in the name unchanged.
func TestHighLUNs(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", rig.QEMUISCSI)
	dir := t.TempDir()
	luns := []int{1, 255, 256, 16383}
	settings := "disks:\n"
	for _, lun := range luns {
		name := fmt.Sprintf("%d.raw", lun)
		rig.MakeRaw(t, filepath.Join(dir, name), 1<<20)
		settings += fmt.Sprintf("  %s: {lun: %d}\n", name, lun)
	}
	file := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(file, []byte(settings), 0o644))
	d := rig.Start(t, rig.Config{DiskDir: dir,
		Env: map[string]string{"KUBEVIRT_DISK_CONFIG": file}})
	portal := testtool.Must(libvirt.ParsePortal(d.Portals[0]))(t)
	for _, lun := range luns {
		disk := testtool.Must(libvirt.Disk(libvirt.LUN{Portals: []libvirt.Portal{portal},
			TargetName: peers.DefaultTarget, Number: lun}, libvirt.Device{}))(t)
		url := d.PortalURL() + "/" + disk.Source.Network.Name
		image := filepath.Join(dir, fmt.Sprintf("%d.raw", lun))
		rig.Same(t, image, url)
	}
}

// TestCopyOffload makes QEMU copy one LUN to another with EXTENDED COPY. No block goes through the
// client, and unallocated blocks stay unallocated.
func TestCopyOffload(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", rig.QEMUISCSI)
	dir, state := t.TempDir(), t.TempDir()
	const size, used = 64 << 20, 24 << 20
	rig.MakeRaw(t, filepath.Join(dir, "a.raw"), used)
	require.NoError(t, os.Truncate(filepath.Join(dir, "a.raw"), size))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "b.raw"),
		bytes.Repeat([]byte("old data"), 16<<20/8), 0o644))
	require.NoError(t, os.Truncate(filepath.Join(dir, "b.raw"), size))
	d := rig.Start(t, rig.Config{DiskDir: dir, StateDir: state})
	rig.OK(t, "qemu-img", "convert", "-C", "-n", "-f", "raw", "-O", "raw", d.URL(1), d.URL(2))
	require.Zero(t, d.Operations("read"), "the target must copy by itself")
	rig.Same(t, d.URL(1), d.URL(2))
	rig.Same(t, filepath.Join(dir, "a.raw"), d.URL(2))
	d.Stop()

	allocated := int64(0)
	require.NoError(t, filepath.WalkDir(state, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			allocated += info.Sys().(*syscall.Stat_t).Blocks * 512
		}
		return err
	}))
	require.Less(t, allocated, int64(8<<20), "bytes of both disks: the destination must free "+
		"what the source does not use")
}

// TestBlockDevicesAndLinks: a person names a logical volume by its link. It is read, written in
// place, and overwritten by convert, and a header that a guest has written on it is not believed.
func TestBlockDevicesAndLinks(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", "qemu-io", rig.QEMUISCSI, "losetup")
	rig.NeedRoot(t)
	dir := t.TempDir()
	image, volume := filepath.Join(dir, "a.qcow2"), filepath.Join(dir, "volume")
	rig.OK(t, "qemu-img", "create", "-q", "-f", "qcow2", image, "8M")
	rig.OK(t, "qemu-io", "-c", "write -P 7 1M 1M", image)
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, bytes.Repeat([]byte("old "), 4<<20), 0o600))
	device := strings.TrimSpace(rig.OK(t, "losetup", "--find", "--show", file))
	t.Cleanup(func() { require.NoError(t, exec.Command("losetup", "--detach", device).Run()) })
	require.NoError(t, os.Symlink(device, volume))
	link := filepath.Join(dir, "link.qcow2")
	require.NoError(t, os.Symlink("a.qcow2", link))

	rig.MustRun(t, nil, "convert", link, volume)
	rig.OK(t, "qemu-io", "-r", "-f", "raw", "-c", "read -P 7 1M 1M", "-c", "read -P 0 0 1M", file)
	got := testtool.Must(os.ReadFile(file))(t)
	require.Equal(t, "old old ", string(got[8<<20:8<<20+8]), "what is behind the disk stays")
	r := rig.Run(t, nil, "convert", volume, device)
	require.NotZero(t, r.Status)
	require.Contains(t, r.Output, "is the image itself")
	r = rig.Run(t, nil, "convert", "--target-format=qcow2", link, volume)
	require.NotZero(t, r.Status)
	require.Contains(t, r.Output, "takes a raw disk")

	serve := func(args ...string) *rig.Daemon {
		return rig.Start(t, rig.Config{Args: append([]string{"--copy-mode=none"}, args...)})
	}
	d := serve(volume)
	rig.OK(t, "qemu-io", "-f", "raw", "-c", "read -P 7 1M 1M", "-c", "write -P 9 4M 64k",
		"-c", "write -z 1M 512k", "-c", "discard 2M 1M", "-c", "flush", d.URL(1))
	r = rig.Run(t, nil, "serve", "--copy-mode=none", "--listen=127.0.0.1:0",
		"--metrics-listen=", device)
	require.NotZero(t, r.Status, "two daemons must not write to one device")
	require.Contains(t, r.Output, "is in use")
	d.Stop()
	rig.OK(t, "qemu-io", "-r", "-f", "raw", "-c", "read -P 9 4M 64k", "-c", "read -P 0 1M 512k",
		"-c", "read -P 7 1536k 512k", file)

	// A guest writes the header of an image that names another file of the host.
	header := filepath.Join(dir, "header.qcow2")
	rig.OK(t, "qemu-img", "create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", header)
	require.NoError(t, os.WriteFile(device, testtool.Must(os.ReadFile(header))(t), 0))
	require.Contains(t, rig.MustRun(t, nil, "inspect", volume).Output, "raw")
}
