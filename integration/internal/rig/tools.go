package rig

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/internal/testtool/certtest"
)

// Timeout limits every client. A client that hangs fails its own test instead of the whole
// run. It is many times what a client needs, because a busy machine can be that much slower.
const Timeout = 4 * time.Minute

var packageOf = map[string]string{
	"iscsi-ls": "libiscsi-bin", "iscsi-inq": "libiscsi-bin", "iscsi-perf": "libiscsi-bin",
	"iscsi-readcapacity16": "libiscsi-bin",
	"iscsi-test-cu":        "libiscsi-bin", "qemu-img": "qemu-utils", "qemu-io": "qemu-utils",
	QEMUISCSI: "qemu-block-extra", "tgtd": "tgt",
	"libvirtd": "libvirt-daemon", QEMUDriver: "libvirt-daemon-driver-qemu",
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

// QEMUISCSI stands for QEMU's iSCSI driver, which is a separate module in Debian.
const QEMUISCSI = "QEMU's iscsi driver"

// QEMUDriver stands for libvirt's QEMU driver, which is also a separate module.
const QEMUDriver = "libvirt's QEMU driver"

// modulesOf are the files of tools that are not programs.
var modulesOf = map[string][]string{
	QEMUISCSI: {"/usr/lib/*/qemu/block-iscsi.so", "/usr/lib/qemu/block-iscsi.so"},
	QEMUDriver: {"/usr/lib/*/libvirt/connection-driver/libvirt_driver_qemu.so",
		"/usr/lib*/libvirt/connection-driver/libvirt_driver_qemu.so"},
}

// Need skips the test if a tool is missing, or fails it if the environment says so.
func Need(t *testing.T, tools ...string) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("drives Linux clients")
	}
	for _, tool := range tools {
		testtool.Needs(t, fmt.Sprintf("%s (Debian package %s)", tool, packageOf[tool]),
			Clients.has(tool) || HaveTool(tool))
	}
}

func HaveTool(tool string) bool {
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

// LastLines keeps a failure readable if the daemon has logged thousands of logins.
func LastLines(text string, n int) string {
	lines := strings.SplitAfter(text, "\n")
	return strings.Join(lines[max(0, len(lines)-n-1):], "")
}

// Result is the output of a client and how it ended.
type Result struct {
	command string
	Output  string // standard output and standard error
	Status  int    // -1: killed, by the time limit or a signal
}

func (r Result) String() string {
	return fmt.Sprintf("%s\nexit status %d\n%s", r.command, r.Status, r.Output)
}

// ClientEnv is the environment of a client: none of our variables, only the given ones.
func ClientEnv(extra ...string) []string {
	return append([]string{"PATH=" + os.Getenv("PATH") + ":/usr/sbin", "LC_ALL=C.UTF-8",
		"HOME=" + os.TempDir(), "GORACE=" + peers.RaceOptions}, extra...)
}

// Client runs a client to its end.
func Client(t *testing.T, env []string, name string, args ...string) Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = ClientEnv(env...)
	cmd.WaitDelay = Timeout / 4
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		require.NoError(t, err, "run %s", name)
	}
	r := Result{command: cmd.String(), Output: out.String(), Status: cmd.ProcessState.ExitCode()}
	if ctx.Err() != nil {
		t.Errorf("killed after %v: %s", Timeout, r)
	}
	return r
}

// OK runs a client that must succeed and returns what it printed.
func OK(t *testing.T, name string, args ...string) string {
	t.Helper()
	return OKEnv(t, nil, name, args...)
}

func OKEnv(t *testing.T, env []string, name string, args ...string) string {
	t.Helper()
	r := Client(t, env, name, args...)
	require.Zero(t, r.Status, "%s", r)
	return r.Output
}

// SecondLoopback is a loopback portal besides 127.0.0.1. It is an IPv6 address if the machine has
// IPv6.
func SecondLoopback() string {
	const six, four = "[::1]:0", "127.0.0.2:0"
	l, err := net.Listen("tcp", six)
	if err != nil {
		return four
	}
	_ = l.Close()
	return six
}

// FreePortal returns a loopback address with a free port, for tests that start a daemon twice at
// the same address.
func FreePortal(t *testing.T) string {
	t.Helper()
	return net.JoinHostPort("127.0.0.1", FreePort(t))
}

// FreePort returns only the port.
func FreePort(t *testing.T) string {
	t.Helper()
	port := testtool.Must(peers.FreePort())(t)
	return strconv.Itoa(port)
}

func Validate(t *testing.T, document, schema string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), schema+".xml")
	require.NoError(t, os.WriteFile(path, []byte(document), 0o644))
	validate := Clients.InRoot("virt-xml-validate", path, schema)
	require.Contains(t, OK(t, validate[0], validate[1:]...), "validates", document)
}

// NameBehindProxy is a name that only the proxy of a test knows.
const NameBehindProxy = "registry.test"

// MakeCertificate makes the certificate of a server on this machine, which has signed itself.
func MakeCertificate(t *testing.T, cert, key string) tls.Certificate {
	t.Helper()
	require.NoError(t, certtest.Authority(cert, key, func(c *x509.Certificate) {
		c.DNSNames = append(c.DNSNames, NameBehindProxy)
	}))
	pair := testtool.Must(tls.LoadX509KeyPair(cert, key))(t)
	return pair
}

// MakeClientCertificate makes a certificate that server.crt, which makeCertificate has made in the
// same directory, has signed.
func MakeClientCertificate(t *testing.T, dir, name string) (cert, key string) {
	t.Helper()
	file := func(name string) string { return filepath.Join(dir, name) }
	cert, key = file(name+".crt"), file(name+".key")
	require.NoError(t, certtest.Sign(file("server.crt"), file("server.key"), cert, key,
		certtest.Client(name)))
	return cert, key
}

// NeedRoot is Need for root.
func NeedRoot(t *testing.T) {
	t.Helper()
	testtool.Needs(t, "root", os.Geteuid() == 0)
}
