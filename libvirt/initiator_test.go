package libvirt

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
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
		name, err := InitiatorName(c.machine, c.domain)
		require.NoError(t, err)
		require.NoError(t, CheckName(name))
		if c.want != "" {
			require.Equal(t, c.want, name)
		}
		require.Empty(t, seen[name], "%q on %q has the same name as another", c.domain, c.machine)
		seen[name] = c.machine + " " + c.domain
		again, err := InitiatorName(c.machine, c.domain)
		require.NoError(t, err)
		require.Equal(t, name, again)
		lun, device := demoLUN(), Device{Initiator: name}
		text, err := DiskXML(lun, device)
		require.NoError(t, err)
		_, parsed, err := ParseDisk(text)
		require.NoError(t, err)
		require.Equal(t, name, parsed.Initiator)
	}
}

func TestMachine(t *testing.T) {
	t.Setenv("NODE_NAME", "node-1")
	t.Setenv("POD_NAME", "virt-launcher-vm-x7k2p")
	name, err := InitiatorName("", "vm")
	require.NoError(t, err)
	require.Equal(t, "iqn.2017-01.io.kubevirt:node-1:vm", name)
	t.Setenv("NODE_NAME", "")
	name, err = InitiatorName("", "")
	require.NoError(t, err)
	require.Equal(t, "iqn.2017-01.io.kubevirt:virt-launcher-vm-x7k2p", name)
	t.Setenv("POD_NAME", "")
	hostname, err := os.Hostname()
	require.NoError(t, err)
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
