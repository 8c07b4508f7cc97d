package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
	"kubevirt.io/disk/status"
)

// TestPullForAClaim: a pull makes the disk as large as it is told to, and no smaller than its
// image, and writes the digest into a file.
func TestPullForAClaim(t *testing.T) {
	cleanEnv(t)
	content := bytes.Repeat([]byte("a disk  "), 8192)
	web := registrytest.NewWeb(t)
	web.Files["/a.img"] = content
	from := web.Server.URL + "/a.img@" + transport.DigestOf(content)
	dir := t.TempDir()
	said := filepath.Join(dir, "digest")
	pull := func(want int, more ...string) string {
		t.Helper()
		exit, _, stderr := run(t, nil, append([]string{"pull", "--force",
			"--registry-ca=" + web.CA(t)}, more...)...)
		require.Equal(t, want, exit, stderr)
		return stderr
	}
	for size, want := range map[string]int{"1Mi": 1 << 20, "4096": len(content)} {
		disk := filepath.Join(dir, size)
		pull(exitDone, "--size="+size, "--digest-file="+said, from, disk)
		got := testtool.Must(os.ReadFile(disk))(t)
		require.Len(t, got, want)
		require.True(t, bytes.Equal(content, got[:len(content)]))
		require.Equal(t, make([]byte, want-len(content)), got[len(content):])
		digest := testtool.Must(os.ReadFile(said))(t)
		require.Equal(t, transport.DigestOf(content)+"\n", string(digest))
	}
	require.Contains(t, pull(exitUsage, "--size=x", from, dir+"/x"), "--size")
	require.Contains(t, pull(exitUsage, "--size=1Mi", from, dir), "is for a raw disk in a file")
	require.Contains(t, pull(exitFailed, "--progress-listen=nowhere:x", from, dir+"/x"),
		"--progress-listen")
	// Not even root may read that.
	refused := pull(exitFailed, "docker-archive:/proc/sys/vm/compact_memory", dir+"/x")
	require.Contains(t, refused, "compact_memory")
	require.NotContains(t, refused, "written")
	require.NoFileExists(t, dir+"/x")
}

// TestTellProgress: whoever asks is told how far a pull is, until it ends.
func TestTellProgress(t *testing.T) {
	port := testtool.Must(peers.FreePort())(t)
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	p := new(registry.Progress)
	stop := testtool.Must(tellProgress(t.Context(), address, p))(t)
	p.Expect(200)
	res := testtool.Must(http.Get("http://" + address + "/progress"))(t)
	text := testtool.Must(io.ReadAll(res.Body))(t)
	require.NoError(t, res.Body.Close())
	var got status.Progress
	require.NoError(t, json.Unmarshal(text, &got))
	require.Equal(t, status.Progress{Total: 200}, got)
	stop()
	require.Error(t, testtool.Err(http.Get("http://"+address+"/progress")))
}
