package images

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// TestImageBuild checks the result of `make image`.
func TestImageBuild(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t)
	t.Run("configuration", func(t *testing.T) {
		for _, arch := range []string{"amd64", "arm64"} {
			var found []struct {
				Architecture, Os string
				Healthcheck      struct{ Test []string }
				Config           struct {
					User, WorkingDir     string
					Entrypoint, Cmd, Env []string
					Labels               map[string]string
					ExposedPorts         map[string]any
				}
			}
			id := rig.Instance(t, e, rig.BaseImage, arch)
			require.NoError(t, json.Unmarshal([]byte(e.OK(t, "podman", "image", "inspect", id)),
				&found))
			require.Len(t, found, 1)
			image := found[0]
			require.Equal(t, "linux/"+arch, image.Os+"/"+image.Architecture)
			container := strings.TrimSpace(e.OK(t, "podman", "create", id))
			binary := filepath.Join(t.TempDir(), "kubevirt-disk")
			e.OK(t, "podman", "cp", container+":/kubevirt-disk", binary)
			info := testtool.Must(os.Stat(binary))(t)
			require.Less(t, info.Size(), int64(24<<20),
				"the binary has grown: is text/template linked, which keeps every method?")
			require.Equal(t, "107:107", image.Config.User,
				"it must be a number, so that Kubernetes knows that it is not root")
			require.Equal(t, []string{"/kubevirt-disk"}, image.Config.Entrypoint)
			require.Equal(t, []string{"serve"}, image.Config.Cmd)
			require.Equal(t, []string{"PATH=/bin"}, image.Config.Env)
			require.Equal(t, []string{"CMD", "/kubevirt-disk", "healthcheck"},
				image.Healthcheck.Test)
			require.Contains(t, image.Config.ExposedPorts, "3260/tcp")
			require.Contains(t, image.Config.ExposedPorts, "9260/tcp")
			for _, label := range []string{"title", "description", "documentation", "licenses",
				"vendor", "created", "revision", "version"} {
				require.NotEmpty(t, image.Config.Labels["org.opencontainers.image."+label], label)
			}
			require.Regexp(t, `^[0-9a-f]{40}$`,
				image.Config.Labels["org.opencontainers.image.revision"])
		}
	})
	t.Run("files", func(t *testing.T) {
		root := e.OK(t, "podman", "image", "mount", rig.BaseImage)
		defer e.OK(t, "podman", "image", "unmount", rig.BaseImage)
		type file struct {
			mode     fs.FileMode
			uid, gid uint32
			link     string
		}
		found := map[string]file{}
		require.NoError(t, filepath.WalkDir(root,
			func(path string, entry fs.DirEntry, err error) error {
				require.NoError(t, err)
				info := testtool.Must(entry.Info())(t)
				stat := info.Sys().(*syscall.Stat_t)
				one := file{mode: info.Mode(), uid: stat.Uid, gid: stat.Gid}
				if info.Mode().Type() == fs.ModeSymlink {
					one.mode = fs.ModeSymlink
					one.link = testtool.Must(os.Readlink(path))(t)
				}
				if name := strings.TrimPrefix(path, root); name != "" {
					found[name] = one
				}
				return nil
			}))
		require.Equal(t, map[string]file{
			"/kubevirt-disk":          {mode: 0o755},
			"/entry-point.sh":         {mode: fs.ModeSymlink, link: "kubevirt-disk"},
			"/bin":                    {mode: fs.ModeDir | 0o755},
			"/bin/cat":                {mode: fs.ModeSymlink, link: "../kubevirt-disk"},
			"/bin/kubevirt-disk":      {mode: fs.ModeSymlink, link: "../kubevirt-disk"},
			"/disk":                   {mode: fs.ModeDir | 0o755},
			"/tmp":                    {mode: fs.ModeDir | fs.ModeSticky | 0o777},
			"/usr":                    {mode: fs.ModeDir | 0o755},
			"/usr/share":              {mode: fs.ModeDir | 0o755},
			"/usr/share/doc":          {mode: fs.ModeDir | 0o755},
			"/usr/share/doc/LICENSES": {mode: 0o644},
			"/var":                    {mode: fs.ModeDir | 0o755},
			"/var/lib":                {mode: fs.ModeDir | 0o755},
			"/var/lib/kubevirt-disk":  {mode: fs.ModeDir | fs.ModeSticky | 0o777, uid: 107},
		}, found)
		licences := rig.ReadFile(t, filepath.Join(root, "usr/share/doc/LICENSES"))
		for _, of := range []string{"kubevirt.io/disk: LICENSE", "Go: LICENSE",
			"github.com/klauspost/compress v"} {
			require.Contains(t, licences, "==== "+of)
		}
	})
	t.Run("two builds give one digest and the next one takes their place", func(t *testing.T) {
		another := rig.OwnEngine(t)
		printed := testtool.Must(another.MakeImage("077"))(t)
		lines := regexp.MustCompile(
			`(?m)^linux/(amd64|arm64) +(sha256:[0-9a-f]{64}) +[0-9.]+MiB unpacked, [0-9.]+MiB in a registry$`).FindAllStringSubmatch(printed, -1)
		require.Len(t, lines, 2, printed)
		for i, instance := range rig.Manifests(t, e, rig.BaseImage) {
			require.Equal(t, []string{instance.Platform.Architecture, instance.Digest},
				lines[i][1:])
		}

		// A build at another time, as of another commit, replaces this one. An image that a user
		// has built from this one stays. With another version, the binaries would be linked again
		// here, and once more for the next test.
		context := t.TempDir()
		rig.MakeRaw(t, filepath.Join(context, "disk.raw"), 1<<20)
		user := another.BuildFrom(t, context, "ADD --chmod=0444 disk.raw /disk/")
		count := func() int {
			return len(
				strings.Fields(another.OK(t, "podman", "images", "--all", "--quiet")))
		}
		before := count()
		require.NoError(t, testtool.Err(another.MakeImage("022", "SOURCE_DATE_EPOCH=1000000000")))
		require.Equal(t, before, count(), "%s", another.OK(t, "podman", "images", "--all"))
		c := another.NewContainer(t, user, []string{"--network=none"})
		c.Start(t)
		rig.UntilReady(t, c)
		require.Zero(t, c.Stop(t))

		// The base image stays if somebody removes images that were made from it, or prunes images.
		another.OK(t, "podman", "rmi", another.BuildFrom(t, context, "ADD --chmod=0444 disk.raw "+
			"/disk/"))
		another.OK(t, "podman", "image", "prune", "--force")
		another.BuildFrom(t, context, "ADD --chmod=0444 disk.raw /disk/")
	})
}

var sizeOfLUN = regexp.MustCompile(`Lun:\d+ .*\(Size:(\w+)\)`)

// TestImageExamples builds each Dockerfile of the examples and counts the LUNs.
func TestImageExamples(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img", "iscsi-ls")
	context := t.TempDir()
	at := func(name string) string { return filepath.Join(context, name) }
	rig.MakeRaw(t, at("disk.raw"), 8<<20)
	rig.MakeQcow2(t, at("disk.raw"), at("fedora.qcow2"), "", true)
	for _, size := range []string{"1", "2", "10"} {
		rig.OK(t, "qemu-img", "create", "-q", "-f", "qcow2", at("disk"+size+".qcow2"), size+"G")
	}
	require.NoError(t, os.Link(at("fedora.qcow2"), at("boot.qcow2")))
	rig.OK(t, "qemu-img", "create", "-q", "-f", "qcow2", at("data.qcow2"), "100G")
	// User 107 cannot read a file with this mode, but the Dockerfiles set another mode.
	require.NoError(t, os.Chmod(at("fedora.qcow2"), 0o600))

	// The sizes that iscsi-ls prints for 8 MiB, 1, 2, 10 and 100 GiB: it calculates with the last
	// block's address, and rounds down.
	sizes := map[string][]string{
		"one": {"7M"}, "several": {"1023M", "1G", "9G"}, "boot-and-data": {"7M", "99G"},
		"raw": {"7M"}, "containerdisk": {"7M"},
	}
	// A containerDisk in KubeVirt's form: the image in /disk belongs to user 107, and nobody else
	// may read it.
	require.NoError(t, os.WriteFile(at("containerdisk"),
		[]byte("FROM scratch\nADD --chown=107:107 fedora.qcow2 /disk/\n"), 0o644))
	options := map[string][]string{
		"containerdisk": {"--build-arg",
			"CONTAINERDISK=localhost/" + e.Build(t, context, at("containerdisk"))},
	}
	examples := testtool.Must(filepath.Glob("../../examples/images/*/Dockerfile"))(t)
	require.Len(t, examples, len(sizes))
	for _, dockerfile := range examples {
		name := filepath.Base(filepath.Dir(dockerfile))
		t.Run(name, func(t *testing.T) {
			image := e.Build(t, context, dockerfile, options[name]...)
			n := rig.Network{}
			c := e.NewContainer(t, image,
				append(rig.WithEnv(append(n.Settings(), rig.Credential...)...), n.Option()))
			c.Start(t)
			rig.UntilReady(t, c)
			list := rig.OKEnv(t, rig.CHAPClient, "iscsi-ls", "-s", "iscsi://"+n.Portal(t, c))
			var found []string
			for _, lun := range sizeOfLUN.FindAllStringSubmatch(list, -1) {
				found = append(found, lun[1])
			}
			require.Equal(t, sizes[name], found, list)
			require.Zero(t, c.Stop(t))
		})
	}
}

// TestImageInspectedWhenBuilt: a bad image fails the build, and the output says which image and
// why.
func TestImageInspectedWhenBuilt(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img")
	context := t.TempDir()
	at := func(name string) string { return filepath.Join(context, name) }
	rig.MakeRaw(t, at("disk.raw"), 1<<20)
	rig.MakeQcow2(t, at("disk.raw"), at("base.qcow2"), "", false)
	require.NoError(t, os.WriteFile(at("notes.txt"), []byte("buy milk\n"), 0o644))
	const inspect = `RUN ["/kubevirt-disk", "inspect", "/disk"]`
	e.BuildFrom(t, context, "ADD --chmod=0444 disk.raw base.qcow2 /disk/\n"+inspect)
	for _, added := range []string{
		"ADD --chmod=0444 disk.raw notes.txt /disk/", // notes.txt is no disk
		"ADD --chmod=0400 disk.raw /disk/",           // cannot be read by user 107
	} {
		e.BuildFrom(t, context, added)
		dockerfile := filepath.Join(t.TempDir(), "Dockerfile")
		require.NoError(t, os.WriteFile(dockerfile,
			[]byte("FROM "+rig.BaseImage+"\n"+added+"\n"+inspect+"\n"), 0o644))
		// buildah 1.28 may lose what a command has said that ends at once.
		built := e.Run(t, "buildah", "build", "--format", "docker", "--tag", "bad", "--file",
			dockerfile, context)
		require.NotZero(t, built.Status, "%s", built)
	}
}
