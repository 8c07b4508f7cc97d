package iscsi

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/libvirt"
)

const (
	mutualUser   = "wrapper"
	mutualSecret = "another-secret-5678"
)

// with returns env with additional variables.
func with(env map[string]string, more ...string) map[string]string {
	all := make(map[string]string)
	for k, v := range env {
		all[k] = v
	}
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

// TestCHAPClients logs in with the right password, a wrong one and none, also for discovery.
func TestCHAPClients(t *testing.T) {
	t.Parallel()
	rig.Need(t, "iscsi-ls", "iscsi-inq", "qemu-img", rig.QEMUISCSI)
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 8<<20), Env: rig.CHAPEnv})
	good := []string{"LIBISCSI_CHAP_USERNAME=" + rig.User, "LIBISCSI_CHAP_PASSWORD=" + rig.Password}
	require.Contains(t, rig.OKEnv(t, good, "iscsi-ls", d.PortalURL()), peers.DefaultTarget)
	require.Contains(t, rig.OKEnv(t, good, "iscsi-inq", d.URL(1)), "KUBEVIRT")
	rig.OK(t, "qemu-img", "info", d.CHAPURL(rig.User, rig.Password, 1))
	for name, env := range map[string][]string{
		"wrong password": {"LIBISCSI_CHAP_USERNAME=" + rig.User,
			"LIBISCSI_CHAP_PASSWORD=not-the-password"},
		"wrong user": {"LIBISCSI_CHAP_USERNAME=nobody",
			"LIBISCSI_CHAP_PASSWORD=" + rig.Password},
		"no credential": nil,
	} {
		t.Run(name, func(t *testing.T) {
			for _, r := range []rig.Result{rig.Client(t, env, "iscsi-ls", d.PortalURL()),
				rig.Client(t, env, "iscsi-inq", d.URL(1))} {
				require.NotZero(t, r.Status, "%s", r)
				require.NotContains(t, r.Output, "KUBEVIRT")
				require.NotContains(t, r.Output, "Target:"+peers.DefaultTarget)
			}
		})
	}
	require.NotZero(t, rig.Client(t, nil, "qemu-img", "info",
		d.CHAPURL(rig.User, "not-the-password", 1)).Status)
	metrics := d.Get("/metrics")
	require.Contains(t, metrics, `reason="bad_password"`)
	for what, text := range map[string]string{"log": d.Output(), "metrics": metrics,
		"status": d.Get("/status")} {
		require.NotContains(t, text, rig.Password, "the secret is in the %s", what)
	}
}

// TestMutualCHAP makes the target prove itself as well.
func TestMutualCHAP(t *testing.T) {
	t.Parallel()
	rig.Need(t, "iscsi-inq")
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 8<<20),
		Env: with(rig.CHAPEnv, "CHAP_MUTUAL_USERNAME", mutualUser, "CHAP_MUTUAL_PASSWORD",
			mutualSecret)})
	env := func(user, secret string) []string {
		return []string{"LIBISCSI_CHAP_USERNAME=" + rig.User,
			"LIBISCSI_CHAP_PASSWORD=" + rig.Password,
			"LIBISCSI_CHAP_TARGET_USERNAME=" + user, "LIBISCSI_CHAP_TARGET_PASSWORD=" + secret}
	}
	require.Contains(t, rig.OKEnv(t, env(mutualUser, mutualSecret), "iscsi-inq", d.URL(1)),
		"KUBEVIRT")
	require.NotZero(t, rig.Client(t, env(mutualUser, "not-that-secret"), "iscsi-inq",
		d.URL(1)).Status)
}

// TestCredentialSources starts the daemon with each way of giving a credential.
func TestCredentialSources(t *testing.T) {
	t.Parallel()
	rig.Need(t, "iscsi-inq")
	files := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(files, "u"), []byte(rig.User+"\n"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(files, "p"), []byte(rig.Password+"\n"), 0o600))
	dir := rig.DiskDir(t, 8<<20)
	for name, env := range map[string]map[string]string{
		"files": {"CHAP_USERNAME_FILE": filepath.Join(files, "u"),
			"CHAP_PASSWORD_FILE": filepath.Join(files, "p")},
		"original": {"USERNAME": rig.User, "PASSWORD": rig.Password},
		"base64": {"USERNAME_BASE64": "Z3Vlc3Q=",
			"PASSWORD_BASE64": "YS1sb25nLXNlY3JldC0xMjM0"},
		"Kubernetes": {"node.session.auth.username": rig.User,
			"node.session.auth.password": rig.Password},
	} {
		t.Run(name, func(t *testing.T) {
			d := rig.Start(t, rig.Config{DiskDir: dir, Env: env})
			require.NotZero(t, rig.Client(t, nil, "iscsi-inq", d.URL(1)).Status)
			rig.OKEnv(t, []string{"LIBISCSI_CHAP_USERNAME=" + rig.User,
				"LIBISCSI_CHAP_PASSWORD=" + rig.Password}, "iscsi-inq", d.URL(1))
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
			return slices.ContainsFunc(d.Log(),
				func(e map[string]any) bool {
					return e["msg"] == "login" && e["header_digest"] ==
						want
				})
		})
	}
}

// TestWriteAndReadBack writes with one client and reads back with others.
func TestWriteAndReadBack(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-io", "qemu-img", rig.QEMUISCSI)
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 32<<20)})
	qemuIO := func(commands ...string) string {
		args := []string{"-f", "raw"}
		for _, c := range commands {
			args = append(args, "-c", c)
		}
		return rig.OK(t, "qemu-io", append(args, d.URL(1))...)
	}
	qemuIO("write -P 0x11 0 4k", "write -P 0x22 1M 3M", "write -P 0x33 512 512",
		"write -f -P 0x44 10M 64k",
		"write -P 0x55 20M 8M", "discard 22M 1M", "write -z 23M 1M", "flush")
	qemuIO("read -P 0x11 0 512", "read -P 0x33 512 512", "read -P 0x22 1M 3M",
		"read -P 0x44 10M 64k",
		"read -P 0x55 20M 2M", "read -P 0 22M 2M", "read -P 0x55 24M 4M")
	copied := filepath.Join(t.TempDir(), "copy.raw")
	rig.OK(t, "qemu-img", "convert", "-f", "raw", "-O", "raw", d.URL(1), copied)
	rig.Same(t, copied, d.URL(1))
	b, err := os.ReadFile(copied)
	require.NoError(t, err)
	require.Equal(t, byte(0x44), b[10<<20+100])

	// And the other way round: convert writes a whole disk, and qemu-io reads it.
	fresh := filepath.Join(t.TempDir(), "fresh.raw")
	rig.MakeRawSeed(t, fresh, 32<<20, 99)
	rig.OK(t, "qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", fresh, d.URL(1))
	rig.Same(t, fresh, d.URL(1))
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
	portal, err := libvirt.ParsePortal(d.Portals[0])
	require.NoError(t, err)
	for _, lun := range luns {
		disk, err := libvirt.Disk(libvirt.LUN{Portals: []libvirt.Portal{portal},
			TargetName: peers.DefaultTarget, Number: lun}, libvirt.Device{})
		require.NoError(t, err)
		url := d.PortalURL() + "/" + disk.Source.Network.Name
		image := filepath.Join(dir, fmt.Sprintf("%d.raw", lun))
		rig.Same(t, image, url)
	}
}

// TestExclusive: a write-exclusive LUN belongs to one initiator name at a time.
func TestExclusive(t *testing.T) {
	t.Parallel()
	rig.Need(t, "iscsi-perf", "qemu-io", rig.QEMUISCSI)
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 8<<20)})
	first := rig.LoginTo(t, d, "iqn.2026-01.test:first")
	require.True(t, rig.Do(t, first, rig.ReadBlock(1, 0)).Good())
	r := rig.Client(t, nil, "qemu-io", "-f", "raw", "-c", "read 0 512", d.URL(1))
	require.NotZero(t, r.Status, "the LUN belongs to the first initiator: %s", r)
	rig.Logout(t, first)
	rig.OK(t, "qemu-io", "-f", "raw", "-c", "read 0 512", d.URL(1))
}

// TestGarbage sends garbage to the portal while a client works.
func TestGarbage(t *testing.T) {
	t.Parallel()
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 8<<20)})
	s := rig.LoginTo(t, d, "iqn.2026-01.test:bystander")
	for _, garbage := range []string{
		"GET / HTTP/1.1\r\nHost: x\r\n\r\n", strings.Repeat("\xff", 4096),
		strings.Repeat("\x00", 4096), "\x43",
		"\x43\x87\x00\x00\xff\xff\xff\xff" + strings.Repeat("\x00", 40),
		"\x01" + strings.Repeat("A", 47),
	} {
		c, err := net.Dial("tcp", d.Portals[0])
		require.NoError(t, err)
		_, err = c.Write([]byte(garbage))
		require.NoError(t, err)
		require.True(t, rig.Do(t, s, rig.ReadBlock(1, 1)).Good())
		require.NoError(t, c.Close())
	}
	require.True(t, rig.Do(t, s, rig.ReadBlock(1, 2)).Good())
}
