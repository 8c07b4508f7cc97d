package machines

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/libvirt"
)

// TestLibvirtMigration follows docs/live-migration.md with two libvirt daemons. A domain that
// writes moves from one to the other, where its disk has another initiator name.
func TestLibvirtMigration(t *testing.T) {
	testtool.NeedNightly(t)
	t.Parallel()
	rig.Need(t, append(libvirtTools, "bash")...)
	node1, node2 := startLibvirtd(t), startLibvirtd(t)
	kernel, initrd := buildWriter(t, node1.dir)
	image, state := writerDisk(t), t.TempDir()
	d := rig.Start(t, rig.Config{DiskDir: filepath.Dir(image), StateDir: state,
		Env: map[string]string{
			"CHAP_USERNAME": "vm", "CHAP_PASSWORD": rig.Password, "COPY_MODE": "none",
		}})
	path := rig.Program(t)
	xml := func(node string, args ...string) string {
		args = append([]string{"xml", "--status-url=http://" + d.Metrics}, args...)
		return rig.OKEnv(t, []string{"NODE_NAME=" + node}, path, args...)
	}
	for _, node := range []*libvirtd{node1, node2} {
		node.defineSecret(xml("", "--secret"), rig.Password)
	}
	const first, second = "iqn.2017-01.io.kubevirt:node-1:vm", "iqn.2017-01.io.kubevirt:node-2:vm"
	disk := func(node string) string {
		return xml(node, "--domain=vm", "--chap-username=vm", "--target-dev=sda")
	}
	require.Equal(t, strings.Replace(disk("node-1"), first, second, 1), disk("node-2"),
		"the XML must differ only in the initiator name")

	console := node1.listen("console")
	document := domainXML(t, disk("node-1"), kernel, initrd, console.Addr().String())
	document = strings.Replace(document, "<name>guest<", "<name>vm<", 1)
	for _, node := range []*libvirtd{node1, node2} {
		t.Cleanup(func() { _, _ = node.tryVirsh("destroy", "vm") }) // it outlives its libvirtd
	}
	node1.virsh("define", node1.file("domain.xml", document))
	node1.virsh("start", "vm")
	before := readConsole(t, console)
	for range 20 {
		before.Until(t, "wrote ")
	}

	doc := rig.ReadDocument(t, "../docs/live-migration.md")
	cmd := exec.CommandContext(t.Context(), "bash", "-c",
		"set -e\n"+doc.Section(t, "With libvirt", 0))
	cmd.Dir = t.TempDir()
	cmd.Env = rig.ClientEnv("WORK_DIR="+filepath.Join(state, "work"),
		"PATH="+filepath.Dir(path)+":"+os.Getenv("PATH"),
		"LIBVIRT_DEFAULT_URI="+node1.uri(), "source="+first, "destination="+second,
		"node2="+node2.uri()+" --migrateuri tcp:127.0.0.1 --listen-address 127.0.0.1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "LUN 1 is open to "+second)
	require.Contains(t, string(out), "the former one, "+first+", is fenced")
	require.Contains(t, d.Get("/status"), first)

	after := readConsole(t, console)
	var last string
	for range 20 {
		last = after.Until(t, "wrote ")
	}
	_, err = node1.tryVirsh("dominfo", "vm")
	require.Error(t, err, "the domain must be gone from the first machine")
	for _, options := range [][]string{nil, {"--inactive"}} {
		var domain libvirtxml.Domain
		shown := node2.virsh(append([]string{"dumpxml", "vm"}, options...)...)
		require.NoError(t, domain.Unmarshal(shown))
		_, device, err := libvirt.FromDisk(&domain.Devices.Disks[0])
		require.NoError(t, err)
		require.Equal(t, second, device.Initiator)
	}
	node2.virsh("destroy", "vm")
	d.Stop()
	require.NotContains(t, strings.Join(append(before.Seen, after.Seen...), "\n"), "refused")
	blocks, err := strconv.Atoi(last)
	require.NoError(t, err)
	requireBlocks(t, image, blocks+1)
}
