package main

import (
	"context"
	"encoding/xml"
	"fmt"
	"math"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubevirt/hookpb"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/vhostuser/vhosttest"
)

// sidecar is a container as KubeVirt makes it for a hook, as far as mounts, the user and the
// environment go.
type sidecar struct {
	t         *testing.T
	hooks     string // the directory that it shares with the launcher
	mounted   string // where that is
	name      string // of the hook's socket in it
	container string // what KubeVirt calls the container; "": it does not say
	disk      string // of images
	// mounted at /run/claim and /run/second if they are not empty
	claim, second string
}

// sidecarScript runs in a mount namespace of its own: HOOKS, IMAGES, CLAIM and BINARY are outside.
// Nothing else can be written, not even the places where the image has directories for that.
const sidecarScript = `set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p "$MOUNTED" /run/disk /run/claim
mount --bind "$HOOKS" "$MOUNTED"
mount --bind "$IMAGES" /run/disk
[ -z "$CLAIM" ] || mount --bind "$CLAIM" /run/claim
[ -z "$SECOND" ] || { mkdir /run/second && mount --bind "$SECOND" /run/second; }
: >/run/kubevirt-disk
mount --bind "$BINARY" /run/kubevirt-disk
mount -o remount,bind,ro /run
mount -o remount,bind,ro /
exec setpriv --reuid 107 --regid 107 --clear-groups --inh-caps=-all --bounding-set=-all \
	--no-new-privs /run/kubevirt-disk "$@"`

func newSidecar(t *testing.T) *sidecar {
	t.Helper()
	testtool.Needs(t, "root (to mount what KubeVirt mounts in a sidecar)", os.Geteuid() == 0)
	testtool.Need(t, "unshare")
	testtool.Need(t, "setpriv")
	s := &sidecar{t: t, hooks: t.TempDir(), disk: t.TempDir(), mounted: "/run/kubevirt-hooks",
		name: "hook-sidecar-0.sock", container: "hook-sidecar-0"}
	require.NoError(t, os.Chown(s.hooks, 107, 107))
	require.NoError(t, os.Chmod(s.disk, 0o755))
	s.image("fedora.raw")
	return s
}

// image adds an image of 1 MiB.
func (s *sidecar) image(name string) {
	s.t.Helper()
	content := []byte(strings.Repeat("boot", 1<<18))
	require.NoError(s.t, os.WriteFile(filepath.Join(s.disk, name), content, 0o644))
}

// mountClaim mounts a claim, which stays when the sidecar is gone.
func (s *sidecar) mountClaim() {
	s.t.Helper()
	s.claim = s.t.TempDir()
	require.NoError(s.t, os.Chown(s.claim, 107, 107))
}

// start starts the container. args follow the binary.
func (s *sidecar) start(args ...string) *process {
	s.t.Helper()
	binary := testtool.Must(filepath.EvalSymlinks(binary(s.t)))(s.t)
	env := []string{"HOOKS=" + s.hooks, "MOUNTED=" + s.mounted, "IMAGES=" + s.disk,
		"CLAIM=" + s.claim, "SECOND=" + s.second, "BINARY=" + binary,
		"DISK_DIR=/run/disk", "CONTAINER_NAME=" + s.container}
	return launch(s.t, "unshare", env, append([]string{"-m", "sh", "-c", sidecarScript, "sidecar"},
		args...)...)
}

// serve starts the container, and waits for it as KubeVirt's launcher does.
func (s *sidecar) serve(args ...string) (*process, *launcher) {
	s.t.Helper()
	p := s.start(append([]string{"serve"}, args...)...)
	return p, s.launcher(p)
}

// again starts the container again. The socket may be there before, of a process that was killed.
func (s *sidecar) again(args ...string) *process {
	s.t.Helper()
	p := s.start(append([]string{"serve"}, args...)...)
	p.until("the launcher is answered", func() bool {
		return p.logged("KubeVirt's launcher can use the disks", "socket") != nil
	})
	return p
}

// terminateLater asks a sidecar to stop while its machine runs.
func (p *process) terminateLater() {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(syscall.SIGTERM))
	p.until("it waits", func() bool {
		return strings.Contains(p.stderr.String(), "stopping when the machine has ended")
	})
}

func (s *sidecar) socket() string { return filepath.Join(s.hooks, s.name) }
func (s *sidecar) nbd() string    { return filepath.Join(s.hooks, "disk", "nbd.sock") }

// launcher is KubeVirt's, in front of a sidecar.
type launcher struct {
	*grpc.ClientConn
	t *testing.T
}

// launcher waits for the hook as KubeVirt's does: everything in the directory that is no directory
// is a socket, which answers.
func (s *sidecar) launcher(p *process) *launcher {
	s.t.Helper()
	p.until("the hook's socket is there", func() bool { return exists(s.socket()) })
	entries, err := os.ReadDir(s.hooks)
	require.NoError(s.t, err)
	var names []string
	for _, e := range entries {
		if !e.IsDir() {
			names = append(names, e.Name())
		}
	}
	require.Equal(s.t, []string{s.name}, names)
	c, err := grpc.NewClient("passthrough:///hook",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return socket.DialUnix(ctx, s.socket())
		}))
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = c.Close() })
	l := &launcher{c, s.t}
	var info hookpb.InfoResult
	require.NoError(s.t, l.call("info.Info/Info", &hookpb.Empty{}, &info))
	require.Equal(s.t, "kubevirt-disk", info.Name)
	return l
}

func (l *launcher) call(procedure string, in, out any) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return l.Invoke(ctx, "/kubevirt.hooks."+procedure, in, out)
}

// define asks for the domain of a machine that says nothing.
func (l *launcher) define() (libvirtxml.Domain, error) {
	l.t.Helper()
	return l.defineFor(`{"metadata":{"name":"vm","annotations":{}}}`)
}

// defineFor asks for the domain of a machine without other disks.
func (l *launcher) defineFor(vmi string) (libvirtxml.Domain, error) {
	l.t.Helper()
	in := &hookpb.DomainParams{DomainXml: []byte(`<domain type="kvm"><devices></devices></domain>`),
		Vmi: []byte(vmi)}
	var out hookpb.DomainResult
	var domain libvirtxml.Domain
	err := l.call("v1alpha3.Callbacks/OnDefineDomain", in, &out)
	if err == nil {
		require.NoError(l.t, xml.Unmarshal(out.DomainXml, &domain), string(out.DomainXml))
	}
	return domain, err
}

func (l *launcher) shutdown() {
	l.t.Helper()
	require.NoError(l.t, l.call("v1alpha3.Callbacks/Shutdown", &hookpb.Empty{}, &hookpb.Empty{}))
}

// qemu is somebody who uses the disk at the socket: a connection that has chosen an export.
func (s *sidecar) qemu(p *process) (leave func()) {
	s.t.Helper()
	c, err := socket.DialUnix(s.t.Context(), s.nbd())
	require.NoError(s.t, err)
	_, err = c.Write(append([]byte{0, 0, 0, 3}, // fixed newstyle, no zeroes
		[]byte("IHAVEOPT\x00\x00\x00\x01\x00\x00\x00\x00")...)) // EXPORT_NAME: the only disk
	require.NoError(s.t, err)
	p.until("the client has chosen the disk", func() bool {
		return strings.Contains(p.stderr.String(), `"NBD client"`)
	})
	return func() { require.NoError(s.t, c.Close()) }
}

// TestHook starts a machine with the disk of an image, as KubeVirt does.
func TestHook(t *testing.T) {
	s := newSidecar(t)
	p, l := s.serve()
	domain := testtool.Must(l.define())(t)
	require.Len(t, domain.Devices.Disks, 1)
	disk := domain.Devices.Disks[0]
	require.Equal(t, "nbd", disk.Source.Network.Protocol)
	require.Equal(t, "fedora.raw", disk.Source.Network.Name)
	require.Equal(t, "/var/run/kubevirt-hooks/hook-sidecar-0/disk/nbd.sock",
		disk.Source.Network.Hosts[0].Socket)
	require.Len(t, disk.Serial, 20)
	require.NotContains(t, p.stderr.String(), `"portal"`, "no port is open")

	leave := s.qemu(p)
	asked := s.start("sessions") // as a person does with kubectl exec
	require.Equal(t, exitDone, asked.status())
	require.Contains(t, asked.stdout.String(), "unix:/var/run/kubevirt-hooks/disk/nbd.sock")
	l.shutdown()
	leave()
	require.Equal(t, exitDone, p.status())
	require.NoFileExists(t, s.socket())
	require.NoFileExists(t, s.nbd())
}

// TestHookWaitsForTheMachine: SIGTERM comes to all containers of the pod at once, and the guest
// still writes then. It may come again, from the kubelet after a person.
func TestHookWaitsForTheMachine(t *testing.T) {
	s := newSidecar(t)
	p, l := s.serve()
	require.NoError(t, testtool.Err(l.define()))
	leave := s.qemu(p)
	p.terminateLater()
	require.Never(t, func() bool { return p.cmd.Process.Signal(syscall.SIGTERM) != nil },
		300*time.Millisecond, 50*time.Millisecond)
	require.NoError(t, testtool.Err(l.define()), "the launcher is answered until the end")
	leave()
	require.Equal(t, exitDone, p.status())
	require.NoFileExists(t, s.socket())

	p, l = s.serve()
	leave = s.qemu(p)
	p.terminateLater()
	l.shutdown()
	leave()
	require.Equal(t, exitDone, p.status())
}

// TestHookAfterKill: a killed sidecar leaves sockets, and its successor replaces them.
func TestHookAfterKill(t *testing.T) {
	s := newSidecar(t)
	p := s.start("serve")
	s.launcher(p)
	p.kill()
	require.FileExists(t, s.socket())
	p = s.again()
	domain := testtool.Must(s.launcher(p).define())(t)
	require.Len(t, domain.Devices.Disks, 1)

	second := s.start("serve")
	require.Equal(t, exitFailed, second.status())
	require.Contains(t, second.stderr.String(), "another daemon uses it")
	require.NoError(t, testtool.Err(s.launcher(p).define()), "the first one goes on")
	require.Equal(t, exitDone, p.terminate())
}

// TestHookThatFails: the launcher has the reason in its log, and does not wait for a hook that
// never comes.
func TestHookThatFails(t *testing.T) {
	s := newSidecar(t)
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"serve", "--disk-dir=/run/claim"}, `no disk image in "/run/claim"`},
		{[]string{"serve", "--access-mode=mine"}, `"mine"`},
		{[]string{"serve", "--no-such-flag"}, "unknown flag --no-such-flag"},
	} {
		p := s.start(c.args...)
		l := s.launcher(p)
		require.ErrorContains(t, testtool.Err(l.define()), c.want)
		p.until("it is logged", func() bool { // the log may come after the answer
			return strings.Contains(p.stderr.String(), "launcher is told why")
		})
		l.shutdown()
		require.NotZero(t, p.status())
		require.NoFileExists(t, s.socket())

		p = s.start(c.args...)
		s.launcher(p)
		require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
		require.NotZero(t, p.status())
	}
}

// TestHookStreams: the disk of any image of a registry, with nothing that can be written but the
// hook's directory. Without the registry the launcher has the reason.
func TestHookStreams(t *testing.T) {
	s := newSidecar(t)
	registry := registrytest.NewLying(t)
	content := registrytest.Noise(1, 1<<20)
	registry.NewImage(t, content)
	image := registry.Host() + "/vm/a:1@" + registry.Tags["1"].Digest.String()
	p, l := s.serve("--disk-dir=/run/claim", "--insecure-registry="+registry.Host(),
		"--image="+image)
	domain := testtool.Must(l.define())(t)
	require.Len(t, domain.Devices.Disks, 1)
	require.Equal(t, content, s.content(domain.Devices.Disks[0].Source.Network.Name))
	require.DirExists(t, filepath.Join(s.hooks, "disk", "work"))
	l.shutdown()
	require.Equal(t, exitDone, p.status())

	p, l = s.serve("--disk-dir=/run/claim", "--insecure-registry="+registry.Host(),
		"--image="+registry.Host()+"/vm/a:2")
	require.ErrorContains(t, testtool.Err(l.define()), "/vm/a:2")
	l.shutdown()
	require.Equal(t, exitFailed, p.status())
}

// content reads a disk as qemu-img does.
func (s *sidecar) content(export string) []byte {
	s.t.Helper()
	testtool.Need(s.t, "qemu-img")
	to := filepath.Join(s.t.TempDir(), "copy")
	// The address of a socket is short, and the directory of a test is not.
	link := filepath.Join(os.TempDir(), fmt.Sprintf("hook-%d.sock", os.Getpid()))
	require.NoError(s.t, os.Symlink(s.nbd(), link))
	defer os.Remove(link)
	out, err := exec.Command("qemu-img", "convert", "-O", "raw",
		"nbd+unix:///"+export+"?socket="+link, to).CombinedOutput()
	require.NoError(s.t, err, "%s", out)
	got, err := os.ReadFile(to)
	require.NoError(s.t, err)
	return got
}

// TestHookIsForbidden serves as everywhere else.
func TestHookIsForbidden(t *testing.T) {
	s := newSidecar(t)
	p := s.start("serve", "--kubevirt-hook=false", "--port=0", "--metrics-listen=",
		"--work-dir=/run/kubevirt-hooks/work", "--ready-file=")
	p.until("it serves", func() bool { return strings.Contains(p.stderr.String(), `"ready"`) })
	require.NotEmpty(t, p.logged("portal", "address"))
	require.NoFileExists(t, s.socket())
	require.Equal(t, exitDone, p.terminate())
}

func TestMemoryMax(t *testing.T) {
	for text, want := range map[string]int64{"max\n": math.MaxInt64, "": math.MaxInt64,
		"67108864\n": 64 << 20} {
		require.Equal(t, want, parseMemoryMax(text))
	}
}

// TestHookVhostUser: a machine that asks for vhost-user gets a socket where its QEMU sees it.
// Nobody can use it before, and SIGTERM waits until the machine has left it.
func TestHookVhostUser(t *testing.T) {
	s := newSidecar(t)
	p, l := s.serve()
	at := filepath.Join(s.hooks, "disk", "vhost-user", "fedora.raw.sock")
	_, err := vhosttest.Dial(at, vhosttest.Options{})
	require.Error(t, err, "the launcher has not asked")
	domain, err := l.defineFor(`{"metadata":{"name":"vm","annotations":` +
		`{"disk.kubevirt.io/transport":"vhost-user"}}}`)
	require.NoError(t, err)
	require.Equal(t, "shared", domain.MemoryBacking.MemoryAccess.Mode)
	require.Equal(t, "/var/run/kubevirt-hooks/hook-sidecar-0/disk/vhost-user/fedora.raw.sock",
		domain.Devices.Disks[0].Source.VHostUser.UNIX.Path)

	qemu := testtool.Must(vhosttest.Dial(at, vhosttest.Options{}))(t)
	asked := s.start("sessions")
	require.Equal(t, exitDone, asked.status())
	require.Contains(t, asked.stdout.String(), "disk/vhost-user/fedora.raw.sock")
	p.terminateLater()
	content := make([]byte, 4096)
	require.NoError(t, qemu.Read(0, 0, content))
	require.Equal(t, strings.Repeat("boot", 1024), string(content))
	require.NoError(t, qemu.Close())
	l.shutdown()
	require.Equal(t, exitDone, p.status())
	require.NoFileExists(t, at)
}

// TestServeByVhostUserOnly: a daemon without any portal is ready, and says where its disks are, for
// a shell.
func TestServeByVhostUserOnly(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "a;b.raw")
	require.NoError(t, os.WriteFile(file, make([]byte, 1<<20), 0o644))
	p := launch(t, binary(t), nil, "serve", "--iscsi=false", "--metrics-listen=",
		"--work-dir="+filepath.Join(dir, "work"), "--vhost-user=sockets", file)
	// libvirt needs the whole path.
	p.until("it is ready", func() bool {
		return strings.Contains(p.stdout.String()+p.stderr.String(), "kubevirt-disk xml "+
			"--vhost-user '"+filepath.Join(p.cmd.Dir, "sockets", "a;b.raw.sock'"))
	})
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
	require.Equal(t, exitDone, p.status())
	p = launch(t, binary(t), nil, "serve", "--nbd=unix:n.sock", file, "--", "echo", "{uri}")
	require.Equal(t, exitDone, p.status())
	require.Contains(t, p.stdout.String(), url.QueryEscape(filepath.Join(p.cmd.Dir, "n.sock")))
}
