package libvirt

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

func TestInitiatorName(t *testing.T) {
	long := strings.Repeat("n", 253)
	seen := map[string]string{}
	for _, c := range []struct{ machine, domain, want string }{
		{"node-1", "", "iqn.2017-01.io.kubevirt:node-1"},
		{"node-1.example.com", "vm", "iqn.2017-01.io.kubevirt:node-1.example.com:vm"},
		{"node-2.example.com", "vm", "iqn.2017-01.io.kubevirt:node-2.example.com:vm"},
		{"node-1", "01234567-89ab-cdef-0123-456789abcdef",
			"iqn.2017-01.io.kubevirt:node-1:01234567-89ab-cdef-0123-456789abcdef"},
		{"node", "1:vm", "iqn.2017-01.io.kubevirt:node:1-vm-5a50b4f57262"},
		{"node:1", "vm", ""},
		{"node-1", "vm", ""},
		{"node-1", "VM", ""},
		{"node-1", "v m", ""},
		{"node-1", "v_m", ""},
		{"node-1", "v/m", ""},
		{"node-1", "ümlaut\n", ""},
		{"Node-1", "vm", ""},
		{long, long, ""},
		{long, long + "n", ""},
		{long + "n", long, ""},
		{long[:maxNamePart], long[:maxNamePart],
			"iqn.2017-01.io.kubevirt:" + long[:maxNamePart] + ":" + long[:maxNamePart]},
	} {
		name := testtool.Must(InitiatorName(c.machine, c.domain))(t)
		require.NoError(t, CheckName(name))
		if c.want != "" {
			require.Equal(t, c.want, name)
		}
		require.Empty(t, seen[name], "%q on %q has the same name as another", c.domain, c.machine)
		seen[name] = c.machine + " " + c.domain
		require.Equal(t, name, testtool.Must(InitiatorName(c.machine, c.domain))(t))
		lun, device := demoLUN(), Device{Initiator: name}
		_, parsed := testtool.Must2(ParseDisk(testtool.Must(DiskXML(lun, device))(t)))(t)
		require.Equal(t, name, parsed.Initiator)
	}
}

func TestMachine(t *testing.T) {
	t.Setenv("NODE_NAME", "node-1")
	t.Setenv("POD_NAME", "virt-launcher-vm-x7k2p")
	name := testtool.Must(InitiatorName("", "vm"))(t)
	require.Equal(t, "iqn.2017-01.io.kubevirt:node-1:vm", name)
	t.Setenv("NODE_NAME", "")
	name = testtool.Must(InitiatorName("", ""))(t)
	require.Equal(t, "iqn.2017-01.io.kubevirt:virt-launcher-vm-x7k2p", name)
	t.Setenv("POD_NAME", "")
	hostname := testtool.Must(os.Hostname())(t)
	machine, err := Machine()
	if distinguishes(hostname) == nil {
		require.NoError(t, err)
		require.Equal(t, hostname, machine)
	} else {
		require.ErrorContains(t, err, "NODE_NAME")
	}

	for _, hostname := range []string{
		"", "localhost", "localhost.localdomain", "LOCALHOST", "(none)",
	} {
		require.ErrorContains(t, distinguishes(hostname), "set NODE_NAME", hostname)
	}
	require.NoError(t, distinguishes("localhost-1"))
}

func TestCheckName(t *testing.T) {
	for _, name := range []string{
		"iqn.2017-01.io.kubevirt:wrapper", "iqn.2001-04.com.example",
		"iqn.2001-04.com.example:storage:diskarrays-sn-a8675309",
		"iqn.2001-12.com.ex-ample:storage.tape1.sys1.xyz", "eui.02004567A425678D",
		"eui.02004567a425678d",
		"naa.52004567BA64678D", "naa.62004567BA64678D0123456789ABCDEF",
		"iqn.2001-04.com.example:" + strings.Repeat("a", maxNameLength-24),
	} {
		require.NoError(t, CheckName(name), name)
	}
	for name, want := range map[string]string{
		"":                                "iqn.",
		"disk":                            "iqn.",
		"IQN.2017-01.io.kubevirt":         "iqn.",
		"iqn.2017-01.io.kubevirt:Wrapper": "iqn.2017-01.io.kubevirt:wrapper",
		"iqn.2017-1.io.kubevirt":          "YEAR-MONTH",
		"iqn.2017-13.io.kubevirt":         "YEAR-MONTH",
		"iqn.17-01.io.kubevirt":           "YEAR-MONTH",
		"iqn.2017-01":                     "YEAR-MONTH",
		"iqn.2017-01.":                    "YEAR-MONTH",
		"iqn.2017-01.io..kubevirt":        "YEAR-MONTH",
		"iqn.2017-01.io.kubevirt:":        "YEAR-MONTH",
		"iqn.2017-01.io.kubevirt:a b":     "' '",
		"iqn.2017-01.io.kubevirt:a_b":     "'_'",
		"iqn.2017-01.io.kubevirt:a\x00":   `'\x00'`,
		"iqn.2017-01.io.kubevirt:ä":       "'ä'",
		"eui.123":                         "16 hexadecimal",
		"eui.02004567A425678G":            "16 hexadecimal",
		"naa.123":                         "16 or 32",
		"iqn.2001-04.com.example:" + strings.Repeat("a", maxNameLength-23): "224 bytes",
	} {
		require.ErrorContains(t, CheckName(name), want, name)
	}
}
