package registry

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/integration/objects"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/testtool"
)

// pushedDigest is the last line of push.
var pushedDigest = regexp.MustCompile(`(?m)^sha256:[0-9a-f]{64}$`)

// pullSecret writes the credentials of a registry into a directory, as Kubernetes mounts them.
func pullSecret(t *testing.T, dir, address string) {
	t.Helper()
	auth := base64.StdEncoding.EncodeToString([]byte(registryUser + ":" + registryPassword))
	require.NoError(t, os.WriteFile(filepath.Join(dir, ".dockerconfigjson"),
		fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, address, auth), 0o600))
}

// newDisk makes a raw disk, and a compressed qcow2 of it.
func newDisk(t *testing.T) (raw, qcow2 string) {
	t.Helper()
	dir := t.TempDir()
	raw, qcow2 = filepath.Join(dir, "fedora.raw"), filepath.Join(dir, "fedora.qcow2")
	rig.MakeRaw(t, raw, 24<<20)
	rig.MakeQcow2(t, raw, qcow2, "", true)
	return raw, qcow2
}

// TestRegistryPushPull stores a disk in a real registry, with and without TLS, a password and a
// token server, and fetches it again.
func TestRegistryPushPull(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img")
	raw, qcow2 := newDisk(t)
	login := []string{"REGISTRY_USERNAME=" + registryUser, "REGISTRY_PASSWORD=" + registryPassword}
	for name, c := range map[string]struct{ tls, basic, token bool }{
		"plain": {}, "TLS and password": {tls: true, basic: true}, "token": {token: true},
	} {
		t.Run(name, func(t *testing.T) {
			auth, issued := "", func() int { return 1 }
			if c.basic {
				auth = basicAuth(t)
			}
			if c.token {
				auth, issued = tokenAuth(t)
			}
			s := rig.StartRegistry(t, c.tls, auth)
			flags := []string{"--insecure-registry=" + s.Address}
			if c.tls {
				flags = []string{"--registry-ca=" + s.CA}
			}
			ref := s.Address + "/vm/fedora:42"
			run := func(env []string, args ...string) rig.Result {
				t.Helper()
				return rig.MustRun(t, env, append(args, flags...)...)
			}
			pushed := run(login, "push", "--base=none", qcow2, ref)
			digest := pushedDigest.FindString(pushed.Output)
			require.NotEmpty(t, digest, "%s", pushed)
			again := run(login, "push", "--base=none", qcow2, s.Address+"/vm/other:1")
			require.Equal(t, digest, pushedDigest.FindString(again.Output))

			dir := t.TempDir()
			run(login, "pull", ref, filepath.Join(dir, "a.raw"))
			rig.SameFile(t, raw, filepath.Join(dir, "a.raw"))
			run(login, "pull", "--format=original", s.Address+"/vm/fedora@"+digest,
				filepath.Join(dir, "a.qcow2"))
			rig.SameFile(t, qcow2, filepath.Join(dir, "a.qcow2"))
			require.Positive(t, issued())

			secret := t.TempDir()
			pullSecret(t, secret, s.Address)
			run([]string{"REGISTRY_CONFIG=" + secret}, "pull", ref, filepath.Join(dir, "b.raw"))
			rig.SameFile(t, raw, filepath.Join(dir, "b.raw"))

			if auth != "" {
				r := rig.Run(t, []string{login[0], login[1] + "2"},
					append([]string{"pull", ref, filepath.Join(dir, "c.raw")}, flags...)...)
				require.Equal(t, 1, r.Status)
				require.NotContains(t, r.String(), registryPassword)
			}
			r := rig.Run(t, login, "pull", ref, filepath.Join(dir, "c.raw"))
			if !c.tls {
				require.Zero(t, r.Status, "without TLS, but on this machine: %s", r)
				require.NoError(t, os.Remove(filepath.Join(dir, "c.raw")))
			} else {
				require.Equal(t, 1, r.Status)
				require.Contains(t, r.Output, "--registry-ca")
			}
			require.Len(t, testtool.Must(os.ReadDir(dir))(t), 3, "nothing of what failed")
		})
	}
}

// TestRegistryBuildah fetches disks from images that buildah has built and pushed, with each
// compression.
func TestRegistryBuildah(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img", "buildah")
	rig.NeedRoot(t)
	e := rig.OwnEngine(t)
	raw, qcow2 := newDisk(t)
	s := rig.StartRegistry(t, false, "")
	work := t.TempDir()
	other := filepath.Join(work, "other.raw")
	rig.MakeRawSeed(t, other, 4<<20, 9)
	for _, file := range []string{raw, qcow2} {
		content := testtool.Must(os.ReadFile(file))(t)
		require.NoError(t, os.WriteFile(filepath.Join(work, filepath.Base(file)), content, 0o644))
	}
	build := func(name, instructions string, options ...string) string {
		t.Helper()
		file := filepath.Join(t.TempDir(), "Dockerfile")
		require.NoError(t, os.WriteFile(file, []byte(instructions), 0o644))
		image := s.Address + "/built/" + name
		args := append([]string{"build", "--quiet", "--layers", "--file", file, "--tag", image},
			options...)
		e.OK(t, "buildah", append(args, work)...)
		return image
	}
	pull := func(image string, args ...string) string {
		t.Helper()
		dest := filepath.Join(t.TempDir(), "disk.raw")
		rig.MustRun(t, nil,
			append([]string{"pull", "--insecure-registry=" + s.Address, image, dest}, args...)...)
		return dest
	}
	const one = "FROM scratch\nADD --chown=107:107 fedora.qcow2 /disk/\n"
	for _, format := range []string{"oci", "docker"} {
		image := build("one:"+format, one, "--format", format)
		e.OK(t, "buildah", "push", "--tls-verify=false", image)
		rig.SameFile(t, raw, pull(image))
	}
	for i, how := range []string{"--compression-format=zstd", "--compression-format=zstd:chunked",
		"--disable-compression"} {
		// Each needs a layer of its own. Otherwise the registry would already have it, compressed
		// by gzip.
		image := build(fmt.Sprintf("packed:%d", i),
			fmt.Sprintf("FROM scratch\nADD fedora.qcow2 /disk/%d.qcow2\n", i), "--format", "oci")
		if r := e.Run(t, "buildah", "push", "--tls-verify=false", how, image); r.Status != 0 {
			require.Contains(t, r.Output, "chunked", "%s", r) // older versions do not know it
			continue
		}
		rig.SameFile(t, raw, pull(image))
	}
	// A layer replaces files, and removes files.
	image := build("two:1",
		"FROM scratch\nADD fedora.qcow2 /disk/disk.img\nADD other.raw /disk/disk.img\n")
	e.OK(t, "buildah", "push", "--tls-verify=false", image)
	rig.SameFile(t, other, pull(image))
	image = build("three:1", "FROM scratch\nADD fedora.qcow2 other.raw /disk/\n")
	e.OK(t, "buildah", "push", "--tls-verify=false", image)
	rig.SameFile(t, other, pull(image, "--path=other.raw"))
	container := strings.TrimSpace(e.OK(t, "buildah", "from", "--pull-never", image))
	mounted := strings.TrimSpace(e.OK(t, "buildah", "mount", container))
	require.NoError(t, os.Remove(filepath.Join(mounted, "disk", "fedora.qcow2")))
	e.OK(t, "buildah", "umount", container)
	removed := s.Address + "/built/removed:1"
	e.OK(t, "buildah", "commit", "--quiet", "--rm", container, removed)
	e.OK(t, "buildah", "push", "--tls-verify=false", removed)
	rig.SameFile(t, other, pull(removed))

	// Without a registry.
	layout, archive := filepath.Join(work, "layout"), filepath.Join(work, "image.tar")
	e.OK(t, "buildah", "push", removed, "oci:"+layout+":latest")
	rig.SameFile(t, other, pull("oci:"+layout+":latest"))
	e.OK(t, "buildah", "push", removed, "docker-archive:"+archive)
	rig.SameFile(t, other, pull("docker-archive:"+archive))
}

// TestRegistryServe pushes a disk onto the base image, and podman runs the result.
func TestRegistryServe(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "docker-registry", "iscsi-ls", "qemu-img")
	address := rig.Registry(t)
	base := address + "/" + rig.BaseImage
	e.OK(t, "buildah", "manifest", "push", "--all", "--tls-verify=false", rig.BaseImage,
		"docker://"+base)
	_, qcow2 := newDisk(t)
	user := address + "/vm/fedora:42"
	rig.MustRun(t, nil, "push", "--insecure-registry="+address, "--base="+base, qcow2, user)

	node := rig.OwnEngine(t)
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

// TestRegistryJob runs the commands of the example of a Job, with the test's paths and names.
func TestRegistryJob(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img")
	all := testtool.Must(objects.Read("../../examples/registry/pull.yaml"))(t)
	claims := map[string]bool{}
	var job *objects.PodTemplate
	for _, o := range all {
		if pod := o.PodOf(); pod != nil {
			job = pod
		} else {
			claims[o.Metadata.Name] = o.Kind == "PersistentVolumeClaim"
		}
	}
	require.NotNil(t, job)
	pod := job.Spec
	require.True(t, claims[pod.Volumes[0].PersistentVolumeClaim.ClaimName])
	container := pod.Containers[0]

	raw, qcow2 := newDisk(t)
	s := rig.StartRegistry(t, false, basicAuth(t))
	login := []string{"REGISTRY_USERNAME=" + registryUser, "REGISTRY_PASSWORD=" + registryPassword}
	rig.MustRun(t, login, "push", "--base=none", "--insecure-registry="+s.Address, qcow2,
		s.Address+"/vm/fedora:42")
	volume, secrets := t.TempDir(), t.TempDir()
	pullSecret(t, secrets, s.Address)
	here := strings.NewReplacer("registry.example.com", s.Address, "/data", volume, "/pull-secret",
		secrets)
	env := []string{"INSECURE_REGISTRY=" + s.Address}
	for _, v := range container.Env {
		env = append(env, v.Name+"="+here.Replace(v.Value))
	}
	var args []string
	for _, a := range container.Args {
		args = append(args, here.Replace(a))
	}
	for range 2 { // a Job may be tried again
		rig.MustRun(t, env, args...)
		rig.SameFile(t, raw, filepath.Join(volume, "disk.img"))
	}
}

// TestRegistryBlockDevice overwrites a block device that has old content.
func TestRegistryBlockDevice(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img", "losetup")
	rig.NeedRoot(t)
	raw, qcow2 := newDisk(t)
	s := rig.StartRegistry(t, false, "")
	flag := "--insecure-registry=" + s.Address
	rig.MustRun(t, nil, "push", "--base=none", flag, qcow2, s.Address+"/vm/fedora:42")
	device := func(size int64) string {
		file := filepath.Join(t.TempDir(), "device")
		require.NoError(t, os.WriteFile(file, bytes.Repeat([]byte("old "), int(size/4)), 0o600))
		name := strings.TrimSpace(rig.OK(t, "losetup", "--find", "--show", file))
		t.Cleanup(func() { require.NoError(t, exec.Command("losetup", "--detach", name).Run()) })
		return name
	}
	large := device(32 << 20)
	rig.MustRun(t, nil, "pull", flag, s.Address+"/vm/fedora:42", large)
	want := testtool.Must(os.ReadFile(raw))(t)
	got := testtool.Must(os.ReadFile(large))(t)
	require.True(t, bytes.Equal(want, got[:len(want)]))
	require.Equal(t, []byte("old old "), got[len(want):len(want)+8],
		"what is behind the disk stays")

	image := testtool.Must(os.Open(large))(t) // as a daemon has it that serves it
	require.NoError(t, flock.Lock(image, unix.LOCK_SH))
	for _, args := range [][]string{{"pull", flag, s.Address + "/vm/fedora:42", large},
		{"convert", qcow2, large}} {
		r := rig.Run(t, nil, args...)
		require.Equal(t, 1, r.Status)
		require.Contains(t, r.Output, "in use by another process")
	}
	require.NoError(t, image.Close())

	r := rig.Run(t, nil, "pull", flag, s.Address+"/vm/fedora:42", device(8<<20))
	require.Equal(t, 1, r.Status)
	require.Contains(t, r.Output, "the disk needs")
}

// oras runs it in a directory. The test is skipped if nobody has built it.
func oras(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), rig.BuiltClient(t, "oras", orasVersion), args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "HOME="+dir)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return string(out)
}

// TestOras pulls what "oras push" has stored, whatever wraps it, and has "oras pull" fetch what
// push --artifact stores.
func TestOras(t *testing.T) {
	t.Parallel()
	dir, back := t.TempDir(), t.TempDir()
	oras(t, dir, "version")
	rig.Need(t, "docker-registry", "qemu-img", "xz")
	s := rig.StartRegistry(t, false, "")
	insecure := "--insecure-registry=" + s.Address
	raw := append(bytes.Repeat([]byte("\x00words"), 1<<16*2), make([]byte, 1<<20)...)
	write := func(name string, content []byte) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), content, 0o644))
	}
	read := func(dir, name string) []byte {
		return testtool.Must(os.ReadFile(filepath.Join(dir, name)))(t)
	}
	write("a.raw", raw)
	out, err := exec.CommandContext(t.Context(), "qemu-img", "convert", "-f", "raw", "-O", "qcow2",
		filepath.Join(dir, "a.raw"), filepath.Join(dir, "a.qcow2")).CombinedOutput()
	require.NoError(t, err, "%s", out)
	qcow2 := read(dir, "a.qcow2")
	write("a.qcow2.xz", packtest.Tool(t, qcow2, "xz", "-9"))
	write("a.tar.gz", packtest.Gzip(t, packtest.Tar(t,
		packtest.File{Name: "README", Data: []byte("read me\n")},
		packtest.File{Name: "a.raw", Data: raw})))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "disk"), 0o755))
	write("disk/b.raw", raw)

	ref := s.Address + "/vm/oras:1"
	to := filepath.Join(back, "out")
	for _, file := range []string{"a.raw", "a.qcow2", "a.qcow2.xz", "a.tar.gz", "disk",
		"a.raw:application/x-disk"} {
		oras(t, dir, "push", "--plain-http", ref, file)
		rig.MustRun(t, nil, "pull", insecure, "--force", ref, to)
		require.True(t, bytes.Equal(raw, read(back, "out")), file)
	}
	require.NoError(t, os.Remove(to))

	rig.MustRun(t, nil, "push", "--artifact", insecure, filepath.Join(dir, "a.qcow2"),
		filepath.Join(dir, "disk", "b.raw"), s.Address+"/vm/ours:1")
	oras(t, back, "pull", "--plain-http", s.Address+"/vm/ours:1")
	require.True(t, bytes.Equal(qcow2, read(back, "a.qcow2")))
	require.True(t, bytes.Equal(raw, read(back, "b.raw")))
	require.Len(t, testtool.Must(os.ReadDir(back))(t), 2, "the index is no file")

	// A copy is the same artifact.
	oras(t, dir, "cp", "--from-plain-http", "--to-plain-http", s.Address+"/vm/ours:1",
		s.Address+"/vm/copy:1")
	rig.MustRun(t, nil, "pull", insecure, "--path=b.raw", s.Address+"/vm/copy:1", to)
	require.True(t, bytes.Equal(raw, read(back, "out")))
}
