package main

import (
	"bytes"
	"encoding/xml"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubevirt/hookpb"
)

// newPlugin is a sidecar as an admission policy adds it for a plugin: KubeVirt does not tell it
// the name of its container.
func newPlugin(t *testing.T) *sidecar {
	t.Helper()
	s := newSidecar(t)
	s.mounted, s.name, s.container = "/run/kubevirt-plugin/disks", "hook.sock", ""
	return s
}

// mutate asks for a domain as the launcher asks its plugins: it renders the domain with the library
// that reads the answer.
func (l *launcher) mutate(occasion string) (libvirtxml.Domain, error) {
	l.t.Helper()
	text, err := (&libvirtxml.Domain{Type: "kvm", Name: "default_vm",
		Devices: &libvirtxml.DomainDeviceList{Emulator: "/usr/bin/qemu"}}).Marshal()
	require.NoError(l.t, err)
	in := &hookpb.MutateRequest{DomainType: "libvirt", Domain: []byte(text),
		Vmi: []byte(`{"metadata":{"name":"vm","annotations":{
			"disk.kubevirt.io/bus.disks":"scsi"}}}`),
		SidecarContext: &hookpb.SidecarContext{InvocationContext: occasion}}
	var out hookpb.MutateResponse
	var domain libvirtxml.Domain
	err = l.call("plugins.v1alpha1.DomainHookService/MutateDomain", in, &out)
	if err == nil {
		require.NoError(l.t, xml.Unmarshal(out.Domain, &domain), string(out.Domain))
	}
	return domain, err
}

// TestPlugin starts a machine with the disk of an image that is a plugin.
func TestPlugin(t *testing.T) {
	s := newPlugin(t)
	p, l := s.serve()
	s.requireRefused("fedora.raw", notAsked)
	domain := testtool.Must(l.mutate("Boot"))(t)
	require.Equal(t, "default_vm", domain.Name)
	require.Len(t, domain.Devices.Disks, 1)
	disk := domain.Devices.Disks[0]
	require.Equal(t, "/var/run/kubevirt-plugin/disks/disk/nbd.sock",
		disk.Source.Network.Hosts[0].Socket)
	require.Equal(t, "scsi", disk.Target.Bus, "an annotation names the plugin")
	require.Equal(t, bytes.Repeat([]byte("boot"), 1<<18), s.content(disk.Source.Network.Name))
	require.NotContains(t, p.stderr.String(), `"portal"`, "no port is open")

	leave := s.qemu(p)
	require.ErrorContains(t, testtool.Err(l.mutate("MigrationSource")), "after a live migration")
	asked := s.start("sessions")
	require.Equal(t, exitDone, asked.status())
	require.Contains(t, asked.stdout.String(), "disk/nbd.sock")
	require.NotEmpty(t, s.content("fedora.raw"), "the machine goes on where it is")
	leave()
	require.ErrorContains(t, testtool.Err(l.mutate("MigrationTarget")), "after a live migration")
	s.requireRefused("fedora.raw", "after a live migration")
	require.Equal(t, exitDone, p.terminate())
	require.NoFileExists(t, s.socket())
}

// TestPluginThatFails: the launcher is told why.
func TestPluginThatFails(t *testing.T) {
	s := newPlugin(t)
	p := s.start("serve", "--access-mode=mine")
	require.ErrorContains(t, testtool.Err(s.launcher(p).mutate("Boot")), `"mine"`)
	require.NotZero(t, p.terminate())
}

// TestFindPlugin: what is no plugin's only directory is none.
func TestFindPlugin(t *testing.T) {
	dir := t.TempDir()
	require.Nil(t, kubevirtPlugin(filepath.Join(dir, "none")))
	require.Nil(t, kubevirtPlugin(dir))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	require.NoError(t, os.Symlink("/tmp", filepath.Join(dir, "link")))
	require.Nil(t, kubevirtPlugin(dir))
	own := filepath.Join(dir, "disks")
	require.NoError(t, os.Mkdir(own, 0o700))
	require.Equal(t, &options.Hook{Dir: own, LauncherDir: own, Container: "disks", Plugin: true},
		kubevirtPlugin(dir))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "other"), 0o700))
	require.Nil(t, kubevirtPlugin(dir), "which one is ours?")
}
