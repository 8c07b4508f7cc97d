package integration

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
	testUser     = "guest"
	testPassword = "a-long-secret-1234"
)

var chapEnv = map[string]string{"CHAP_USERNAME": testUser, "CHAP_PASSWORD": testPassword}

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

// sample adds up a metric for a LUN and an operation, over all initiators.
func (d *daemon) sample(metric string, lun int, operation string) (sum float64) {
	d.t.Helper()
	for line := range strings.Lines(d.get("/metrics")) {
		if strings.HasPrefix(line, metric+"{") &&
			strings.Contains(line, fmt.Sprintf(`lun="%d",operation="%s"`, lun, operation)) {
			_, value, _ := strings.Cut(line, "} ")
			var n float64
			_, err := fmt.Sscan(value, &n)
			require.NoError(d.t, err, line)
			sum += n
		}
	}
	return sum
}

// complete reports whether a LUN no longer needs its image, according to the status page.
func (d *daemon) complete(lun uint16) bool {
	d.t.Helper()
	var page status.Status
	require.NoError(d.t, json.Unmarshal([]byte(d.get("/status")), &page))
	for _, l := range page.LUNs {
		if l.LUN == lun && l.Copy != nil {
			return l.Copy.Complete
		}
	}
	return false
}

// until waits for a condition while the daemon runs.
func (d *daemon) until(what string, condition func() bool) {
	d.t.Helper()
	testtool.Within(d.t, clientTimeout, func() bool {
		running := d.Running() // asked first: what it has done last counts
		if condition() {
			return true
		}
		require.True(d.t, running, "ended before: %s\n%s", what, d.Output())
		return false
	}, "%s\n%s", what, func() any { return d.Output() })
}

// untilSaid waits until the daemon has logged a text.
func (d *daemon) untilSaid(text string) {
	d.t.Helper()
	d.until(text, func() bool { return strings.Contains(d.Output(), text) })
}

// operations returns how many commands of a kind the daemon has counted, over all LUNs and
// initiators.
func (d *daemon) operations(kind string) (sum int) {
	d.t.Helper()
	for line := range strings.Lines(d.get("/metrics")) {
		var n float64
		if strings.HasPrefix(line, "kubevirt_disk_operations_total{") &&
			strings.Contains(line, `operation="`+kind+`"`) {
			_, value, _ := strings.Cut(line, "} ")
			_, err := fmt.Sscan(value, &n)
			require.NoError(d.t, err, line)
			sum += int(n)
		}
	}
	return sum
}

// kubevirtDisk runs the command without the credentials in a person's home.
func kubevirtDisk(t *testing.T, env []string, args ...string) result {
	t.Helper()
	path, err := binary()
	require.NoError(t, err)
	return client(t, append(env, "HOME="+t.TempDir()), path, args...)
}

// mustDisk is kubevirtDisk for commands that must succeed.
func mustDisk(t *testing.T, env []string, args ...string) result {
	t.Helper()
	r := kubevirtDisk(t, env, args...)
	require.Zero(t, r.status, "%v: %s", args, r)
	return r
}

// chapURL is the URL of a LUN with user and password, in QEMU's form.
func (d *daemon) chapURL(user, password string, lun int) string {
	return strings.Replace(d.url(lun), "iscsi://", "iscsi://"+user+"%"+password+"@", 1)
}

// status returns the /status page.
func (d *daemon) status() (page status.Status) {
	d.t.Helper()
	require.NoError(d.t, json.Unmarshal([]byte(d.get("/status")), &page))
	return page
}

// handover runs the command against the daemon of a state directory, as user.
func handover(t *testing.T, stateDir string, user uint32, args ...string) (status int,
	output string) {
	t.Helper()
	path, err := binary()
	require.NoError(t, err)
	cmd := exec.Command(path, append([]string{"handover"}, args...)...)
	if user != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user,
			Gid: user}}
	}
	cmd.Env = clientEnv("WORK_DIR=" + filepath.Join(stateDir, "work"))
	out, err := cmd.CombinedOutput()
	if err != nil {
		require.ErrorAs(t, err, new(*exec.ExitError))
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

// binary builds kubevirt-disk once per run and returns its path. If the tests run with the race
// detector, so does the binary.
var binary = sync.OnceValues(func() (string, error) {
	dir, err := dirOfRun("integration")
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
	if err := removeImages(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		status = 1
	}
	os.Exit(status)
}
