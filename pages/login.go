package pages

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/status"
)

// commands show how to use a LUN, for copying. They contain no secret: the reader replaces the
// parts in capitals.
type commands struct{ QEMU, Libvirt, Iscsiadm string }

// initiator is the name in the commands, for a machine named domain. Each machine needs another
// one.
const initiator = "iqn.2017-01.io.kubevirt:vm:domain"

func commandsFor(portal string, s *status.Status, l *status.LUN) *commands {
	chap := s.Authentication != status.AuthNone
	return &commands{QEMU: qemuCommand(portal, s.TargetName, l, chap),
		Libvirt: libvirtDisk(portal, s.TargetName, l, chap),
		Iscsiadm: iscsiadmCommand(portal, s.TargetName, chap,
			s.Authentication == status.AuthMutualCHAP)}
}

func qemuCommand(portal, target string, l *status.LUN, chap bool) string {
	var b strings.Builder
	b.WriteString("qemu-system-x86_64 -m 1G -device virtio-scsi-pci \\\n")
	login := ""
	if chap {
		b.WriteString("  -object secret,id=chap,file=PASSWORD_FILE \\\n")
		login = ",user=USER,password-secret=chap"
	}
	if l.ReadOnly {
		login += ",read-only=on"
	}
	fmt.Fprintf(&b, "  -blockdev driver=iscsi,node-name=lun%d,transport=tcp,portal=%s,\\\n"+
		"target=%s,lun=%d,\\\ninitiator-name=%s%s \\\n", l.LUN, portal, target,
		libvirt.QEMULUN(int(l.LUN)), initiator, login)
	fmt.Fprintf(&b, "  -device scsi-hd,drive=lun%d%s", l.LUN, blocks(l))
	return b.String()
}

// blocks are the options of QEMU's device for blocks of another length than 512 bytes, its default.
func blocks(l *status.LUN) string {
	if l.BlockSize <= 512 {
		return ""
	}
	return fmt.Sprintf(",logical_block_size=%d,physical_block_size=%[1]d", l.BlockSize)
}

// ForLibvirt describes a LUN for the library that renders libvirt's elements. The caller adds the
// portals and the credential.
func ForLibvirt(l *status.LUN, target string) libvirt.LUN {
	return libvirt.LUN{TargetName: target, Number: int(l.LUN),
		AccessMode: libvirt.AccessMode(l.AccessMode), ReadOnly: l.ReadOnly,
		Serial: l.Serial, WWN: l.NAA, BlockSize: l.BlockSize}
}

// libvirtDisk is the element that the command xml prints.
func libvirtDisk(portal, target string, l *status.LUN, chap bool) string {
	device := libvirt.Device{Initiator: initiator}
	lun := ForLibvirt(l, target).For(device)
	if chap {
		lun.Credential = libvirt.Credential{Username: "USER", SecretUsage: target}
	}
	at, err := libvirt.ParsePortal(portal)
	lun.Portals = []libvirt.Portal{at}
	text := ""
	if err == nil {
		text, err = libvirt.DiskXML(lun, device)
	}
	if err != nil { // an address that a domain cannot have
		return "kubevirt-disk xml --status-url URL --lun " + strconv.Itoa(int(l.LUN))
	}
	return text
}

func iscsiadmCommand(portal, target string, chap, mutual bool) string {
	if !chap {
		return fmt.Sprintf("iscsiadm -m discovery -t sendtargets -p %s\n"+
			"iscsiadm -m node -T %s -p %s --login", portal, target, portal)
	}
	var b strings.Builder
	// On a command line, every user of the machine could see the password.
	b.WriteString("# in /etc/iscsi/iscsid.conf, which only root can read\n")
	values := []string{"authmethod = CHAP", "username = USER", "password = PASSWORD"}
	if mutual {
		values = append(values, "username_in = TARGET_USER", "password_in = TARGET_PASSWORD")
	}
	for _, v := range values {
		fmt.Fprintf(&b, "node.session.auth.%s\n", v)
	}
	fmt.Fprintf(&b, "# then\niscsiadm -m node -T %s -p %s -o new\n"+
		"iscsiadm -m node -T %s -p %s --login", target, portal, target, portal)
	return b.String()
}

// portalFor is a portal's address for the client of the page. If the portal is bound to every
// address, it is the address of the page: the one that the client uses, or the local one.
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
