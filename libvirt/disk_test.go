package libvirt

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/internal/testtool"
)

// demoLUN is a LUN without special settings.
func demoLUN() LUN {
	return LUN{
		Portals:    []Portal{{Host: "10.0.0.5", Port: 3261}},
		TargetName: "iqn.2017-01.io.kubevirt:wrapper",
		Number:     1,
		Credential: Credential{Username: "u", SecretUsage: "demo"},
	}
}

// TestTheOriginalElements renders the same as the first wrapper's handler, with nothing else set.
func TestTheOriginalElements(t *testing.T) {
	text := testtool.Must(DiskXML(demoLUN(), Device{}))(t)
	require.Equal(t, `<disk type="network" device="disk">
  <driver name="qemu" type="raw" cache="none" discard="unmap"></driver>
  <auth username="u">
    <secret type="iscsi" usage="demo"></secret>
  </auth>
  <source protocol="iscsi" name="iqn.2017-01.io.kubevirt:wrapper/1">
    <host name="10.0.0.5" port="3261"></host>
  </source>
  <target dev="vda" bus="virtio"></target>
</disk>`, text)
	secret := testtool.Must(SecretXML(demoLUN().Credential))(t)
	require.Equal(t, `<secret ephemeral="no" private="yes">
  <usage type="iscsi">
    <target>demo</target>
  </usage>
</secret>`, secret)
}

func TestEveryElement(t *testing.T) {
	text := testtool.Must(DiskXML(LUN{
		Portals:    []Portal{{Host: "fd00::5"}, {Host: "disk.example.com", Port: 3261}},
		TargetName: "iqn.2017-01.io.kubevirt:wrapper",
		Number:     300,
		Credential: Credential{Username: "u", SecretUUID: "01234567-89AB-cdef-0123-456789abcdef",
			SecretUsage: "not this one"},
		AccessMode: ReadShared,
		Serial:     "0123456789abcdef0123",
		WWN:        "0x3C0FFEE000000001",
	}, Device{
		Dev: "sdb", Bus: BusSCSI, BootOrder: 2, Initiator: "iqn.2020-01.org.example:vm",
		Cache: CacheDirectsync, IO: IONative, Discard: DiscardUnmap,
		DetectZeroes: ZeroesUnmap, ErrorPolicy: ErrorNoSpace, ReadErrorPolicy: ErrorReport,
	}))(t)
	require.Equal(t, `<disk type="network" device="disk">
  <driver name="qemu" type="raw" cache="directsync" error_policy="enospace" rerror_policy="report" io="native" discard="unmap" detect_zeroes="unmap"></driver>
  <auth username="u">
    <secret type="iscsi" uuid="01234567-89ab-cdef-0123-456789abcdef"></secret>
  </auth>
  <source protocol="iscsi" name="iqn.2017-01.io.kubevirt:wrapper/16684">
    <host name="fd00::5" port="3260"></host>
    <host name="disk.example.com" port="3261"></host>
    <initiator>
      <iqn name="iqn.2020-01.org.example:vm"></iqn>
    </initiator>
  </source>
  <target dev="sdb" bus="scsi"></target>
  <readonly></readonly>
  <shareable></shareable>
  <serial>0123456789abcdef0123</serial>
  <wwn>3c0ffee000000001</wwn>
  <boot order="2"></boot>
</disk>`, text)
}

func TestAccessModes(t *testing.T) {
	for _, c := range []struct {
		mode                AccessMode
		readOnly            bool
		readonly, shareable bool
	}{
		{mode: "", readonly: false, shareable: false},
		{mode: WriteExclusive, readOnly: true, readonly: true, shareable: false},
		{mode: WriteShared, readonly: false, shareable: true},
		{mode: ReadShared, readonly: true, shareable: true},
	} {
		l := demoLUN()
		l.AccessMode, l.ReadOnly = c.mode, c.readOnly
		disk := testtool.Must(Disk(l, Device{}))(t)
		require.Equal(t, c.readonly, disk.ReadOnly != nil, "%+v", c)
		require.Equal(t, c.shareable, disk.Shareable != nil, "%+v", c)
	}
}

// TestDiskLeavesItsArguments: callers use one LUN for several devices, also concurrently.
func TestDiskLeavesItsArguments(t *testing.T) {
	l := demoLUN()
	l.Portals[0].Port = 0
	require.NoError(t, testtool.Err(Disk(l, Device{})))
	require.Equal(t, []Portal{{Host: "10.0.0.5"}}, l.Portals)
}

func TestDeviceDefaults(t *testing.T) {
	for _, c := range []struct {
		given    Device
		dev, bus string
	}{
		{Device{}, "vda", "virtio"},
		{Device{Dev: "vdc"}, "vdc", "virtio"},
		{Device{Dev: "sdc"}, "sdc", "scsi"},
		{Device{Bus: BusSATA}, "sda", "sata"},
		{Device{Bus: BusSCSI}, "sda", "scsi"},
	} {
		disk := testtool.Must(Disk(demoLUN(), c.given))(t)
		require.Equal(t, &libvirtxml.DomainDiskTarget{Dev: c.dev, Bus: c.bus}, disk.Target)
	}
}

func TestWithoutACredentialThereIsNoAuth(t *testing.T) {
	l := demoLUN()
	l.Credential = Credential{}
	require.Nil(t, testtool.Must(Disk(l, Device{}))(t).Auth)
}

// TestWhatIsWrongIsNamed changes one thing in a good LUN or device, or both.
func TestWhatIsWrongIsNamed(t *testing.T) {
	wrong := func(name string, l LUN, d Device, field, says string) {
		t.Run(name, func(t *testing.T) {
			_, err := Disk(l, d)
			var wrong *FieldError
			require.ErrorAs(t, err, &wrong)
			require.Equal(t, field, wrong.Field)
			require.Contains(t, wrong.Problem, says)
			var joined interface{ Unwrap() []error }
			require.True(t, errors.As(err, &joined))
			require.Len(t, joined.Unwrap(), 1, "one mistake must give one error: %v", err)
		})
	}
	for name, c := range map[string]struct {
		change      func(*LUN)
		field, says string
	}{
		"no portal": {func(l *LUN) { l.Portals = nil }, "LUN.Portals", "no host"},
		"an empty host": {func(l *LUN) { l.Portals = append(l.Portals, Portal{}) },
			"LUN.Portals[1].Host", "empty"},
		"every address": {func(l *LUN) { l.Portals[0].Host = "0.0.0.0" },
			"LUN.Portals[0].Host", "every address"},
		"every IPv6 address": {func(l *LUN) { l.Portals[0].Host = "::" },
			"LUN.Portals[0].Host", "every address"},
		"an address with a zone": {func(l *LUN) { l.Portals[0].Host = "fe80::1%eth0" },
			"LUN.Portals[0].Host", "zone"},
		"brackets": {func(l *LUN) { l.Portals[0].Host = "[::1]" },
			"LUN.Portals[0].Host", "brackets"},
		"a host with a port": {func(l *LUN) { l.Portals[0].Host = "a:1" },
			"LUN.Portals[0].Host", "DNS name"},
		"no target name": {func(l *LUN) { l.TargetName = "" }, "LUN.TargetName", "empty"},
		"a bad IQN":      {func(l *LUN) { l.TargetName = "iqn.bad" }, "LUN.TargetName", "iqn.bad"},
		"a target name with a LUN": {func(l *LUN) { l.TargetName += "/1" },
			"LUN.TargetName", "'/'"},
		"LUN 0":          {func(l *LUN) { l.Number = 0 }, "LUN.Number", "begin at 1"},
		"a negative LUN": {func(l *LUN) { l.Number = -1 }, "LUN.Number", "-1"},
		"too high a LUN": {func(l *LUN) { l.Number = 16384 }, "LUN.Number", "16383"},
		"a secret without a user": {func(l *LUN) { l.Credential.Username = "" },
			"LUN.Credential.Username", "empty"},
		"a user with a newline": {func(l *LUN) { l.Credential.Username = "a\nb" },
			"LUN.Credential.Username", "control"},
		"a user that is not UTF-8": {func(l *LUN) { l.Credential.Username = "a\xff" },
			"LUN.Credential.Username", "not UTF-8"},
		"a user without a secret": {func(l *LUN) { l.Credential.SecretUsage = "" },
			"LUN.Credential.SecretUsage", "reference"},
		"a usage with a slash": {func(l *LUN) { l.Credential.SecretUsage = "a/b" },
			"LUN.Credential.SecretUsage", "a/b"},
		"a usage with a newline": {func(l *LUN) { l.Credential.SecretUsage = "a\nb" },
			"LUN.Credential.SecretUsage", "control"},
		"a bad UUID": {func(l *LUN) { l.Credential.SecretUUID = "1234" },
			"LUN.Credential.SecretUUID", "1234"},
		"an access mode": {func(l *LUN) { l.AccessMode = "rw" },
			"LUN.AccessMode", "write-exclusive, write-shared or read-shared"},
		"a serial's characters": {func(l *LUN) { l.Serial = "a/b" }, "LUN.Serial", "a/b"},
		"a serial that virtio cuts": {func(l *LUN) { l.Serial = "0123456789abcdef01234" },
			"LUN.Serial", "21 characters"},
		"a WWN of a virtio disk": {func(l *LUN) { l.WWN = "3c0ffee000000001" },
			"LUN.WWN", "virtio"},
	} {
		l := demoLUN()
		c.change(&l)
		wrong(name, l, Device{}, c.field, c.says)
	}
	for name, c := range map[string]struct {
		device      Device
		field, says string
	}{
		"a bus":           {Device{Bus: "ide"}, "Device.Bus", "virtio, scsi, sata or usb"},
		"sda on virtio":   {Device{Dev: "sda", Bus: BusVirtio}, "Device.Dev", "vda"},
		"vda on scsi":     {Device{Dev: "vda", Bus: BusSCSI}, "Device.Dev", "sda"},
		"a partition":     {Device{Dev: "vda1"}, "Device.Dev", "vda1"},
		"a path":          {Device{Dev: "/dev/vda"}, "Device.Dev", "/dev/vda"},
		"a kind":          {Device{Kind: "cdrom"}, "Device.Kind", "disk or lun"},
		"a LUN on virtio": {Device{Kind: KindLUN}, "Device.Kind", "scsi"},
		"a cache mode":    {Device{Cache: "fast"}, "Device.Cache", "writeback"},
		"an I/O mode":     {Device{IO: "aio"}, "Device.IO", "io_uring"},
		"native I/O through a cache": {Device{IO: IONative, Cache: CacheWriteback},
			"Device.IO", "writeback"},
		"a discard mode":  {Device{Discard: "on"}, "Device.Discard", "unmap or ignore"},
		"a mode of zeros": {Device{DetectZeroes: "yes"}, "Device.DetectZeroes", "off, on or unmap"},
		"zeros discarded, kept mapped": {Device{DetectZeroes: ZeroesUnmap, Discard: DiscardIgnore},
			"Device.DetectZeroes", "ignore"},
		"an error policy": {Device{ErrorPolicy: "retry"}, "Device.ErrorPolicy", "enospace"},
		"a policy that reads lack": {Device{ReadErrorPolicy: ErrorNoSpace},
			"Device.ReadErrorPolicy", "stop, report or ignore"},
		"an initiator": {Device{Initiator: "vm"}, "Device.Initiator", "vm"},
	} {
		wrong(name, demoLUN(), c.device, c.field, c.says)
	}
	for name, c := range map[string]struct {
		change      func(*LUN)
		device      Device
		field, says string
	}{
		"a serial that SATA cuts": {func(l *LUN) { l.Serial = "0123456789abcdef01234" },
			Device{Bus: BusSATA}, "LUN.Serial", "21 characters"},
		"a serial that SCSI cuts": {
			func(l *LUN) { l.Serial = "0123456789abcdef0123456789abcdef01234" },
			Device{Dev: "sda"}, "LUN.Serial", "37 characters"},
		"a bad WWN": {func(l *LUN) { l.WWN = "naa.3" }, Device{Dev: "sda"},
			"LUN.WWN", "16 hexadecimal"},
		"a WWN of a SATA disk": {func(l *LUN) { l.WWN = "3c0ffee000000001" }, Device{Bus: BusSATA},
			"LUN.WWN", "sata"},
		"a LUN with a serial": {func(l *LUN) { l.Serial = "a" }, Device{Kind: KindLUN, Dev: "sda"},
			"LUN.Serial", "target's own"},
		"a LUN with a WWN": {func(l *LUN) { l.WWN = "3c0ffee000000001" },
			Device{Kind: KindLUN, Dev: "sda"}, "LUN.WWN", "target's own"},
		"a read-only SATA disk": {func(l *LUN) { l.ReadOnly = true }, Device{Bus: BusSATA},
			"Device.Bus", "read-only"},
	} {
		l := demoLUN()
		c.change(&l)
		wrong(name, l, c.device, c.field, c.says)
	}
}

func TestAllErrorsAreReportedAtOnce(t *testing.T) {
	_, err := DiskXML(LUN{}, Device{Bus: "ide"})
	for _, field := range []string{"LUN.Portals", "LUN.TargetName", "LUN.Number", "Device.Bus"} {
		require.ErrorContains(t, err, field+": ")
	}
}

func TestNativeIOPastTheCache(t *testing.T) {
	for _, cache := range []Cache{CacheNone, CacheDirectsync} {
		disk := testtool.Must(Disk(demoLUN(), Device{IO: IONative, Cache: cache}))(t)
		require.Equal(t, "native", disk.Driver.IO)
	}
}

func TestForADevice(t *testing.T) {
	l := demoLUN()
	l.Serial, l.WWN = "s", "3c0ffee000000001"
	for _, c := range []struct {
		d           Device
		serial, wwn string
	}{
		{Device{}, "s", ""}, {Device{Dev: "sda"}, "s", l.WWN}, {Device{Bus: BusSATA}, "s", ""},
		{Device{Dev: "sda", Kind: KindLUN}, "", ""},
	} {
		disk := testtool.Must(Disk(l.For(c.d), c.d))(t)
		require.Equal(t, c.serial, disk.Serial)
		require.Equal(t, c.wwn, disk.WWN)
	}
}

func TestHotplug(t *testing.T) {
	for _, dev := range []string{"vdb", "sdb"} {
		plain := testtool.Must(DiskXML(demoLUN(), Device{Dev: dev}))(t)
		require.Equal(t, plain, testtool.Must(HotplugXML(demoLUN(), Device{Dev: dev}))(t))
	}
	_, err := HotplugXML(demoLUN(), Device{Bus: BusSATA})
	require.ErrorContains(t, err, "Device.Bus: ")
	require.ErrorContains(t, testtool.Err(HotplugXML(LUN{}, Device{})), "LUN.Portals: ")
}

func TestSecret(t *testing.T) {
	secret, err := Secret(Credential{SecretUUID: "01234567-89AB-cdef-0123-456789abcdef"})
	require.NoError(t, err)
	require.Equal(t, "01234567-89ab-cdef-0123-456789abcdef", secret.UUID)
	require.Equal(t, "01234567-89ab-cdef-0123-456789abcdef", secret.Usage.Target,
		"libvirt lets a disk use only a secret for iSCSI")
	secret = testtool.Must(Secret(Credential{SecretUUID: "01234567-89ab-cdef-0123-456789abcdef",
		SecretUsage: "name"}))(t)
	require.Equal(t, "name", secret.Usage.Target)
	for field, c := range map[string]Credential{
		"Credential.SecretUsage": {Username: "u"},
		"Credential.SecretUUID":  {SecretUUID: "x"},
	} {
		_, err := SecretXML(c)
		var wrong *FieldError
		require.ErrorAs(t, err, &wrong)
		require.Equal(t, field, wrong.Field)
	}
}

func TestParsePortal(t *testing.T) {
	for text, want := range map[string]Portal{
		"10.0.0.5": {Host: "10.0.0.5"}, "10.0.0.5:3261": {Host: "10.0.0.5", Port: 3261},
		"::1": {Host: "::1"}, "[::1]": {Host: "::1"},
		"[fd00::5]:3261":                {Host: "fd00::5", Port: 3261},
		"disk.example.com:3260":         {Host: "disk.example.com", Port: 3260},
		"a:03260":                       {Host: "a", Port: 3260},
		strings.Repeat("a.", 126) + "a": {Host: strings.Repeat("a.", 126) + "a"},
	} {
		require.Equal(t, want, testtool.Must(ParsePortal(text))(t, text))
	}
	for _, text := range []string{"", ":3260", "a:b", "a:0", "a:65536", "0.0.0.0:3260", "a b",
		"[::1]:x", "http://a", "a:1:2", strings.Repeat("a.", 126) + "ab"} {
		require.Error(t, testtool.Err(ParsePortal(text)), text)
	}
	require.Equal(t, "[::1]:3260", Portal{Host: "::1"}.String())
}

func TestFileDisk(t *testing.T) {
	text := testtool.Must(File{Path: "/vm/disk.qcow2"}.DiskXML(Device{}))(t)
	require.Equal(t, `<disk type="file" device="disk">
  <driver name="qemu" type="qcow2" cache="none" discard="unmap"></driver>
  <source file="/vm/disk.qcow2"></source>
  <backingStore></backingStore>
  <target dev="vda" bus="virtio"></target>
</disk>`, text)
}

func TestFileDiskWithAnOverlay(t *testing.T) {
	text := testtool.Must(File{
		Path: "/vm/disk.raw", CopyMode: CopyOnRead, Overlay: "/storage/ssd/a&b.qcow2",
		Serial: "DATA-1", WWN: "0x3C0FFEE000000001",
	}.DiskXML(Device{Dev: "sdb", BootOrder: 1, IO: IOThreads}))(t)
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

	disk = testtool.Must(File{Path: "/vm/disk.raw", AccessMode: WriteShared}.Disk(Device{}))(t)
	require.NotNil(t, disk.Shareable)
	disk = testtool.Must(File{Path: "/vm/disk", Format: FormatQcow2, AccessMode: ReadShared}.Disk(
		Device{}))(t)
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
