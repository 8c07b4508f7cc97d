package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/status"
)

// exportOf runs the command, which must succeed, and parses its output.
func exportOf(t *testing.T, args ...string) (libvirt.Export, libvirt.Device) {
	t.Helper()
	stdout, stderr := works(t, nil, append([]string{"xml"}, args...)...)
	require.Empty(t, stderr)
	e, device := testtool.Must2(libvirt.ParseExport(stdout))(t, stdout)
	return e, device
}

func TestXMLByNBD(t *testing.T) {
	e, device := exportOf(t, "--nbd=unix:/run/disk/nbd.sock")
	require.Equal(t, libvirt.Export{Socket: "/run/disk/nbd.sock", Reconnect: 30 * time.Second,
		AccessMode: libvirt.WriteExclusive}, e)
	require.Equal(t, libvirt.Device{Dev: "vda", Bus: libvirt.BusVirtio, Kind: libvirt.KindDisk,
		Cache: libvirt.CacheNone, Discard: libvirt.DiscardUnmap}, device)

	e, device = exportOf(t, "--nbd=disks.example.com", "--export=a b.qcow2", "--tls",
		"--reconnect=0", "--read-only", "--serial=s", "--wwn=3c0ffee000000001", "--bus=scsi",
		"--cache=writeback", "--boot-order=2")
	require.Equal(t, libvirt.Export{Name: "a b.qcow2", TLS: true, ReadOnly: true, Serial: "s",
		Portal: libvirt.Portal{Host: "disks.example.com", Port: libvirt.DefaultNBDPort},
		WWN:    "3c0ffee000000001", AccessMode: libvirt.WriteExclusive}, e)
	require.Equal(t, uint(2), device.BootOrder)
	e, _ = exportOf(t, "--nbd=[fd00::5]:1", "--lun=2", "--access-mode=read-shared")
	require.Equal(t, libvirt.Export{Name: "2", Portal: libvirt.Portal{Host: "fd00::5", Port: 1},
		Reconnect: 30 * time.Second, AccessMode: libvirt.ReadShared, ReadOnly: true}, e)
}

// TestXMLByNBDFromStatus: the daemon tells where it serves NBD, and what the disk is called.
func TestXMLByNBDFromStatus(t *testing.T) {
	portals := func(secure bool, at ...string) string {
		return statusServer(t, func(s *status.Status) {
			s.NBDPortals, s.NBDTLS, s.Authentication = at, secure, "chap"
		})
	}
	both := portals(true, "0.0.0.0:10809", "unix:/run/disk/nbd.sock")
	e, _ := exportOf(t, "--status-url="+both, "--lun=1", "--nbd=auto")
	require.Equal(t, libvirt.Export{Name: "a.raw", Socket: "/run/disk/nbd.sock",
		Reconnect: 30 * time.Second, AccessMode: libvirt.WriteExclusive,
		Serial: "0123456789abcdef0123"}, e)
	e, _ = exportOf(t, "--status-url="+both, "--lun=2", "--nbd=disks.example.com:1", "--bus=scsi",
		"--serial=own")
	require.Equal(t, libvirt.Export{Name: "b.raw", Reconnect: 30 * time.Second, TLS: true,
		Portal:     libvirt.Portal{Host: "disks.example.com", Port: 1},
		AccessMode: libvirt.ReadShared, ReadOnly: true, Serial: "own",
		WWN: "3c0ffee000000002"}, e)
	e, _ = exportOf(t, "--status-url="+portals(false, "0.0.0.0:10810"), "--lun=1", "--nbd=auto",
		"--export=other")
	require.Equal(t, libvirt.Portal{Host: "127.0.0.1", Port: 10810}, e.Portal)
	require.False(t, e.TLS)
	require.Equal(t, "other", e.Name)
}

func TestXMLByNBDRefuses(t *testing.T) {
	alone := statusServer(t, nil)
	for name, c := range map[string]struct{ args, want []string }{
		"nowhere": {[]string{"--export=a"}, []string{"--nbd is missing"}},
		"no path": {[]string{"--nbd=unix:"}, []string{"--nbd: unix: names no socket"}},
		"a path of no root": {[]string{"--nbd=unix:nbd.sock"},
			[]string{`--nbd: "nbd.sock" is relative`}},
		"every address": {[]string{"--nbd=0.0.0.0"}, []string{"--nbd:", "every address"}},
		"no address":    {[]string{"--nbd=a b"}, []string{"--nbd:", "a b", "or unix:PATH"}},
		"auto alone":    {[]string{"--nbd=auto"}, []string{"--nbd: auto needs", "--status-url"}},
		"no NBD there": {[]string{"--nbd=auto", "--lun=1", "--status-url=" + alone},
			[]string{"--nbd: the daemon serves no disk by NBD"}},
		"no such LUN": {[]string{"--nbd=auto", "--lun=7", "--status-url=" + alone},
			[]string{"--lun: the daemon has no LUN 7"}},
		"TLS at a socket": {[]string{"--nbd=unix:/s", "--tls"}, []string{"--tls: a socket"}},
		"half a second": {[]string{"--nbd=unix:/s", "--reconnect=500ms"},
			[]string{"--reconnect: 500ms"}},
		"an export": {[]string{"--nbd=unix:/s", "--export=a\tb"}, []string{"--export:"}},
		"iSCSI, too": {[]string{"--nbd=unix:/s", "--host=a", "--chap-username=u", "--secret",
			"--initiator-name=iqn.2020-01.a:b", "--domain=d", "--port=1"},
			[]string{"--host: is about iSCSI", "--chap-username:", "--secret:",
				"--initiator-name:", "--domain:", "--port:"}},
		"a file, too": {[]string{"--nbd=unix:/s", "--file=/a.raw"},
			[]string{"--nbd: is about a LUN"}},
		"a kind": {[]string{"--nbd=unix:/s", "--device=lun", "--bus=scsi"},
			[]string{"--device:"}},
		"a mode": {[]string{"--nbd=unix:/s", "--access-mode=rw", "--serial=a/b"},
			[]string{"--access-mode:", "--serial:"}},
	} {
		t.Run(name, func(t *testing.T) {
			status, stdout, stderr := run(t, nil, append([]string{"xml"}, c.args...)...)
			require.Equal(t, exitUsage, status, stderr)
			require.Empty(t, stdout)
			for _, part := range c.want {
				require.Contains(t, stderr, part)
			}
		})
	}
}

// TestXMLByVhostUser: by a socket that is named, and by that of a daemon.
func TestXMLByVhostUser(t *testing.T) {
	url := statusServer(t, func(s *status.Status) { s.LUNs[0].VhostUser = "/run/disks/a.raw.sock" })
	for _, at := range [][]string{{"--vhost-user=/run/disks/a.raw.sock"},
		{"--vhost-user=auto", "--status-url=" + url, "--lun=1"}} {
		stdout, _ := works(t, nil,
			append([]string{"xml", "--queues=2", "--target-dev=vdc"}, at...)...)
		v, device := testtool.Must2(libvirt.ParseVhostUser(stdout))(t, stdout)
		require.Equal(t, libvirt.VhostUser{Socket: "/run/disks/a.raw.sock", Queues: 2,
			Reconnect: time.Second}, v)
		require.Equal(t, "vdc", device.Dev)
	}
	code, stdout, _ := run(t, nil, "xml", "--memory-backing")
	require.Equal(t, exitDone, code)
	require.Equal(t, libvirt.SharedMemoryXML+"\n", stdout)
	for want, args := range map[string][]string{
		"--vhost-user: auto needs a daemon":       {"--vhost-user=auto"},
		"--vhost-user is missing":                 {"--queues=2"},
		"--serial: libvirt takes none":            {"--vhost-user=/s", "--serial=x"},
		"--nbd: is about NBD":                     {"--vhost-user=/s", "--nbd=unix:/s"},
		"--host: is about iSCSI":                  {"--vhost-user=/s", "--host=h"},
		"--cache: libvirt has none":               {"--vhost-user=/s", "--cache=none"},
		"--queues: 17: want at most 16":           {"--vhost-user=/s", "--queues=17"},
		"--status-url: is not asked for a socket": {"--vhost-user=/s", "--status-url=" + url},
		"no socket for vhost-user": {"--vhost-user=auto",
			"--status-url=" + url, "--lun=2"},
		`--vhost-user: "s" is relative: libvirt `: {"--vhost-user=s"},
	} {
		code, _, stderr := run(t, nil, append([]string{"xml"}, args...)...)
		require.NotEqual(t, exitDone, code, want)
		require.Contains(t, stderr, want)
	}
}
