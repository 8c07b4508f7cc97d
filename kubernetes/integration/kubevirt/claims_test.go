package kubevirt

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
)

// identity is a machine with a VM identity whose disk is in its pod: another start finds it.
func (c *cluster) identity(t *testing.T) {
	const name = "known"
	dir := c.volume(t, v1alpha1.ClaimName(name), "ReadWriteOncePod")
	c.Apply(t, strings.NewReplacer("attachment: Service", "attachment: Sidecar", "moves", name,
		"LiveMigrate", "None").Replace(c.withDigest(c.manifest(t, "moves.yaml"))))
	m := c.running(t, name)
	m.write("/dev/vda")
	m.writes(20)
	written := m.found("/dev/vda")
	gone := m.ends()
	c.virtctl(t, "restart", name)
	gone()
	m.boots()
	m.has("/dev/vda", written)
	require.Contains(t, c.Kubectl(t, "get", "vmid", name), "true")
	m.delete("vm")
	kept(t, dir, written)
}

// filled is a machine of KubeVirt's own disk alone, on a claim that was filled with an image.
func (c *cluster) filled(t *testing.T) {
	c = c.in(t, "filled", "registries: trusted")
	c.Apply(t, c.manifest(t, "claim.yaml"))
	t.Cleanup(func() {
		if t.Failed() {
			c.tell(t, "describe", "vmimage,pvc,job,pod")
			c.tell(t, "logs", "-l", v1alpha1.Group+"/fill", "--tail=60")
		}
	})
	claim := "vmfill-" + c.Kubectl(t, "get", "pvc", "claim-disk", "-o", "jsonpath={.metadata.uid}")
	c.until(t, "the claim that is filled is there", func() bool {
		_, err := c.TryKubectl("", "get", "pvc", claim)
		return err == nil
	})
	dir := c.volume(t, claim, "ReadWriteOnce") // as a driver makes it
	m := c.running(t, "claim")
	require.Equal(t, c.imageSum(t), m.begin("/dev/vda"))
	m.write("/dev/vda")
	m.writes(10)
	written := m.found("/dev/vda")
	m.delete("vm")
	kept(t, dir, written)
}

// hotplug is a machine with a disk of ours into which a claim is plugged, by each bus, and out of
// which it is taken, while the guest writes to our disk.
func (c *cluster) hotplug(t *testing.T) {
	c.volume(t, "plugging-disk", "ReadWriteOnce")
	c.Apply(t, strings.ReplaceAll(c.manifest(t, "stays.yaml"), "stays", "plugging"))
	m := c.running(t, "plugging")
	m.write("/dev/vda")
	devices := func() []string { return strings.Fields(m.run("cd /sys/block; echo [sv]d*")) }
	for _, bus := range []string{"scsi", "virtio"} {
		name := "plugged-" + bus
		dir := c.volume(t, name, "ReadWriteOnce")
		disk := filepath.Join(dir, "disk.img")
		require.NoError(t, os.WriteFile(disk, nil, 0o644))
		require.NoError(t, os.Truncate(disk, 64<<20))
		require.NoError(t, os.Chown(disk, 107, 107))
		c.Apply(t, claim(name))
		c.virtctl(t, "addvolume", m.name, "--volume-name="+name, "--bus="+bus)
		var found []string
		c.until(t, name+" is there", func() bool {
			found = devices()
			return len(found) == 2
		})
		device := "/dev/" + strings.ReplaceAll(strings.Join(found, ""), "vda", "")
		m.copies(device, 0, 16)
		m.writes(5)
		c.virtctl(t, "removevolume", m.name, "--volume-name="+name)
		c.until(t, name+" is gone", func() bool { return len(devices()) == 1 })
		m.writes(5)
	}
	m.found("/dev/vda")
	m.delete("vm")
}

// copied is a machine with a claim of which KubeVirt makes a snapshot, a restore and a clone. None
// has our disk, as the documentation says: a restored machine has what was written after the
// snapshot, and a clone, which names the same claim, does not start beside the machine.
func (c *cluster) copied(t *testing.T) {
	dir := c.volume(t, "copied-disk", "ReadWriteOnce")
	c.Apply(t, strings.ReplaceAll(c.manifest(t, "stays.yaml"), "stays", "copied"))
	m := c.running(t, "copied")
	m.write("/dev/vda")
	c.Apply(t, fmt.Sprintf(copies, "snapshot", "VirtualMachineSnapshot", "snapshot",
		"source: {apiGroup: kubevirt.io, kind: VirtualMachine, name: copied}"))
	c.Kubectl(t, "wait", "vmsnapshot/snapshot", "--for=condition=Ready", "--timeout=5m")
	require.Empty(t, c.Kubectl(t, "get", "vmsnapshot", "snapshot", "-o",
		"jsonpath={.status.snapshotVolumes.includedVolumes}"))
	m.writes(10)
	written := m.found("/dev/vda")

	c.Apply(t, fmt.Sprintf(copies, "clone", "VirtualMachineClone", "clone",
		"source: {apiGroup: kubevirt.io, kind: VirtualMachine, name: copied}, "+
			"target: {apiGroup: kubevirt.io, kind: VirtualMachine, name: copied-twin}"))
	c.until(t, "the clone is made", func() bool {
		out, err := c.TryKubectl("", "get", "vm", "copied-twin")
		return err == nil && out != ""
	})
	c.virtctl(t, "start", "copied-twin")
	c.until(t, "the clone does not start", func() bool {
		out, _ := c.TryKubectl("", "logs", "-l", "vm.kubevirt.io/name=copied-twin", "-c",
			"hook-sidecar-0")
		return strings.Contains(out, "in use")
	})
	c.Kubectl(t, "delete", "vm", "copied-twin")

	gone := m.ends()
	c.virtctl(t, "stop", m.name)
	gone()
	c.Apply(t, fmt.Sprintf(copies, "snapshot", "VirtualMachineRestore", "restore",
		"target: {apiGroup: kubevirt.io, kind: VirtualMachine, name: copied}, "+
			"virtualMachineSnapshotName: snapshot"))
	c.Kubectl(t, "wait", "vmrestore/restore", "--for=condition=Ready", "--timeout=5m")
	c.virtctl(t, "start", m.name)
	m.boots()
	m.has("/dev/vda", written)
	m.delete("vm")
	kept(t, dir, written)
}

// copies is an object of KubeVirt's API for snapshots or clones: its group, kind, name and content.
const copies = "{apiVersion: %s.kubevirt.io/v1beta1, kind: %s, metadata: {name: %s}, spec: {%s}}"

// withDigest is a manifest with the digest of the guest's image in the place of its own.
func (c *cluster) withDigest(manifest string) string {
	return regexp.MustCompile(`sha256:[0-9a-f]{64}`).ReplaceAllString(manifest,
		c.Digest(guestImage))
}

// stays is a machine with a claim: stopped and started, and switched off by its guest, it has what
// was written. So has the claim when the machine is deleted.
func (c *cluster) stays(t *testing.T) {
	dir := c.volume(t, "stays-disk", "ReadWriteOnce")
	c.Apply(t, c.manifest(t, "stays.yaml"))
	m := c.running(t, "stays")
	m.write("/dev/vda")
	m.writes(20)
	written := m.found("/dev/vda")

	gone := m.ends()
	c.virtctl(t, "stop", m.name)
	gone()
	kept(t, dir, written)
	c.virtctl(t, "start", m.name)
	m.boots()
	m.has("/dev/vda", written)

	gone = m.ends()
	m.run("(sleep 1; poweroff -f) >/dev/null 2>&1 </dev/null & true")
	gone()
	m.boots() // runStrategy Always
	m.has("/dev/vda", written)
	m.delete("vm")
	kept(t, dir, written)
}

// kept compares what a guest has written, as found counts it, with the disk of a claim.
func kept(t *testing.T, dir string, writes int) {
	t.Helper()
	disk, err := os.Open(filepath.Join(dir, "disk.img")) // it may be larger than the memory
	require.NoError(t, err)
	defer disk.Close()
	sector := make([]byte, 512)
	for i := 1; i <= writes; i++ {
		require.NoError(t, testtool.Err(disk.ReadAt(sector, int64(firstWrite+i)*512)))
		require.Equal(t, fmt.Sprintln(i), string(bytes.TrimRight(sector, "\x00")),
			"write %d of %d", i, writes)
	}
}
