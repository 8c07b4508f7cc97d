package images

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

// asWrapper is the command that the original wrapper's callers use.
func asWrapper(port string) string {
	return fmt.Sprintf(`--entrypoint=["/entry-point.sh",%q]`, port)
}

// TestImageOriginalCallers starts containers like the controller of the first KubeVirt releases:
// two disks in one pod, each with its port as the command's argument and in the environment, a
// target name, a secret of 32 random bytes encoded twice, and `cat /tmp/healthy` as readiness
// probe. It sets nothing else.
func TestImageOriginalCallers(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img", rig.QEMUISCSI)
	image, source := oneDisk(t, e)
	n := rig.Namespace(t)
	secret := func() string {
		random := make([]byte, 32)
		_, _ = rand.Read(random) // never fails
		return base64.URLEncoding.EncodeToString(random)
	}
	user, password := secret(), secret()
	require.Len(t, password, 44)
	var first *rig.Container
	for _, port := range []string{"3261", "3262"} {
		wwn := "iqn.2017-01.io.kubevirt:disk-" + port
		c := e.NewContainer(t, image,
			append([]string{n.Option(), asWrapper(port)}, rig.WithEnv("PORT="+port, "WWN="+wwn,
				"USERNAME_BASE64="+base64.StdEncoding.EncodeToString([]byte(user)),
				"PASSWORD_BASE64="+base64.StdEncoding.EncodeToString([]byte(password)))...))
		c.Start(t)
		rig.UntilReady(t, c)
		if first == nil {
			first = c
		}
		require.Equal(t, "0.0.0.0:"+port, rig.Logged(c.Log(t), "portal", "address"))
		url := fmt.Sprintf("iscsi://%s%%%s@%s:%s/%s/1", user, password, n.Host, port, wwn)
		rig.Same(t, source, url)
		if port == "3262" {
			require.Contains(t, c.Log(t), "no metrics and status pages: their port is taken",
				"the containers of the pod share one network")
			require.Zero(t, c.Exec(t, "kubevirt-disk", "healthcheck").Status,
				"the ready file must decide")
			r := c.Exec(t, "kubevirt-disk", "healthcheck", "--live")
			require.NotZero(t, r.Status, "what the other container's daemon says is not about "+
				"this one")
			require.Contains(t, r.Output, "not a page of the daemon in this container")
			require.Zero(t, first.Stop(t))
			require.Zero(t, c.Exec(t, "kubevirt-disk", "healthcheck").Status,
				"not even if there is no page any more")
		}
	}
	t.Run("base64 wins, and without PORT it is 3260", func(t *testing.T) {
		c := e.NewContainer(t, image,
			append([]string{n.Option(), `--entrypoint=["/entry-point.sh"]`},
				rig.WithEnv("USERNAME=plain", "PASSWORD=a-plain-password",
					"USERNAME_BASE64="+base64.StdEncoding.EncodeToString([]byte(rig.User)),
					"PASSWORD_BASE64="+base64.StdEncoding.EncodeToString([]byte(rig.Password)))...))
		c.Start(t)
		rig.UntilReady(t, c)
		rig.OK(t, "qemu-img", "info", rig.DiskURL(n.Host+":3260", 1))
	})
}

// changesBelow lists what a container has changed in a directory of its image.
func changesBelow(t *testing.T, c *rig.Container, dir string) (changes []string) {
	t.Helper()
	for line := range strings.Lines(c.E.OK(t, "podman", "diff", c.Name)) {
		if _, path, _ := strings.Cut(strings.TrimSpace(line), " "); path == dir ||
			strings.HasPrefix(path, dir+"/") {
			changes = append(changes, line)
		}
	}
	return changes
}

// TestImageStaysAsItIs: a guest's write goes to the work directory. In the image's own file, it
// would make the union file system copy all of it.
func TestImageStaysAsItIs(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-io", rig.QEMUISCSI)
	context := t.TempDir()
	rig.MakeRaw(t, filepath.Join(context, "disk.raw"), 8<<20)
	n := rig.Namespace(t)
	c := e.NewContainer(t, e.BuildFrom(t, context, "ADD disk.raw /disk"),
		append(rig.WithEnv(rig.Credential...), n.Option()))
	c.Start(t)
	rig.UntilReady(t, c)
	rig.OK(t, "qemu-io", "-f", "raw", "-c", "write -P 0x42 0 64k", "-c", "flush",
		rig.DiskURL(n.Portal(t, c), 1))
	require.Empty(t, changesBelow(t, c, "/disk"))
	require.NotEmpty(t, changesBelow(t, c, "/var/lib/kubevirt-disk"))
}
