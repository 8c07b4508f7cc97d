package machines

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// libvirtd is a libvirt daemon for one test, in session mode. It keeps everything below one
// directory. If the test runs as root, the daemon runs as nobody; otherwise it would be the
// system's daemon.
type libvirtd struct {
	t   *testing.T
	dir string // readable by the daemon's user; short, because it holds sockets
	env []string
	uid *syscall.Credential
}

// libvirtTools are what the domain test needs.
var libvirtTools = []string{"libvirtd", rig.QEMUDriver, "virsh", "qemu-system-x86_64",
	rig.QEMUISCSI,
	"apt-get", "dpkg-deb"}

func startLibvirtd(t *testing.T) *libvirtd {
	t.Helper()
	if rig.Clients != rig.Installed {
		rig.NeedRoot(t)
	}
	dir := testtool.Must(os.MkdirTemp("", "libvirt-"))(t)
	t.Cleanup(func() { os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755))
	l := &libvirtd{t: t, dir: dir}
	if os.Geteuid() == 0 {
		l.uid = &syscall.Credential{Uid: 65534, Gid: 65534}
	}
	for variable, name := range map[string]string{
		"HOME": "", "XDG_RUNTIME_DIR": "run", "XDG_CONFIG_HOME": "config",
		"XDG_CACHE_HOME": "cache", "XDG_DATA_HOME": "data",
	} {
		l.env = append(l.env, variable+"="+filepath.Join(dir, name))
	}
	// No virtlogd, and no confinement of processes that are an ordinary user's anyway.
	l.file("config/libvirt/qemu.conf", "stdio_handler = \"file\"\nsecurity_driver = \"none\"\n")
	// Each needs a host UUID of its own, because libvirt does not migrate to the same machine.
	l.file("libvirtd.conf", fmt.Sprintf(
		"log_outputs = \"3:stderr\"\nhost_uuid = \"01234567-89ab-cdef-0123-%012x\"\n",
		rand.Int64N(1<<48)))
	for _, sub := range []string{"run", "cache", "data"} {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, sub), 0o700))
	}
	l.own()

	cmd := l.command(context.Background(), "libvirtd", "--config",
		filepath.Join(dir, "libvirtd.conf"))
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	require.NoError(t, cmd.Start())
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-ended:
		case <-time.After(rig.Timeout):
			_ = cmd.Process.Kill()
			<-ended
		}
		if t.Failed() {
			t.Logf("libvirtd printed last:\n%s", rig.LastLines(log.String(), 40))
			logs, _ := filepath.Glob(filepath.Join(dir, "cache/libvirt/qemu/log/*.log"))
			for _, path := range logs {
				t.Logf("%s:\n%s", filepath.Base(path), rig.LastLines(rig.ReadFile(t, path), 20))
			}
		}
	})
	testtool.Within(t, rig.Timeout, func() bool {
		conn, err := net.Dial("unix", l.socket())
		if err != nil {
			return false
		}
		conn.Close()
		return true
	}, "libvirtd listens")
	return l
}

// socket is the path that the daemon listens on.
func (l *libvirtd) socket() string { return filepath.Join(l.dir, "run/libvirt/libvirt-sock") }

// uri is how programs without the daemon's environment reach it.
func (l *libvirtd) uri() string { return "qemu+unix:///session?socket=" + l.socket() }

// file writes a file below the daemon's directory, and returns its path.
func (l *libvirtd) file(name, content string) string {
	l.t.Helper()
	path := filepath.Join(l.dir, name)
	require.NoError(l.t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(l.t, os.WriteFile(path, []byte(content), 0o644))
	return path
}

// own gives everything in the directory to the daemon's user.
func (l *libvirtd) own() {
	l.t.Helper()
	if l.uid == nil {
		return
	}
	require.NoError(l.t, filepath.WalkDir(l.dir, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, int(l.uid.Uid), int(l.uid.Gid))
	}))
}

// command prepares a command that runs as the daemon's user, with its environment.
func (l *libvirtd) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	if _, err := exec.LookPath(name); err != nil && rig.Clients == rig.Installed {
		name = filepath.Join("/usr/sbin", name)
	}
	uid, run := l.uid, append([]string{name}, args...)
	if rig.Clients != rig.Installed { // root takes the release, and then becomes the daemon's user
		uid, run = nil, rig.Clients.InRoot(append([]string{"setpriv", "--reuid=65534",
			"--regid=65534", "--clear-groups"}, run...)...)
	}
	cmd := exec.CommandContext(ctx, run[0], run[1:]...)
	cmd.Env = append(l.env, "PATH="+os.Getenv("PATH")+":/usr/sbin", "LC_ALL=C.UTF-8")
	cmd.Dir = l.dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: uid}
	return cmd
}

// virsh runs a command that must succeed, and returns its output.
func (l *libvirtd) virsh(args ...string) string {
	l.t.Helper()
	out, err := l.tryVirsh(args...)
	require.NoError(l.t, err, "virsh %s: %s", strings.Join(args, " "), out)
	return out
}

func (l *libvirtd) tryVirsh(args ...string) (string, error) {
	// The clean-up runs after the test's own context has ended.
	ctx, cancel := context.WithTimeout(context.Background(), rig.Timeout)
	defer cancel()
	out, err := l.command(ctx, "virsh",
		append([]string{"-c", "qemu:///session"}, args...)...).CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// defineSecret defines a secret and sets its value, which is on no command line.
func (l *libvirtd) defineSecret(document, value string) {
	l.t.Helper()
	path := l.file("secret.xml", document)
	// It prints "Secret UUID created".
	fields := strings.Fields(l.virsh("secret-define", path))
	require.Len(l.t, fields, 3)
	l.virsh("secret-set-value", fields[1], "--file", l.file("secret.value", value), "--plain")
	require.NoError(l.t, os.Remove(filepath.Join(l.dir, "secret.value")))
}
