package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/status"
)

// xmlOf runs the command, which must succeed, and parses its output.
func xmlOf(t *testing.T, env []string, args ...string) (libvirt.LUN, libvirt.Device) {
	t.Helper()
	stdout, stderr := works(t, env, append([]string{"xml"}, args...)...)
	require.Empty(t, stderr)
	lun, device := testtool.Must2(libvirt.ParseDisk(stdout))(t, stdout)
	return lun, device
}

func TestXMLFromFlags(t *testing.T) {
	lun, device := xmlOf(t, []string{"NODE_NAME=node-1"}, "--host=10.0.0.5", "--port=3261",
		"--lun=2", "--chap-username=vm")
	require.Equal(t, libvirt.LUN{
		Portals:    []libvirt.Portal{{Host: "10.0.0.5", Port: 3261}},
		TargetName: "iqn.2017-01.io.kubevirt:wrapper", Number: 2,
		Credential: libvirt.Credential{Username: "vm",
			SecretUsage: "iqn.2017-01.io.kubevirt:wrapper"}, AccessMode: libvirt.WriteExclusive,
	}, lun)
	require.Equal(t, libvirt.Device{
		Dev: "vda", Bus: libvirt.BusVirtio, Kind: libvirt.KindDisk,
		Initiator: "iqn.2017-01.io.kubevirt:node-1",
		Cache:     libvirt.CacheNone, Discard: libvirt.DiscardUnmap,
	}, device)

	lun, _ = xmlOf(t, nil, "--host=10.0.0.5:3261,10.0.0.6", "--port=3261", "--lun=2")
	require.Equal(t, []libvirt.Portal{{Host: "10.0.0.5", Port: 3261},
		{Host: "10.0.0.6", Port: 3261}}, lun.Portals)

	lun, device = xmlOf(t, []string{"WWN=iqn.2020-01.a:b", "PORT=3262", "ACCESS_MODE=write-shared"},
		"--host=[fd00::5]:3270,disk.example.com", "--lun=1", "--target-dev=sdb", "--bus=scsi",
		"--boot-order=1", "--initiator-name=iqn.2020-01.org.example:vm", "--cache=writeback",
		"--io=threads", "--discard=ignore", "--detect-zeroes=on", "--error-policy=enospace",
		"--rerror-policy=stop", "--serial=s", "--wwn=3c0ffee000000001", "--chap-username=vm",
		"--secret-uuid=01234567-89ab-cdef-0123-456789abcdef")
	require.Equal(t, libvirt.LUN{
		Portals: []libvirt.Portal{{Host: "fd00::5", Port: 3270},
			{Host: "disk.example.com", Port: 3262}}, TargetName: "iqn.2020-01.a:b", Number: 1,
		Credential: libvirt.Credential{Username: "vm",
			SecretUUID: "01234567-89ab-cdef-0123-456789abcdef"}, AccessMode: libvirt.WriteShared,
		Serial: "s", WWN: "3c0ffee000000001",
	}, lun)
	require.Equal(t, libvirt.Device{
		Dev: "sdb", Bus: libvirt.BusSCSI, Kind: libvirt.KindDisk, BootOrder: 1,
		Initiator: "iqn.2020-01.org.example:vm", Cache: libvirt.CacheWriteback,
		IO: libvirt.IOThreads, Discard: libvirt.DiscardIgnore, DetectZeroes: libvirt.ZeroesOn,
		ErrorPolicy:     libvirt.ErrorNoSpace,
		ReadErrorPolicy: libvirt.ErrorStop,
	}, device)

	lun, device = xmlOf(t, nil, "--host=a", "--lun=1", "--device=lun", "--bus=scsi", "--read-only")
	require.True(t, lun.ReadOnly)
	require.Equal(t, libvirt.KindLUN, device.Kind)
}

// TestXMLNamesTheMachine: QEMU's default name is the same on both machines of a live migration, so
// neither could be fenced.
func TestXMLNamesTheMachine(t *testing.T) {
	name := func(env []string, args ...string) string {
		t.Helper()
		_, device := xmlOf(t, env, append([]string{"--host=10.0.0.5", "--lun=1"}, args...)...)
		return device.Initiator
	}
	node, pod := "NODE_NAME=node-1", "POD_NAME=virt-launcher-vm-x7k2p"
	require.Equal(t, "iqn.2017-01.io.kubevirt:node-1", name([]string{node, pod}))
	require.Equal(t, "iqn.2017-01.io.kubevirt:node-1:vm", name([]string{node, pod}, "--domain=vm"))
	require.Equal(t, "iqn.2017-01.io.kubevirt:virt-launcher-vm-x7k2p:vm",
		name([]string{pod}, "--domain=vm"))
	require.Equal(t, "iqn.2017-01.io.kubevirt:node-2:vm",
		name([]string{"NODE_NAME=node-2"}, "--domain=vm"))
	require.NotEqual(t, name([]string{node}, "--domain=vm"), name([]string{node}, "--domain=VM"))
	require.Equal(t, "iqn.2020-01.a:b", name([]string{node}, "--initiator-name=iqn.2020-01.a:b"))
	require.Empty(t, name([]string{node}, "--initiator-name="), "QEMU's own is asked for")
	fails(t, []string{node}, exitUsage, "--domain: cannot be combined with --initiator-name", "xml",
		"--host=10.0.0.5", "--lun=1", "--domain=vm", "--initiator-name=iqn.2020-01.a:b")
	own, err := libvirt.InitiatorName("", "")
	require.NoError(t, err, "this machine's hostname is no name: set NODE_NAME")
	if os.Getenv("NODE_NAME") == "" && os.Getenv("POD_NAME") == "" {
		require.Equal(t, own, name(nil))
	}
}

func TestXMLSecret(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "<target>iqn.2017-01.io.kubevirt:wrapper</target>"},
		{[]string{"--secret-usage=demo"}, "<target>demo</target>"},
		{[]string{"--secret-uuid=01234567-89ab-cdef-0123-456789abcdef"},
			"<uuid>01234567-89ab-cdef-0123-456789abcdef</uuid>"},
	} {
		stdout, _ := works(t, nil, append([]string{"xml", "--secret"}, c.args...)...)
		require.Contains(t, stdout, `<secret ephemeral="no" private="yes">`)
		require.Contains(t, stdout, c.want)
	}
}

// TestXMLRefuses checks that the message names each wrong flag, with exit status 2.
func TestXMLRefuses(t *testing.T) {
	good := []string{"xml", "--host=10.0.0.5", "--lun=1"}
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"a bad IQN": {append(good, "--target-name=wrapper"),
			[]string{"--target-name:", "wrapper"}},
		"LUN 0":   {append(good, "--lun=0"), []string{"--lun:", "begin at 1"}},
		"no LUN":  {[]string{"xml", "--host=a"}, []string{"--lun is missing", "--status-url"}},
		"no host": {[]string{"xml", "--lun=1"}, []string{"--host is missing", "--status-url"}},
		"neither": {[]string{"xml"}, []string{"--lun is missing", "--host is missing", "2 errors"}},
		"every address": {append(good, "--host=0.0.0.0"),
			[]string{"--host:", "every address"}},
		"a device off its bus": {append(good, "--target-dev=sda", "--bus=virtio"),
			[]string{"--target-dev:", "virtio"}},
		"a bus":  {append(good, "--bus=ide"), []string{"--bus:", "sata"}},
		"a port": {append(good, "--port=x"), []string{"--port:", `"x"`}},
		"port 0": {append(good, "--port=0"), []string{"--port:", "1 to 65535"}},
		"two ports": {append(good, "--host=a:1", "--port=2"),
			[]string{"--host and --port:", "a:1"}},
		"an access mode": {append(good, "--access-mode=rw"),
			[]string{"--access-mode:", "read-shared"}},
		"a WWN on virtio": {append(good, "--wwn=3c0ffee000000001"),
			[]string{"--wwn:", "virtio"}},
		"a serial": {append(good, "--serial=a/b"), []string{"--serial:"}},
		"a secret but no user": {append(good, "--secret-usage=demo"),
			[]string{"--chap-username:"}},
		"a usage": {append(good, "--chap-username=u", "--secret-usage=a/b"),
			[]string{"--secret-usage:"}},
		"a UUID": {append(good, "--chap-username=u", "--secret-uuid=1"),
			[]string{"--secret-uuid:"}},
		"a UUID of a secret": {[]string{"xml", "--secret", "--secret-uuid=1"},
			[]string{"--secret-uuid:"}},
		"modes": {append(good, "--cache=x", "--io=x", "--discard=x",
			"--detect-zeroes=x", "--error-policy=x", "--rerror-policy=x", "--device=x",
			"--initiator-name=x"), []string{"--cache:", "--io:", "--discard:", "--detect-zeroes:",
			"--error-policy:", "--rerror-policy:", "--device:", "--initiator-name:", "8 errors"}},
		"a password": {append(good, "--chap-password=precious-secret"),
			[]string{"--chap-password", "environment"}},
		"an argument": {append(good, "more"), []string{"xml"}},
		"a URL": {[]string{"xml", "--status-url=10.0.0.5:9260"},
			[]string{"--status-url:", "http://HOST:PORT/status"}},
		"a file": {[]string{"xml", "--status-url=ftp://10.0.0.5/status"},
			[]string{"--status-url:", "http://HOST:PORT/status"}},
		"no machine": {[]string{"xml", "--status-url=http:///status"},
			[]string{"--status-url:", "http://HOST:PORT/status"}},
		"an empty URL": {[]string{"xml", "--status-url="}, []string{"--status-url is empty"}},
		"a URL with a user": {[]string{"xml", "--status-url=http://u:precious-secret@a/"},
			[]string{"--status-url:", "user name"}},
		"no URL, with a user": {[]string{"xml", "--status-url=http://u:%-precious-secret@a/"},
			[]string{"--status-url:", "user name"}},
		"a file, with a user": {[]string{"xml", "--status-url=ftp://u:precious-secret@a/"},
			[]string{"--status-url:", "user name"}},
		"a user and a machine": {[]string{"xml", "--status-url=u:precious-secret@a:9260"},
			[]string{"--status-url:", "user name"}},
		"what the daemon tells": {[]string{"xml", "--status-url=http://127.0.0.1:1",
			"--target-name=iqn.2020-01.a", "--access-mode=write-shared"},
			[]string{"--target-name:", "--access-mode:"}},
	} {
		t.Run(name, func(t *testing.T) {
			status, stdout, stderr := run(t, nil, c.args...)
			require.Equal(t, exitUsage, status, stderr)
			require.Empty(t, stdout)
			for _, part := range c.want {
				require.Contains(t, stderr, part)
			}
			require.NotContains(t, stderr, "precious-secret")
		})
	}
}

// statusServer serves a status page.
func statusServer(t *testing.T, change func(*status.Status)) string {
	t.Helper()
	page := status.Status{
		State: status.StateReady, Ready: true, TargetName: "iqn.2020-01.a:b",
		Authentication: "none", Portals: []string{"127.0.0.1:3260"},
		LUNs: []status.LUN{
			{LUN: 1, Image: "a.raw", AccessMode: "write-exclusive", Serial: "0123456789abcdef0123",
				NAA: "3c0ffee000000001", Ready: true},
			{LUN: 2, Image: "b.raw", AccessMode: "read-shared", ReadOnly: true, Serial: "s2",
				NAA: "3c0ffee000000002", Ready: true},
		},
		StartedAt: time.Now(),
	}
	if change != nil {
		change(&page)
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/status" {
			http.NotFound(w, r)
			return
		}
		_ = json.NewEncoder(w).Encode(page)
	}))
	t.Cleanup(srv.Close)
	return srv.URL
}

func TestXMLFromStatus(t *testing.T) {
	url := statusServer(t, nil)
	// Settings of a daemon in the environment do not count: they may be another daemon's.
	env := []string{"PORT=1", "WWN=iqn.2020-01.other", "ACCESS_MODE=write-shared"}
	lun, device := xmlOf(t, env, "--status-url="+url, "--lun=1")
	require.Equal(t, libvirt.LUN{
		Portals: []libvirt.Portal{{Host: "127.0.0.1", Port: 3260}}, TargetName: "iqn.2020-01.a:b",
		Number: 1, AccessMode: libvirt.WriteExclusive,
		Serial: "0123456789abcdef0123",
	}, lun)
	require.Equal(t, "vda", device.Dev)

	withCHAP := statusServer(t, func(s *status.Status) { s.Authentication = "chap" })
	lun, _ = xmlOf(t, nil, "--status-url="+withCHAP+"/status", "--lun=2", "--target-dev=sda",
		"--host=[fd00::5]:3270", "--host=a", "--chap-username=u")
	require.Equal(t, libvirt.LUN{
		Portals:    []libvirt.Portal{{Host: "fd00::5", Port: 3270}, {Host: "a", Port: 3260}},
		TargetName: "iqn.2020-01.a:b", Number: 2,
		AccessMode: libvirt.ReadShared, ReadOnly: true, Serial: "s2", WWN: "3c0ffee000000002",
		Credential: libvirt.Credential{Username: "u", SecretUsage: "iqn.2020-01.a:b"},
	}, lun)

	lun, _ = xmlOf(t, nil, "--status-url="+url+"/", "--lun=2", "--bus=scsi", "--port=31000",
		"--serial=own", "--wwn=3c0ffee00000000f")
	require.Equal(t, []libvirt.Portal{{Host: "127.0.0.1", Port: 31000}}, lun.Portals)
	require.Equal(t, "own", lun.Serial)
	require.Equal(t, "3c0ffee00000000f", lun.WWN)
	lun, _ = xmlOf(t, nil, "--status-url="+url, "--lun=1", "--device=lun", "--bus=scsi")
	require.Empty(t, lun.Serial+lun.WWN, "the target tells its own")

	lun, _ = xmlOf(t, nil, "--status-url="+url, "--lun=1", "--bus=scsi", "--serial=", "--wwn=")
	require.Empty(t, lun.Serial+lun.WWN, "none is asked for")

	readOnly := statusServer(t, func(s *status.Status) { s.LUNs[0].ReadOnly = true })
	lun, _ = xmlOf(t, nil, "--status-url="+readOnly, "--lun=1")
	require.True(t, lun.ReadOnly, "a guest that can be written to would not know why it fails")

	stdout, _ := works(t, nil, "xml", "--secret", "--status-url="+url)
	require.Contains(t, stdout, "<target>iqn.2020-01.a:b</target>")
}

func TestXMLFindsThePortal(t *testing.T) {
	for _, c := range []struct {
		bound []string
		want  string
	}{
		{[]string{"0.0.0.0:3261"}, "127.0.0.1:3261"},
		{[]string{"[::]:3262"}, "127.0.0.1:3262"},
		{[]string{"[fd00::5]:3263", "127.0.0.1:3264"}, "[fd00::5]:3263"},
	} {
		url := statusServer(t, func(s *status.Status) { s.Portals = c.bound; s.LUNs = s.LUNs[:1] })
		lun, _ := xmlOf(t, nil, "--status-url="+url)
		require.Equal(t, c.want, lun.Portals[0].String())
		require.Len(t, lun.Portals, 1)
	}
}

func TestXMLFromAStatusThatWillNotDo(t *testing.T) {
	gone := testtool.Must(net.Listen("tcp4", "127.0.0.1:0"))(t)
	require.NoError(t, gone.Close())
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/json" {
			fmt.Fprint(w, "{}")
			return
		}
		fmt.Fprint(w, "<html>")
	}))
	defer other.Close()
	for name, c := range map[string]struct {
		url    string
		args   []string
		status int
		want   string
	}{
		"nobody": {"http://" + gone.Addr().String(), nil, exitFailed,
			"no daemon answers at http://" + gone.Addr().String() + "/status: "},
		"another page":   {statusServer(t, nil) + "/metrics", nil, exitFailed, "404"},
		"another server": {other.URL, nil, exitFailed, "not a status page"},
		"another JSON":   {other.URL + "/json", nil, exitFailed, "not a status page"},
		"not the only LUN": {statusServer(t, func(s *status.Status) { s.LUNs = s.LUNs[:1] }),
			[]string{"--lun=3"}, exitUsage, "the daemon has no LUN 3: it has 1 (a.raw)"},
		"no iSCSI": {statusServer(t, func(s *status.Status) { s.Portals = nil }),
			[]string{"--lun=1", "--host=a"}, exitUsage, "has no iSCSI: add --nbd=auto or --vhost"},
		"no such LUN": {statusServer(t, nil), []string{"--lun=3"}, exitUsage,
			"1 (a.raw), 2 (b.raw)"},
		"which LUN": {statusServer(t, nil), nil, exitUsage,
			"--lun is missing: the daemon has 1 (a.raw), 2 (b.raw)"},
		"no LUN yet": {statusServer(t, func(s *status.Status) {
			s.LUNs, s.State = nil, status.StateStarting
		}), nil, exitFailed, "starting"},
		"a LUN not ready": {statusServer(t, func(s *status.Status) { s.LUNs[0].Ready = false }),
			[]string{"--lun=1"}, exitFailed, "LUN 1 (a.raw) is not ready"},
		"a serial virtio cuts": {statusServer(t,
			func(s *status.Status) { s.LUNs[0].Serial += "4" }),
			[]string{"--lun=1"}, exitUsage, "--serial: "},
		"CHAP without user": {statusServer(t,
			func(s *status.Status) { s.Authentication = "chap" }), []string{"--lun=1"}, exitUsage,
			"--chap-username is missing"},
		"a user without CHAP": {statusServer(t, nil), []string{"--lun=1", "--chap-username=u"},
			exitUsage, "has no CHAP"},
	} {
		t.Run(name, func(t *testing.T) {
			status, stdout, stderr := run(t, nil,
				append([]string{"xml", "--status-url=" + c.url}, c.args...)...)
			require.Equal(t, c.status, status, stderr)
			require.Empty(t, stdout)
			require.Contains(t, stderr, c.want)
		})
	}
}

// TestXMLOfADaemon asks a real daemon.
func TestXMLOfADaemon(t *testing.T) {
	place := newPlace(t, "a.raw")
	p := place.serve(t)
	lun, _ := xmlOf(t, nil, "--status-url=http://"+p.logged("metrics", "address").(string),
		"--target-dev=sda")
	require.Equal(t, p.logged("portal", "address"), lun.Portals[0].String())
	require.Equal(t, p.logged("serving a LUN", "serial"), lun.Serial)
	require.Equal(t, p.logged("serving a LUN", "naa"), lun.WWN)
	require.Equal(t, 1, lun.Number)
	require.Equal(t, exitDone, p.terminate())
}

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
