package libvirt

import (
	"cmp"
	"path/filepath"
	"strings"

	"libvirt.org/go/libvirtxml"
)

// KernelBoot describes a domain that boots without a boot loader: libvirt gives QEMU a kernel, an
// initramfs and a command line. A disk that `kubevirt-disk adapt` has made from a container image
// boots this way.
type KernelBoot struct {
	Kernel  string // path on the host of the domain
	Initrd  string // path, or "" for none
	Cmdline string // of the kernel; "": none
	Arch    Arch   // "": ArchAMD64
	Machine string // QEMU's machine type; "": q35, or virt on ArchARM64
}

// Arch is the architecture of a domain, as libvirt names it.
type Arch string

// The architectures.
const (
	ArchAMD64 Arch = "x86_64"
	ArchARM64 Arch = "aarch64"
)

func arches() []Arch { return []Arch{ArchAMD64, ArchARM64} }

func (b KernelBoot) withDefaults() KernelBoot {
	b.Arch = cmp.Or(b.Arch, ArchAMD64)
	if b.Machine == "" {
		b.Machine = "q35"
		if b.Arch == ArchARM64 {
			b.Machine = "virt"
		}
	}
	return b
}

func (b KernelBoot) check(p *problems) {
	checkPath(p, "KernelBoot.Kernel", b.Kernel)
	if b.Initrd != "" {
		checkPath(p, "KernelBoot.Initrd", b.Initrd)
	}
	known(p, "KernelBoot.Arch", b.Arch, arches())
	if !printable(b.Cmdline) {
		p.add("KernelBoot.Cmdline", "%q has characters that do not print", b.Cmdline)
	}
	if !printable(b.Machine) {
		p.add("KernelBoot.Machine", "%q is not a machine type", b.Machine)
	}
}

// checkPath requires a path with the same meaning for libvirt, which has its own working directory.
func checkPath(p *problems, field, path string) {
	switch {
	case path == "":
		p.add(field, "it is empty: name the file")
	case !filepath.IsAbs(path):
		p.add(field, "%q is relative: libvirt needs a path that begins with /", path)
	case !printable(path):
		p.add(field, "%q has characters that do not print", path)
	}
}

// checkSocket refuses a path that QEMU cannot open as a socket: unix(7) has no room for more.
func checkSocket(p *problems, field, path string) {
	const most = 107
	if checkPath(p, field, path); len(path) > most {
		p.add(field, "%q has %d bytes, and QEMU takes at most %d: give the directory or the disk "+
			"a shorter name", path, len(path), most)
	}
}

func (b KernelBoot) os() *libvirtxml.DomainOS {
	return &libvirtxml.DomainOS{
		Type:    &libvirtxml.DomainOSType{Arch: string(b.Arch), Machine: b.Machine, Type: "hvm"},
		Kernel:  b.Kernel,
		Initrd:  b.Initrd,
		Cmdline: b.Cmdline,
	}
}

// KernelDomain is a complete domain that boots a kernel from one disk, as for a container image.
// Name, Boot and Disk are required.
type KernelDomain struct {
	Name   string
	Boot   KernelBoot
	Disk   *libvirtxml.DomainDisk // from Disk or FileDisk
	Memory uint                   // in mebibytes; 0: 256
	CPUs   uint                   // 0: 1
	// Emulated is for a host without KVM.
	Emulated bool
	// Publish forwards ports of the host to ports of the guest, by QEMU's user network.
	Publish []Publish
	// Port is the name of a virtio-serial port in the guest. On the host, libvirt chooses its UNIX
	// socket. "": none.
	Port string
}

const (
	defaultMemory = 256
	defaultCPUs   = 1
)

// Domain returns the domain's description, with a network card in QEMU's user network, a console,
// and a random number generator. The caller may change it.
func (k KernelDomain) Domain() (*libvirtxml.Domain, error) {
	k.Boot = k.Boot.withDefaults()
	k.Memory = cmp.Or(k.Memory, defaultMemory)
	k.CPUs = cmp.Or(k.CPUs, defaultCPUs)
	var p problems
	k.Boot.check(&p)
	if k.Name == "" || !printable(k.Name) || strings.Contains(k.Name, "/") {
		p.add("KernelDomain.Name", "%q is not a name for a domain: want letters without /", k.Name)
	}
	if k.Disk == nil {
		p.add("KernelDomain.Disk", "it is missing: make it with Disk or FileDisk")
	}
	if !printable(k.Port) {
		p.add("KernelDomain.Port", "%q has characters that do not print", k.Port)
	}
	for _, one := range k.Publish {
		if !one.Address.Is4() || one.Host == 0 || one.Guest == 0 {
			p.add("KernelDomain.Publish", "%v: it needs an IPv4 address and two ports", one)
		}
	}
	if err := p.err(); err != nil {
		return nil, err
	}
	domain := &libvirtxml.Domain{
		Type:       "kvm",
		Name:       k.Name,
		Memory:     &libvirtxml.DomainMemory{Value: k.Memory, Unit: "MiB"},
		VCPU:       &libvirtxml.DomainVCPU{Value: k.CPUs},
		OS:         k.Boot.os(),
		OnPoweroff: "destroy",
		OnReboot:   "restart",
		OnCrash:    "destroy",
		Devices:    k.devices(),
	}
	// libvirt uses the power button of ACPI to stop the guest. Without firmware, aarch64 has no
	// ACPI, and Debian's kernel has no driver for its other button.
	if k.Boot.Arch == ArchAMD64 {
		domain.Features = &libvirtxml.DomainFeatureList{ACPI: &libvirtxml.DomainFeature{}}
	}
	if len(k.Publish) > 0 {
		domain.Devices.Interfaces = nil
		domain.QEMUCommandline = publishing(k.Publish)
	}
	if k.Emulated {
		// QEMU's default CPU has 32 bits on virt, and on q35 less than many distributions need.
		domain.Type, domain.CPU = "qemu", &libvirtxml.DomainCPU{Mode: "maximum"}
	} else {
		domain.CPU = &libvirtxml.DomainCPU{Mode: "host-passthrough"}
	}
	return domain, nil
}

func (k KernelDomain) devices() *libvirtxml.DomainDeviceList {
	zero := uint(0)
	list := &libvirtxml.DomainDeviceList{
		Disks: []libvirtxml.DomainDisk{*k.Disk},
		Interfaces: []libvirtxml.DomainInterface{{
			Source: &libvirtxml.DomainInterfaceSource{
				User: &libvirtxml.DomainInterfaceSourceUser{}},
			Model: &libvirtxml.DomainInterfaceModel{Type: "virtio"},
		}},
		Consoles: []libvirtxml.DomainConsole{{
			Source: &libvirtxml.DomainChardevSource{Pty: &libvirtxml.DomainChardevSourcePty{}},
			Target: &libvirtxml.DomainConsoleTarget{Type: "serial", Port: &zero},
		}},
		RNGs: []libvirtxml.DomainRNG{{
			Model: "virtio",
			Backend: &libvirtxml.DomainRNGBackend{
				Random: &libvirtxml.DomainRNGBackendRandom{Device: "/dev/urandom"}},
		}},
	}
	if k.Disk.Target != nil && k.Disk.Target.Bus == string(BusSCSI) {
		list.Controllers = []libvirtxml.DomainController{{Type: "scsi", Model: "virtio-scsi"}}
	}
	if k.Port != "" {
		list.Channels = []libvirtxml.DomainChannel{{
			Source: &libvirtxml.DomainChardevSource{
				UNIX: &libvirtxml.DomainChardevSourceUNIX{Mode: "bind"}},
			Target: &libvirtxml.DomainChannelTarget{
				VirtIO: &libvirtxml.DomainChannelTargetVirtIO{Name: k.Port}},
		}}
	}
	return list
}

// DomainXML returns Domain as indented text without a newline at the end. It is the document for
// virDomainDefineXML and `virsh define`.
func (k KernelDomain) DomainXML() (string, error) {
	domain, err := k.Domain()
	return text("domain", domain, err)
}

// FileDisk returns the <disk> element of a qcow2 file on the host, given by an absolute path, and
// of its backing files. The guest finds the disk by serial. File has more options.
func FileDisk(path, serial string, d Device) (*libvirtxml.DomainDisk, error) {
	return File{Path: path, Format: FormatQcow2, Serial: serial, FollowBacking: true}.Disk(d)
}
