package pages

import (
	"html"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/status"
)

// TestNBDCommands: the commands name the disk and where it is, and what the library reads back is
// the export.
func TestNBDCommands(t *testing.T) {
	lun := status.LUN{LUN: 2, Image: "b.qcow2", AccessMode: "write-exclusive", Serial: "s2",
		NAA: "3c0ffee000000002"}
	page := &status.Status{LUNs: []status.LUN{{LUN: 1, Image: "a.qcow2"}, lun},
		NBDPortals: []string{"unix:/run/disk/nbd.sock", "10.0.0.5:10809"}}
	c := nbdCommandsFor(page, &lun, "example.com:9260", "")
	require.Contains(t, c.QEMU, "export=b.qcow2,\\\n"+
		"server.type=unix,server.path=/run/disk/nbd.sock")
	require.Contains(t, c.QEMU, "reconnect-delay=30 ")
	require.True(t, strings.HasSuffix(c.QEMU, ",drive=disk2"))
	require.Equal(t, "nbdinfo 'nbd+unix:///b.qcow2?socket=%2Frun%2Fdisk%2Fnbd.sock'", c.List)
	e, _ := testtool.Must2(libvirt.ParseExport(c.Libvirt))(t)
	require.Equal(t, libvirt.Export{Name: "b.qcow2", Socket: "/run/disk/nbd.sock",
		Reconnect: 30 * time.Second, AccessMode: libvirt.WriteExclusive, Serial: "s2"}, e)

	page.NBDPortals, lun.BlockSize = []string{"unix:/run/a b+c.sock"}, 4096
	c = nbdCommandsFor(page, &lun, "", "")
	require.Contains(t, c.QEMU, "'server.type=unix,server.path=/run/a b+c.sock',")
	require.Contains(t, c.List, "?socket=%2Frun%2Fa%20b%2Bc.sock'")
	const long = ",drive=disk2,logical_block_size=4096,physical_block_size=4096"
	require.True(t, strings.HasSuffix(c.QEMU, long), c.QEMU)
	require.True(t, strings.HasSuffix(commandsFor("a:1", page, &lun).QEMU,
		strings.Replace(long, "disk2", "lun2", 1)))

	page.NBDPortals, page.NBDTLS, lun.ReadOnly = []string{"[::]:10809"}, true, true
	c = nbdCommandsFor(page, &lun, "example.com:9260", "")
	require.Equal(t, "example.com:10809", c.Portal)
	require.Contains(t, c.QEMU, "server.host=example.com,server.port=10809")
	require.Contains(t, c.QEMU, ",tls-creds=tls,read-only=on ")
	require.Equal(t, "nbdinfo 'nbds://example.com:10809/b.qcow2?tls-certificates=CERTIFICATES'",
		c.List)
	e, _ = testtool.Must2(libvirt.ParseExport(c.Libvirt))(t)
	require.True(t, e.TLS && e.ReadOnly)
	require.Equal(t, libvirt.Portal{Host: "example.com", Port: 10809}, e.Portal)

	for name, want := range map[string]string{"a.qcow2": "2", "": "2", "x y.raw": "2",
		"';reboot;'": "2", "$x": "2", "-x": "2", "c.raw": "c.raw"} {
		lun.Image = name
		require.Contains(t, nbdCommandsFor(page, &lun, "", "").QEMU, "export="+want+",", name)
	}
	for _, name := range []string{"a\u3000b", "\uFFFD"} { // the latter was no UTF-8
		lun.Image = name
		require.Equal(t, "2", ExportForLibvirt(&lun, page).Name)
	}
	page.LUNs[0].Image = "2" // another one's number
	lun.Image = "x y.raw"
	require.Contains(t, nbdCommandsFor(page, &lun, "", "").QEMU, "export=3c0ffee000000002,")
	page.NBDPortals = nil
	require.Nil(t, nbdCommandsFor(page, &lun, "", ""))
}

// TestPageOfProtocols: a page has the commands of what is served.
func TestPageOfProtocols(t *testing.T) {
	for _, c := range []struct {
		portals, nbd []string
		iscsi, byNBD bool
	}{
		{[]string{"127.0.0.1:3260"}, nil, true, false},
		{[]string{"127.0.0.1:3260"}, []string{"unix:/run/nbd.sock"}, true, true},
		{nil, []string{"unix:/run/nbd.sock"}, false, true},
		{nil, nil, true, false}, // it has not begun to listen
	} {
		f := newFake()
		f.status.Portals, f.status.NBDPortals = c.portals, c.nbd
		_, ts := f.serve(t)
		_, body, _ := get(t, ts.URL+"/?lun=2")
		body = html.UnescapeString(body)
		for text, want := range map[string]bool{`id="cmd-iscsiadm"`: c.iscsi,
			"driver=iscsi": c.iscsi, `id="cmd-nbd-qemu"`: c.byNBD, "driver=nbd": c.byNBD,
			"<h3>By NBD at unix:/run/nbd.sock</h3>":       c.byNBD,
			`<source protocol="nbd" name="disk-2.qcow2">`: c.byNBD} {
			if want {
				require.Contains(t, body, text)
			} else {
				require.NotContains(t, body, text)
			}
		}
	}
}

// TestPageOfVhostUser: the page has the commands for a disk's socket, which the library reads back,
// and none of iSCSI if only vhost-user is served.
func TestPageOfVhostUser(t *testing.T) {
	f := newFake()
	f.status.Portals, f.status.NBDPortals = nil, nil
	f.status.LUNs[1].VhostUser = "/run/disks/b,c.sock"
	_, ts := f.serve(t)
	_, body, _ := get(t, ts.URL+"/?lun=2")
	body = html.UnescapeString(body)
	require.NotContains(t, body, `id="cmd-iscsiadm"`)
	require.Contains(t, body, "<h3>By vhost-user at /run/disks/b,c.sock</h3>")
	require.Contains(t, body, "path=/run/disks/b,,c.sock,reconnect-ms=1000")
	require.Contains(t, body, "before 9.2: <code>reconnect=1</code>")
	require.Contains(t, body, `<access mode="shared"></access>`)
	_, text, _ := strings.Cut(vhostUserCommandsFor(&f.status.LUNs[1]).Libvirt, "devices -->")
	v, _ := testtool.Must2(libvirt.ParseVhostUser(text))(t)
	require.Equal(t, libvirt.VhostUser{Socket: "/run/disks/b,c.sock", Reconnect: time.Second}, v)
	// The name of the socket is that of a file in the image.
	f.status.LUNs[1].VhostUser = "/run/disks/$(id)'.sock"
	require.Contains(t, vhostUserCommandsFor(&f.status.LUNs[1]).QEMU,
		`-chardev 'socket,id=disk2,path=/run/disks/$(id)'\''.sock,reconnect-ms=1000' `)
}
