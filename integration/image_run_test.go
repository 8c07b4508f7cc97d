package integration

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// oneDisk builds an image with one compressed qcow2. It returns the image's name and a raw file
// with the same content.
func oneDisk(t *testing.T, e *engine) (image, source string) {
	t.Helper()
	context := t.TempDir()
	source = filepath.Join(t.TempDir(), "source.raw")
	makeRaw(t, source, 16<<20)
	makeQcow2(t, source, filepath.Join(context, "disk.qcow2"), "", true)
	return e.buildFrom(t, context, "ADD disk.qcow2 /disk"), source
}

// TestImageContainers runs a user's image with podman and with runc, in the host's network and in a
// network of its own, hardened, with a volume as work directory. An initiator logs in with CHAP.
// The container is stopped with SIGTERM and started again, and the writes are still there.
func TestImageContainers(t *testing.T) {
	t.Parallel()
	e := requireImages(t, "qemu-img", "qemu-io", "iscsi-ls", "iscsi-inq", qemuISCSI)
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
			var n network
			if c.own {
				n = namespace(t)
			}
			work := emptyDir(t)
			again := func() sandbox {
				if c.runc {
					return e.newBundle(t, image, work, n.path,
						append(n.settings(), credential...)...)
				}
				options := append([]string{n.option(),
					"--volume=" + work + ":/var/lib/kubevirt-disk"}, hardened...)
				return e.newContainer(t, image,
					append(options, withEnv(append(n.settings(), credential...)...)...))
			}
			s := again()
			s.start(t)
			untilReady(t, s)
			confined(t, s)
			portal := n.portal(t, s)
			for _, env := range [][]string{nil,
				{"LIBISCSI_CHAP_USERNAME=" + testUser, "LIBISCSI_CHAP_PASSWORD=not-the-password"}} {
				require.NotZero(t, client(t, env, "iscsi-ls", "iscsi://"+portal).status)
			}
			require.Contains(t, okEnv(t, chapClient, "iscsi-ls", "-s", "iscsi://"+portal), "Lun:1 ")
			require.Contains(t, ok(t, "qemu-img", "compare", "-f", "raw", "-F", "raw", source,
				lunURL(portal, 1)), "identical")
			ok(t, "qemu-io", "-f", "raw", "-c", "write -P 0x77 1M 1M", lunURL(portal, 1))
			serial := logged(s.log(t), "serving a LUN", "serial")
			require.Zero(t, s.exec(t, "kubevirt-disk", "healthcheck").status)
			require.Zero(t, s.stop(t))
			require.NotEmpty(t, logged(s.log(t), "stopped", "time"), s.log(t))

			// Start the same container again, then another one with the same volume, as Kubernetes
			// does.
			for _, next := range []sandbox{s, again()} {
				next.start(t)
				untilReady(t, next)
				ok(t, "qemu-io", "-r", "-f", "raw", "-c", "read -P 0x77 1M 1M",
					lunURL(n.portal(t, next), 1))
				require.Equal(t, serial, logged(next.log(t), "serving a LUN", "serial"))
				require.Zero(t, next.stop(t))
			}
		})
	}
}

// TestImageOfAnyUser runs the image without a volume, like platforms that choose the users of their
// containers: OpenShift takes any number, and group 0. It also runs the image's health check.
func TestImageOfAnyUser(t *testing.T) {
	t.Parallel()
	e := requireImages(t, "qemu-img", "iscsi-ls")
	image, _ := oneDisk(t, e)
	for _, user := range []string{"1000650000:0", "1234:1234"} {
		t.Run(user, func(t *testing.T) {
			n := namespace(t)
			c := e.newContainer(t, image,
				append(withEnv(credential...), n.option(), "--user="+user, "--cap-drop=all"))
			c.start(t)
			untilReady(t, c)
			require.Contains(t, okEnv(t, chapClient, "iscsi-ls", "-s", "iscsi://"+n.portal(t, c)),
				"Lun:1 ")
			e.ok(t, "podman", "healthcheck", "run", c.name)
			require.Equal(t, "healthy", c.inspect(t, "{{.State.Health.Status}}"))
			require.Zero(t, c.stop(t))
		})
	}
}

// TestImagesThatShareAWorkDirectory runs two containers on one volume. The control socket belongs
// to the first: a handover in the second must not hand over a LUN of the first.
func TestImagesThatShareAWorkDirectory(t *testing.T) {
	t.Parallel()
	e := requireImages(t, "qemu-img")
	first, source := oneDisk(t, e)
	context := t.TempDir()
	makeQcow2(t, source, filepath.Join(context, "other.qcow2"), "", true)
	second := e.buildFrom(t, context, "ADD other.qcow2 /disk/")
	shared := t.TempDir()
	require.NoError(t, os.Chmod(shared, 0o777))
	run := func(image string, variables ...string) *container {
		c := e.newContainer(t, image,
			append(withEnv(variables...), "--network=none",
				"--volume="+shared+":/var/lib/kubevirt-disk"))
		c.start(t)
		untilReady(t, c)
		return c
	}
	open := func(c *container) result {
		return c.exec(t, "kubevirt-disk", "handover", "--lun=1", "--to=iqn.2020-01.test:second")
	}
	one, two := run(first), run(second)
	refused := open(two)
	require.Equal(t, 1, refused.status, "%s", refused)
	require.Contains(t, refused.output, "a daemon in another container")
	require.Contains(t, refused.output, "CONTROL_SOCKET")
	require.NotContains(t, one.log(t), `"msg":"handover"`)
	require.Zero(t, open(one).status)
	untilLogged(t, one, `"msg":"handover"`)

	require.Zero(t, two.stop(t))
	two = run(second, "CONTROL_SOCKET=two.sock")
	require.Zero(t, open(two).status)
	untilLogged(t, two, `"msg":"handover"`)
}

// TestImageWarnsOfNoVolume: the persistent disk would be lost with the container.
func TestImageWarnsOfNoVolume(t *testing.T) {
	t.Parallel()
	e := requireImages(t, "qemu-img")
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
		c := e.newContainer(t, image,
			append(withEnv("PERSISTENT_DIR=/data"), "--network=none", place.option))
		c.start(t)
		untilReady(t, c)
		require.Equal(t, place.warns, strings.Contains(c.log(t), warning), place.option)
		require.Zero(t, c.stop(t))
	}
	c := e.newContainer(t, image, append(withEnv("PERSISTENT_DIR=/tmp"), "--network=none"))
	c.start(t)
	untilReady(t, c)
	// With the storage driver vfs, the container's own layer is an ordinary directory of the
	// machine.
	require.Equal(t, storageDriver(e.dir) == "overlay" || volatile(e.dir),
		strings.Contains(c.log(t), warning))
	require.Zero(t, c.stop(t))
}

// TestImageSaysWhatIsMissing starts images that cannot work. Each ends with a status and a message
// that says what to do.
func TestImageSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	e := requireImages(t, "qemu-img")
	image, _ := oneDisk(t, e)
	context := t.TempDir()
	makeRaw(t, filepath.Join(context, "disk.raw"), 1<<20)
	require.NoError(t, os.Chmod(filepath.Join(context, "disk.raw"), 0o600))
	unreadable := e.buildFrom(t, context, "ADD disk.raw /disk/")
	readable := e.buildFrom(t, context, "ADD --chmod=0444 disk.raw /disk/")
	owned := e.buildFrom(t, context, "ADD --chown=107:107 disk.raw /disk/")
	for _, c := range []struct {
		name, image string
		options     []string
		status      int
		says        []string
	}{
		{"no image", baseImage, nil, 1, []string{"no disk image in", "/disk", "add a qcow2 or " +
			"raw image"}},
		{"an image that only root can read", unreadable, nil, 1,
			[]string{"disk.raw", "user 107", "ADD --chmod=0444"}},
		{"no volume for the disks", image, []string{"--read-only"}, 1,
			[]string{"/var/lib/kubevirt-disk", "read-only", "mount a volume", "user 107"}},
		{"no /tmp", image, []string{"--read-only", "--read-only-tmpfs=false"}, 1,
			[]string{"/tmp/healthy", "mount a volume", "READY_FILE"}},
		{"half a credential", image, withEnv("CHAP_USERNAME=" + testUser), 2,
			[]string{"CHAP_PASSWORD"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := e.newContainer(t, c.image, append([]string{"--network=none"}, c.options...))
			s.start(t)
			require.Equal(t, c.status, s.wait(t))
			for _, text := range c.says {
				require.Contains(t, s.log(t), text)
			}
		})
	}
	for _, image := range []string{readable, owned} {
		s := e.newContainer(t, image, []string{"--network=none"})
		s.start(t)
		untilReady(t, s)
		require.Zero(t, s.stop(t))
	}
}
