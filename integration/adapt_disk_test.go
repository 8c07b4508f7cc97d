package integration

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/adapter/machine"
)

// rawOf writes a machine's disk into a raw file.
func rawOf(t *testing.T, disk string) string {
	t.Helper()
	raw := filepath.Join(t.TempDir(), "disk.raw")
	ok(t, "qemu-img", "convert", "-O", "raw", disk, raw)
	return raw
}

// requireClean checks the file system of a raw file: e2fsck finds nothing.
func requireClean(t *testing.T, raw string) {
	t.Helper()
	out := ok(t, "e2fsck", "-fn", raw)
	for _, sign := range []string{"Fix?", "IGNORED", "Clear?", "WARNING"} {
		require.NotContains(t, out, sign)
	}
}

// TestMachineLosesItsPower: QEMU is killed while a guest writes to a file system that has grown.
// The journal makes it whole again, for e2fsck as for the next start, and what was synced is there.
func TestMachineLosesItsPower(t *testing.T) {
	t.Parallel()
	requireTools(t, "e2fsck")
	dir := adapted(t, t.TempDir(), "--size=12Gi", "--", "stress")
	m := bootAdapted(t, dir, machineConfig{noNet: true})
	eventually(t, func() bool { return strings.Contains(m.console(), "synced 5\n") },
		machineTime, 5*time.Millisecond)
	m.kill()
	disk := filepath.Join(dir, "disk.qcow2")
	ok(t, "qemu-img", "check", "-q", disk)
	raw := rawOf(t, disk)
	r := client(t, nil, "e2fsck", "-p", raw)
	require.Contains(t, r.output, "recovering journal", "the machine was killed while it wrote")
	require.LessOrEqual(t, r.status, 1, "%s", r)
	requireClean(t, raw)

	m = bootAdapted(t, dir, machineConfig{noNet: true})
	require.Equal(t, "0", m.exited(), m.console())
	found := regexp.MustCompile(`checked ([0-9]+)\n`).FindStringSubmatch(m.console())
	require.Len(t, found, 2)
	checked, err := strconv.Atoi(found[1])
	require.NoError(t, err)
	require.GreaterOrEqual(t, checked, 3)
	requireClean(t, rawOf(t, disk))
}

// layersOf are the digests of the layers of an image in a registry.
func layersOf(t *testing.T, address, reference string) (digests []string) {
	t.Helper()
	request, err := http.NewRequest(http.MethodGet,
		"http://"+address+"/v2/vm/"+reference, nil)
	require.NoError(t, err)
	request.Header.Set("Accept", "application/vnd.oci.image.manifest.v1+json, "+
		"application/vnd.oci.image.index.v1+json")
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	var m struct {
		Layers, Manifests []struct{ Digest string }
	}
	require.NoError(t, json.NewDecoder(response.Body).Decode(&m))
	if len(m.Manifests) > 0 {
		return layersOf(t, address, "machine/manifests/"+m.Manifests[0].Digest)
	}
	for _, l := range m.Layers {
		digests = append(digests, l.Digest)
	}
	return digests
}

// TestLevelsAreStreamed: levels are pushed like any disk. The machine then boots from a LUN whose
// content is fetched as it is read, and an image with the same lower layers shares their blobs.
func TestLevelsAreStreamed(t *testing.T) {
	t.Parallel()
	requireTools(t, "docker-registry", qemuISCSI)
	w := newWatchedRegistry(t)
	dir := t.TempDir()
	var layers [2][]string
	for i, status := range []string{"16", "17"} {
		require.NoError(t, os.RemoveAll(filepath.Join(dir, "disk.qcow2")))
		adapted(t, dir, "--", "exit", status)
		tops, err := filepath.Glob(filepath.Join(dir, "image-*.qcow2"))
		require.NoError(t, err)
		require.Len(t, tops, 1)
		mustDisk(t, nil, "push", "--base=none", "--insecure-registry="+w.address, tops[0],
			w.address+"/vm/machine:"+status)
		layers[i] = layersOf(t, w.address, "machine/manifests/"+status)
		require.NoError(t, os.Remove(tops[0]))
	}
	common := 0
	for _, l := range layers[0] {
		for _, other := range layers[1] {
			if l == other {
				common++
			}
		}
	}
	// All but the index and the level with the configuration.
	require.Equal(t, len(layers[0])-2, common, "%v", layers)
	require.Positive(t, common)

	d := start(t, config{diskDir: t.TempDir(), args: []string{
		"--image=" + w.proxy + "/vm/machine:17", "--insecure-registry=" + w.proxy,
		"--copy-mode=copy-on-write"}})
	m := bootMachine(t, machineConfig{noNet: true, cmdline: machine.ParamGrace + "=1",
		disk: "format=raw,cache=none,file=" + d.url(1)})
	require.Equal(t, "17", m.exited())
	n, _ := w.asked()
	require.Positive(t, n)
}

// TestArm64Machine: an image for arm64 runs under qemu-system-aarch64. With UEFI, which KubeVirt
// has, the power button is its stop signal; without, the word on the port is.
func TestArm64Machine(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("boots firmware by emulation")
	}
	requireTools(t, "qemu-system-aarch64", "buildah", "apt-get", "dpkg-deb")
	const firmware = "/usr/share/qemu-efi-aarch64/QEMU_EFI.fd"
	boot := madeBootFiles(t, func() (string, error) { return makeBootFiles("arm64") })
	ref, err := makeContainerImage("arm64")
	require.NoError(t, err)
	dir := adaptedFrom(t, ref, boot, t.TempDir())
	c := machineConfig{arm64: true, boot: boot, noNet: true}
	if _, err := os.Stat(firmware); err == nil {
		c.firmware = firmware
	} else if os.Getenv(requireToolsEnv) == "1" {
		t.Fatal("needs the firmware of Debian's package qemu-efi-aarch64")
	}
	m := bootAdapted(t, dir, c)
	m.word(machine.WordRunning)
	eventually(t, func() bool { return strings.Contains(m.console(), "serving\n") },
		machineTime, 20*time.Millisecond)
	if c.firmware != "" {
		m.powerButton()
	} else {
		_, err := fmt.Fprintln(m.port, machine.WordStop)
		require.NoError(t, err)
	}
	require.Equal(t, "42", m.exited())
	requireClean(t, rawOf(t, filepath.Join(dir, "disk.qcow2")))
}
