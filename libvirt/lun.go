package libvirt

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// DefaultPort is the port of a portal without a port (RFC 7143 4.2.7.1).
const DefaultPort = 3260

// MaxLUN is the highest LUN: the flat space addressing method has 14 bits for it (SAM-5 4.7.7.3).
const MaxLUN = 1<<14 - 1

// QEMU uses the number after a target's name as the first two bytes of a LUN's address on the wire.
// Up to maxPeripheral these bytes are the number itself (peripheral device addressing). Above that
// they also carry the two bits of the flat addressing method (SAM-5 4.7.7).
const (
	maxPeripheral = 1<<8 - 1
	flatMethod    = 1 << 14
)

// QEMULUN is the number of a LUN in QEMU and libiscsi, and in SourceName.
func QEMULUN(number int) int {
	if number > maxPeripheral {
		return flatMethod + number
	}
	return number
}

// numberOf is the inverse of QEMULUN. QEMU reaches no LUN by a number above maxPeripheral without
// the method bits, but the LUN is clear.
func numberOf(address int) int {
	if address >= flatMethod {
		return address - flatMethod
	}
	return address
}

// LUN is a served disk: its place, and its properties for a virtual machine.
type LUN struct {
	// Portals are the addresses of the target: at least one, the preferred one first. All become
	// <host> elements. libvirt's QEMU driver connects to the first, and libvirt's validation schema
	// allows only one.
	Portals []Portal

	TargetName string // iSCSI name
	Number     int    // 1 to 16383

	Credential Credential // the zero value: the target does not use CHAP

	AccessMode AccessMode // "": WriteExclusive
	// ReadOnly makes the guest's disk read-only. With ReadShared it always is. WriteShared with
	// ReadOnly renders the same element as ReadShared, and is parsed back as ReadShared.
	ReadOnly bool

	// Serial is the disk's serial number in the guest: letters, digits, '_', '.', '+', '-' and
	// spaces, at most 36 characters with BusSCSI and 20 with the others. "": none.
	Serial string

	// WWN is the disk's NAA identifier, 16 hexadecimal digits. Only disks of BusSCSI have one. "":
	// none.
	WWN string

	// BlockSize is the length of a logical block in bytes, 512 or 4096. 0: 512. QEMU shows the
	// guest blocks of 512 bytes unless the element has another value.
	BlockSize int

	// NBD is the export, if the disk is one. Then Portals, TargetName, Number and Credential are
	// empty, and the other fields here count instead of those of the Export. ParseSources sets it.
	// nil: the disk is a LUN of iSCSI.
	NBD *Export

	// Copy has the settings of a specification for the server's copy of the disk. ParseSources sets
	// it. Disk does not render it, because the server does the copying.
	Copy Copy
}

// Portal is a network address of a target.
type Portal struct {
	Host string // IPv4 or IPv6 address without brackets, or DNS name
	Port uint16 // 0: DefaultPort
}

// ParsePortal reads HOST, HOST:PORT, an IPv6 address, or [IPv6]:PORT.
func ParsePortal(text string) (Portal, error) {
	p := Portal{Host: text}
	if inner, ok := strings.CutPrefix(text, "["); ok && strings.HasSuffix(inner, "]") {
		p.Host = strings.TrimSuffix(inner, "]")
	} else if _, err := netip.ParseAddr(text); err != nil && strings.Contains(text, ":") {
		host, port, err := net.SplitHostPort(text)
		if err != nil {
			return Portal{}, fmt.Errorf("%q is not a portal: want HOST, HOST:PORT or [IPv6]:PORT",
				text)
		}
		p.Host = host
		if p.Port, err = parsePort(port); err != nil {
			return Portal{}, fmt.Errorf("%q: %w", text, err)
		}
	}
	if err := checkHost(p.Host); err != nil {
		return Portal{}, err
	}
	return p, nil
}

func parsePort(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is not a port: want 1 to 65535", text)
	}
	return uint16(n), nil
}

// String is HOST:PORT, with brackets around an IPv6 address.
func (p Portal) String() string {
	port := cmp.Or(p.Port, DefaultPort)
	return net.JoinHostPort(p.Host, strconv.Itoa(int(port)))
}

// AccessMode decides who may use the disk at the same time.
type AccessMode string

// The access modes. The names are those of kubevirt-disk.
const (
	WriteExclusive AccessMode = "write-exclusive" // one virtual machine
	WriteShared    AccessMode = "write-shared"    // several, for cluster file systems: <shareable>
	// several, all of them readers: <shareable> and <readonly>
	ReadShared AccessMode = "read-shared"
)

func accessModes() []AccessMode { return []AccessMode{WriteExclusive, WriteShared, ReadShared} }

// Credential is a CHAP user, and a reference to the libvirt secret that holds the password.
type Credential struct {
	// Username is passed on unchanged. libvirt's validation schema allows only letters, digits,
	// '_', '+' and '-'; libvirt itself takes any name.
	Username string

	SecretUsage string // the usage name of the secret; no '/'
	SecretUUID  string // if not empty, used instead of SecretUsage
}

func (c Credential) isZero() bool { return c == Credential{} }

// withDefaults replaces empty fields with their defaults.
func (l LUN) withDefaults() LUN {
	l.Portals = slices.Clone(l.Portals)
	for i := range l.Portals {
		if l.Portals[i].Port == 0 {
			l.Portals[i].Port = DefaultPort
		}
	}
	l.AccessMode = cmp.Or(l.AccessMode, WriteExclusive)
	l.ReadOnly = l.ReadOnly || l.AccessMode == ReadShared
	l.WWN = strings.ToLower(strings.TrimPrefix(l.WWN, "0x"))
	l.Credential = l.Credential.withDefaults()
	if l.NBD != nil {
		e := l.export().withDefaults()
		l.NBD = &e
	}
	return l
}

func (l LUN) export() Export {
	e := *l.NBD
	e.AccessMode, e.ReadOnly, e.Serial, e.WWN = l.AccessMode, l.ReadOnly, l.Serial, l.WWN
	e.BlockSize = l.BlockSize
	return e
}

func (c Credential) withDefaults() Credential {
	c.SecretUUID = strings.ToLower(c.SecretUUID)
	return c
}

// For returns the LUN without the parts of its identity that the device cannot show: serial number
// and WWN with KindLUN, the WWN unless the disk is on BusSCSI. It is for callers that fill in the
// identity for every device, because Disk refuses parts that do not fit.
func (l LUN) For(d Device) LUN {
	d = d.withDefaults()
	if d.Kind == KindLUN {
		l.Serial = ""
	}
	if d.Kind == KindLUN || d.Bus != BusSCSI {
		l.WWN = ""
	}
	return l
}

var (
	dnsPattern = regexp.MustCompile(
		`^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*\.?$`)
	wwnPattern    = regexp.MustCompile(`^[0-9a-f]{16}$`)
	serialPattern = regexp.MustCompile(`^[A-Za-z0-9_.+-]([A-Za-z0-9_.+ -]*[A-Za-z0-9_.+-])?$`)
	uuidPattern   = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
)

// check validates a LUN whose defaults are filled in.
func (l LUN) check(p *problems) {
	if l.NBD != nil {
		if len(l.Portals) > 0 || l.TargetName != "" || l.Number != 0 || !l.Credential.isZero() {
			p.add("LUN.NBD", "the disk is an export: leave Portals, TargetName, Number and "+
				"Credential empty")
		}
		l.NBD.check(p)
		l.checkShown(p)
		return
	}
	if len(l.Portals) == 0 {
		p.add("LUN.Portals", "there is no host: want at least one")
	}
	for i, portal := range l.Portals {
		p.addError(fmt.Sprintf("LUN.Portals[%d].Host", i), checkHost(portal.Host))
	}
	p.addError("LUN.TargetName", CheckName(l.TargetName))
	switch {
	case l.Number == 0:
		p.add("LUN.Number", "0 is not a disk: the LUNs of disks begin at 1")
	case l.Number < 0 || l.Number > MaxLUN:
		p.add("LUN.Number", "%d is not a LUN: want 1 to %d", l.Number, MaxLUN)
	}
	if !l.Credential.isZero() {
		l.Credential.check(p, "LUN.Credential")
	}
	l.checkShown(p)
}

// The lengths of logical blocks in bytes.
const (
	shortBlock = 512
	longBlock  = 4096
)

// checkShown validates the part that the guest sees.
func (l LUN) checkShown(p *problems) {
	known(p, "LUN.AccessMode", l.AccessMode, accessModes())
	if l.Serial != "" && !serialPattern.MatchString(l.Serial) {
		p.add("LUN.Serial", "%q has characters that libvirt does not take: want letters, digits, "+
			"'_', '.', '+', '-', and spaces between them", l.Serial)
	}
	if l.BlockSize != 0 && l.BlockSize != shortBlock && l.BlockSize != longBlock {
		p.add("LUN.BlockSize", "%d is not the length of a logical block: want %d or %d",
			l.BlockSize, shortBlock, longBlock)
	}
	if l.WWN != "" && !wwnPattern.MatchString(l.WWN) {
		p.add("LUN.WWN", "%q is not a WWN: want 16 hexadecimal digits", l.WWN)
	}
}

func checkHost(host string) error {
	if host == "" {
		return errors.New("the host is empty: want an IP address or a DNS name")
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		switch {
		case addr.IsUnspecified():
			return fmt.Errorf("%s means every address: want one that the VM's host can reach", host)
		case addr.Zone() != "":
			return fmt.Errorf("%q has a zone, which libvirt does not take: want an address "+
				"without one", host)
		}
		return nil
	}
	if len(host) > 253 || !dnsPattern.MatchString(host) {
		return fmt.Errorf("%q is neither an IP address (IPv6 without brackets) nor a DNS name",
			host)
	}
	return nil
}

func (c Credential) check(p *problems, field string) {
	if c.Username == "" {
		p.add(field+".Username", "it is empty: want the CHAP user name that belongs to the secret")
	} else if !printable(c.Username) {
		p.add(field+".Username", "%q has control characters, or is not UTF-8", c.Username)
	}
	c.checkReference(p, field)
}

func (c Credential) checkReference(p *problems, field string) {
	if c.SecretUUID == "" && c.SecretUsage == "" {
		p.add(field+".SecretUsage", "it is empty, and so is SecretUUID: want the reference to a "+
			"libvirt secret")
	}
	if c.SecretUUID != "" && !uuidPattern.MatchString(c.SecretUUID) {
		p.add(field+".SecretUUID", "%q is not a UUID: want 01234567-89ab-cdef-0123-456789abcdef",
			c.SecretUUID)
	}
	if strings.Contains(c.SecretUsage, "/") || !printable(c.SecretUsage) {
		p.add(field+".SecretUsage", "%q has '/' or control characters, which libvirt does not take",
			c.SecretUsage)
	}
}

// oneOf lists the values of an enumeration for a message.
func oneOf[T ~string](values []T) string {
	var b strings.Builder
	for i, v := range values {
		switch {
		case i > 0 && i == len(values)-1:
			b.WriteString(" or ")
		case i > 0:
			b.WriteString(", ")
		}
		b.WriteString(string(v))
	}
	return b.String()
}
