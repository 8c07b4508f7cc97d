package libvirt

import (
	"math/rand/v2"
	"testing"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"

	"github.com/stretchr/testify/require"
)

func pick[T any](r *rand.Rand, values ...T) T { return values[r.IntN(len(values))] }

// randomDisk makes a LUN and a device that Disk accepts, with the defaults filled in.
func randomDisk(r *rand.Rand) (LUN, Device) {
	l := LUN{
		TargetName: pick(r, "iqn.2017-01.io.kubevirt:wrapper", "iqn.2001-04.com.example",
			"eui.02004567A425678D", "naa.52004567BA64678D"),
		Number:     1 + r.IntN(MaxLUN),
		AccessMode: pick(r, accessModes()...),
		ReadOnly:   r.IntN(3) == 0,
	}
	for range 1 + r.IntN(3) {
		l.Portals = append(l.Portals,
			Portal{Host: pick(r, "10.0.0.5", "fd00::5", "disk.example.com"),
				Port: uint16(1 + r.IntN(65535))})
	}
	switch r.IntN(3) {
	case 0:
		l.Credential = Credential{Username: pick(r, "u", `a<&>"'b`, "3q2-7w_xyz0=", "ü ser"),
			SecretUsage: pick(r, "demo", `<a "&" 'b'>`)}
	case 1:
		l.Credential = Credential{Username: "u", SecretUUID: "01234567-89ab-cdef-0123-456789abcdef"}
	}
	d := Device{
		Bus: pick(r, buses()...), Kind: KindDisk, Cache: pick(r, caches()...),
		Discard: pick(r, dis()...),
		IO:      pick(r, "", IOThreads, IOUring), DetectZeroes: pick(r, "", ZeroesOff, ZeroesOn),
		ErrorPolicy:     pick(r, append(reads(), "", ErrorNoSpace)...),
		ReadErrorPolicy: pick(r, append(reads(), "")...),
		BootOrder:       uint(r.IntN(3)), Initiator: pick(r, "", "iqn.2020-01.org.example:vm"),
	}
	d.Dev = d.Bus.prefix() + pick(r, "a", "z", "aa")
	if l.AccessMode == WriteShared || d.Bus == BusSATA {
		l.ReadOnly = false
	}
	if d.Bus == BusSATA && l.AccessMode == ReadShared {
		l.AccessMode = WriteExclusive
	}
	switch {
	case d.Bus == BusSCSI && r.IntN(3) == 0:
		d.Kind = KindLUN
	case d.Bus == BusSCSI:
		l.Serial, l.WWN = pick(r, "", "0123456789abcdef0123456789abcdef0123"),
			pick(r, "", "3c0ffee000000001")
	default:
		l.Serial = pick(r, "", "a b+c.d_e-f")
	}
	return l.withDefaults(), d
}

// TestRoundTrip parses what Disk renders from random LUNs and devices.
func TestRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		l, d := randomDisk(r)
		text := testtool.Must(DiskXML(l, d))(t)
		gotLUN, gotDevice := testtool.Must2(ParseDisk(text))(t, text)
		require.Equal(t, l, gotLUN, text)
		require.Equal(t, d, gotDevice, text)
	}
}

// TestAddressOfALUN: QEMU sends the number in the name as the first two bytes of the LUN. For a LUN
// above 255 these also hold the addressing method.
func TestAddressOfALUN(t *testing.T) {
	for _, c := range []struct {
		number int
		name   string
		other  string // parsed as the same LUN, but never rendered
	}{
		{1, "a/1", "a/16385"},
		{255, "a/255", "a/16639"},
		{256, "a/16640", "a/256"},
		{16383, "a/32767", "a/16383"},
	} {
		l := LUN{Portals: []Portal{{Host: "h"}}, TargetName: "iqn.2020-01.a", Number: c.number}
		disk := testtool.Must(Disk(l, Device{}))(t)
		require.Equal(t, "iqn.2020-01."+c.name, disk.Source.Network.Name)
		for _, name := range []string{c.name, c.other} {
			disk.Source.Network.Name = "iqn.2020-01." + name
			got, _ := testtool.Must2(FromDisk(disk))(t, name)
			require.Equal(t, c.number, got.Number, name)
		}
	}
}

// TestParseWhatLibvirtShows parses a disk as `virsh dumpxml` prints it for a running domain. The
// credential is inside <source>, where other handlers write it.
func TestParseWhatLibvirtShows(t *testing.T) {
	l, d := testtool.Must2(ParseDisk(`
    <disk type='network' device='disk' snapshot='no'>
      <driver name='qemu' type='raw' queues='2'/>
      <source protocol='iscsi' name='iqn.2017-01.io.kubevirt:wrapper/2' index='1'>
        <host name='10.0.0.5'/>
        <initiator><iqn name='iqn.2017-01.io.kubevirt:node-1:vm'/></initiator>
        <auth username='u'><secret type='iscsi' uuid='01234567-89AB-cdef-0123-456789abcdef'/></auth>
        <privateData><objects/></privateData>
      </source>
      <backingStore/>
      <target dev='sda' bus='scsi'/>
      <iotune><total_bytes_sec>1</total_bytes_sec></iotune>
      <shareable/>
      <wwn>3c0ffee000000001</wwn>
      <alias name='scsi0-0-0-0'/>
      <address type='drive' controller='0' bus='0' target='0' unit='0'/>
    </disk>
    <!-- the end -->
`))(t)
	require.Equal(t, LUN{
		Portals:    []Portal{{Host: "10.0.0.5", Port: 3260}},
		TargetName: "iqn.2017-01.io.kubevirt:wrapper", Number: 2, WWN: "3c0ffee000000001",
		Credential: Credential{Username: "u", SecretUUID: "01234567-89ab-cdef-0123-456789abcdef"},
		AccessMode: WriteShared,
	}, l)
	require.Equal(t, Device{
		Dev: "sda", Bus: BusSCSI, Kind: KindDisk, Initiator: "iqn.2017-01.io.kubevirt:node-1:vm",
		Cache: CacheDefault, Discard: DiscardIgnore,
	}, d)
}

func TestParseRefuses(t *testing.T) {
	const source = `<source protocol="iscsi" name="iqn.2020-01.a:b/1"><host name="a"/></source>`
	const target = `<target dev="sda" bus="scsi"/>`
	for name, c := range map[string]struct{ document, field string }{
		"a file": {`<disk type="file"><source file="/a"/>` + target + `</disk>`,
			"disk/@type"},
		"no source": {`<disk>` + target + `</disk>`, "disk/@type"},
		"another protocol": {`<disk type="network"><source protocol="rbd" name="a/1"/>` +
			target + `</disk>`, "disk/source/@protocol"},
		"no name":        {`<disk type="network"><source protocol="iscsi"><host name="a"/></source>` + target + `</disk>`, "disk/source/@name"},
		"no LUN":         {`<disk type="network"><source protocol="iscsi" name="iqn.2020-01.a:b"><host name="a"/></source>` + target + `</disk>`, "disk/source/@name"},
		"LUN 0":          {`<disk type="network"><source protocol="iscsi" name="iqn.2020-01.a:b/0"><host name="a"/></source>` + target + `</disk>`, "disk/source/@name"},
		"flat LUN 0":     {`<disk type="network"><source protocol="iscsi" name="iqn.2020-01.a:b/16384"><host name="a"/></source>` + target + `</disk>`, "disk/source/@name"},
		"too high a LUN": {`<disk type="network"><source protocol="iscsi" name="iqn.2020-01.a:b/32768"><host name="a"/></source>` + target + `</disk>`, "disk/source/@name"},
		"a bad LUN":      {`<disk type="network"><source protocol="iscsi" name="iqn.2020-01.a:b/x"><host name="a"/></source>` + target + `</disk>`, "disk/source/@name"},
		"a bad IQN":      {`<disk type="network"><source protocol="iscsi" name="b/1"><host name="a"/></source>` + target + `</disk>`, "disk/source/@name"},
		"no host":        {`<disk type="network"><source protocol="iscsi" name="iqn.2020-01.a:b/1"/>` + target + `</disk>`, "disk/source/host"},
		"a bad host":     {`<disk type="network"><source protocol="iscsi" name="iqn.2020-01.a:b/1"><host name="a"/><host name="b c"/></source>` + target + `</disk>`, "disk/source/host[2]/@name"},
		"a port":         {`<disk type="network"><source protocol="iscsi" name="iqn.2020-01.a:b/1"><host name="a" port="x"/></source>` + target + `</disk>`, "disk/source/host[1]/@port"},
		"a transport":    {`<disk type="network"><source protocol="iscsi" name="iqn.2020-01.a:b/1"><host transport="unix" socket="/a"/></source>` + target + `</disk>`, "disk/source/host[1]/@transport"},
		"no target":      {`<disk type="network">` + source + `</disk>`, "disk/target/@dev"},
		"another bus": {`<disk type="network">` + source +
			`<target dev="sda" bus="ide"/></disk>`, "disk/target/@bus"},
		"another device": {`<disk type="network" device="cdrom">` + source + target +
			`</disk>`, "disk/@device"},
		"another driver": {`<disk type="network"><driver name="xen"/>` + source + target +
			`</disk>`, "disk/driver/@name"},
		"a format": {`<disk type="network"><driver type="qcow2"/>` + source + target +
			`</disk>`, "disk/driver/@type"},
		"a cache mode": {`<disk type="network"><driver cache="x"/>` + source + target +
			`</disk>`, "disk/driver/@cache"},
		"auth without a secret": {`<disk type="network"><auth username="u"/>` + source + target +
			`</disk>`, "disk/auth/secret"},
		"auth without a user": {`<disk type="network"><auth><secret type="iscsi" usage="a"/></auth>` + source + target + `</disk>`, "disk/auth/@username"},
		"a secret of no name": {`<disk type="network"><auth username="u"><secret type="iscsi"/></auth>` + source + target + `</disk>`, "disk/auth/secret"},
		"a secret of Ceph":    {`<disk type="network"><auth username="u"><secret type="ceph" usage="a"/></auth>` + source + target + `</disk>`, "disk/auth/secret/@type"},
		"encryption": {`<disk type="network">` + source + target +
			`<encryption format="luks"/></disk>`, "disk/encryption"},
		"encryption, inside": {`<disk type="network"><source protocol="iscsi" name="iqn.2020-01.a:b/1"><host name="a"/><encryption format="luks"/></source>` + target + `</disk>`, "disk/source/encryption"},
		"a part of it":       {`<disk type="network"><source protocol="iscsi" name="iqn.2020-01.a:b/1"><host name="a"/><slices><slice type="storage" offset="512" size="512"/></slices></source>` + target + `</disk>`, "disk/source/slices"},
		"a snapshot":         {`<disk type="network"><source protocol="iscsi" name="iqn.2020-01.a:b/1"><host name="a"/><snapshot name="s"/></source>` + target + `</disk>`, "disk/source/snapshot"},
		"transient": {`<disk type="network">` + source + target + `<transient/></disk>`,
			"disk/transient"},
		"a read-only SATA disk": {`<disk type="network">` + source +
			`<target dev="sda" bus="sata"/><readonly/></disk>`, "disk/target/@bus"},
		"a serial of a LUN": {`<disk type="network" device="lun">` + source + target +
			`<serial>a</serial></disk>`, "disk/serial"},
		"a serial": {`<disk type="network">` + source + target +
			`<serial>a/b</serial></disk>`, "disk/serial"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := ParseDisk(c.document)
			var wrong *FieldError
			require.ErrorAs(t, err, &wrong)
			require.Equal(t, c.field, wrong.Field, "%v", err)
		})
	}
	named := `<disk type="network"><source protocol="iscsi" name="iqn.2020-01.a:b/1"><host name="a"/>` +
		`<initiator><iqn name="Node-1"/></initiator></source>` + target + `</disk>`
	var wrong *FieldError
	require.ErrorAs(t, testtool.Err2(ParseDisk(named)), &wrong)
	require.Equal(t, "disk/source/initiator/iqn/@name", wrong.Field)
	good := `<disk type="network">` + source + target + `</disk>`
	require.NoError(t, testtool.Err2(ParseDisk(good)))
	for _, document := range []string{"", "disk", "<disk", "<domain></domain>", good + good,
		good + "<a", good[:len(good)-7]} {
		require.Error(t, testtool.Err2(ParseDisk(document)), document)
	}
}

// FuzzParseDisk: ParseDisk never panics, and what it accepts renders and parses back unchanged.
func FuzzParseDisk(f *testing.F) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 20 {
		f.Add(testtool.Must(DiskXML(randomDisk(r)))(f))
	}
	f.Fuzz(func(t *testing.T, document string) {
		l, d, err := ParseDisk(document)
		if err != nil {
			return
		}
		text := testtool.Must(DiskXML(l, d))(t)
		gotLUN, gotDevice := testtool.Must2(ParseDisk(text))(t, text)
		require.Equal(t, l, gotLUN)
		require.Equal(t, d, gotDevice)
	})
}

// TestHighestLUN: this package imports nothing of the server, but the LUNs are the server's.
func TestHighestLUN(t *testing.T) {
	require.Equal(t, serving.MaxNumber, MaxLUN)
}
