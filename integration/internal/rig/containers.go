package rig

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/testtool"
)

// BaseImage is the name after FROM in a user's Dockerfile.
const BaseImage = "kubevirt.io:disk"

// Engine runs buildah and podman on storage of its own. So it uses nothing from the machine, and
// leaves nothing behind.
type Engine struct {
	Dir  string
	Vars []string // they tell buildah and podman where the storage is
	env  []string // a client's environment with vars
}

// OwnEngine makes storage for one test.
func OwnEngine(t *testing.T) *Engine {
	t.Helper()
	e := testtool.Must(NewEngine())(t)
	t.Cleanup(func() { require.NoError(t, e.Remove()) })
	return e
}

// NewEngine makes the storage in a new directory. The path is short, because podman makes sockets
// in it.
func NewEngine() (*Engine, error) {
	dir, err := os.MkdirTemp("", "kd-image-")
	if err != nil {
		return nil, err
	}
	e := &Engine{Dir: dir}
	for name, text := range map[string]string{
		"storage.conf": fmt.Sprintf("[storage]\ndriver = %q\ngraphroot = %q\nrunroot = %q\n",
			StorageDriver(dir), e.path("graph"), e.path("run")),
		"containers.conf": fmt.Sprintf(`[containers]
default_ulimits = [%s]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = %q
[network]
network_config_dir = %q
`, ulimits(), e.path("tmp"), e.path("net")),
	} {
		if err := os.WriteFile(e.path(name), []byte(text), 0o644); err != nil {
			return nil, errors.Join(err, e.Remove())
		}
	}
	e.Vars = []string{"CONTAINERS_STORAGE_CONF=" + e.path("storage.conf"),
		"CONTAINERS_CONF=" + e.path("containers.conf"),
		"BUILDAH_ISOLATION=chroot", "DISABLE_HC_SYSTEMD=true"}
	e.env = ClientEnv(e.Vars...)
	return e, nil
}

func (e *Engine) path(name string) string { return filepath.Join(e.Dir, name) }

// StorageDriver is overlay if the kernel and the file system support it. Otherwise it is vfs, which
// copies.
func StorageDriver(dir string) string {
	at := func(name string) string { return filepath.Join(dir, "probe", name) }
	for _, name := range []string{"lower", "upper", "work", "merged"} {
		if os.MkdirAll(at(name), 0o755) != nil {
			return "vfs"
		}
	}
	defer os.RemoveAll(at(""))
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", at("lower"), at("upper"),
		at("work"))
	if syscall.Mount("overlay", at("merged"), "overlay", 0, options) != nil {
		return "vfs"
	}
	_ = syscall.Unmount(at("merged"), 0)
	return "overlay"
}

// ulimits are low enough for any user. Podman's defaults are higher than root may set without
// CAP_SYS_RESOURCE.
func ulimits() string {
	const enough, nproc = 16384, 6 // nproc is RLIMIT_NPROC, which package syscall lacks
	var all []string
	for name, resource := range map[string]int{"nofile": syscall.RLIMIT_NOFILE, "nproc": nproc} {
		var limit syscall.Rlimit
		if syscall.Getrlimit(resource, &limit) == nil {
			n := min(limit.Max, enough)
			all = append(all, strconv.Quote(fmt.Sprintf("%s=%d:%d", name, n, n)))
		}
	}
	return strings.Join(all, ", ")
}

// Remove ends every container and removes the storage.
func (e *Engine) Remove() error {
	// without podman there are no containers
	_, _ = e.finally("podman", "rm", "--force", "--all", "--time", "0")
	for _, mount := range mountsBelow(e.Dir) {
		_ = syscall.Unmount(mount, syscall.MNT_DETACH)
	}
	return os.RemoveAll(e.Dir)
}

// mountsBelow lists the mounts in a directory, the last one first.
func mountsBelow(dir string) (mounts []string) {
	table, _ := os.ReadFile("/proc/self/mounts")
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); len(fields) > 1 &&
			strings.HasPrefix(fields[1], dir+"/") {
			mounts = append([]string{fields[1]}, mounts...)
		}
	}
	return mounts
}

// Run runs buildah, podman or any other tool on the storage.
func (e *Engine) Run(t *testing.T, name string, args ...string) Result {
	t.Helper()
	return Client(t, e.env, name, args...)
}

// OK is run for commands that must succeed. It returns the output without surrounding white space.
func (e *Engine) OK(t *testing.T, name string, args ...string) string {
	t.Helper()
	r := e.Run(t, name, args...)
	require.Zero(t, r.Status, "%s", r)
	return strings.TrimSpace(r.Output)
}

// finally runs a command after the test, when the test's context is over.
func (e *Engine) finally(name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Env = e.env
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// images is the engine that the tests share. It is made once per run, and contains the base image,
// built with the command that a person would use.
var images = sync.OnceValues(func() (*Engine, error) {
	imagesMade.Store(true)
	e, err := NewEngine()
	if err != nil {
		return nil, err
	}
	_, err = e.MakeImage("022")
	return e, err
})

var imagesMade atomic.Bool

// HoldBin waits until no make writes into bin, and keeps others from it until release. Each room
// is a process of its own, so the lock is a file's.
func HoldBin() (release func(), err error) {
	dir := filepath.Join("..", "..", "bin")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := flock.Lock(f, unix.LOCK_EX); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// MakeImage runs `make image` with a umask and additional variables, and returns what it printed.
func (e *Engine) MakeImage(umask string, vars ...string) (string, error) {
	return e.Make("image", umask, vars...)
}

// Make runs make with a target that builds an image.
func (e *Engine) Make(target, umask string, vars ...string) (string, error) {
	cmd := exec.Command("sh", "-c", "umask "+umask+" && exec make --no-print-directory "+target)
	cmd.Dir = "../.."
	release, err := HoldBin()
	if err != nil {
		return "", err
	}
	defer release()
	// It compiles, so it needs the environment of the go command.
	cmd.Env = append(append(os.Environ(), e.Vars...), vars...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("make %s: %w\n%s", target, err, out)
	}
	return string(out), nil
}

// NeedImages returns the shared engine, or skips the test if there can be none.
func NeedImages(t *testing.T, tools ...string) *Engine {
	t.Helper()
	Need(t, append([]string{"buildah", "podman", "runc"}, tools...)...)
	NeedRoot(t)
	e := testtool.Must(images())(t)
	return e
}

// BuildFrom builds a user's image and returns its name. instructions is the Dockerfile after FROM;
// context is the directory of its files.
func (e *Engine) BuildFrom(t *testing.T, context, instructions string) string {
	t.Helper()
	dockerfile := filepath.Join(t.TempDir(), "Dockerfile")
	require.NoError(t, os.WriteFile(dockerfile, []byte("FROM "+BaseImage+"\n"+instructions+"\n"),
		0o644))
	return e.Build(t, context, dockerfile)
}

// Build builds a Dockerfile in the docker format, which keeps the base image's health check.
func (e *Engine) Build(t *testing.T, context, dockerfile string, options ...string) string {
	t.Helper()
	name := fmt.Sprintf("user-%d", imageNumber.Add(1))
	args := append([]string{"build", "--quiet", "--format", "docker", "--tag", name, "--file",
		dockerfile}, options...)
	e.OK(t, "buildah", append(args, context)...)
	return name
}

// imageNumber gives the images and containers of a run different names.
var imageNumber atomic.Int64

// removeImages removes the shared engine, if a test has made it.
func removeImages() error {
	if !imagesMade.Load() {
		return nil
	}
	e, _ := images() // after a failure, its storage may be gone, or still there
	if e == nil {
		return nil
	}
	return e.Remove()
}

// qemuUser is the user and group of QEMU where KubeVirt runs it.
const qemuUser = 107

// AsQEMU runs a tool as QEMU's user.
func AsQEMU(t *testing.T, name string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Timeout)
	defer cancel()
	user := strconv.Itoa(qemuUser)
	run := Clients.InRoot(append([]string{"setpriv", "--reuid=" + user, "--regid=" + user,
		"--clear-groups", name}, args...)...)
	cmd := exec.CommandContext(ctx, run[0], run[1:]...)
	cmd.Env, cmd.Dir = ClientEnv(), "/"
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// manifest is an entry of an image's manifest list.
type manifest struct {
	Digest   string
	Platform struct{ Architecture, OS string }
}

func Manifests(t *testing.T, e *Engine, image string) []manifest {
	t.Helper()
	var list struct{ Manifests []manifest }
	require.NoError(t, json.Unmarshal([]byte(e.OK(t, "buildah", "manifest", "inspect", image)),
		&list))
	require.Len(t, list.Manifests, 2)
	return list.Manifests
}

// Instance is the id of an image for one architecture.
func Instance(t *testing.T, e *Engine, image, arch string) string {
	t.Helper()
	listed := e.OK(t, "podman", "images", "--all", "--no-trunc", "--format", "{{.Digest}} {{.ID}}")
	for _, m := range Manifests(t, e, image) {
		if m.Platform.Architecture != arch {
			continue
		}
		for line := range strings.Lines(listed) {
			if digest, id, _ := strings.Cut(strings.TrimSpace(line), " "); digest == m.Digest {
				return id
			}
		}
	}
	t.Fatalf("no image for %s", arch)
	return ""
}

// Registry starts a container registry on a free loopback port and returns its address. It ends
// with the test.
func Registry(t *testing.T) string {
	t.Helper()
	port := testtool.Must(peers.FreePort())(t)
	address := fmt.Sprintf("127.0.0.1:%d", port)
	dir := t.TempDir()
	config := filepath.Join(dir, "config.yml")
	require.NoError(t, os.WriteFile(config, []byte(fmt.Sprintf("version: 0.1\nlog: {level: "+
		"error}\nstorage: {filesystem: {rootdirectory: %q}}\nhttp: {addr: %q}\n",
		filepath.Join(dir, "data"), address)), 0o644))
	cmd := exec.Command(registryProgram(t), "serve", config)
	cmd.Env = ClientEnv()
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	testtool.Within(t, Timeout, func() bool {
		c, err := net.Dial("tcp", address)
		if err != nil {
			return false
		}
		return c.Close() == nil
	}, "the registry listens")
	return address
}

// CHAPClient is the tests' credential in the form that libiscsi's tools take.
var CHAPClient = []string{"LIBISCSI_CHAP_USERNAME=" + User,
	"LIBISCSI_CHAP_PASSWORD=" + Password}

// Credential is the tests' credential in the form that the daemon takes.
var Credential = []string{"CHAP_USERNAME=" + User, "CHAP_PASSWORD=" + Password}

// Hardened are the options of a container that may do only what it needs.
var Hardened = []string{"--read-only", "--cap-drop=all", "--security-opt=no-new-privileges"}

// Confined checks the process from outside: user, capabilities, no new privileges, and no secret on
// the command line.
func Confined(t *testing.T, s Sandbox) {
	t.Helper()
	proc := filepath.Join("/proc", s.PID(t))
	status, err := os.ReadFile(filepath.Join(proc, "status"))
	require.NoError(t, err)
	fields := map[string]string{}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		fields[name] = strings.TrimSpace(value)
	}
	require.Equal(t, "107\t107\t107\t107", fields["Uid"])
	require.Equal(t, "107\t107\t107\t107", fields["Gid"])
	require.Equal(t, "1", fields["NoNewPrivs"])
	for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
		require.Equal(t, "0000000000000000", fields[set], set)
	}
	line, err := os.ReadFile(filepath.Join(proc, "cmdline"))
	require.NoError(t, err)
	require.Equal(t, "/kubevirt-disk\x00serve\x00", string(line))
}
