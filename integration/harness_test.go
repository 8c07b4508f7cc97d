package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/peers"
)

// clientTimeout limits every client. A client that hangs fails its own test instead of the whole
// run. It is many times what a client needs, because a busy machine can be that much slower.
const clientTimeout = 4 * time.Minute

// requireToolsEnv makes a missing tool a failure instead of a skip.
const requireToolsEnv = "KUBEVIRT_DISK_REQUIRE_TOOLS"

var packageOf = map[string]string{
	"iscsi-ls": "libiscsi-bin", "iscsi-inq": "libiscsi-bin", "iscsi-perf": "libiscsi-bin",
	"iscsi-readcapacity16": "libiscsi-bin",
	"iscsi-test-cu":        "libiscsi-bin", "qemu-img": "qemu-utils", "qemu-io": "qemu-utils",
	qemuISCSI: "qemu-block-extra", "tgtd": "tgt",
	"libvirtd": "libvirt-daemon", qemuDriver: "libvirt-daemon-driver-qemu",
	"virsh": "libvirt-clients", "virt-xml-validate": "libvirt-clients",
	"xmllint": "libxml2-utils", "qemu-system-x86_64": "qemu-system-x86",
	"qemu-system-aarch64": "qemu-system-arm", "apt-get": "apt",
	"bash": "bash", "dpkg-deb": "dpkg", "setpriv": "util-linux",
	"buildah": "buildah", "podman": "podman", "runc": "runc", "e2fsck": "e2fsprogs",
	"debugfs": "e2fsprogs", "docker-registry": "docker-registry", "losetup": "mount",
	"ip": "iproute2", "chromium": "chromium",
	"qemu-aarch64": "qemu-user", "qemu-x86_64": "qemu-user", "curl": "curl",
	"xz": "xz-utils", "zstd": "zstd", "gzip": "gzip",
	"skopeo": "skopeo", "unshare": "util-linux",
	"nbdinfo": "libnbd-bin", "nbdcopy": "libnbd-bin", "nbdsh": "python3-libnbd",
	"nbdkit": "nbdkit", "fio": "fio", "git": "git",
}

// qemuISCSI stands for QEMU's iSCSI driver, which is a separate module in Debian.
const qemuISCSI = "QEMU's iscsi driver"

// qemuDriver stands for libvirt's QEMU driver, which is also a separate module.
const qemuDriver = "libvirt's QEMU driver"

// modulesOf are the files of tools that are not programs.
var modulesOf = map[string][]string{
	qemuISCSI: {"/usr/lib/*/qemu/block-iscsi.so", "/usr/lib/qemu/block-iscsi.so"},
	qemuDriver: {"/usr/lib/*/libvirt/connection-driver/libvirt_driver_qemu.so",
		"/usr/lib*/libvirt/connection-driver/libvirt_driver_qemu.so"},
}

// requireTools skips the test if a tool is missing, or fails it if the environment says so.
func requireTools(t *testing.T, tools ...string) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("drives Linux clients")
	}
	for _, tool := range tools {
		if haveTool(tool) {
			continue
		}
		message := fmt.Sprintf("needs %s (Debian package %s)", tool, packageOf[tool])
		if os.Getenv(requireToolsEnv) == "1" {
			t.Fatal(message)
		}
		t.Skip(message)
	}
}

func haveTool(tool string) bool {
	if patterns, ok := modulesOf[tool]; ok {
		for _, pattern := range patterns {
			if found, _ := filepath.Glob(pattern); len(found) > 0 {
				return true
			}
		}
		return false
	}
	if _, err := exec.LookPath(tool); err == nil {
		return true
	}
	_, err := os.Stat(filepath.Join("/usr/sbin", tool))
	return err == nil
}

// binary builds kubevirt-disk once per run and returns its path. If the tests run with the race
// detector, so does the binary.
var binary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "kubevirt-disk-integration-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "kubevirt-disk")
	args := []string{"build", "-o", path}
	if raceEnabled {
		args = append(args, "-race")
	}
	cmd := exec.Command("go", append(args, "./cmd/kubevirt-disk")...)
	cmd.Dir = ".."
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s: %w\n%s", cmd, err, out)
	}
	return path, nil
})

// leftovers are directories that tests share. They are removed when all tests have ended.
var leftovers struct {
	sync.Mutex
	dirs []string
}

// dirOfRun makes a directory that several tests use.
func dirOfRun(name string) (string, error) {
	dir, err := os.MkdirTemp("", "kubevirt-disk-"+name+"-")
	if err == nil {
		leftovers.Lock()
		leftovers.dirs = append(leftovers.dirs, dir)
		leftovers.Unlock()
	}
	return dir, err
}

func TestMain(m *testing.M) {
	status := m.Run()
	for _, dir := range leftovers.dirs {
		os.RemoveAll(dir)
	}
	if path, err := binary(); err == nil {
		os.RemoveAll(filepath.Dir(path))
	}
	if err := removeImages(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		status = 1
	}
	os.Exit(status)
}

// config describes a daemon to start.
type config struct {
	binary   string // default: kubevirt-disk for this machine
	diskDir  string
	stateDir string // default: a new one
	env      map[string]string
	args     []string
}

// newVolume makes the directory of a volume, which must exist before the daemon starts.
func newVolume(t *testing.T, dir string) string {
	t.Helper()
	volume := filepath.Join(dir, "volume")
	require.NoError(t, os.Mkdir(volume, 0o755))
	return volume
}

// daemon is a running kubevirt-disk. At the end of its test it is stopped with SIGTERM, unless the
// test has stopped it already.
type daemon struct {
	*peers.Daemon
	t       *testing.T
	stopped bool
}

// start starts the daemon and waits until it is ready.
func start(t *testing.T, c config) *daemon {
	t.Helper()
	d, err := tryStart(t, c)
	require.NoError(t, err)
	return d
}

// tryStart is start for a daemon that may refuse. The error is a *peers.ExitError then.
func tryStart(t *testing.T, c config) (*daemon, error) {
	t.Helper()
	if c.binary == "" {
		path, err := binary()
		require.NoError(t, err)
		c.binary = path
	}
	if c.stateDir == "" {
		c.stateDir = t.TempDir()
	}
	started, err := peers.StartDaemon(peers.DaemonOptions{Binary: c.binary, DiskDir: c.diskDir,
		StateDir: c.stateDir, Env: c.env, Args: c.args})
	if err != nil {
		return nil, err
	}
	d := &daemon{Daemon: started, t: t}
	t.Cleanup(func() {
		if !d.stopped {
			d.stop()
		}
		if t.Failed() {
			t.Logf("kubevirt-disk printed last:\n%s", lastLines(d.Output(), 60))
		}
	})
	return d, nil
}

// lastLines keeps a failure readable if the daemon has logged thousands of logins.
func lastLines(text string, n int) string {
	lines := strings.SplitAfter(text, "\n")
	return strings.Join(lines[max(0, len(lines)-n-1):], "")
}

// refused starts a daemon that must end at once. It returns its exit status and what it printed.
func refused(t *testing.T, c config) (int, string) {
	t.Helper()
	_, err := tryStart(t, c)
	var exit *peers.ExitError
	require.ErrorAs(t, err, &exit, "it should have refused to start")
	return exit.Status, exit.Output
}

// stop ends the daemon with SIGTERM and checks the end of every run: it drained and exited with 0,
// the ready file is gone, and there was no panic.
func (d *daemon) stop() {
	d.t.Helper()
	d.stopped = true
	if d.Running() && d.Metrics != "" {
		d.checkPanicCounter()
	}
	if err := d.Signal(syscall.SIGTERM); err != nil {
		d.t.Error(err)
	}
	status, err := d.Wait(clientTimeout)
	if err != nil {
		d.t.Error(err)
		d.Kill()
	} else if status != 0 {
		d.t.Errorf("exit status %d after SIGTERM", status)
	}
	if _, err := os.Stat(d.ReadyFile); !errors.Is(err, os.ErrNotExist) {
		d.t.Errorf("the ready file %s outlived the daemon", d.ReadyFile)
	}
	for _, sign := range []string{"panic", "goroutine ", "DATA RACE"} {
		if strings.Contains(d.Output(), sign) {
			d.t.Errorf("the log has %q:\n%s", sign, d.Output())
		}
	}
}

// kill ends the daemon without letting it clean up.
func (d *daemon) kill() {
	d.t.Helper()
	d.stopped = true
	require.NoError(d.t, d.Kill())
}

func (d *daemon) checkPanicCounter() {
	d.t.Helper()
	found := false
	for line := range strings.Lines(d.get("/metrics")) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if !strings.HasPrefix(name, "#") && strings.Contains(name, "panic") {
			found = true
			if value != "0" {
				d.t.Errorf("%s is %s", name, value)
			}
		}
	}
	if !found {
		d.t.Error("/metrics has no counter of panics")
	}
}

// get fetches a page of the monitoring listener; any status is fine.
func (d *daemon) get(path string) string {
	d.t.Helper()
	client := http.Client{Timeout: clientTimeout}
	response, err := client.Get("http://" + d.Metrics + path)
	require.NoError(d.t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(d.t, err)
	return string(body)
}

// url is the iSCSI URL of a LUN at the first portal.
func (d *daemon) url(lun int) string {
	return "iscsi://" + d.Portals[0] + "/" + peers.DefaultTarget + "/" + strconv.Itoa(lun)
}

// portalURL is the URL for discovery.
func (d *daemon) portalURL() string { return "iscsi://" + d.Portals[0] }

// result is the output of a client and how it ended.
type result struct {
	command string
	output  string // standard output and standard error
	status  int    // -1: killed, by the time limit or a signal
}

func (r result) String() string {
	return fmt.Sprintf("%s\nexit status %d\n%s", r.command, r.status, r.output)
}

// clientEnv is the environment of a client: none of our variables, only the given ones.
func clientEnv(extra ...string) []string {
	return append([]string{"PATH=" + os.Getenv("PATH") + ":/usr/sbin", "LC_ALL=C.UTF-8",
		"HOME=" + os.TempDir(), "GORACE=" + peers.RaceOptions}, extra...)
}

// client runs a client to its end.
func client(t *testing.T, env []string, name string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), clientTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = clientEnv(env...)
	cmd.WaitDelay = clientTimeout / 4
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		require.NoError(t, err, "run %s", name)
	}
	r := result{command: cmd.String(), output: out.String(), status: cmd.ProcessState.ExitCode()}
	if ctx.Err() != nil {
		t.Errorf("killed after %v: %s", clientTimeout, r)
	}
	return r
}

// ok runs a client that must succeed and returns what it printed.
func ok(t *testing.T, name string, args ...string) string {
	t.Helper()
	return okEnv(t, nil, name, args...)
}

func okEnv(t *testing.T, env []string, name string, args ...string) string {
	t.Helper()
	r := client(t, env, name, args...)
	require.Zero(t, r.status, "%s", r)
	return r.output
}

// secondLoopback is a loopback portal besides 127.0.0.1. It is an IPv6 address if the machine has
// IPv6.
func secondLoopback() string {
	const six, four = "[::1]:0", "127.0.0.2:0"
	l, err := net.Listen("tcp", six)
	if err != nil {
		return four
	}
	_ = l.Close()
	return six
}

// freePortal returns a loopback address with a free port, for tests that start a daemon twice at
// the same address.
func freePortal(t *testing.T) string {
	t.Helper()
	return net.JoinHostPort("127.0.0.1", freePort(t))
}

// freePort returns only the port.
func freePort(t *testing.T) string {
	t.Helper()
	port, err := peers.FreePort()
	require.NoError(t, err)
	return strconv.Itoa(port)
}
