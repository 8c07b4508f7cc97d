package pages

import (
	"fmt"
	"net"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"kubevirt.io/disk/internal/words"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/status"
)

// socketPrefix comes before the path in a portal of NBD that is a Unix socket.
const socketPrefix = "unix:"

// reconnect is how long QEMU should hold requests while the daemon restarts.
const reconnect = 30 * time.Second

// nbdCommands show how to use a disk by NBD, for copying.
type nbdCommands struct{ Portal, QEMU, Libvirt, List string }

// nbdCommandsFor writes the commands for a disk at the first portal of NBD; nil: there is none.
func nbdCommandsFor(s *status.Status, l *status.LUN, asked, local string) *nbdCommands {
	if len(s.NBDPortals) == 0 {
		return nil
	}
	portal := portalFor(s.NBDPortals, asked, local)
	e := ExportForLibvirt(l, s)
	e.Name = exportOf(l, s, plainWord.MatchString) // without special characters of a shell or QEMU
	c := &nbdCommands{Portal: portal, QEMU: nbdQEMU(portal, e.Name, l, s.NBDTLS),
		List: "nbdinfo '" + NBDURI(portal, e.Name, s.NBDTLS) + "'"}
	e.Reconnect = reconnect
	var err error
	if path, ok := strings.CutPrefix(portal, socketPrefix); ok {
		e.Socket = path
	} else {
		e.TLS = s.NBDTLS
		e.Portal, err = libvirt.ParsePortal(portal)
	}
	if err == nil {
		c.Libvirt, err = e.For(libvirt.Device{}).DiskXML(libvirt.Device{})
	}
	if err != nil { // an address that a domain cannot have
		c.Libvirt = "kubevirt-disk xml --status-url URL --nbd ADDRESS --lun " +
			strconv.Itoa(int(l.LUN))
	}
	return c
}

// plainWord matches text that needs no quotes.
var plainWord = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)

func nbdQEMU(portal, export string, l *status.LUN, secure bool) string {
	var b strings.Builder
	b.WriteString("qemu-system-x86_64 -m 1G \\\n")
	server, options := "", ""
	if path, ok := strings.CutPrefix(portal, socketPrefix); ok {
		server = words.Shell("server.type=unix,server.path=" + strings.ReplaceAll(path, ",", ",,"))
	} else {
		host, port, err := net.SplitHostPort(portal)
		if err != nil {
			host, port = portal, strconv.Itoa(libvirt.DefaultNBDPort)
		}
		server = fmt.Sprintf("server.type=inet,server.host=%s,server.port=%s", host, port)
		if secure {
			b.WriteString("  -object tls-creds-x509,id=tls,endpoint=client,dir=CERTIFICATES \\\n")
			options = ",tls-creds=tls"
		}
	}
	if l.ReadOnly {
		options += ",read-only=on"
	}
	fmt.Fprintf(&b, "  -blockdev driver=nbd,node-name=disk%d,export=%s,\\\n%s,\\\n"+
		"reconnect-delay=%d%s \\\n", l.LUN, export, server, int(reconnect/time.Second), options)
	fmt.Fprintf(&b, "  -device virtio-blk-pci,drive=disk%d%s", l.LUN, blocks(l))
	return b.String()
}

// vhostUserCommands show how a machine of this host uses a disk by vhost-user.
type vhostUserCommands struct{ Socket, QEMU, Libvirt string }

// vhostUserCommandsFor writes the commands for a disk; nil: it has no socket.
func vhostUserCommandsFor(l *status.LUN) *vhostUserCommands {
	if l.VhostUser == "" {
		return nil
	}
	// A part of the path is a name that may come from the image.
	socket := words.Shell(fmt.Sprintf("socket,id=disk%d,path=%s,reconnect-ms=1000", l.LUN,
		strings.ReplaceAll(l.VhostUser, ",", ",,")))
	c := &vhostUserCommands{Socket: l.VhostUser, QEMU: fmt.Sprintf("qemu-system-x86_64 -m 1G \\\n"+
		"  -object memory-backend-memfd,id=mem,size=1G,share=on -numa node,memdev=mem \\\n"+
		"  -chardev %s \\\n  -device vhost-user-blk-pci,chardev=disk%d", socket, l.LUN)}
	disk, err := VhostUserForLibvirt(l).DiskXML(libvirt.Device{})
	if err != nil { // a path that a domain cannot have
		disk = "kubevirt-disk xml --vhost-user SOCKET"
	}
	c.Libvirt = "<!-- in the domain -->\n" + libvirt.SharedMemoryXML +
		"\n<!-- in its devices -->\n" + disk
	return c
}

// VhostUserForLibvirt describes a LUN for the library that renders libvirt's elements, as a disk by
// vhost-user. QEMU tries to reconnect each second.
func VhostUserForLibvirt(l *status.LUN) libvirt.VhostUser {
	return libvirt.VhostUser{Socket: l.VhostUser, Reconnect: time.Second}
}

// ExportForLibvirt describes a LUN for the library that renders libvirt's elements, as an export of
// NBD. The caller adds its address.
func ExportForLibvirt(l *status.LUN, s *status.Status) libvirt.Export {
	name := exportOf(l, s, func(name string) bool { // XML has no other names
		return !strings.ContainsRune(plain(name), unicode.ReplacementChar)
	})
	return libvirt.Export{Name: name, AccessMode: libvirt.AccessMode(l.AccessMode),
		ReadOnly: l.ReadOnly, Serial: l.Serial, WWN: l.NAA, BlockSize: l.BlockSize}
}

// exportOf is an export name of package nbd for a LUN and no other one, for which usable returns
// true.
func exportOf(l *status.LUN, s *status.Status, usable func(string) bool) string {
	for _, name := range []string{l.Image, strconv.Itoa(int(l.LUN))} {
		another := func(o status.LUN) bool { return o.LUN != l.LUN && o.Image == name }
		if name != "" && usable(name) && !slices.ContainsFunc(s.LUNs, another) {
			return name
		}
	}
	return l.NAA
}

// NBDURI is the URI of an export at a portal of status.Status.NBDPortals. The caller has replaced
// an unspecified address. secure: portals at addresses use TLS.
func NBDURI(portal, export string, secure bool) string {
	if path, ok := strings.CutPrefix(portal, socketPrefix); ok {
		// Clients take a + literally.
		return "nbd+unix:///" + url.PathEscape(export) + "?socket=" +
			strings.ReplaceAll(url.QueryEscape(path), "+", "%20")
	}
	if secure {
		return "nbds://" + portal + "/" + url.PathEscape(export) + "?tls-certificates=CERTIFICATES"
	}
	return "nbd://" + portal + "/" + url.PathEscape(export)
}
