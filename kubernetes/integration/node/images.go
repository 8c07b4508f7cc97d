package node

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// Image is a container image of one layer, or one that was built elsewhere.
type Image struct {
	Name   string            // complete, with a tag
	Files  map[string]string // files or directories of this machine, by their path in the image
	Config v1.Config

	built   v1.Image // if not nil, the image
	archive string   // of images that stays where it is; "": none
}

// Archive is a file with images, as `ctr images import` reads it. It stays where it is.
func Archive(path string) Image { return Image{Name: path, archive: path} }

// As is the image by another name.
func (i Image) As(name string) Image {
	i.Name = name
	return i
}

// write makes an OCI layout, as an archive that containerd imports, and returns the image's digest.
// A node knows the image by its name, and by the name with this digest. An archive has no digest.
func (i Image) write(path string) (digest string, err error) {
	if i.archive != "" {
		_ = os.Remove(path) // of a node that stayed
		return "", os.Symlink(i.archive, path)
	}
	image := i.built
	if image == nil {
		layer, done, err := i.layer(path + ".layer")
		if err != nil {
			return "", err
		}
		defer done()
		image, err = mutate.AppendLayers(empty.Image, static.NewLayer(layer, types.OCILayer))
		if err != nil {
			return "", err
		}
		image, err = mutate.ConfigFile(mutate.MediaType(image, types.OCIManifestSchema1),
			&v1.ConfigFile{OS: "linux", Architecture: "amd64", Config: i.Config,
				RootFS: rootFS(image)})
		if err != nil {
			return "", err
		}
	}
	hash, err := image.Digest()
	if err != nil {
		return "", err
	}
	dir := path + ".layout"
	l, err := layout.Write(dir, empty.Index)
	if err != nil {
		return "", err
	}
	repository := i.Name[:strings.LastIndex(i.Name, ":")]
	for _, name := range []string{i.Name, repository + "@" + hash.String()} {
		if err := l.AppendImage(image, layout.WithAnnotations(map[string]string{
			"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name,
		})); err != nil {
			return "", err
		}
	}
	out, err := os.Create(path)
	if err != nil {
		return "", err
	}
	w := tar.NewWriter(out)
	err = errors.Join(w.AddFS(os.DirFS(dir)), w.Close(), out.Close(), os.RemoveAll(dir))
	return hash.String(), err
}

func rootFS(image v1.Image) v1.RootFS {
	config, err := image.ConfigFile()
	if err != nil {
		return v1.RootFS{}
	}
	return config.RootFS
}

// layer is the tar archive of the files, until done is called. It keeps their modes; the owner is
// root. It is in a file that is mapped into memory: the race detector watches Go's own memory, and
// would take minutes for that much.
func (i Image) layer(path string) (layer []byte, done func(), err error) {
	file, err := os.Create(path)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, file.Close(), os.Remove(path)) }()
	if err := i.archiveFiles(tar.NewWriter(file)); err != nil {
		return nil, nil, err
	}
	size, err := file.Seek(0, io.SeekCurrent)
	if err != nil {
		return nil, nil, err
	}
	layer, err = unix.Mmap(int(file.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	return layer, func() { _ = unix.Munmap(layer) }, err
}

// archiveFiles writes the archive of a layer.
func (i Image) archiveFiles(w *tar.Writer) error {
	for at, from := range i.Files {
		err := filepath.WalkDir(from, func(path string, _ fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			rest, err := filepath.Rel(from, path)
			if err != nil {
				return err
			}
			return addFile(w, filepath.Join(at, rest)[1:], path)
		})
		if err != nil {
			return err
		}
	}
	// A directory where everybody may write, as in every base image.
	tmp := &tar.Header{Typeflag: tar.TypeDir, Name: "tmp", Mode: 0o1777}
	return errors.Join(w.WriteHeader(tmp), w.Close())
}

// addFile adds the file or directory at a path of this machine.
func addFile(w *tar.Writer, at, path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	h := &tar.Header{Name: at, Mode: int64(info.Mode().Perm()), ModTime: time.Unix(0, 0)}
	if info.IsDir() {
		h.Typeflag = tar.TypeDir
		return w.WriteHeader(h)
	}
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	h.Typeflag, h.Size = tar.TypeReg, info.Size()
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	_, err = io.Copy(w, file)
	return err
}

func pauseImage(t testing.TB) Image {
	t.Helper()
	return Image{Name: "localhost/pause:1", Files: map[string]string{
		"/pause": Build(t, "kubernetes", "./integration/node/pause"),
	}, Config: v1.Config{Entrypoint: []string{"/pause"}}}
}

// DiskImage is a user's image as it is built FROM kubevirt.io:disk: the binary, and a disk.
func DiskImage(t testing.TB, name, disk string) Image {
	t.Helper()
	i := Image{Name: name, Files: map[string]string{
		"/kubevirt-disk":         Build(t, ".", "./cmd/kubevirt-disk"),
		"/disk":                  t.TempDir(),
		"/var/lib/kubevirt-disk": t.TempDir(),
	}, Config: v1.Config{Entrypoint: []string{"/kubevirt-disk"}, Cmd: []string{"serve"},
		User: "107:107", Env: []string{"PATH=/bin"}}}
	if disk != "" {
		i.Files["/disk/"+filepath.Base(disk)] = disk
	}
	return i
}

// ControllerImage is what `make controller-image` builds, for this machine only, and of the binary
// as other tests have compiled it.
func ControllerImage(t testing.TB, name string) Image {
	t.Helper()
	b := newBuilder(t)
	bin := filepath.Join(b.dir, "bin")
	err := errors.Join(os.Mkdir(bin, 0o755), os.Rename(Build(t, "kubernetes", "./command"),
		filepath.Join(bin, "kubevirt-disk-controller-linux-amd64")))
	require.NoError(t, err)
	licenses, err := exec.Command(filepath.Join(b.root, "scripts/licenses.sh"),
		"kubernetes", "./command").Output()
	if err == nil {
		err = os.WriteFile(filepath.Join(bin, "kubevirt-disk-controller-LICENSES"), licenses, 0o644)
	}
	require.NoError(t, err)
	b.run("buildah", "build", "--quiet", "--isolation", "chroot", "--platform", "linux/amd64",
		"--tag", name, "--file", filepath.Join(b.root, "Containerfile.controller"), bin)
	return b.image(name)
}

// BaseImage is what `make image` builds, for this machine only: kubevirt.io:disk. The others are
// images that users make of it, by their names, each with the file of its disk, as the README says.
func BaseImage(t testing.TB, users map[string]string) []Image {
	t.Helper()
	b := newBuilder(t)
	binary := Build(t, ".", "./cmd/kubevirt-disk", "-ldflags", "-s -w")
	const base = "kubevirt.io:disk"
	b.run(filepath.Join(b.root, "scripts/build-image.sh"), base, binary, binary)
	b.run("buildah", "tag", base+"-amd64", "docker.io/library/"+base)
	images := []Image{b.image("docker.io/library/" + base)}
	for name, disk := range users {
		context := filepath.Join(b.dir, "context")
		err := errors.Join(os.MkdirAll(context, 0o755),
			os.WriteFile(filepath.Join(context, "Dockerfile"), []byte("FROM "+base+
				"\nADD "+filepath.Base(disk)+" /disk/\n"), 0o644))
		require.NoError(t, err)
		b.run("cp", disk, context)
		b.run("buildah", "build", "--quiet", "--isolation", "chroot", "--format", "docker",
			"--tag", name, context)
		images = append(images, b.image(name))
	}
	return images
}

// builder builds images with buildah, in a store of its own.
type builder struct {
	t    testing.TB
	root string // of the repository
	dir  string
}

func newBuilder(t testing.TB) *builder {
	t.Helper()
	testtool.Need(t, "buildah")
	root, err := plane.Root()
	require.NoError(t, err)
	b := &builder{t: t, root: root, dir: t.TempDir()}
	err = os.WriteFile(filepath.Join(b.dir, "storage.conf"), []byte("[storage]\ndriver = \"vfs\"\n"+
		"graphroot = \""+b.dir+"/graph\"\nrunroot = \""+b.dir+"/run\"\n"), 0o644)
	require.NoError(t, err)
	return b
}

func (b *builder) run(args ...string) {
	b.t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "CONTAINERS_STORAGE_CONF="+filepath.Join(b.dir, "storage.conf"))
	if out, err := cmd.CombinedOutput(); err != nil {
		b.t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// image takes an image out of the store.
func (b *builder) image(name string) Image {
	b.t.Helper()
	dir := b.t.TempDir()
	b.run("buildah", "push", "--quiet", name, "oci:"+dir+":latest")
	index, err := layout.ImageIndexFromPath(dir)
	require.NoError(b.t, err)
	list, err := index.IndexManifest()
	require.NoError(b.t, err)
	image, err := index.Image(list.Manifests[0].Digest)
	require.NoError(b.t, err)
	return Image{Name: name, built: image}
}

// libraries matches the paths that ldd prints.
var libraries = regexp.MustCompile(`(?m)(/\S+) \(0x`)

// QEMUImage has this machine's QEMU with its iSCSI driver, and everything to run machines without
// KVM.
func QEMUImage(t testing.TB, name string) Image {
	t.Helper()
	files := map[string]string{}
	var paths []string
	for _, name := range []string{"qemu-system-x86_64", "qemu-io"} {
		path := testtool.Must(exec.LookPath(name))(t)
		paths = append(paths, path)
	}
	modules := testtool.Must(filepath.Glob("/usr/lib/*/qemu/block-iscsi.so"))(t)
	require.NotEmpty(t, modules, "QEMU has no iSCSI driver: install qemu-block-extra")
	emulation := testtool.Must(filepath.Glob(
		"/usr/lib/*/qemu/accel-tcg-x86_64.so"))(t) // or built in
	for _, path := range slices.Concat(modules, emulation, paths) {
		files[path] = path
		out := testtool.Must(exec.Command("ldd", path).Output())(t)
		for _, found := range libraries.FindAllStringSubmatch(string(out), -1) {
			files[found[1]] = found[1]
		}
	}
	for _, dir := range []string{"/usr/share/qemu", "/usr/share/seabios", "/usr/lib/ipxe/qemu"} {
		if _, err := os.Stat(dir); err == nil {
			files[dir] = dir
		}
	}
	return Image{Name: name, Files: files,
		Config: v1.Config{User: "107:107", Env: []string{"PATH=/usr/bin"}}}
}

// Build builds a static command of the module in a directory, which is relative to that of the main
// module, with further flags, and returns the binary.
func Build(t testing.TB, module, pkg string, flags ...string) string {
	t.Helper()
	root := testtool.Must(plane.Root())(t)
	path := filepath.Join(t.TempDir(), filepath.Base(pkg))
	// As the Makefile builds it, so that nothing is compiled twice.
	cmd := exec.Command("go", slices.Concat([]string{"build", "-trimpath", "-o", path}, flags,
		[]string{pkg})...)
	cmd.Dir, cmd.Env = filepath.Join(root, module), append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	return path
}
