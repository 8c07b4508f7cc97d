// Package rig has what the rooms of integration share: the tools, the daemon that a test starts,
// files, containers, registries, guests and initiators. The rooms build kubevirt-disk, start it,
// and drive it with the clients that people use. A room has the tests of one subject:
//
//	iscsi     initiators: libiscsi, QEMU, the kernel; copy modes, restarts, handovers, pages
//	nbd       NBD clients
//	vhostuser guests that use disks by vhost-user
//	images    the container image, and pods
//	registry  push, pull, streaming, commit, signatures
//	volumes   volumes on demand
//	machines  container images that boot, libvirt, migration
//	kubevirt  KubeVirt's launcher
//	docs      import rules, lengths of files, names in documents
//
// Tests mostly wait, so they run in parallel. What several tests of a room need is made once
// (Binary, NeedImages). Each test has its own ports, directories and network namespaces, and waits
// have limits of minutes.
//
// If a client is missing, the tests that need it skip and name its package; with
// KUBEVIRT_DISK_REQUIRE_TOOLS=1 they fail. The tests and the benchmark program share the packages
// beside the rooms: conformance runs libiscsi's conformance suite, peers starts the targets that
// we compare ours with, bench measures, and guest makes a Linux guest for QEMU.
package rig

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

// The credential of the tests.
const (
	User     = "guest"
	Password = "a-long-secret-1234"
)

var CHAPEnv = map[string]string{"CHAP_USERNAME": User, "CHAP_PASSWORD": Password}

// Config describes a daemon to start.
type Config struct {
	Binary   string // default: kubevirt-disk for this machine
	DiskDir  string
	StateDir string // default: a new one
	Env      map[string]string
	Args     []string
}

// NewVolume makes the directory of a volume, which must exist before the daemon starts.
func NewVolume(t *testing.T, dir string) string {
	t.Helper()
	volume := filepath.Join(dir, "volume")
	require.NoError(t, os.Mkdir(volume, 0o755))
	return volume
}

// Daemon is a running kubevirt-disk. At the end of its test it is stopped with SIGTERM, unless the
// test has stopped it already.
type Daemon struct {
	*peers.Daemon
	T       *testing.T
	stopped bool
}

// Start starts the daemon and waits until it is ready.
func Start(t *testing.T, c Config) *Daemon {
	t.Helper()
	d := testtool.Must(TryStart(t, c))(t)
	return d
}

// TryStart is start for a daemon that may refuse. The error is a *peers.ExitError then.
func TryStart(t *testing.T, c Config) (*Daemon, error) {
	t.Helper()
	if c.Binary == "" {
		c.Binary = Program(t)
	}
	if c.StateDir == "" {
		c.StateDir = t.TempDir()
	}
	started, err := peers.StartDaemon(peers.DaemonOptions{Binary: c.Binary, DiskDir: c.DiskDir,
		StateDir: c.StateDir, Env: c.Env, Args: c.Args})
	if err != nil {
		return nil, err
	}
	d := &Daemon{Daemon: started, T: t}
	t.Cleanup(func() {
		if !d.stopped {
			d.Stop()
		}
		if t.Failed() {
			t.Logf("kubevirt-disk printed last:\n%s", LastLines(d.Output(), 60))
		}
	})
	return d, nil
}

// Refused starts a daemon that must end at once. It returns its exit status and what it printed.
func Refused(t *testing.T, c Config) (int, string) {
	t.Helper()
	_, err := TryStart(t, c)
	var exit *peers.ExitError
	require.ErrorAs(t, err, &exit, "it should have refused to start")
	return exit.Status, exit.Output
}

// Stop ends the daemon with SIGTERM and checks the end of every run: it drained and exited with 0,
// the ready file is gone, and there was no panic.
func (d *Daemon) Stop() {
	d.T.Helper()
	d.stopped = true
	if d.Running() && d.Metrics != "" {
		d.checkPanicCounter()
	}
	if err := d.Signal(syscall.SIGTERM); err != nil {
		d.T.Error(err)
	}
	status, err := d.Wait(Timeout)
	if err != nil {
		d.T.Error(err)
		d.Kill()
	} else if status != 0 {
		d.T.Errorf("exit status %d after SIGTERM", status)
	}
	if _, err := os.Stat(d.ReadyFile); !errors.Is(err, os.ErrNotExist) {
		d.T.Errorf("the ready file %s outlived the daemon", d.ReadyFile)
	}
	for _, sign := range []string{"panic", "goroutine ", "DATA RACE"} {
		if strings.Contains(d.Output(), sign) {
			d.T.Errorf("the log has %q:\n%s", sign, d.Output())
		}
	}
}

// Crash ends the daemon without letting it clean up.
func (d *Daemon) Crash() {
	d.T.Helper()
	d.stopped = true
	require.NoError(d.T, d.Kill())
}

func (d *Daemon) checkPanicCounter() {
	d.T.Helper()
	found := false
	for line := range strings.Lines(d.Get("/metrics")) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if !strings.HasPrefix(name, "#") && strings.Contains(name, "panic") {
			found = true
			if value != "0" {
				d.T.Errorf("%s is %s", name, value)
			}
		}
	}
	if !found {
		d.T.Error("/metrics has no counter of panics")
	}
}

// Get fetches a page of the monitoring listener; any status is fine.
func (d *Daemon) Get(path string) string {
	d.T.Helper()
	client := http.Client{Timeout: Timeout}
	response, err := client.Get("http://" + d.Metrics + path)
	require.NoError(d.T, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(d.T, err)
	return string(body)
}

// URL is the iSCSI URL of a LUN at the first portal.
func (d *Daemon) URL(lun int) string {
	return "iscsi://" + d.Portals[0] + "/" + peers.DefaultTarget + "/" + strconv.Itoa(lun)
}

// PortalURL is the URL for discovery.
func (d *Daemon) PortalURL() string { return "iscsi://" + d.Portals[0] }

// Sample adds up a metric for a LUN and an operation, over all initiators.
func (d *Daemon) Sample(metric string, lun int, operation string) (sum float64) {
	d.T.Helper()
	for line := range strings.Lines(d.Get("/metrics")) {
		if strings.HasPrefix(line, metric+"{") &&
			strings.Contains(line, fmt.Sprintf(`lun="%d",operation="%s"`, lun, operation)) {
			_, value, _ := strings.Cut(line, "} ")
			var n float64
			require.NoError(d.T, testtool.Err(fmt.Sscan(value, &n)), line)
			sum += n
		}
	}
	return sum
}

// Complete reports whether a LUN no longer needs its image, according to the status page.
func (d *Daemon) Complete(lun uint16) bool {
	d.T.Helper()
	var page status.Status
	require.NoError(d.T, json.Unmarshal([]byte(d.Get("/status")), &page))
	for _, l := range page.LUNs {
		if l.LUN == lun && l.Copy != nil {
			return l.Copy.Complete
		}
	}
	return false
}

// Until waits for a condition while the daemon runs.
func (d *Daemon) Until(what string, condition func() bool) {
	d.T.Helper()
	testtool.Within(d.T, Timeout, func() bool {
		running := d.Running() // asked first: what it has done last counts
		if condition() {
			return true
		}
		require.True(d.T, running, "ended before: %s\n%s", what, d.Output())
		return false
	}, "%s\n%s", what, func() any { return d.Output() })
}

// UntilFree waits until nobody uses the disks any more. A client that has ended may still have its
// session, and then another one gets no write-exclusive disk.
func (d *Daemon) UntilFree() {
	d.T.Helper()
	d.Until("nobody uses the disks", func() bool { return len(d.Status().Sessions) == 0 })
}

// UntilSaid waits until the daemon has logged a text.
func (d *Daemon) UntilSaid(text string) {
	d.T.Helper()
	d.Until(text, func() bool { return strings.Contains(d.Output(), text) })
}

// Operations returns how many commands of a kind the daemon has counted, over all LUNs and
// initiators.
func (d *Daemon) Operations(kind string) (sum int) {
	d.T.Helper()
	for line := range strings.Lines(d.Get("/metrics")) {
		var n float64
		if strings.HasPrefix(line, "kubevirt_disk_operations_total{") &&
			strings.Contains(line, `operation="`+kind+`"`) {
			_, value, _ := strings.Cut(line, "} ")
			require.NoError(d.T, testtool.Err(fmt.Sscan(value, &n)), line)
			sum += int(n)
		}
	}
	return sum
}

// Run runs the command without the credentials in a person's home.
func Run(t *testing.T, env []string, args ...string) Result {
	t.Helper()
	return Client(t, append(env, "HOME="+t.TempDir()), Program(t), args...)
}

// MustRun is kubevirtDisk for commands that must succeed.
func MustRun(t *testing.T, env []string, args ...string) Result {
	t.Helper()
	r := Run(t, env, args...)
	require.Zero(t, r.Status, "%v: %s", args, r)
	return r
}

// CHAPURL is the URL of a LUN with user and password, in QEMU's form.
func (d *Daemon) CHAPURL(user, password string, lun int) string {
	return strings.Replace(d.URL(lun), "iscsi://", "iscsi://"+user+"%"+password+"@", 1)
}

// Status returns the /status page.
func (d *Daemon) Status() (page status.Status) {
	d.T.Helper()
	require.NoError(d.T, json.Unmarshal([]byte(d.Get("/status")), &page))
	return page
}

// Handover runs the command for LUN 1 of the daemon of a state directory. It ends with this status.
func Handover(t *testing.T, stateDir string, status int, args ...string) (output string) {
	t.Helper()
	r := Client(t, []string{"WORK_DIR=" + filepath.Join(stateDir, "work")}, Program(t),
		append([]string{"handover", "--lun=1"}, args...)...)
	require.Equal(t, status, r.Status, "%s", r)
	return r.Output
}

// Program returns the path of Binary.
func Program(t testing.TB) string {
	t.Helper()
	path := testtool.Must(Binary())(t)
	return path
}

// Binary builds kubevirt-disk once per run and returns its path. If the tests run with the race
// detector, so does the binary.
var Binary = sync.OnceValues(func() (string, error) {
	dir, err := DirOfRun("integration")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "kubevirt-disk")
	args := []string{"build", "-o", path}
	if raceEnabled {
		args = append(args, "-race")
	}
	cmd := exec.Command("go", append(args, "./cmd/kubevirt-disk")...)
	cmd.Dir = "../.."
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

// DirOfRun makes a directory that several tests use.
func DirOfRun(name string) (string, error) {
	dir, err := os.MkdirTemp("", "kubevirt-disk-"+name+"-")
	if err == nil {
		leftovers.Lock()
		leftovers.dirs = append(leftovers.dirs, dir)
		leftovers.Unlock()
	}
	return dir, err
}

// Main runs the tests of a room with the generation of clients, removes what they share, and ends
// the process.
func Main(m *testing.M) {
	if err := Clients.find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	status := m.Run()
	for _, dir := range leftovers.dirs {
		os.RemoveAll(dir)
	}
	if err := removeImages(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		status = 1
	}
	os.Exit(status)
}
