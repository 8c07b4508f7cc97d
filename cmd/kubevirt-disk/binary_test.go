package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// timeout limits what a test waits for. No result depends on how long something takes within it.
const timeout = 4 * time.Minute

// buildDir is the directory that build has made, or "" if no test needed it. It is in tempDir,
// because a test may have set TMPDIR to a directory that goes with the test.
var (
	buildDir string
	tempDir  = os.TempDir()
)

// build makes the binary once for all tests that need a process of its own: signals, kills, several
// daemons, what others see of it. It is what is released, without the race detector.
var build = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp(tempDir, "kubevirt-disk-cmd-")
	if err != nil {
		return "", err
	}
	buildDir = dir
	path := filepath.Join(dir, "kubevirt-disk")
	cmd := exec.Command("go", "build", "-o", path, "-ldflags",
		"-X main.version="+testVersion+" -X main.commit="+testCommit, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return path, errors.Join(err, errors.New(string(out)))
	}
	return path, nil
})

const testVersion, testCommit = "v0.0.0-test", "c0ffee"

func TestMain(m *testing.M) {
	version, commit = testVersion, testCommit
	status := m.Run()
	if buildDir != "" {
		os.RemoveAll(buildDir)
	}
	os.Exit(status)
}

// output collects what a process prints. Others can read it meanwhile.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// process is a started binary.
type process struct {
	t              *testing.T
	cmd            *exec.Cmd
	stdout, stderr output
	done           chan struct{}
}

// launch starts the binary under the given name, with only the given environment.
func launch(t *testing.T, name string, env []string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(name, args...), done: make(chan struct{})}
	p.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, env...)
	p.cmd.Dir = t.TempDir()
	p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
	p.cmd.WaitDelay = timeout // what it has started may outlive it, and has its streams
	require.NoError(t, p.cmd.Start())
	go func() {
		_ = p.cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.done
		if t.Failed() {
			t.Logf("%s printed:\n%s%s", p.cmd, p.stdout.String(), p.stderr.String())
		}
	})
	return p
}

// status waits for the process to end.
func (p *process) status() int {
	p.t.Helper()
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(timeout):
		p.t.Fatalf("%s does not end; it printed:\n%s", p.cmd, p.stderr.String())
		return -1
	}
}

func (p *process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// until waits for a condition, as long as the process runs.
func (p *process) until(what string, ok func() bool) {
	p.t.Helper()
	testtool.Within(p.t, timeout, func() bool {
		running := p.running() // asked first: what it has done last counts
		if ok() {
			return true
		}
		require.True(p.t, running, "ended before: %s\n%s", what, p.stderr.String())
		return false
	}, "%s\n%s", what, func() any { return p.stderr.String() })
}

// entries returns the log entries so far.
func (p *process) entries() (all []map[string]any) {
	for line := range strings.Lines(p.stderr.String()) {
		var entry map[string]any
		if json.Unmarshal([]byte(line), &entry) == nil {
			all = append(all, entry)
		}
	}
	return all
}

// logged returns a field of the first log entry with a message, or nil.
func (p *process) logged(message, field string) any {
	for _, e := range p.entries() {
		if e["msg"] == message {
			return e[field]
		}
	}
	return nil
}

func binary(t *testing.T) string {
	t.Helper()
	return testtool.Must(build())(t)
}

// run runs a command in this process, to its end, in a directory of its own and with only the given
// environment.
func run(t *testing.T, env []string, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	return runAs(t, "kubevirt-disk", env, args...)
}

// works runs a command in this process, which must succeed, and returns what it prints.
func works(t *testing.T, env []string, args ...string) (stdout, stderr string) {
	t.Helper()
	status, stdout, stderr := run(t, env, args...)
	require.Equal(t, exitDone, status, "%q: %s", args, stderr)
	return stdout, stderr
}

// fails runs a command in this process, which must end with that status, say this as an error, and
// print nothing else.
func fails(t *testing.T, env []string, want int, said string, args ...string) (stderr string) {
	t.Helper()
	status, stdout, stderr := run(t, env, args...)
	require.Equal(t, want, status, "%q: %s", args, stderr)
	require.Empty(t, stdout, "%q", args)
	require.Contains(t, stderr, said, "%q", args)
	return stderr
}

// apart runs the binary to its end, in a process of its own: several do at the same time, or what
// it does to its process counts.
func apart(t *testing.T, env []string, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	p := launch(t, binary(t), env, args...)
	status = p.status()
	return status, p.stdout.String(), p.stderr.String()
}

// inProcess guards what all of this process has in common.
var inProcess sync.Mutex

// runAs is run by another name of the binary.
func runAs(t *testing.T, name string, env []string, args ...string) (status int, stdout,
	stderr string) {
	t.Helper()
	require.True(t, inProcess.TryLock(), "two commands at once need processes: apart")
	defer inProcess.Unlock()
	before, dir := os.Environ(), t.TempDir()
	set := func(env []string) {
		os.Clearenv()
		for _, pair := range env {
			key, value, _ := strings.Cut(pair, "=")
			require.NoError(t, os.Setenv(key, value))
		}
	}
	set(append([]string{"PATH=" + os.Getenv("PATH")}, env...))
	defer set(before)
	back := testtool.Must(os.Getwd())(t)
	require.NoError(t, os.Chdir(dir))
	defer func() { require.NoError(t, os.Chdir(back)) }()

	var out, said output
	a := &app{stdin: strings.NewReader(""), stdout: &out, stderr: &said,
		exit: func(status int) { panic(fmt.Sprint("ends the process with status ", status)) }}
	status = a.run(append([]string{name}, args...))
	return status, out.String(), said.String()
}

// place is a directory of images and everything else that a daemon needs.
type place struct {
	dir string
	env []string
}

// newPlace makes a place with the given raw images, each of a few sectors.
func newPlace(t *testing.T, images ...string) place {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "disk"), 0o755))
	for i, name := range images {
		content := bytes.Repeat([]byte{byte(i + 1)}, 4096*(i+1))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "disk", name), content, 0o644))
	}
	return place{dir: dir, env: []string{
		"DISK_DIR=" + filepath.Join(dir, "disk"), "WORK_DIR=" + filepath.Join(dir, "work"),
		"READY_FILE=" + filepath.Join(dir, "healthy"),
		"LISTEN=127.0.0.1:0", "METRICS_LISTEN=127.0.0.1:0",
	}}
}

func (l place) readyFile() string { return filepath.Join(l.dir, "healthy") }

// serve starts a daemon and waits until it is ready.
func (l place) serve(t *testing.T, env ...string) *process {
	t.Helper()
	p := launch(t, binary(t), append(append([]string{}, l.env...), env...), "serve")
	p.untilReady(l)
	return p
}

func (p *process) untilReady(l place) {
	p.t.Helper()
	p.until("the ready file is there", func() bool { return exists(l.readyFile()) })
	p.until("it is logged", func() bool { return p.logged("ready", "target") != nil })
}

func (p *process) terminate() int {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(syscall.SIGTERM))
	return p.status()
}

// page fetches a page of the daemon.
func (p *process) page(path string) (int, string) {
	p.t.Helper()
	var address string
	// The log and what is said on standard output are two pipes: one may be read later.
	testtool.Within(p.t, timeout, func() bool {
		var ok bool
		address, ok = p.logged("metrics", "address").(string)
		return ok
	}, "the address of the pages is logged: %s", func() any { return p.stderr.String() })
	client := http.Client{Timeout: timeout}
	res, err := client.Get("http://" + address + path)
	require.NoError(p.t, err)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	require.NoError(p.t, err)
	return res.StatusCode, string(body)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
