package libvirt_test

import (
	"fmt"

	"go.yaml.in/yaml/v3"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/libvirt"
)

// A handler defines the secret and adds the disk of a pod to its domain.
func Example() {
	lun := libvirt.LUN{
		Portals:    []libvirt.Portal{{Host: "10.0.0.5", Port: 3261}},
		TargetName: "iqn.2017-01.io.kubevirt:wrapper",
		Number:     1,
		Credential: libvirt.Credential{Username: "vm", SecretUsage: "vm-disk"},
		Serial:     "5f9d2c70b1a84e36aa01",
	}
	secret, err := libvirt.SecretXML(lun.Credential)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(secret) // for virSecretDefineXML; then virSecretSetValue

	disk, err := libvirt.Disk(lun, libvirt.Device{Dev: "sda", BootOrder: 1})
	if err != nil {
		fmt.Println(err)
		return
	}
	index := uint(0)
	domain := libvirtxml.Domain{
		Type: "kvm",
		Name: "vm",
		Devices: &libvirtxml.DomainDeviceList{
			Controllers: []libvirtxml.DomainController{{Type: "scsi", Index: &index,
				Model: "virtio-scsi"}},
			Disks: []libvirtxml.DomainDisk{*disk},
		},
	}
	document, err := domain.Marshal()
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(document)
	// Output:
	// <secret ephemeral="no" private="yes">
	//   <usage type="iscsi">
	//     <target>vm-disk</target>
	//   </usage>
	// </secret>
	// <domain type="kvm">
	//   <name>vm</name>
	//   <devices>
	//     <disk type="network" device="disk">
	//       <driver name="qemu" type="raw" cache="none" discard="unmap"></driver>
	//       <auth username="vm">
	//         <secret type="iscsi" usage="vm-disk"></secret>
	//       </auth>
	//       <source protocol="iscsi" name="iqn.2017-01.io.kubevirt:wrapper/1">
	//         <host name="10.0.0.5" port="3261"></host>
	//       </source>
	//       <target dev="sda" bus="scsi"></target>
	//       <serial>5f9d2c70b1a84e36aa01</serial>
	//       <boot order="1"></boot>
	//     </disk>
	//     <controller type="scsi" index="0" model="virtio-scsi"></controller>
	//   </devices>
	// </domain>
}

// The document works for `virsh attach-device` and `virsh detach-device`.
func ExampleHotplugXML() {
	document, err := libvirt.HotplugXML(libvirt.LUN{
		Portals:    []libvirt.Portal{{Host: "fd00::5"}},
		TargetName: "iqn.2017-01.io.kubevirt:wrapper",
		Number:     2,
		AccessMode: libvirt.ReadShared,
	}, libvirt.Device{Dev: "vdb", ErrorPolicy: libvirt.ErrorStop})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(document)
	// Output:
	// <disk type="network" device="disk">
	//   <driver name="qemu" type="raw" cache="none" error_policy="stop" discard="unmap"></driver>
	//   <source protocol="iscsi" name="iqn.2017-01.io.kubevirt:wrapper/2">
	//     <host name="fd00::5" port="3260"></host>
	//   </source>
	//   <target dev="vdb" bus="virtio"></target>
	//   <readonly></readonly>
	//   <shareable></shareable>
	// </disk>
}

// The error reports all mistakes at once, by field.
func ExampleDisk_errors() {
	_, err := libvirt.Disk(libvirt.LUN{
		Portals:    []libvirt.Portal{{Host: "0.0.0.0"}},
		TargetName: "iqn.2017-01.io.kubevirt:wrapper",
	}, libvirt.Device{Dev: "sda", Bus: libvirt.BusVirtio})
	fmt.Println(err)
	// Output:
	// LUN.Portals[0].Host: 0.0.0.0 means every address: want one that the VM's host can reach
	// LUN.Number: 0 is not a disk: the LUNs of disks begin at 1
	// Device.Dev: "sda" does not fit the bus virtio, whose disks are vda and so on
}

func ExampleParseDisk() {
	lun, device, err := libvirt.ParseDisk(`<disk type='network' device='disk'>
  <driver name='qemu' type='raw' cache='none'/>
  <source protocol='iscsi' name='iqn.2017-01.io.kubevirt:wrapper/1'><host name='10.0.0.5' port='3261'/></source>
  <target dev='vda'/>
  <auth username='vm'><secret type='iscsi' usage='vm-disk'/></auth>
</disk>`)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(lun.Portals[0], lun.TargetName, lun.Number, lun.Credential.Username,
		lun.Credential.SecretUsage)
	fmt.Println(device.Dev, device.Bus, device.Cache)
	// Output:
	// 10.0.0.5:3261 iqn.2017-01.io.kubevirt:wrapper 1 vm vm-disk
	// vda virtio none
}

// Read the disk sources of a virtual machine's specification. Any YAML or JSON decoder will do.
func ExampleParseSources() {
	var document map[string]any
	if err := yaml.Unmarshal([]byte(`
disks:
  - source:
      iscsi:
        host:
          name: iscsi-demo-target
          port: "3260"
        portal: iqn.2017-01.io.kubevirt:sn.42
        lun: 2
`), &document); err != nil {
		fmt.Println(err)
		return
	}
	luns, err := libvirt.ParseSources(document)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, lun := range luns {
		fmt.Println(lun.Portals[0], lun.TargetName, lun.Number)
	}
	// Output:
	// iscsi-demo-target:3260 iqn.2017-01.io.kubevirt:sn.42 2
}
