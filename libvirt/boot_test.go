package libvirt

import (
	"testing"

	"github.com/stretchr/testify/require"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/internal/testtool"
)

func demoDomain(t *testing.T) KernelDomain {
	t.Helper()
	disk := testtool.Must(FileDisk("/vm/disk.qcow2", "container", Device{Cache: CacheWriteback}))(t)
	return KernelDomain{Name: "web", Disk: disk, Emulated: true, Port: "io.kubevirt.disk.0",
		Boot: KernelBoot{Kernel: "/vm/kernel", Initrd: "/vm/initrd",
			Cmdline: "console=ttyS0 kubevirt.serial=container"}}
}

func TestKernelDomain(t *testing.T) {
	text := testtool.Must(demoDomain(t).DomainXML())(t)
	require.Equal(t, `<domain type="qemu">
  <name>web</name>
  <memory unit="MiB">256</memory>
  <vcpu>1</vcpu>
  <os>
    <type arch="x86_64" machine="q35">hvm</type>
    <kernel>/vm/kernel</kernel>
    <initrd>/vm/initrd</initrd>
    <cmdline>console=ttyS0 kubevirt.serial=container</cmdline>
  </os>
  <features>
    <acpi></acpi>
  </features>
  <cpu mode="maximum"></cpu>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>restart</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <disk type="file" device="disk">
      <driver name="qemu" type="qcow2" cache="writeback" discard="unmap"></driver>
      <source file="/vm/disk.qcow2"></source>
      <target dev="vda" bus="virtio"></target>
      <serial>container</serial>
    </disk>
    <interface type="user">
      <model type="virtio"></model>
    </interface>
    <console type="pty">
      <target type="serial" port="0"></target>
    </console>
    <channel type="unix">
      <source mode="bind"></source>
      <target type="virtio" name="io.kubevirt.disk.0"></target>
    </channel>
    <rng model="virtio">
      <backend model="random">/dev/urandom</backend>
    </rng>
  </devices>
</domain>`, text)
}

// TestKernelDomainOtherwise: a LUN on virtio-scsi, on another architecture, with KVM.
func TestKernelDomainOtherwise(t *testing.T) {
	lun := demoLUN()
	lun.Serial = "1234"
	disk := testtool.Must(Disk(lun, Device{Bus: BusSCSI}))(t)
	k := KernelDomain{Name: "web", Disk: disk, Memory: 512, CPUs: 2,
		Boot: KernelBoot{Kernel: "/vm/kernel", Arch: ArchARM64}}
	domain := testtool.Must(k.Domain())(t)
	require.Equal(t, "kvm", domain.Type)
	require.Equal(t, "host-passthrough", domain.CPU.Mode)
	require.Equal(t, "virt", domain.OS.Type.Machine)
	require.Empty(t, domain.OS.Initrd)
	require.Equal(t, "virtio-scsi", domain.Devices.Controllers[0].Model)
	require.Empty(t, domain.Devices.Channels)
	k.Emulated = true
	domain = testtool.Must(k.Domain())(t)
	require.Equal(t, "qemu", domain.Type)
	require.Equal(t, "maximum", domain.CPU.Mode, "a CPU of 32 bits boots no kernel of 64")
}

func TestKernelBootRefuses(t *testing.T) {
	_, err := KernelDomain{Name: "vm", Disk: new(libvirtxml.DomainDisk),
		Boot: KernelBoot{Kernel: "kernel", Initrd: "a\nb", Arch: "mips", Cmdline: "\x00"}}.Domain()
	for _, want := range []string{`KernelBoot.Kernel: "kernel" is relative`,
		`KernelBoot.Initrd: "a\nb" is relative`, `KernelBoot.Arch: "mips" is unknown`,
		"KernelBoot.Cmdline: "} {
		require.ErrorContains(t, err, want)
	}
	k := demoDomain(t)
	k.Name, k.Disk = "a/b", nil
	_, err = k.DomainXML()
	require.ErrorContains(t, err, `KernelDomain.Name: "a/b"`)
	require.ErrorContains(t, err, "KernelDomain.Disk: it is missing")
	_, err = FileDisk("disk", "123456789012345678901", Device{Kind: KindLUN})
	for _, want := range []string{`File.Path: "disk" is relative`, "File.Serial: ",
		"Device.Kind: "} {
		require.ErrorContains(t, err, want)
	}
}
