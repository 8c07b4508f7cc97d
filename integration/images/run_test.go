package images

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/integration/internal/rig"
)

// oneDisk builds an image with one compressed qcow2. It returns the image's name and a raw file
// with the same content.
func oneDisk(t *testing.T, e *rig.Engine) (image, source string) {
	t.Helper()
	context := t.TempDir()
	source = filepath.Join(t.TempDir(), "source.raw")
	rig.MakeRaw(t, source, 16<<20)
	rig.MakeQcow2(t, source, filepath.Join(context, "disk.qcow2"), "", true)
	return e.BuildFrom(t, context, "ADD disk.qcow2 /disk"), source
}

// TestImageContainers runs a user's image with podman and with runc, in the host's network and in a
// network of its own, hardened, with a volume as work directory. An initiator logs in with CHAP.
// The container is stopped with SIGTERM and started again, and the writes are still there.
func TestImageContainers(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img", "qemu-io", "iscsi-ls", "iscsi-inq", rig.QEMUISCSI)
	image, source := oneDisk(t, e)
	for _, c := range []struct {
		name string
		runc bool
		own  bool // in a network of its own
	}{
		{"podman", false, false}, {"podman in its own network", false, true}, {"runc", true, false},
		{"runc in its own network", true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var n rig.Network
			if c.own {
				n = rig.Namespace(t)
			}
			work := rig.EmptyDir(t)
			again := func() rig.Sandbox {
				if c.runc {
					return e.NewBundle(t, image, work, n.Path,
						append(n.Settings(), rig.Credential...)...)
				}
				options := append([]string{n.Option(),
					"--volume=" + work + ":/var/lib/kubevirt-disk"}, rig.Hardened...)
				return e.NewContainer(t, image,
					append(options, rig.WithEnv(append(n.Settings(), rig.Credential...)...)...))
			}
			s := again()
			s.Start(t)
			rig.UntilReady(t, s)
			rig.Confined(t, s)
			portal := n.Portal(t, s)
			for _, env := range [][]string{nil,
				{"LIBISCSI_CHAP_USERNAME=" + rig.User, "LIBISCSI_CHAP_PASSWORD=not-the-password"}} {
				require.NotZero(t, rig.Client(t, env, "iscsi-ls", "iscsi://"+portal).Status)
			}
			require.Contains(t, rig.OKEnv(t, rig.CHAPClient, "iscsi-ls", "-s", "iscsi://"+portal),
				"Lun:1 ")
			rig.Same(t, source, rig.DiskURL(portal, 1))
			rig.OK(t, "qemu-io", "-f", "raw", "-c", "write -P 0x77 1M 1M", rig.DiskURL(portal, 1))
			serial := rig.Logged(s.Log(t), "serving a LUN", "serial")
			require.Zero(t, s.Exec(t, "kubevirt-disk", "healthcheck").Status)
			require.Zero(t, s.Stop(t))
			require.NotEmpty(t, rig.Logged(s.Log(t), "stopped", "time"), s.Log(t))

			// Start the same container again, then another one with the same volume, as Kubernetes
			// does.
			for _, next := range []rig.Sandbox{s, again()} {
				next.Start(t)
				rig.UntilReady(t, next)
				rig.OK(t, "qemu-io", "-r", "-f", "raw", "-c", "read -P 0x77 1M 1M",
					rig.DiskURL(n.Portal(t, next), 1))
				require.Equal(t, serial, rig.Logged(next.Log(t), "serving a LUN", "serial"))
				require.Zero(t, next.Stop(t))
			}
		})
	}
}

// TestImageOfAnyUser runs the image without a volume, like platforms that choose the users of their
// containers: OpenShift takes any number, and group 0. It also runs the image's health check.
func TestImageOfAnyUser(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img", "iscsi-ls")
	image, _ := oneDisk(t, e)
	for _, user := range []string{"1000650000:0", "1234:1234"} {
		t.Run(user, func(t *testing.T) {
			n := rig.Namespace(t)
			c := e.NewContainer(t, image,
				append(rig.WithEnv(rig.Credential...), n.Option(), "--user="+user,
					"--cap-drop=all"))
			c.Start(t)
			rig.UntilReady(t, c)
			require.Contains(t, rig.OKEnv(t, rig.CHAPClient, "iscsi-ls", "-s",
				"iscsi://"+n.Portal(t, c)), "Lun:1 ")
			e.OK(t, "podman", "healthcheck", "run", c.Name)
			require.Equal(t, "healthy", c.Inspect(t, "{{.State.Health.Status}}"))
			require.Zero(t, c.Stop(t))
		})
	}
}

// TestImagesThatShareAWorkDirectory runs two containers on one volume. The control socket there
// belongs to the first. In the second, a handover finds its own daemon, unless that place is named.
func TestImagesThatShareAWorkDirectory(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img")
	first, source := oneDisk(t, e)
	context := t.TempDir()
	rig.MakeQcow2(t, source, filepath.Join(context, "other.qcow2"), "", true)
	second := e.BuildFrom(t, context, "ADD other.qcow2 /disk/")
	shared := t.TempDir()
	require.NoError(t, os.Chmod(shared, 0o777))
	run := func(image string, variables ...string) *rig.Container {
		c := e.NewContainer(t, image, append(rig.WithEnv(variables...), "--network=none",
			"--volume="+shared+":/var/lib/kubevirt-disk"))
		c.Start(t)
		rig.UntilReady(t, c)
		return c
	}
	open := func(c *rig.Container) rig.Result {
		return c.Exec(t, "kubevirt-disk", "handover", "--lun=1", "--to=iqn.2020-01.test:second")
	}
	one, two := run(first), run(second)
	refused := two.Exec(t, "kubevirt-disk", "handover", "--lun=1", "--to=iqn.2020-01.test:second",
		"--work-dir=/var/lib/kubevirt-disk")
	require.Equal(t, 1, refused.Status, "%s", refused)
	require.Contains(t, refused.Output, "a daemon in another container")
	require.Contains(t, refused.Output, "CONTROL_SOCKET")
	require.Zero(t, open(two).Status)
	rig.UntilLogged(t, two, `"msg":"handover"`)
	require.NotContains(t, one.Log(t), `"msg":"handover"`)
	require.Zero(t, open(one).Status)
	rig.UntilLogged(t, one, `"msg":"handover"`)

	require.Zero(t, two.Stop(t))
	two = run(second, "CONTROL_SOCKET=two.sock")
	require.Zero(t, open(two).Status)
	rig.UntilLogged(t, two, `"msg":"handover"`)
}

// TestImageWarnsOfNoVolume: the persistent disk would be lost with the container.
func TestImageWarnsOfNoVolume(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img")
	image, _ := oneDisk(t, e)
	const warning = "the persistent disks will be lost"
	volume := t.TempDir()
	require.NoError(t, os.Chmod(volume, 0o777))
	// The test machine may itself be a container, or keep its temporary files in memory.
	volatile := func(dir string) bool {
		var st unix.Statfs_t
		require.NoError(t, unix.Statfs(dir, &st))
		return slices.Contains([]int64{unix.OVERLAYFS_SUPER_MAGIC, unix.TMPFS_MAGIC,
			unix.RAMFS_MAGIC}, int64(st.Type))
	}
	places := []struct {
		option string
		warns  bool
	}{{"--tmpfs=/data:mode=1777", true}, {"--volume=" + volume + ":/data", volatile(volume)}}
	for _, place := range places {
		c := e.NewContainer(t, image,
			append(rig.WithEnv("PERSISTENT_DIR=/data"), "--network=none", place.option))
		c.Start(t)
		rig.UntilReady(t, c)
		require.Equal(t, place.warns, strings.Contains(c.Log(t), warning), place.option)
		require.Zero(t, c.Stop(t))
	}
	c := e.NewContainer(t, image, append(rig.WithEnv("PERSISTENT_DIR=/tmp"), "--network=none"))
	c.Start(t)
	rig.UntilReady(t, c)
	// With the storage driver vfs, the container's own layer is an ordinary directory of the
	// machine.
	require.Equal(t, rig.StorageDriver(e.Dir) == "overlay" || volatile(e.Dir),
		strings.Contains(c.Log(t), warning))
	require.Zero(t, c.Stop(t))
}

// TestImageSaysWhatIsMissing starts images that cannot work. Each ends with a status and a message
// that says what to do.
func TestImageSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img")
	image, _ := oneDisk(t, e)
	context := t.TempDir()
	rig.MakeRaw(t, filepath.Join(context, "disk.raw"), 1<<20)
	require.NoError(t, os.Chmod(filepath.Join(context, "disk.raw"), 0o600))
	unreadable := e.BuildFrom(t, context, "ADD disk.raw /disk/")
	readable := e.BuildFrom(t, context, "ADD --chmod=0444 disk.raw /disk/")
	owned := e.BuildFrom(t, context, "ADD --chown=107:107 disk.raw /disk/")
	for _, c := range []struct {
		name, image string
		options     []string
		status      int
		says        []string
	}{
		{"no image", rig.BaseImage, nil, 1, []string{"no disk image in", "/disk",
			"add a qcow2 or " +
				"raw image"}},
		{"an image that only root can read", unreadable, nil, 1,
			[]string{"disk.raw", "user 107", "ADD --chmod=0444"}},
		{"no volume for the disks", image, []string{"--read-only"}, 1,
			[]string{"/var/lib/kubevirt-disk", "read-only", "mount a volume", "user 107"}},
		{"no /tmp", image, []string{"--read-only", "--read-only-tmpfs=false"}, 1,
			[]string{"/tmp/healthy", "mount a volume", "READY_FILE"}},
		{"half a credential", image, rig.WithEnv("CHAP_USERNAME=" + rig.User), 2,
			[]string{"CHAP_PASSWORD"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := e.NewContainer(t, c.image, append([]string{"--network=none"}, c.options...))
			s.Start(t)
			require.Equal(t, c.status, s.Wait(t))
			for _, text := range c.says {
				require.Contains(t, s.Log(t), text)
			}
		})
	}
	for _, image := range []string{readable, owned} {
		s := e.NewContainer(t, image, []string{"--network=none"})
		s.Start(t)
		rig.UntilReady(t, s)
		require.Zero(t, s.Stop(t))
	}
}
