package integration

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
)

// registry starts a container registry on a free loopback port and returns its address. It ends
// with the test.
func registry(t *testing.T) string {
	t.Helper()
	port, err := peers.FreePort()
	require.NoError(t, err)
	address := fmt.Sprintf("127.0.0.1:%d", port)
	dir := t.TempDir()
	config := filepath.Join(dir, "config.yml")
	require.NoError(t, os.WriteFile(config, []byte(fmt.Sprintf("version: 0.1\nlog: {level: "+
		"error}\nstorage: {filesystem: {rootdirectory: %q}}\nhttp: {addr: %q}\n",
		filepath.Join(dir, "data"), address)), 0o644))
	cmd := exec.Command("docker-registry", "serve", config)
	cmd.Env = clientEnv()
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	testtool.Within(t, clientTimeout, func() bool {
		c, err := net.Dial("tcp", address)
		if err != nil {
			return false
		}
		return c.Close() == nil
	}, "the registry listens")
	return address
}

// TestImageRegistry pushes the base image to a registry, as the output of `make image` advises. A
// second machine's storage, which has never seen the image, builds a user's image from it and
// pushes that. A third machine runs it.
func TestImageRegistry(t *testing.T) {
	t.Parallel()
	e := requireImages(t, "docker-registry", "iscsi-ls", "qemu-img")
	address := registry(t)
	remote := address + "/" + baseImage
	e.ok(t, "buildah", "manifest", "push", "--all", "--tls-verify=false", baseImage,
		"docker://"+remote)
	for _, m := range manifests(t, e, baseImage) {
		// The registry has the digest that `make image` has printed.
		answer, err := http.Head("http://" + address + "/v2/" +
			strings.TrimSuffix(baseImage, ":disk") + "/manifests/" + m.Digest)
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
		require.Equal(t, http.StatusOK, answer.StatusCode, "%s in the registry",
			m.Platform.Architecture)
	}

	elsewhere := func() *engine {
		other, err := newEngine()
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, other.remove()) })
		return other
	}
	context := t.TempDir()
	makeRaw(t, filepath.Join(context, "disk.raw"), 4<<20)
	dockerfile := filepath.Join(context, "Dockerfile")
	require.NoError(t, os.WriteFile(dockerfile, []byte("FROM "+remote+"\nADD disk.raw /disk/\n"),
		0o644))
	user := address + "/my-disk:1"
	builder := elsewhere()
	builder.ok(t, "buildah", "build", "--quiet", "--format", "docker", "--tls-verify=false",
		"--tag", user, context)
	builder.ok(t, "buildah", "push", "--tls-verify=false", user)

	node := elsewhere()
	node.ok(t, "podman", "pull", "--quiet", "--tls-verify=false", user)
	n := network{}
	c := node.newContainer(t, user,
		append(withEnv(append(n.settings(), credential...)...), n.option()))
	c.start(t)
	untilReady(t, c)
	require.Contains(t, okEnv(t, chapClient, "iscsi-ls", "-s", "iscsi://"+n.portal(t, c)), "Lun:1 ")
	require.Zero(t, c.stop(t))
}
