package integration

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

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
