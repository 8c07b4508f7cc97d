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
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// Image is a container image of one layer.
type Image struct {
	Name   string            // complete, with a tag
	Files  map[string]string // files or directories of this machine, by their path in the image
	Config v1.Config

	archive string // of the whole image, which was built elsewhere; "": it is made of the above
}

// write makes an OCI layout, as an archive that containerd imports, and returns the image's digest.
// A node knows the image by its name, and by the name with this digest. An image that was built
// elsewhere has no digest here.
func (i Image) write(path string) (digest string, err error) {
	if i.archive != "" {
		return "", os.Rename(i.archive, path)
	}
	layer, done, err := i.layer(path + ".layer")
	if err != nil {
		return "", err
	}
	defer done()
	image, err := mutate.AppendLayers(empty.Image, static.NewLayer(layer, types.OCILayer))
	if err != nil {
		return "", err
	}
	image, err = mutate.ConfigFile(mutate.MediaType(image, types.OCIManifestSchema1),
		&v1.ConfigFile{OS: "linux", Architecture: "amd64", Config: i.Config, RootFS: rootFS(image)})
	if err != nil {
		return "", err
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
	testtool.Need(t, "buildah")
	root, err := plane.Root()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	bin, archive := filepath.Join(dir, "bin"), filepath.Join(dir, "controller.tar")
	err = errors.Join(os.Mkdir(bin, 0o755),
		os.Rename(Build(t, "kubernetes", "./command"),
			filepath.Join(bin, "kubevirt-disk-controller-linux-amd64")))
	if err != nil {
		t.Fatal(err)
	}
	licenses, err := exec.Command(filepath.Join(root, "scripts/licenses.sh"),
		"kubernetes", "./command").Output()
	if err == nil {
		err = os.WriteFile(filepath.Join(bin, "kubevirt-disk-controller-LICENSES"), licenses, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"build", "--quiet", "--isolation", "chroot", "--platform", "linux/amd64", "--tag", name,
			"--file", filepath.Join(root, "Containerfile.controller"), bin},
		{"push", "--quiet", name, "docker-archive:" + archive + ":" + name},
	} {
		cmd := exec.Command("buildah", append([]string{"--storage-driver", "vfs",
			"--root", filepath.Join(dir, "root"), "--runroot", filepath.Join(dir, "run")},
			args...)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("buildah %s: %v\n%s", args[0], err, out)
		}
	}
	return Image{Name: name, archive: archive}
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
		path, err := exec.LookPath(name)
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, path)
	}
	modules, err := filepath.Glob("/usr/lib/*/qemu/block-iscsi.so")
	if err != nil || len(modules) == 0 {
		t.Fatal("QEMU has no iSCSI driver: install qemu-block-extra")
	}
	emulation, err := filepath.Glob("/usr/lib/*/qemu/accel-tcg-x86_64.so") // or built in
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range slices.Concat(modules, emulation, paths) {
		files[path] = path
		out, err := exec.Command("ldd", path).Output()
		if err != nil {
			t.Fatal(err)
		}
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
// module, and returns the binary.
func Build(t testing.TB, module, pkg string) string {
	t.Helper()
	root, err := plane.Root()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), filepath.Base(pkg))
	// As the Makefile builds it, so that nothing is compiled twice.
	cmd := exec.Command("go", "build", "-trimpath", "-o", path, pkg)
	cmd.Dir, cmd.Env = filepath.Join(root, module), append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return path
}
