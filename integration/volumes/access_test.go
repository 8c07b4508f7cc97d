package volumes

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/volume/api"
	volumeclient "kubevirt.io/disk/volume/client"
)

// TestVolumesAreProtected: beyond loopback, nobody can make volumes without a certificate and a
// token, and the token is not readable anywhere.
func TestVolumesAreProtected(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	const token = "0123456789abcdef0123456789abcdef"
	require.NoError(t, os.WriteFile(at("token"), []byte(token+"\n"), 0o600))
	rig.MakeCertificate(t, at("cert"), at("key"))
	with := func(env ...string) map[string]string {
		all := map[string]string{"VOLUMES_LISTEN": "0.0.0.0:0"}
		for i := 0; i+1 < len(env); i += 2 {
			all[env[i]] = env[i+1]
		}
		return all
	}
	for want, env := range map[string]map[string]string{
		"without a certificate everybody on the way": with(),
		"could read tokens":                          with("VOLUMES_TOKEN_FILE", at("token")),
		"could make and delete volumes": with("VOLUMES_TLS_CERT", at("cert"),
			"VOLUMES_TLS_KEY", at("key")),
		"a certificate needs its key": with("VOLUMES_TLS_CERT", at("cert")),
		"one word of at least 16": with("VOLUMES_TLS_CERT", at("cert"), "VOLUMES_TLS_KEY",
			at("key"), "VOLUMES_TOKEN_FILE", os.DevNull),
		"cannot be used": with("VOLUMES_TLS_CERT", at("token"), "VOLUMES_TLS_KEY", at("key"),
			"VOLUMES_TOKEN_FILE", at("token")),
		"does nothing without an address": {"VOLUMES_TOKEN_FILE": at("token")},
	} {
		status, output := rig.Refused(t, rig.Config{DiskDir: rig.DiskDir(t, 1<<20), Env: env})
		require.NotZero(t, status)
		require.Contains(t, output, want)
		require.NotContains(t, output, token)
	}

	d := rig.Start(t, rig.Config{DiskDir: t.TempDir(), Env: with("VOLUMES_TLS_CERT", at("cert"),
		"VOLUMES_TLS_KEY", at("key"), "VOLUMES_TOKEN_FILE", at("token"),
		"VOLUMES_PORTAL", "storage.example.com:13260")})
	_, port, _ := strings.Cut(strings.TrimPrefix(volumesAddress(t, d), "[::]"), ":")
	server := "https://127.0.0.1:" + port
	stranger, err := volumeclient.New(volumeclient.Options{Server: server, CAFile: at("cert")})
	require.NoError(t, err)
	defer stranger.Close()
	_, err = stranger.Put(t.Context(), "vm1", api.Spec{Size: 1 << 20})
	var e *api.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, http.StatusUnauthorized, e.HTTPStatus())
	c := testtool.Must(volumeclient.New(volumeclient.Options{Server: server, CAFile: at("cert"),
		TokenFile: at("token")}))(t)
	defer c.Close()
	v := testtool.Must(c.Put(t.Context(), "vm1", api.Spec{Size: 1 << 20}))(t)
	require.Equal(t, api.Host{Name: "storage.example.com", Port: "13260"}, v.ISCSI.Host)
	for what, text := range map[string]string{"log": d.Output(), "metrics": d.Get("/metrics"),
		"status": d.Get("/status")} {
		require.NotContains(t, text, token, what)
	}
}

// TestVolumesOnClaims: a volume on a claim is disk.img there, for everybody who mounts the claim.
// If there is only a persistent directory, the default volume is disk.img in it.
func TestVolumesOnClaims(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", "qemu-io", rig.QEMUISCSI)
	dir, claim, root, fast := t.TempDir(), t.TempDir(), t.TempDir(), t.TempDir()
	raw := filepath.Join(t.TempDir(), "raw")
	rig.Pattern(t, raw, 8<<20, 0x42)
	rig.MakeQcow2(t, raw, filepath.Join(dir, "fedora.qcow2"), "", true)
	v := startVolumes(t, map[string]string{"DISK_DIR": dir, "VOLUMES_CLAIM": "some-pvc=" + claim,
		"USAGE_TYPES": "fast=" + fast})
	const spec = "from: {image: fedora.qcow2}\nsize: 16Mi\npvc: {claimname: some-pvc}\n"
	status, text := v.ask("PUT", "/volume/data", spec)
	require.Contains(t, []int{http.StatusCreated, http.StatusAccepted}, status, text)
	v.Until("the claim is filled", func() bool {
		return v.answers("GET", "/volume/data") == http.StatusOK
	})
	status, text = v.ask("PUT", "/volume/data", spec)
	require.Equal(t, http.StatusOK, status, text)
	require.True(t, strings.HasPrefix(text, "pvc:\n  claimname: some-pvc\n"), text)
	disk := filepath.Join(claim, "disk.img")
	rig.Same(t, disk, raw)
	v.json(http.StatusOK, "PUT", "/volume/data", strings.Replace(spec, "16Mi", "32Mi", 1))
	require.Equal(t, int64(32<<20), rig.FileStat(t, disk).Size)
	v.refusal(http.StatusConflict, "PUT", "/volume/other", spec)

	typed := v.put("typed", "size: 1Mi\ncopy: {usage-type: fast}")
	require.Contains(t, strings.Join(files(t, fast), "\n"), "typed/disk.img")
	require.Len(t, v.Status().LUNs, 2, "the image and the volume; claims are no LUNs")
	v.Crash()
	v.restart(t)
	require.Equal(t, typed.Info, v.json(http.StatusOK, "GET", "/volume/typed", "").Info)
	for _, name := range []string{"data", "typed"} {
		require.Equal(t, http.StatusNoContent, v.answers("DELETE", "/volume/"+name))
	}
	require.Empty(t, files(t, claim))
	require.Empty(t, files(t, fast))
	v.Stop()

	v = startVolumes(t, map[string]string{"PERSISTENT_DIR": root})
	alone := v.put("", "size: 4Mi")
	require.FileExists(t, filepath.Join(root, "disk.img"))
	atDisk(t, volumeURL(alone), "write -P 0x33 1M 1M", "flush")
	v.put("another", "size: 4Mi")
	v.Crash()
	v.restart(t)
	again := v.json(http.StatusOK, "GET", "/volume", "")
	require.Equal(t, alone.Info, again.Info)
	atDisk(t, volumeURL(again), "read -P 0x33 1M 1M")
	require.Len(t, v.Status().LUNs, 2)
}

// TestVolumesByCertificate: if clients use certificates, one of the authority needs no token, and
// all others are refused.
func TestVolumesByCertificate(t *testing.T) {
	t.Parallel()
	rig.Need(t, "curl")
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"server", "client", "stranger"} {
		rig.MakeCertificate(t, at(name+".cert"), at(name+".key"))
	}
	d := rig.Start(t, rig.Config{DiskDir: t.TempDir(), Env: map[string]string{
		"VOLUMES_LISTEN": "0.0.0.0:0", "VOLUMES_TLS_CERT": at("server.cert"),
		"VOLUMES_TLS_KEY": at("server.key"), "VOLUMES_CLIENT_CA": at("client.cert")}})
	_, port, _ := strings.Cut(strings.TrimPrefix(volumesAddress(t, d), "[::]"), ":")
	url := "https://127.0.0.1:" + port
	ask := func(args ...string) rig.Result {
		return rig.Client(t, nil, "curl", append([]string{"-sS", "--cacert", at("server.cert"),
			"-o", os.DevNull, "-w", "%{http_code}", "-X", "PUT", "--data-binary", "size: 1Mi",
			url + "/volume/vm1"}, args...)...)
	}
	require.Equal(t, "401", ask().Output)
	require.Equal(t, "401", ask("-H", "Authorization: Bearer 0123456789abcdef").Output)
	r := ask("--cert", at("stranger.cert"), "--key", at("stranger.key"))
	require.NotZero(t, r.Status, "%s", r)
	require.Empty(t, d.Status().Volumes.States)
	r = ask("--cert", at("client.cert"), "--key", at("client.key"))
	require.Equal(t, "201", r.Output)

	raw, _ := rig.MakeUpload(t, 1<<20)
	path := rig.Program(t)
	upload := []string{"upload", raw, url + "/volume/vm2", "--ca", at("server.cert")}
	r = rig.Client(t, nil, path, upload...)
	require.NotZero(t, r.Status)
	require.Contains(t, r.Output, "certificate")
	rig.OK(t, path, append(upload, "--cert", at("client.cert"), "--key", at("client.key"))...)
	require.Equal(t, map[string]int{"ready": 2}, d.Status().Volumes.States)
}
