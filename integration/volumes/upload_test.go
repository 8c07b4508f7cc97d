package volumes

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
)

// upload sends a file as people do, and returns the status and the text of the answer.
func (v *volumeDaemon) upload(path, name string, args ...string) (status int, text string) {
	v.T.Helper()
	// The server says whether it wants the content. By default, curl waits only a second for that.
	// Then it sends, and may be cut off before it reads the refusal.
	out := rig.OK(v.T, "curl", append(args, "-sS", "--expect100-timeout", "120", "-T", path,
		"-w", "\n%{http_code}", v.base+"/volume/"+name+"/data")...)
	at := strings.LastIndexByte(out, '\n')
	status = testtool.Must(strconv.Atoi(out[at+1:]))(v.T, out)
	return status, out[:at]
}

// ready returns a volume that must have its data.
func (v *volumeDaemon) ready(name string) api.Volume {
	v.T.Helper()
	a := v.json(http.StatusOK, "GET", "/volume/"+name, "")
	require.Equal(v.T, api.StateReady, a.Info.State)
	return a
}

// sendPart begins a request and sends a part of its content.
func (v *volumeDaemon) sendPart(method, path string, part []byte, length int,
	headers string) net.Conn {
	v.T.Helper()
	c := testtool.Must(net.Dial("tcp", strings.TrimPrefix(v.base, "http://")))(v.T)
	v.T.Cleanup(func() { _ = c.Close() })
	_, err := fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n%s\r\n",
		method, path, length, headers)
	require.NoError(v.T, err)
	require.NoError(v.T, testtool.Err(io.Copy(c, bytes.NewReader(part))))
	v.Until("it has come", func() bool {
		s := v.Status().Volumes
		return len(s.Uploads) > 0 && s.Uploads[0].ReceivedBytes >= int64(len(part))&^(1<<20-1)
	})
	return c
}

// TestUploadKilled: the daemon is killed during an upload. The volume still awaits its data, and
// the command continues from the data on storage.
func TestUploadKilled(t *testing.T) {
	t.Parallel()
	rig.Need(t, "curl", "qemu-img", rig.QEMUISCSI)
	v := startVolumes(t, map[string]string{"LISTEN": rig.FreePortal(t)})
	raw, content := rig.MakeUpload(t, 160<<20)
	const half = 150 << 20
	v.json(http.StatusAccepted, "PUT", "/volume/vm", "from: {upload: true}")

	v.sendPart("PUT", "/volume/vm/data", content[:8<<20], len(content), "")
	status, text := v.upload(raw, "vm")
	require.Equal(t, http.StatusConflict, status, text)
	v.sendPart("PUT", "/volume/new/data", content[:8<<20], len(content), "")
	v.Crash()
	v.restart(t)
	require.Equal(t, http.StatusAccepted, v.answers("GET", "/volume/vm"))
	v.refusal(http.StatusNotFound, "GET", "/volume/new", "")
	require.NotContains(t, strings.Join(files(t, v.home), "\n"), "disk.img")

	v.sendPart("PUT", "/volume/vm/data", content[:half], len(content), "Upload-Complete: ?1\r\n")
	const durable = 64 << 20 // so much is synced at a time, and is on storage a little later
	v.Until("a part is on storage", func() bool {
		text := testtool.Must(os.ReadFile(filepath.Join(v.home, "work", ".volumes", "vm",
			"disk.img.upload.json")))(t)
		var record struct{ State struct{ Offset int64 } }
		require.NoError(t, json.Unmarshal(text, &record))
		return record.State.Offset >= durable
	})
	v.Crash()
	v.restart(t)
	require.Equal(t, http.StatusAccepted, v.answers("GET", "/volume/vm"))
	require.Empty(t, v.Status().LUNs)
	status, text = v.upload(raw, "vm")
	require.Equal(t, http.StatusConflict, status, text)
	require.Contains(t, text, "kubevirt-disk upload")

	path := rig.Program(t)
	out := rig.OK(t, path, "upload", raw, v.base+"/volume/vm")
	require.Contains(t, out, "iscsi:")
	require.Contains(t, out, "vm: 160 MiB")
	rig.Same(t, raw, volumeURL(v.ready("vm")))
	bytesSent := metric(t, v.Get("/metrics"), "kubevirt_disk_upload_bytes_total")
	require.LessOrEqual(t, bytesSent, float64(len(content)-durable), "it did not go on")
}

// metric is the value of a series without labels.
func metric(t *testing.T, page, name string) float64 {
	t.Helper()
	for line := range strings.Lines(page) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return testtool.Must(strconv.ParseFloat(strings.TrimSpace(value), 64))(t)
		}
	}
	t.Fatalf("there is no %s", name)
	return 0
}

// TestUploadOfQcow2Killed: the daemon is killed while it copies the content of an uploaded image.
// The next one continues that.
func TestUploadOfQcow2Killed(t *testing.T) {
	t.Parallel()
	rig.Need(t, "curl", "qemu-img", rig.QEMUISCSI)
	v := startVolumes(t, nil)
	raw, _ := rig.MakeUpload(t, 192<<20)
	image := filepath.Join(filepath.Dir(raw), "disk.qcow2")
	rig.MakeQcow2(t, raw, image, "", true)
	status, text := v.upload(image, "vm")
	require.Equal(t, http.StatusCreated, status, text)
	v.Crash()
	v.restart(t)
	rig.Same(t, raw, volumeURL(v.ready("vm")))
	v.Until("the image is gone", func() bool {
		return !strings.Contains(strings.Join(files(t, v.home), "\n"), "upload")
	})
}

// TestUploadCommand uploads with a certificate and a token, and without.
func TestUploadCommand(t *testing.T) {
	t.Parallel()
	path := rig.Program(t)
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	rig.MakeCertificate(t, in("cert.pem"), in("key.pem"))
	const token = "0123456789-abcdefghijk"
	require.NoError(t, os.WriteFile(in("token"), []byte(token+"\n"), 0o600))
	require.NoError(t, os.WriteFile(in("wrong"), []byte(strings.ToUpper(token)), 0o600))
	v := startVolumes(t, map[string]string{"VOLUMES_TLS_CERT": in("cert.pem"),
		"VOLUMES_TLS_KEY": in("key.pem"), "VOLUMES_TOKEN_FILE": in("token")})
	raw, _ := rig.MakeUpload(t, 3<<20)
	url := strings.Replace(v.base, "http://", "https://", 1) + "/volume/vm"

	run := func(args ...string) rig.Result {
		return rig.Client(t, nil, path, append([]string{"upload"}, args...)...)
	}
	for _, test := range []struct {
		args   []string
		status int
		says   string
	}{
		{[]string{raw, url, "--ca", in("cert.pem")}, 1, "token"},
		{[]string{raw, url, "--ca", in("cert.pem"), "--token-file", in("wrong")}, 1, "token"},
		{[]string{raw, url, "--ca", in("cert.pem"), "--token-file", in("none")}, 1,
			"the file of the token cannot be read"}, // its name may be the token
		{[]string{"/etc/passwd", url, "--ca", in("cert.pem"), "--token-file", in("token")}, 1,
			"text file"},
		{[]string{in("none"), url}, 1, "no such file"},
		{[]string{"/dev/null", url}, 1, "curl -T - URL/data"},
		{[]string{raw, "vm"}, 2, "https://HOST:8443/volume/NAME"},
		{[]string{raw, "https://user:" + token + "@x/volume/vm"}, 2, "--token-file"},
		{[]string{raw, url, "--cert", in("cert.pem")}, 2, "--key"},
	} {
		r := run(test.args...)
		require.Equal(t, test.status, r.Status, "%s", r)
		require.Contains(t, r.Output, test.says)
		require.NotContains(t, r.Output, token)
	}
	r := rig.Client(t, []string{"VOLUMES_TOKEN_FILE=" + in("token")}, path, "upload", raw, url,
		"--ca", in("cert.pem"))
	require.Zero(t, r.Status, "%s", r)
	require.Contains(t, r.Output, "iscsi:\n")
	require.NotContains(t, v.Output(), token)
}

// TestUploadOnAFullStorage: storage fills up during an upload of unknown size. The volume is as
// empty as before and no LUN appears. Others go on, even a volume on the same storage and another
// daemon.
func TestUploadOnAFullStorage(t *testing.T) {
	t.Parallel()
	rig.Need(t, "curl", "zstd", "qemu-io", "qemu-img", rig.QEMUISCSI)
	small, large := t.TempDir(), t.TempDir()
	rig.MountTmpfs(t, small, "24m")
	v := startVolumes(t, map[string]string{"USAGE_TYPES": "small=" + small + ",large=" + large})
	other := startVolumes(t, map[string]string{"VOLUMES_DIR": filepath.Join(small, "other")})
	there := []api.Volume{v.put("large", "size: 4Mi\ncopy: {usage-type: large}"),
		v.put("small", "size: 4Mi\ncopy: {usage-type: small}"), other.put("other", "size: 4Mi")}
	for _, a := range there {
		atDisk(t, volumeURL(a), "write -P 0x42 0 1M", "flush")
	}
	raw, _ := rig.MakeUpload(t, 128<<20) // 32 MiB are data
	rig.OK(t, "zstd", "-q", "-1", "-k", raw)
	image := filepath.Join(t.TempDir(), "disk.qcow2")
	rig.MakeQcow2(t, raw, image, "", false)

	const spec = "from: {upload: true}\ncopy: {usage-type: small}"
	v.json(http.StatusAccepted, "PUT", "/volume/vm", spec)
	luns := len(v.Status().LUNs)
	// The length is unknown: only writing shows that there is no room.
	for _, file := range []string{raw, raw + ".zst", image} {
		status, text := v.upload(file, "vm", "-H", "Transfer-Encoding: chunked")
		require.Equal(t, http.StatusInsufficientStorage, status, text)
		require.Contains(t, text, small)
		require.Contains(t, text, "make room")
		require.Equal(t, http.StatusAccepted, v.answers("GET", "/volume/vm"))
		require.Len(t, v.Status().LUNs, luns)
		require.NotContains(t, strings.Join(files(t, small), "\n"), "/vm/disk.img")
		for _, a := range there {
			atDisk(t, volumeURL(a), "read -P 0x42 0 1M", "write -P 0x43 2M 1M", "flush")
		}
	}
	// The length is known, so no data is received.
	before := metric(t, v.Get("/metrics"), "kubevirt_disk_upload_bytes_total")
	status, text := v.upload(raw, "vm")
	require.Equal(t, http.StatusInsufficientStorage, status, text)
	require.Contains(t, text, "are free")
	require.Equal(t, before, metric(t, v.Get("/metrics"), "kubevirt_disk_upload_bytes_total"))

	fits, _ := rig.MakeUpload(t, 4<<20)
	status, text = v.upload(fits, "vm")
	require.Equal(t, http.StatusCreated, status, text)
	rig.Same(t, fits, volumeURL(v.ready("vm")))

	filler := filepath.Join(small, "filler")
	require.Error(t, os.WriteFile(filler, make([]byte, 32<<20), 0o600))
	require.Equal(t, http.StatusInsufficientStorage,
		v.answers(http.MethodPut, "/volume/small/snapshots/s"))
	require.NoError(t, os.Remove(filler))
	require.Equal(t, http.StatusCreated, v.answers(http.MethodPut, "/volume/small/snapshots/s"))
}
