package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// TestAddressCommands: pull and inspect take addresses, and no command tells a query.
func TestAddressCommands(t *testing.T) {
	cleanEnv(t)
	content := bytes.Repeat([]byte("a disk  "), 8192)
	digest := transport.DigestOf(content)
	web := registrytest.NewWeb(t)
	web.Files["/a.img"], web.Files["/b.img"] = content, content
	web.Files["/SUMS"] = fmt.Appendf(nil, "%s  a.img\n%064x  c.img\n",
		strings.TrimPrefix(digest, "sha256:"), 1)
	ca, sums, address := "--registry-ca="+web.CA(t), "--checksums=SUMS", web.Server.URL+"/a.img"
	dir := t.TempDir()
	told := func(want int, args ...string) string {
		t.Helper()
		status, stdout, stderr := run(t, nil, args...)
		require.Equal(t, want, status, stderr)
		require.NotContains(t, stdout+stderr, "hush")
		return stdout + stderr
	}
	text := told(exitDone, "pull", ca, sums, address+"?sig=hush", filepath.Join(dir, "a.raw"))
	require.Contains(t, text, address+": disk/a.img (raw) of "+digest)
	got, err := os.ReadFile(filepath.Join(dir, "a.raw"))
	require.NoError(t, err)
	require.True(t, bytes.Equal(content, got))
	text = told(exitFailed, "pull", ca, sums, web.Server.URL+"/b.img", filepath.Join(dir, "b.raw"))
	require.Contains(t, text, "have no SHA-256 and no SHA-512 of \"b.img\"")

	text = told(exitDone, "inspect", ca, sums, "--json", address+"?sig=hush")
	var shown inspectedReference
	require.NoError(t, json.Unmarshal([]byte(text), &shown))
	require.Equal(t, inspectedReference{Reference: address, Digest: digest, MediaType: "a file",
		Size: int64(len(content)), Signatures: shown.Signatures}, shown)
	require.Contains(t, told(exitDone, "inspect", ca, address), "not known before")
	_, key := registrytest.NewSigner(t)
	require.Contains(t, told(exitFailed, "inspect", ca, "--verify-key="+key, address),
		"no signature can be")

	require.Contains(t, told(exitUsage, "pull", sums, "r.example/a:1", "x"), "--checksums: is for")
	require.Contains(t, told(exitUsage, "inspect", sums, "r.example/a:1"), "--checksums: is for")

	bad := strings.Replace(address, "://", "://me:hush@", 1)
	require.Contains(t, told(exitUsage, "pull", bad, "x"), "credentials come from")
	require.Contains(t, told(exitUsage, "inspect", bad), "credentials come from")
	require.Contains(t, told(exitUsage, "adapt", address+"?hush", "x"), "not an image reference")
	require.Contains(t, told(exitUsage, "serve", "--container-image", address+"?hush"),
		"not an image reference")
	require.Contains(t, told(exitUsage, "serve", "--volumes-listen=127.0.0.1:0",
		"--volumes-url=https://me:hush@h"), "credentials come from")
}
