package volumes

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target/targettest"
	"kubevirt.io/disk/volume/api"
	volumeclient "kubevirt.io/disk/volume/client"
)

// TestVolumeLife: a volume is made, used by a running QEMU, enlarged meanwhile, found again after a
// kill, deleted while in use and made again.
func TestVolumeLife(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-system-x86_64", "qemu-io", rig.QEMUISCSI)
	v := startVolumes(t, map[string]string{"LISTEN": rig.FreePortal(t)})
	made := v.put("vm1", "size: 64Mi\n")
	require.Equal(t, api.StateReady, made.Info.State)
	require.Equal(t, made, v.json(http.StatusOK, "PUT", "/volume/vm1", "size: 64Mi"))
	require.Equal(t, made, v.json(http.StatusOK, "PUT", "/volume/vm1", ""))
	lun := int(made.ISCSI.LUN)
	m, s := rig.StartMonitor(t), &rig.RunningTarget{Portal: v.Portals[0]}
	m.Plug(s, lun)
	m.Works(lun, 1, 0)

	addr := testtool.Must(net.ResolveTCPAddr("tcp", v.Portals[0]))(t)
	other := targettest.MustLogin(t, addr, targettest.LoginOptions{}, made.ISCSI.LUN)
	grown := v.json(http.StatusOK, "PUT", "/volume/vm1", `{"size": "128Mi"}`)
	require.Equal(t, api.Size(128<<20), grown.Info.Size)
	told := rig.Do(t, other, targettest.TestUnitReady(made.ISCSI.LUN))
	require.Equal(t, "06/2A/09", told.Sense.String(), "CAPACITY DATA HAS CHANGED")
	rig.Logout(t, other)
	m.Withdraw(lun)
	m.Good("block_resize", map[string]any{"node-name": fmt.Sprintf("node%d", lun),
		"size": 128 << 20})
	m.Export(lun)
	m.Works(lun, 2, 128<<20-64<<10)

	// While it is used, it is not deleted. The answer names the differences.
	e := v.refusal(http.StatusConflict, "DELETE", "/volume/vm1", "")
	require.Equal(t, api.CodeInUse, e.Code)
	require.Len(t, e.Users, 1)
	require.Contains(t, v.Get("/status"), e.Users[0])
	e = v.refusal(http.StatusConflict, "PUT", "/volume/vm1", "size: 1Mi\naccess-mode: read-shared")
	require.Equal(t, api.CodeDiffers, e.Code)
	require.Len(t, e.Differs, 2)

	// QEMU does not notice the restart.
	v.Crash()
	v.restart(t)
	require.Equal(t, grown, v.json(http.StatusOK, "GET", "/volume/vm1", ""))
	output, code := m.IO(lun, "read -P 2 134152192 64k")
	require.Zero(t, code, output)
	require.Equal(t, http.StatusConflict, v.answers("DELETE", "/volume/vm1"))
	require.Equal(t, http.StatusNoContent, v.answers("DELETE", "/volume/vm1?force=true"))
	output, _ = m.IO(lun, "write -P 3 0 64k")
	require.Contains(t, output, "failed")
	require.Equal(t, http.StatusNoContent, v.answers("DELETE", "/volume/vm1"))
	v.refusal(http.StatusNotFound, "GET", "/volume/vm1", "")
	require.NotContains(t, strings.Join(files(t, v.home), "\n"), "disk.img")

	remade := v.put("vm1", "size: 64Mi")
	require.NotEqual(t, made.ISCSI.LUN, remade.ISCSI.LUN)
	require.NotEqual(t, made.Info.Serial, remade.Info.Serial)
	output, _ = m.IO(lun, "write -P 4 0 64k")
	require.Contains(t, output, "failed", "the new disk is another one")
	m.Unplug(lun)
	again := int(remade.ISCSI.LUN)
	m.Plug(s, again)
	output, code = m.IO(again, "read -P 0 0 64M")
	require.Zero(t, code, output)
	require.NotContains(t, output, "failed")
	m.Works(again, 5, 0)
}

// TestVolumeAnswer: the answer is the YAML of a disk's source, which the library reads, also for
// LUNs with large numbers. The Go client gets the same answer.
func TestVolumeAnswer(t *testing.T) {
	t.Parallel()
	v := startVolumes(t, nil)
	code, text := v.ask("PUT", "/volume", "size: 1Mi\naccess-mode: write-shared\n")
	require.Equal(t, http.StatusCreated, code, text)
	var document map[string]any
	require.NoError(t, yaml.Unmarshal([]byte(text), &document))
	luns := testtool.Must(libvirt.ParseSources(document))(t)
	require.Len(t, luns, 1)
	require.Equal(t, []libvirt.Portal{{Host: "127.0.0.1", Port: luns[0].Portals[0].Port}},
		luns[0].Portals)
	require.Equal(t, libvirt.WriteShared, luns[0].AccessMode)
	require.True(t, strings.HasPrefix(text, "iscsi:\n  host:\n    name: 127.0.0.1\n    port: \""),
		text)

	c := testtool.Must(volumeclient.New(volumeclient.Options{Server: v.base}))(t)
	defer c.Close()
	byClient := testtool.Must(c.Get(t.Context(), api.DefaultName))(t)
	require.Equal(t, luns[0].Number, int(byClient.ISCSI.LUN))
	two := testtool.Must(c.Put(t.Context(), "two", api.Spec{Size: 1 << 20}))(t)
	require.NotEqual(t, two.ISCSI.LUN, byClient.ISCSI.LUN)
	require.Equal(t, []api.Volume{byClient, two}, testtool.Must(c.List(t.Context()))(t))
	_, err := c.Put(t.Context(), "two", api.Spec{Size: 512})
	var refused *api.Error
	require.ErrorAs(t, err, &refused)
	require.Equal(t, api.CodeDiffers, refused.Code)
	require.Equal(t, "size", refused.Differs[0].Field)
	require.NoError(t, c.Delete(t.Context(), "two", false))
	require.ErrorAs(t, testtool.Err(c.Get(t.Context(), "two")), &refused)
	require.Equal(t, http.StatusNotFound, refused.HTTPStatus())

	// /status and the metrics report volumes.
	require.Contains(t, v.Get("/metrics"), `kubevirt_disk_volumes{state="ready"} 1`)
	require.Contains(t, v.Get("/metrics"), "kubevirt_disk_volumes_bytes 1.048576e+06")
	page := v.Status()
	require.Equal(t, &status.Volumes{Address: strings.TrimPrefix(v.base, "http://"),
		States: map[string]int{"ready": 1}, Bytes: 1 << 20, Max: 1024}, page.Volumes)
	require.Equal(t, api.DefaultName, page.LUNs[0].Volume)
}

// TestVolumesOfImages: a volume from an image in the directory, with CHAP, beside the image itself.
// A complete volume later needs no image. An incomplete one without its image reports that after a
// restart.
func TestVolumesOfImages(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-io", "qemu-img", rig.QEMUISCSI)
	dir, raw := t.TempDir(), filepath.Join(t.TempDir(), "raw")
	rig.Pattern(t, raw, 8<<20, 0x42)
	image := filepath.Join(dir, "fedora.qcow2")
	rig.MakeQcow2(t, raw, image, "", true)
	env := map[string]string{"DISK_DIR": dir}
	maps.Copy(env, rig.CHAPEnv)
	v := startVolumes(t, env)
	clone := v.put("clone", "") // of the only image
	require.Equal(t, &api.Source{Image: "fedora.qcow2"}, clone.Info.From)
	over := v.put("over", "from: {image: fedora.qcow2}\nsize: 16Mi\ncopy: {mode: copy-on-write}")
	url := func(a api.Volume) string {
		return v.CHAPURL(rig.User, rig.Password, number(a.ISCSI.LUN))
	}
	for _, a := range []api.Volume{clone, over} {
		atDisk(t, url(a), "read -P 0x42 0 8M", "write -P 0x43 1M 1M", "flush")
	}
	atDisk(t, url(over), "read -P 0 8M 8M")
	require.NotZero(t, rig.Client(t, nil, "qemu-io", "-f", "raw", "-c", "read 0 512",
		volumeURL(clone)).Status, "without the password")
	const shared = "from: {image: fedora.qcow2}\naccess-mode: read-shared\n"
	v.put("shared", shared)
	grown := v.json(http.StatusOK, "PUT", "/volume/shared", shared+"size: 16Mi")
	rig.OK(t, "qemu-io", "-r", "-f", "raw", "-c", "read -P 0x42 0 8M", "-c", "read -P 0 8M 8M",
		url(grown))
	require.NotZero(t, rig.Client(t, nil, "qemu-io", "-f", "raw", "-c", "write 0 512",
		url(grown)).Status)
	for request, want := range map[string]string{
		"from: {image: none.qcow2}":                             "there is no image",
		"from: {image: ../fedora.qcow2}":                        "there is no image",
		"from: {image: fedora.qcow2}\nsize: 1Mi":                "less than",
		"from: {image: fedora.qcow2}\ncopy: {mode: none}":       "others use, too",
		"from: {reference: 'oci:/etc'}":                         "not an image in a registry",
		"from: {image: fedora.qcow2}\ncopy: {usage-type: fast}": `usage type "fast" is unknown`,
		"pvc: {claimname: none}\nsize: 1Mi":                     "no claim",
	} {
		e := v.refusal(http.StatusBadRequest, "PUT", "/volume/x", request)
		require.Contains(t, e.Message, want, request)
	}
	v.Until("the clone is complete", func() bool {
		for _, l := range v.Status().LUNs {
			if l.Volume == "clone" {
				return l.Copy.Complete
			}
		}
		return false
	})
	v.Stop()
	require.NoError(t, os.Remove(image))
	rig.Pattern(t, filepath.Join(dir, "other.raw"), 1<<20, 1)
	v.restart(t)
	atDisk(t, url(v.json(http.StatusOK, "GET", "/volume/clone", "")), "read -P 0x42 0 1M",
		"read -P 0x43 1M 1M")
	failed := v.json(http.StatusOK, "GET", "/volume/over", "")
	require.Equal(t, api.StateFailed, failed.Info.State)
	require.Contains(t, failed.Info.Failure, "fedora.qcow2")
	require.Nil(t, failed.ISCSI)
	require.Equal(t, []status.FailedVolume{{Name: "over", Failure: failed.Info.Failure}},
		v.Status().Volumes.Failed)
	require.Equal(t, "ok\n", v.Get("/healthz"), "a restart would not help, and harm the others")
	rig.MakeQcow2(t, raw, image, "", true)
	v.json(http.StatusOK, "PUT", "/volume/over", "") // tries again
	atDisk(t, url(v.json(http.StatusOK, "GET", "/volume/over", "")), "read -P 0x43 1M 1M")
}

// TestVolumeOfSlowReference: if an image has to be fetched first, the request for its volume does
// not wait. Fetching goes on after a kill, and ends with DELETE.
func TestVolumeOfSlowReference(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img", rig.QEMUISCSI)
	raw := rig.NewLargeDisk(t)
	w := rig.NewWatchedRegistry(t)
	rig.PushPlain(t, w.Address, raw)
	release := sync.OnceFunc(w.Hold.Unlock)
	w.Hold.Lock()
	t.Cleanup(release)
	v := startVolumes(t, map[string]string{"INSECURE_REGISTRY": w.Proxy,
		"LISTEN": rig.FreePortal(t)})
	spec := "from: {reference: '" + w.Proxy + "/vm/fedora:42'}\n"
	for _, name := range []string{"vm1", "gone", "vm1"} {
		a := v.json(http.StatusAccepted, "PUT", "/volume/"+name, spec)
		require.Equal(t, api.StateFilling, a.Info.State)
		require.Nil(t, a.ISCSI)
	}
	require.Equal(t, http.StatusNoContent, v.answers("DELETE", "/volume/gone"))
	v.refusal(http.StatusNotFound, "GET", "/volume/gone", "")
	v.Crash()
	v.restart(t)
	v.json(http.StatusAccepted, "GET", "/volume/vm1", "")
	require.Empty(t, v.Status().LUNs)
	require.Equal(t, map[string]int{"filling": 1}, v.Status().Volumes.States)

	// This is what starts a machine.
	c := testtool.Must(volumeclient.New(volumeclient.Options{Server: v.base}))(t)
	defer c.Close()
	asked := api.Spec{From: &api.Source{Reference: w.Proxy + "/vm/fedora:42"}}
	early, cancel := context.WithTimeout(t.Context(), 2*time.Second) // enough to find it
	defer cancel()
	_, err := c.Provide(early, "vm1", asked)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, `volume "vm1" gets its image`)
	time.AfterFunc(100*time.Millisecond, release)
	provided := testtool.Must(c.Provide(t.Context(), "vm1", asked))(t)
	require.Equal(t, v.ready("vm1"), provided)
	rig.Same(t, raw, volumeURL(provided))
	v.json(http.StatusOK, "PUT", "/volume/vm1", spec)
	require.NoError(t, c.Delete(t.Context(), "vm1", false))
	require.NoError(t, c.Delete(t.Context(), "vm1", false))
}

// TestVolumesOfReferences: volumes of an image in a registry can be used at once. They are found
// again while the registry is away.
func TestVolumesOfReferences(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img", "qemu-io", rig.QEMUISCSI)
	raw, qcow2 := rig.NewFullDisk(t)
	s := rig.StartRegistry(t, false, "")
	rig.Push(t, s.Address, qcow2)
	v := startVolumes(t, map[string]string{"INSECURE_REGISTRY": s.Address,
		"LISTEN": rig.FreePortal(t)})
	from := "from: {reference: '" + s.Address + "/vm/fedora:42'}\n"
	make := func(name, spec string) api.Volume {
		status, text := v.ask("PUT", "/volume/"+name, spec)
		require.Contains(t, []int{http.StatusCreated, http.StatusAccepted}, status, text)
		v.Until("it can be used", func() bool {
			return v.answers("GET", "/volume/"+name) == http.StatusOK
		})
		return v.ready(name)
	}
	clone, over := make("clone", from), make("over", from+"copy: {mode: copy-on-write}")
	for _, a := range []api.Volume{clone, over} {
		r := rig.Client(t, nil, "qemu-img", "compare", "-f", "raw", "-F", "raw", volumeURL(a), raw)
		require.Zero(t, r.Status, "%s", r)
		atDisk(t, volumeURL(a), "write -P 0x43 1M 1M", "flush")
	}
	for request, want := range map[string]string{
		"from: {reference: '" + s.Address + "/vm/none:1'}":  "none",
		strings.Replace(from, "}", ", disk: other.raw}", 1): `"other.raw"`,
	} {
		status, text := v.ask("PUT", "/volume/x", request)
		require.GreaterOrEqual(t, status, 400)
		require.Contains(t, text, want)
		v.refusal(http.StatusNotFound, "GET", "/volume/x", "")
	}
	v.Until("the clone is complete", func() bool {
		for _, l := range v.Status().LUNs {
			if l.Volume == "clone" {
				return l.Copy.Complete
			}
		}
		return false
	})
	v.Crash()
	s.Kill()
	v.restart(t)
	for _, a := range []api.Volume{clone, over} {
		require.Equal(t, a, v.json(http.StatusOK, "GET", "/volume/"+a.Info.Name, ""))
		atDisk(t, volumeURL(a), "read 0 24M", "read -P 0x43 1M 1M")
		require.Equal(t, http.StatusNoContent, v.answers("DELETE", "/volume/"+a.Info.Name))
	}
	require.Empty(t, v.Status().LUNs)
}

// TestVolumeExamples runs the examples of docs/volumes.md, one after the other.
func TestVolumeExamples(t *testing.T) {
	t.Parallel()
	rig.Need(t, "bash", "curl", "qemu-img")
	dir, raw := t.TempDir(), filepath.Join(t.TempDir(), "raw")
	rig.Pattern(t, raw, 1<<20, 1)
	rig.MakeQcow2(t, raw, filepath.Join(dir, "fedora.qcow2"), "", true)
	v := startVolumes(t, map[string]string{"DISK_DIR": dir})
	text := testtool.Must(os.ReadFile(filepath.Join("..", "..", "docs", "volumes.md")))(t)
	blocks := regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(string(text), -1)
	require.Len(t, blocks, 5)
	home := t.TempDir()
	var out string
	for _, block := range blocks {
		script := strings.NewReplacer("http://127.0.0.1:8443", v.base, "/tmp/", home+"/",
			"curl -sS", "curl -sS --fail-with-body").Replace(block[1])
		out += rig.OK(t, "bash", "-euo", "pipefail", "-c", script)
	}
	for _, want := range []string{"lun: 64", `"lun": 64`, "size: 1073741824", "size: 2147483648",
		"image: fedora.qcow2", "mode: copy-on-write"} {
		require.Contains(t, out, want)
	}
	require.Contains(t, string(text), "lun: 64\n", "the answer that is shown")
	require.Contains(t, rig.OK(t, "curl", "-sS", "--fail-with-body", v.base+"/openapi.yaml"),
		"openapi: 3.1.0")
}

// bootVolume boots a machine from a volume, and returns the machine and QEMU's monitor.
func bootVolume(t *testing.T, a api.Volume) (*rig.KernelGuest, *rig.Monitor) {
	t.Helper()
	return rig.BootFrom(t, "-drive", "if=none,id=disk,format=raw,file="+volumeURL(a))
}

// TestVolumeBoots: a machine boots from a volume that PUT has made and curl has filled. The volume
// is enlarged while it runs, and the machine uses the new space. Then the volume is deleted and
// made again.
func TestVolumeBoots(t *testing.T) {
	testtool.NeedNightly(t)
	t.Parallel()
	rig.Need(t, "curl", "qemu-system-x86_64", "qemu-img", rig.QEMUISCSI)
	raw := rig.BootDisk(t)
	v := startVolumes(t, nil)
	fill := func() api.Volume {
		v.json(http.StatusAccepted, "PUT", "/volume/vm1", "from: {upload: true}")
		status, text := v.upload(raw, "vm1")
		require.Equal(t, http.StatusCreated, status, text)
		return v.ready("vm1")
	}
	first := fill()
	began := time.Now()
	g, control := bootVolume(t, first)
	t.Logf("booted after %s", time.Since(began))
	// The machine has booted from the disk: it has nothing else.
	g.OK(t, `test "$(cat /sys/block/vda/size)" = 131072`)

	grown := v.json(http.StatusOK, "PUT", "/volume/vm1", "size: 96Mi\nfrom: {upload: true}")
	require.Equal(t, api.Size(96<<20), grown.Info.Size)
	require.Equal(t, first.Info.Serial, grown.Info.Serial)
	control.Good("block_resize", map[string]any{"device": "disk", "size": 96 << 20})
	g.OK(t, `for i in $(seq 3000); do test "$(cat /sys/block/vda/size)" = 196608 && break; sleep 0.1; done
test "$(cat /sys/block/vda/size)" = 196608
head -c 1048576 /dev/urandom >/tmp/written
dd if=/tmp/written of=/dev/vda bs=1048576 seek=95 conv=notrunc,fsync 2>/dev/null
echo 3 >/proc/sys/vm/drop_caches
dd if=/dev/vda of=/tmp/read bs=1048576 skip=95 2>/dev/null
cmp /tmp/written /tmp/read
! dmesg | grep -iE 'I/O error|vda.*(error|fail)'`)

	e := v.refusal(http.StatusConflict, "DELETE", "/volume/vm1", "")
	require.Equal(t, api.CodeInUse, e.Code)
	g.Close()
	v.UntilFree()
	require.Equal(t, http.StatusNoContent, v.answers("DELETE", "/volume/vm1"))
	require.Empty(t, v.Status().LUNs)

	again := fill()
	require.EqualValues(t, 64<<20, again.Info.Size)
	require.NotEqual(t, first.Info.Serial, again.Info.Serial)
	rig.Same(t, raw, volumeURL(again))
}
