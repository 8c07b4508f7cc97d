package main

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	inmemory "github.com/google/go-containerregistry/pkg/registry"
	"github.com/secure-systems-lab/go-securesystemslib/encrypted"
	"github.com/spf13/cobra"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// encryptedKey writes a key as cosign does.
func encryptedKey(t *testing.T, key crypto.Signer, password string) string {
	der := testtool.Must(x509.MarshalPKCS8PrivateKey(key))(t)
	secret := testtool.Must(encrypted.Encrypt(der, []byte(password)))(t)
	file := filepath.Join(t.TempDir(), "cosign.key")
	require.NoError(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{
		Type: "ENCRYPTED SIGSTORE PRIVATE KEY", Bytes: secret}), 0o600))
	return file
}

// plainKey writes a key without a password.
func plainKey(t *testing.T, key crypto.Signer) string {
	der := testtool.Must(x509.MarshalPKCS8PrivateKey(key))(t)
	file := filepath.Join(t.TempDir(), "key.pem")
	require.NoError(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY",
		Bytes: der}), 0o600))
	return file
}

// memoryRegistry serves a registry without TLS, and returns its host.
func memoryRegistry(t *testing.T) (host string) {
	t.Helper()
	server := httptest.NewServer(inmemory.New(inmemory.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

// saidOf runs a command, and returns all that it says.
func saidOf(t *testing.T, status int, args ...string) string {
	t.Helper()
	var out, said bytes.Buffer
	a := &app{stdout: &out, stderr: &said, stdin: strings.NewReader("")}
	require.Equal(t, status, a.execute(args), "%s%s", &out, &said)
	return out.String() + said.String()
}

// TestSignAndInspect: push signs with cosign's key, inspect says who has signed and whether that
// counts, and no output shows the password.
func TestSignAndInspect(t *testing.T) {
	cleanEnv(t)
	host := memoryRegistry(t)
	key, public := registrytest.NewSigner(t)
	_, other := registrytest.NewSigner(t)
	file := encryptedKey(t, key, "pa55word")
	raw := filepath.Join(t.TempDir(), "a.raw")
	require.NoError(t, os.WriteFile(raw, make([]byte, 64<<10), 0o600))
	ref := host + "/vm/a:1"
	said := func(status int, args ...string) string {
		t.Helper()
		text := saidOf(t, status, append(args, "--insecure-registry="+host)...)
		require.NotContains(t, text, "pa55")
		return text
	}
	push := []string{"push", "--base=none", raw, ref, "--sign-key=" + file}
	require.Contains(t, said(exitUsage, push...), "is needed: give it in COSIGN_PASSWORD")
	t.Setenv("COSIGN_PASSWORD_FILE", "pa55word")
	require.Contains(t, said(exitUsage, push...), "COSIGN_PASSWORD_FILE names a file that cannot "+
		"be read: no such file")
	require.NoError(t, os.Unsetenv("COSIGN_PASSWORD_FILE"))
	t.Setenv("COSIGN_PASSWORD", "pa55worx")
	require.Contains(t, said(exitUsage, push...), "the password is wrong")
	require.Contains(t, said(exitFailed, "inspect", ref), "does not exist")
	t.Setenv("COSIGN_PASSWORD", "")
	require.NoError(t, os.Unsetenv("COSIGN_PASSWORD"))
	password := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(password, []byte("pa55word\n"), 0o600))
	t.Setenv("COSIGN_PASSWORD_FILE", password)
	fingerprint := registrytest.Fingerprint(t, key)
	require.Contains(t, said(exitDone, push...), "signed by "+fingerprint)

	text := said(exitDone, "inspect", ref)
	require.Contains(t, text, "no key was given to verify it with")
	require.Contains(t, said(exitUsage, "inspect", ref, "--format=raw"), "is for files")
	text = said(exitDone, "inspect", ref, "--verify-key="+public)
	require.Contains(t, text, fingerprint+" (simple-signing): verified")
	text = said(exitFailed, "inspect", ref, "--verify-key="+other, "--json")
	var shown inspectedReference
	require.NoError(t, json.Unmarshal([]byte(text), &shown))
	require.False(t, *shown.Admitted)
	require.Contains(t, shown.Reason, "is by another key")
	require.Len(t, shown.Signatures, 1)
	require.Empty(t, shown.Signatures[0].Key)
	require.Nil(t, shown.Streamed, "nobody has looked inside")

	text = said(exitDone, "inspect", ref, "--verify-key="+public, "--json")
	require.NoError(t, json.Unmarshal([]byte(text), &shown))
	require.Equal(t, []string{"linux/amd64", "linux/arm64"}, shown.Platforms)
	require.True(t, *shown.Streamed)
	require.Len(t, shown.Disks, 1)
	require.EqualValues(t, 64<<10, shown.Disks[0].VirtualSize)
}

// TestInspectLayout: an image in an OCI layout is looked at like one in a registry.
func TestInspectLayout(t *testing.T) {
	cleanEnv(t)
	_, public := registrytest.NewSigner(t)
	s := registrytest.Store{}
	ref := "oci:" + s.Layout(t, s.Image(t, registrytest.TarOf(t,
		registrytest.TarFile{Name: "disk/a.img", Content: registrytest.Noise(1, 64<<10)})))
	require.Contains(t, saidOf(t, exitDone, "inspect", ref), "a.img")
	require.Contains(t, saidOf(t, exitFailed, "inspect", ref, "--verify-key="+public),
		"has no signature")
}

// TestSignedBelow: what a new image is built on has to be signed, too, and the new one is signed by
// whoever makes it. So has a container image that becomes a disk.
func TestSignedBelow(t *testing.T) {
	cleanEnv(t)
	host := memoryRegistry(t)
	key, public := registrytest.NewSigner(t)
	file := plainKey(t, key)
	dir := t.TempDir()
	raw := filepath.Join(dir, "a.raw")
	write := func(parts ...string) (content []byte) {
		for _, part := range parts {
			content = append(content, bytes.Repeat([]byte(part), 1<<17)...)
		}
		require.NoError(t, os.WriteFile(raw, content, 0o600))
		return content
	}
	said := func(status int, args ...string) string {
		t.Helper()
		return saidOf(t, status, append(args, "--insecure-registry="+host)...)
	}
	ref := func(tag string) string { return host + "/vm/a:" + tag }
	verify := "--verify-key=" + public
	write("the same", "unsigned")
	said(exitDone, "push", "--base=none", raw, ref("unsigned"))
	write("the same", "is known")
	said(exitDone, "push", "--base=none", raw, ref("signed"), "--sign-key="+file)
	want := write("the same", "changed ")
	const none = "has no signature"
	for _, how := range []string{"--onto", "--base"} {
		require.Contains(t, said(exitFailed, "push", how+"="+ref("unsigned"), raw, ref("2"),
			verify), none)
		require.Contains(t, said(exitFailed, "inspect", ref("2")), "does not exist")
	}
	require.Contains(t, said(exitFailed, "adapt", ref("unsigned"), "--to", filepath.Join(dir, "to"),
		verify, "--kernel="+raw, "--initrd="+raw), none)
	require.NoDirExists(t, filepath.Join(dir, "to", "disk"))
	require.Contains(t, said(exitDone, "push", "--onto="+ref("signed"), raw, ref("2"), verify,
		"--sign-key="+file), "signed by "+registrytest.Fingerprint(t, key))
	said(exitDone, "pull", ref("2"), filepath.Join(dir, "out.raw"), verify)
	got := testtool.Must(os.ReadFile(filepath.Join(dir, "out.raw")))(t)
	require.True(t, bytes.Equal(want, got))
}

// TestOneDigest: the digest that push prints is the one that all others say and take. That of this
// machine's image stands beside it, and is as good a name, with a signature, too.
func TestOneDigest(t *testing.T) {
	cleanEnv(t)
	host := memoryRegistry(t)
	key, public := registrytest.NewSigner(t)
	dir := t.TempDir()
	signs, raw := plainKey(t, key), filepath.Join(dir, "a.raw")
	require.NoError(t, os.WriteFile(raw, bytes.Repeat([]byte("a disk  "), 8192), 0o600))
	insecure, verify := "--insecure-registry="+host, "--verify-key="+public
	_, pushed, _ := run(t, nil, "push", insecure, "--base=none", "--sign-key="+signs, raw,
		host+"/vm/a:1")
	digest := strings.TrimSpace(pushed)

	inspect := func(ref string) (shown inspectedReference) {
		t.Helper()
		text, _ := works(t, nil, "inspect", "--json", insecure, verify, ref)
		require.NoError(t, json.Unmarshal([]byte(text), &shown))
		return shown
	}
	shown := inspect(host + "/vm/a:1")
	require.Equal(t, digest, shown.Digest)
	platform := shown.PlatformDigest
	require.NotContains(t, []string{"", digest}, platform)
	said := filepath.Join(dir, "digest")
	for name, want := range map[string]string{":1": digest, "@" + digest: digest,
		"@" + platform: platform} {
		ref := host + "/vm/a" + name
		require.Equal(t, want, inspect(ref).Digest)
		_, text := works(t, nil, "pull", insecure, verify, "--force", "--digest-file="+said, ref,
			filepath.Join(dir, "out.raw"))
		require.Contains(t, text, " of "+want)
		require.Contains(t, text, platform)
		require.Equal(t, want+"\n", string(testtool.Must(os.ReadFile(said))(t)))

		l := newPlace(t)
		p := launch(t, binary(t), l.env, "serve", insecure, verify, "--image="+ref)
		p.untilReady(l)
		_, page := p.page("/?lun=1")
		_, metrics := p.page("/metrics")
		_, status := p.page("/status")
		for _, where := range []string{page, metrics, status, p.stderr.String()} {
			require.Contains(t, where, want)
			require.Contains(t, where, platform)
		}
		require.Equal(t, exitDone, p.terminate())
	}
}

// TestNamesImage: what may be a file is one.
func TestNamesImage(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, os.MkdirAll("disk.d/vm", 0o755))
	for text, want := range map[string]bool{"registry.example.com/vm/a:1": true,
		"localhost:5000/a": true, "oci:dir": true, "docker://vm/a": true, "a.qcow2": false,
		"vm/a": false, "./vm/a:1": false, "../vm.d/a": false, "/vm.d/a": false,
		"disk.d/vm": false, "-": false} {
		_, ok := testtool.Must2(namesImage([]string{text}))(t)
		require.Equal(t, want, ok, text)
	}
	// Neither a file nor a reference: the message says what is wrong with each.
	for text, want := range map[string]string{"localhost:5000/VM/a:1": "can only contain",
		"localhost:5000/a@sha256:00": "no valid digest"} {
		_, _, err := namesImage([]string{text})
		require.ErrorContains(t, err, "there is no file")
		require.ErrorContains(t, err, want)
	}
}

// TestSignAfterwards: an image that was pushed without a signature is signed later, by a key that
// we have made, and each digest of it is admitted then. The files of a key are never replaced.
func TestSignAfterwards(t *testing.T) {
	cleanEnv(t)
	t.Setenv("COSIGN_PASSWORD", "pa55word")
	host := memoryRegistry(t)
	dir := t.TempDir()
	key, public := filepath.Join(dir, "own.key"), filepath.Join(dir, "own.pub")
	said := func(status int, args ...string) string {
		t.Helper()
		text := saidOf(t, status, args...)
		require.NotContains(t, text, "pa55")
		return text
	}
	half := key + durable.PartialSuffix // what a killed one has left
	require.NoError(t, os.WriteFile(half, []byte("-----BEGIN"), 0o600))
	require.Contains(t, said(exitDone, "key", "generate", "--output="+filepath.Join(dir, "own")),
		"must stay secret")
	require.NoFileExists(t, half)
	info := testtool.Must(os.Stat(key))(t)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	again := said(exitFailed, "key", "generate", "--output="+filepath.Join(dir, "own"))
	require.Contains(t, again, "is there already")
	require.Contains(t, said(exitFailed, "key", "generate", "--output="+dir+"/none/own"),
		"make it first")
	_, other := registrytest.NewSigner(t)
	raw, ref := filepath.Join(dir, "a.raw"), host+"/vm/a:1"
	require.NoError(t, os.WriteFile(raw, make([]byte, 64<<10), 0o600))
	require.Contains(t, said(exitFailed, "sign", ref, "--sign-key="+key), "does not exist")
	said(exitDone, "push", "--base=none", raw, ref)
	require.Contains(t, said(exitFailed, "verify", ref, "--verify-key="+public), "no signature")
	require.Contains(t, said(exitUsage, "verify", ref), "whose signature counts")
	require.Contains(t, said(exitUsage, "sign", ref), "key generate")
	require.Contains(t, said(exitUsage, "sign", ref, "--sign-key="+public), "own.pub")

	list := strings.TrimSpace(said(exitDone, "inspect", ref, "--json"))
	require.NotEmpty(t, list)
	require.Contains(t, said(exitDone, "sign", ref, "--sign-key="+key), "signed by sha256:")
	said(exitDone, "sign", ref, "--sign-key="+key) // once more changes nothing
	require.Contains(t, said(exitDone, "verify", ref, "--verify-key="+public), "signed by sha256:")
	require.Contains(t, said(exitFailed, "verify", ref, "--verify-key="+other), "another key")
	digest := filepath.Join(dir, "digest")
	said(exitDone, "pull", ref, filepath.Join(dir, "b.raw"), "--verify-key="+public,
		"--digest-file="+digest)
	var shown inspectedReference
	require.NoError(t, json.Unmarshal([]byte(list), &shown))
	for _, pinned := range []string{shown.Digest, shown.PlatformDigest} {
		require.NotEmpty(t, pinned)
		require.Contains(t, said(exitDone, "verify", host+"/vm/a@"+pinned,
			"--verify-key="+public), pinned)
	}
}

// TestNewPasswordIsAskedForTwice: a slip in it would make a key that nobody can use.
func TestNewPasswordIsAskedForTwice(t *testing.T) {
	cleanEnv(t)
	for typed, status := range map[string]int{"one\none\n": exitDone, "one\nome\n": exitFailed} {
		person, terminal := newTerminal(t)
		testtool.Must(person.WriteString(typed))(t)
		var said bytes.Buffer
		a := &app{stdin: terminal, stdout: io.Discard, stderr: &said, exit: os.Exit}
		prefix := filepath.Join(t.TempDir(), "new")
		require.Equal(t, status, a.execute([]string{"key", "generate", "--output", prefix}))
		require.Contains(t, said.String(), "the same again: ")
		require.NotContains(t, said.String(), "one\n")
		if status == exitFailed {
			require.Contains(t, said.String(), "the two passwords differ")
			require.NoFileExists(t, prefix+".key")
		}
	}
}

// TestRegistryIsInterrupted: a command that waits for a registry says that it was interrupted.
func TestRegistryIsInterrupted(t *testing.T) {
	cleanEnv(t)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		assert.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
		<-r.Context().Done()
	}))
	defer server.Close()
	ref := strings.TrimPrefix(server.URL, "http://") + "/vm/a:1"
	t.Setenv("COSIGN_PASSWORD", "")
	key := filepath.Join(t.TempDir(), "own")
	saidOf(t, exitDone, "key", "generate", "--output="+key)
	for _, args := range [][]string{{"inspect", ref}, {"sign", ref, "--sign-key=" + key + ".key"},
		{"verify", ref, "--verify-key=" + key + ".pub"}} {
		require.Equal(t, "kubevirt-disk: interrupted: run the same command again\n",
			saidOf(t, exitFailed, args...))
	}

	// What is left is told, too.
	cmd := new(cobra.Command)
	cmd.SetContext(t.Context())
	settings.AddSettings(cmd.Flags(), new(reach).settings())
	err := new(app).withRegistry(cmd, testtool.Must(transport.ParseReference(ref))(t),
		func(ctx context.Context, _ *registry.Client) error {
			assert.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
			<-ctx.Done()
			return errors.Join(fmt.Errorf("asking: %w", ctx.Err()), errors.New("a file is left"))
		})
	require.EqualError(t, err, "interrupted: run the same command again\na file is left")
}
