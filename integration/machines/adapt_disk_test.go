package machines

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// rawOf writes a machine's disk into a raw file.
func rawOf(t *testing.T, disk string) string {
	t.Helper()
	raw := filepath.Join(t.TempDir(), "disk.raw")
	rig.OK(t, "qemu-img", "convert", "-O", "raw", disk, raw)
	return raw
}

// requireClean checks the file system of a raw file: e2fsck finds nothing.
func requireClean(t *testing.T, raw string) {
	t.Helper()
	out := rig.OK(t, "e2fsck", "-fn", raw)
	for _, sign := range []string{"Fix?", "IGNORED", "Clear?", "WARNING"} {
		require.NotContains(t, out, sign)
	}
}

// TestMachineLosesItsPower kills QEMU while a guest writes to a file system that has grown. The
// journal repairs it, for e2fsck as for the next start, and all synced data is there.
func TestMachineLosesItsPower(t *testing.T) {
	testtool.NeedNightly(t)
	t.Parallel()
	rig.Need(t, "e2fsck")
	dir := adapted(t, t.TempDir(), "--size=12Gi", "--", "stress")
	m := bootAdapted(t, dir, machineConfig{noNet: true})
	m.says("synced 5\n")
	m.kill()
	disk := filepath.Join(dir, "disk.qcow2")
	rig.OK(t, "qemu-img", "check", "-q", disk)
	raw := rawOf(t, disk)
	r := rig.Client(t, nil, "e2fsck", "-p", raw)
	require.Contains(t, r.Output, "recovering journal", "the machine was killed while it wrote")
	require.LessOrEqual(t, r.Status, 1, "%s", r)
	requireClean(t, raw)

	m = bootAdapted(t, dir, machineConfig{noNet: true})
	require.Equal(t, "0", m.exited(), m.console())
	found := regexp.MustCompile(`checked ([0-9]+)\n`).FindStringSubmatch(m.console())
	require.Len(t, found, 2)
	require.GreaterOrEqual(t, testtool.Must(strconv.Atoi(found[1]))(t), 3)
	requireClean(t, rawOf(t, disk))
}

// pushedLayer is a layer of an image in a registry.
type pushedLayer struct {
	Digest string
	Size   int64
}

// layersOf returns the layers of an image in a registry.
func layersOf(t *testing.T, address, reference string) []pushedLayer {
	t.Helper()
	request := testtool.Must(http.NewRequest(http.MethodGet,
		"http://"+address+"/v2/vm/"+reference, nil))(t)
	request.Header.Set("Accept", "application/vnd.oci.image.manifest.v1+json, "+
		"application/vnd.oci.image.index.v1+json")
	response := testtool.Must(http.DefaultClient.Do(request))(t)
	defer response.Body.Close()
	var m struct {
		Layers    []pushedLayer
		Manifests []struct{ Digest string }
	}
	require.NoError(t, json.NewDecoder(response.Body).Decode(&m))
	if len(m.Manifests) > 0 {
		return layersOf(t, address, "machine/manifests/"+m.Manifests[0].Digest)
	}
	return m.Layers
}

// savedImage is an image as docker saves it. The test's program is in a layer above a layer with a
// file of this many bytes that nobody reads.
func savedImage(t *testing.T, program string, unread int) string {
	t.Helper()
	noise := make([]byte, unread)
	_, _ = rand.NewChaCha8([32]byte{3}).Read(noise)
	archive := func(w io.Writer, name string, mode int64, content []byte) {
		t.Helper()
		out := tar.NewWriter(w)
		require.NoError(t, out.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg,
			Mode: mode, Size: int64(len(content))}))
		require.NoError(t, testtool.Err(out.Write(content)))
		require.NoError(t, out.Flush())
	}
	var layers [2]bytes.Buffer
	archive(&layers[0], "unread", 0o644, noise)
	archive(&layers[1], "container", 0o755, []byte(rig.ReadFile(t, program)))
	var ids []string
	for i := range layers {
		layers[i].Write(make([]byte, 1024)) // the end of an archive
		ids = append(ids, fmt.Sprintf("sha256:%x", sha256.Sum256(layers[i].Bytes())))
	}
	config, err := json.Marshal(map[string]any{"os": "linux", "architecture": runtime.GOARCH,
		"config": map[string]any{"Entrypoint": []string{"/container"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": ids}})
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "saved.tar")
	f := testtool.Must(os.Create(file))(t)
	defer f.Close()
	archive(f, "config.json", 0o644, config)
	archive(f, "one.tar", 0o644, layers[0].Bytes())
	archive(f, "two.tar", 0o644, layers[1].Bytes())
	archive(f, "manifest.json", 0o644, []byte(`[{"Config":"config.json",
		"RepoTags":["saved:1"],"Layers":["one.tar","two.tar"]}]`))
	require.NoError(t, testtool.Err(f.Write(make([]byte, 1024))))
	return "docker-archive:" + file
}

// TestLevelsAreStreamed: levels are pushed like any disk. The machine then boots from a LUN whose
// content is fetched as it is read, and an image with the same lower layers shares their blobs.
func TestLevelsAreStreamed(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	rig.Need(t, "docker-registry", rig.QEMUISCSI)
	const unread = 24 << 20
	ref, boot := requireContainerImage(t), requireBootFiles(t)
	program := filepath.Join(filepath.Dir(strings.TrimPrefix(ref, "oci:")), "container")
	ref = savedImage(t, program, unread)
	w := rig.NewWatchedRegistry(t)
	dir := t.TempDir()
	var layers [2][]pushedLayer
	for i, status := range []string{"16", "17"} {
		require.NoError(t, os.RemoveAll(filepath.Join(dir, "disk.qcow2")))
		adaptedFrom(t, ref, boot, dir, "--", "exit", status)
		tops := testtool.Must(filepath.Glob(filepath.Join(dir, "image-*.qcow2")))(t)
		require.Len(t, tops, 1)
		rig.MustRun(t, nil, "push", "--base=none", "--insecure-registry="+w.Address, tops[0],
			w.Address+"/vm/machine:"+status)
		layers[i] = layersOf(t, w.Address, "machine/manifests/"+status)
		require.NoError(t, os.Remove(tops[0]))
	}
	common, largest := 0, int64(0)
	for _, l := range layers[0] {
		if slices.Contains(layers[1], l) {
			common++
		}
		largest = max(largest, l.Size)
	}
	// All levels but the index and the level with the configuration.
	require.Equal(t, len(layers[0])-2, common, "%v", layers)
	require.Positive(t, common)
	require.GreaterOrEqual(t, largest, int64(unread))

	require.Zero(t, w.Sent.Load())
	d := rig.Start(t, rig.Config{DiskDir: t.TempDir(), Args: []string{
		"--image=" + w.Proxy + "/vm/machine:17", "--insecure-registry=" + w.Proxy,
		"--copy-mode=copy-on-write"}})
	m := bootMachine(t, machineConfig{noNet: true, cmdline: machine.ParamGrace + "=1",
		disk: "format=raw,cache=none,file=" + d.URL(1)})
	require.Equal(t, "17", m.exited())
	sent := w.Sent.Load()
	t.Logf("%d KiB were fetched, the largest level has %d KiB", sent>>10, largest>>10)
	require.Positive(t, sent)
	require.Less(t, sent, largest, "a level that nobody needs was fetched")
}

// TestArm64Machine runs an image for arm64 under qemu-system-aarch64. With UEFI, which KubeVirt
// has, the power button is its stop signal; without UEFI, the word on the port is.
func TestArm64Machine(t *testing.T) {
	testtool.NeedNightly(t)
	t.Parallel()
	if testing.Short() {
		t.Skip("boots firmware by emulation")
	}
	rig.Need(t, "qemu-system-aarch64", "buildah", "apt-get", "dpkg-deb")
	const firmware = "/usr/share/qemu-efi-aarch64/QEMU_EFI.fd"
	boot := madeBootFiles(t, func() (string, error) { return makeBootFiles("arm64") })
	dir := adaptedFrom(t, testtool.Must(makeContainerImage("arm64"))(t), boot, t.TempDir())
	c := machineConfig{arm64: true, boot: boot, noNet: true}
	if _, err := os.Stat(firmware); err == nil {
		c.firmware = firmware
	} else if os.Getenv(rig.NeedEnv) == "1" {
		t.Fatal("needs the firmware of Debian's package qemu-efi-aarch64")
	}
	m := bootAdapted(t, dir, c)
	m.word(machine.WordRunning)
	m.says("serving\n")
	if c.firmware != "" {
		m.powerButton()
	} else {
		require.NoError(t, testtool.Err(fmt.Fprintln(m.port, machine.WordStop)))
	}
	require.Equal(t, "42", m.exited())
	requireClean(t, rawOf(t, filepath.Join(dir, "disk.qcow2")))
}
