package libvirt

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFileDisk(t *testing.T) {
	text, err := File{Path: "/vm/disk.qcow2"}.DiskXML(Device{})
	require.NoError(t, err)
	require.Equal(t, `<disk type="file" device="disk">
  <driver name="qemu" type="qcow2" cache="none" discard="unmap"></driver>
  <source file="/vm/disk.qcow2"></source>
  <backingStore></backingStore>
  <target dev="vda" bus="virtio"></target>
</disk>`, text)
}

func TestFileDiskWithAnOverlay(t *testing.T) {
	text, err := File{
		Path: "/vm/disk.raw", CopyMode: CopyOnRead, Overlay: "/storage/ssd/a&b.qcow2",
		Serial: "DATA-1", WWN: "0x3C0FFEE000000001",
	}.DiskXML(Device{Dev: "sdb", BootOrder: 1, IO: IOThreads})
	require.NoError(t, err)
	require.Equal(t, `<disk type="file" device="disk">
  <driver name="qemu" type="qcow2" cache="none" io="threads" copy_on_read="on" `+
		`discard="unmap"></driver>
  <source file="/storage/ssd/a&amp;b.qcow2"></source>
  <backingStore type="file">
    <format type="raw"></format>
    <source file="/vm/disk.raw"></source>
    <backingStore></backingStore>
  </backingStore>
  <target dev="sdb" bus="scsi"></target>
  <serial>DATA-1</serial>
  <wwn>3c0ffee000000001</wwn>
  <boot order="1"></boot>
</disk>`, text)

	disk, err := File{Path: "/vm/disk.raw", CopyMode: CopyClone, Overlay: "/ssd/vm.raw"}.Disk(
		Device{})
	require.NoError(t, err)
	require.Equal(t, "/ssd/vm.raw", disk.Source.File.File)
	require.Equal(t, "raw", disk.Driver.Type)
	require.Nil(t, disk.BackingStore.Source)

	disk, err = File{Path: "/vm/disk.raw", AccessMode: WriteShared}.Disk(Device{})
	require.NoError(t, err)
	require.NotNil(t, disk.Shareable)
	disk, err = File{Path: "/vm/disk", Format: FormatQcow2, AccessMode: ReadShared}.Disk(
		Device{})
	require.NoError(t, err)
	require.NotNil(t, disk.ReadOnly)
}

func TestFileDiskRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		file   File
		device Device
		field  string
	}{
		"no path":           {File{Format: FormatRaw}, Device{}, "File.Path"},
		"a relative path":   {File{Path: "disk.raw"}, Device{}, "File.Path"},
		"control character": {File{Path: "/a\nb.raw"}, Device{}, "File.Path"},
		"unknown extension": {File{Path: "/a.vmdk"}, Device{}, "File.Format"},
		"unknown mode":      {File{Path: "/a.raw", CopyMode: "cow"}, Device{}, "File.CopyMode"},
		"no overlay": {File{Path: "/a.raw", CopyMode: CopyOnWrite}, Device{},
			"File.Overlay"},
		"an overlay for nothing": {File{Path: "/a.raw", Overlay: "/b.qcow2"}, Device{},
			"File.Overlay"},
		"over itself": {File{Path: "/a.qcow2", Overlay: "/a.qcow2", CopyMode: CopyOnWrite},
			Device{}, "File.Overlay"},
		"shared qcow2": {File{Path: "/a.qcow2", AccessMode: WriteShared}, Device{},
			"File.AccessMode"},
		"shared overlay": {File{Path: "/a.raw", Overlay: "/b", CopyMode: CopyOnWrite,
			AccessMode: WriteShared}, Device{}, "File.AccessMode"},
		"shared clone": {File{Path: "/a.raw", Overlay: "/b", CopyMode: CopyClone,
			AccessMode: WriteShared}, Device{}, "File.AccessMode"},
		"read-only copy-on-read": {File{Path: "/a.raw", Overlay: "/b", CopyMode: CopyOnRead,
			ReadOnly: true}, Device{}, "File.CopyMode"},
		"serial":    {File{Path: "/a.raw", Serial: "ä"}, Device{}, "File.Serial"},
		"wwn":       {File{Path: "/a.raw", WWN: "1"}, Device{Bus: BusSCSI}, "File.WWN"},
		"device":    {File{Path: "/a.raw"}, Device{Dev: "x"}, "Device.Dev"},
		"kind":      {File{Path: "/a.raw"}, Device{Bus: BusSCSI, Kind: KindLUN}, "Device.Kind"},
		"initiator": {File{Path: "/a.raw"}, Device{Initiator: "iqn.2020-01.a"}, "Device.Initiator"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.file.DiskXML(c.device)
			var wrong *FieldError
			require.ErrorAs(t, err, &wrong)
			require.Equal(t, c.field, wrong.Field)
		})
	}
}
