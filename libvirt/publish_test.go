package libvirt

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

func TestParsePublish(t *testing.T) {
	for text, want := range map[string]string{"8080:80": "127.0.0.1:8080:80/tcp",
		"0.0.0.0:53:5353/udp": "0.0.0.0:53:5353/udp", "10.0.0.1:1:2/tcp": "10.0.0.1:1:2/tcp"} {
		require.Equal(t, want, testtool.Must(ParsePublish(text))(t).String())
	}
	for _, text := range []string{"", "80", "0:80", "80:0", "65536:1", "a:1", ":80:80", "::1:80:80",
		"[::1]:80:80", "1:2:3:4", "8080:80/sctp", "8080:80/", "127.0.0.1,x:1:2", " 1:2"} {
		require.Error(t, testtool.Err(ParsePublish(text)), text)
	}
}

// TestDomainPublishes: the card with the ports takes the place of the one without.
func TestDomainPublishes(t *testing.T) {
	disk := testtool.Must(FileDisk("/x/disk.qcow2", "container", Device{}))(t)
	domain := KernelDomain{Name: "web", Disk: disk, Boot: KernelBoot{Kernel: "/x/kernel"},
		Publish: []Publish{{Address: netip.MustParseAddr("127.0.0.1"), Host: 8080, Guest: 80},
			{Address: netip.MustParseAddr("0.0.0.0"), Host: 53, Guest: 54, UDP: true}}}
	text := testtool.Must(domain.DomainXML())(t)
	require.NotContains(t, text, "<interface")
	require.Contains(t, text, `value="user,id=publish,hostfwd=tcp:127.0.0.1:8080-:80,`+
		`hostfwd=udp:0.0.0.0:53-:54"`)
	domain.Publish[0].Guest = 0
	require.ErrorContains(t, testtool.Err(domain.DomainXML()), "KernelDomain.Publish")
}
