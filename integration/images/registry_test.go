package images

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

// TestImageRegistry pushes the base image to a registry, as the output of `make image` advises. A
// second machine's storage, which has never seen the image, builds a user's image from it and
// pushes that. A third machine runs it.
func TestImageRegistry(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "docker-registry", "iscsi-ls", "qemu-img")
	address := rig.Registry(t)
	remote := address + "/" + rig.BaseImage
	e.OK(t, "buildah", "manifest", "push", "--all", "--tls-verify=false", rig.BaseImage,
		"docker://"+remote)
	for _, m := range rig.Manifests(t, e, rig.BaseImage) {
		// The registry has the digest that `make image` has printed.
		answer, err := http.Head("http://" + address + "/v2/" +
			strings.TrimSuffix(rig.BaseImage, ":disk") + "/manifests/" + m.Digest)
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
		require.Equal(t, http.StatusOK, answer.StatusCode, "%s in the registry",
			m.Platform.Architecture)
	}

	elsewhere := func() *rig.Engine {
		other, err := rig.NewEngine()
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, other.Remove()) })
		return other
	}
	context := t.TempDir()
	rig.MakeRaw(t, filepath.Join(context, "disk.raw"), 4<<20)
	dockerfile := filepath.Join(context, "Dockerfile")
	require.NoError(t, os.WriteFile(dockerfile, []byte("FROM "+remote+"\nADD disk.raw /disk/\n"),
		0o644))
	user := address + "/my-disk:1"
	builder := elsewhere()
	builder.OK(t, "buildah", "build", "--quiet", "--format", "docker", "--tls-verify=false",
		"--tag", user, context)
	builder.OK(t, "buildah", "push", "--tls-verify=false", user)

	node := elsewhere()
	node.OK(t, "podman", "pull", "--quiet", "--tls-verify=false", user)
	n := rig.Network{}
	c := node.NewContainer(t, user,
		append(rig.WithEnv(append(n.Settings(), rig.Credential...)...), n.Option()))
	c.Start(t)
	rig.UntilReady(t, c)
	require.Contains(t, rig.OKEnv(t, rig.CHAPClient, "iscsi-ls", "-s", "iscsi://"+n.Portal(t, c)),
		"Lun:1 ")
	require.Zero(t, c.Stop(t))
}
