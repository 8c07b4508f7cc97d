package pages

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"net"
	"net/netip"
	"strings"
)

// commands show how to use a LUN, for copying. They contain no secret: the reader replaces the
// parts in capitals.
type commands struct{ QEMU, Libvirt, Iscsiadm string }

// qemuLUN is a LUN as QEMU and libiscsi take it: for the first two bytes of its address.
func qemuLUN(lun uint16) int {
	if lun > 255 {
		return int(lun) + 1<<14
	}
	return int(lun)
}

// commandsFor writes the commands for a LUN at a portal.
func commandsFor(portal, target string, lun uint16, chap, mutual, readOnly bool) commands {
	return commands{QEMU: qemuCommand(portal, target, lun, chap, readOnly),
		Libvirt:  libvirtDisk(portal, target, lun, chap, readOnly),
		Iscsiadm: iscsiadmCommand(portal, target, chap, mutual)}
}

func qemuCommand(portal, target string, lun uint16, chap, readOnly bool) string {
	var b strings.Builder
	b.WriteString("qemu-system-x86_64 -m 1G -device virtio-scsi-pci \\\n")
	login := ""
	if chap {
		b.WriteString("  -object secret,id=chap,file=PASSWORD_FILE \\\n")
		login = ",user=USER,password-secret=chap"
	}
	if readOnly {
		login += ",read-only=on"
	}
	fmt.Fprintf(&b, "  -blockdev driver=iscsi,node-name=lun%d,transport=tcp,portal=%s,\\\n"+
		"target=%s,lun=%d,\\\ninitiator-name=INITIATOR%s \\\n", lun, portal, target,
		qemuLUN(lun), login)
	fmt.Fprintf(&b, "  -device scsi-hd,drive=lun%d", lun)
	return b.String()
}

func libvirtDisk(portal, target string, lun uint16, chap, readOnly bool) string {
	host, port, _ := net.SplitHostPort(portal)
	var b strings.Builder
	b.WriteString("<disk type='network' device='disk'>\n  <driver name='qemu' type='raw'/>\n")
	fmt.Fprintf(&b, "  <source protocol='iscsi' name='%s/%d'>\n    <host name='%s' port='%s'/>\n",
		escapeXML(target), qemuLUN(lun), escapeXML(host), escapeXML(port))
	if chap {
		b.WriteString("    <auth username='USER'><secret type='iscsi' uuid='UUID'/></auth>\n")
	}
	b.WriteString("    <initiator><iqn name='INITIATOR'/></initiator>\n  </source>\n")
	b.WriteString("  <target dev='sda' bus='scsi'/>\n")
	if readOnly {
		b.WriteString("  <readonly/>\n")
	}
	b.WriteString("</disk>")
	return b.String()
}

func iscsiadmCommand(portal, target string, chap, mutual bool) string {
	if !chap {
		return fmt.Sprintf("iscsiadm -m discovery -t sendtargets -p %s\n"+
			"iscsiadm -m node -T %s -p %s --login", portal, target, portal)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "N=\"-m node -T %s -p %s\"\niscsiadm $N -o new\n", target, portal)
	values := []string{"authmethod -v CHAP", "username -v USER", "password -v PASSWORD"}
	if mutual {
		values = append(values, "username_in -v TARGET_USER", "password_in -v TARGET_PASSWORD")
	}
	for _, v := range values {
		fmt.Fprintf(&b, "iscsiadm $N -o update -n node.session.auth.%s\n", v)
	}
	b.WriteString("iscsiadm $N --login")
	return b.String()
}

func escapeXML(s string) string {
	var b bytes.Buffer
	_ = xml.EscapeText(&b, []byte(s)) // a buffer takes everything
	return b.String()
}

// portalFor is a portal's address for the client of the page. If the portal is bound to every
// address, that is the address of the page: as the client calls it, or the local one.
func portalFor(portals []string, asked, local string) string {
	if len(portals) == 0 {
		return "HOST:3260"
	}
	host, port, err := net.SplitHostPort(portals[0])
	if err != nil {
		return portals[0]
	}
	if ip, err := netip.ParseAddr(host); err != nil || !ip.IsUnspecified() {
		return portals[0]
	}
	for _, page := range []string{asked, local} {
		name := page
		if h, _, err := net.SplitHostPort(page); err == nil {
			name = h
		}
		if name = strings.Trim(name, "[]"); isHost(name) {
			return net.JoinHostPort(name, port)
		}
	}
	return net.JoinHostPort("HOST", port)
}

// isHost reports whether a text is an address or looks like a name. It comes from a client.
func isHost(s string) bool {
	if _, err := netip.ParseAddr(s); err == nil {
		return !strings.Contains(s, "%")
	}
	for _, r := range s {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '-', r == '.':
		default:
			return false
		}
	}
	return s != "" && len(s) <= 253 && s[0] != '-'
}
