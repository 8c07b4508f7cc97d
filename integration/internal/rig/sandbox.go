package rig

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
)

// Sandbox is a container that podman or runc runs. After a stop it may be started again.
type Sandbox interface {
	Start(t *testing.T)
	Exec(t *testing.T, args ...string) Result
	Running(t *testing.T) bool
	PID(t *testing.T) string
	Log(t *testing.T) string
	// starts returns how many starts the log covers.
	starts() int
	// stop sends SIGTERM and returns the exit status.
	Stop(t *testing.T) int
}

// UntilReady asks like the original wrapper's callers, until the LUNs can be used. It also waits
// for the log, because podman's monitor may write it after the ready file appears.
func UntilReady(t *testing.T, s Sandbox) {
	t.Helper()
	testtool.Within(t, Timeout, func() bool {
		return s.Exec(t, "cat", "/tmp/healthy").Status == 0 &&
			strings.Count(s.Log(t), `"msg":"ready"`) >= s.starts() || !s.Running(t)
	}, "it is ready or has ended")
	require.True(t, s.Running(t), "it has ended:\n%s", s.Log(t))
}

// UntilLogged waits until the log contains a text.
func UntilLogged(t *testing.T, s Sandbox, text string) {
	t.Helper()
	testtool.Within(t, Timeout, func() bool { return strings.Contains(s.Log(t), text) },
		"%s is logged: %s", text, func() any { return s.Log(t) })
}

// Logged returns a field of the last entry with a message, from a log of JSON lines.
func Logged(log, message, field string) (value string) {
	for line := range strings.Lines(log) {
		var entry map[string]any
		if json.Unmarshal([]byte(line), &entry) == nil && entry["msg"] == message {
			value = fmt.Sprint(entry[field])
		}
	}
	return value
}

// Container is a sandbox that podman runs.
type Container struct {
	E    *Engine
	Name string
	args []string // of podman: run and what follows

	started int // how often; all starts share one log
}

// NewContainer prepares a container of an image with additional options for podman run. command
// follows the image.
func (e *Engine) NewContainer(t *testing.T, image string, options []string,
	command ...string) *Container {
	t.Helper()
	c := &Container{E: e, Name: fmt.Sprintf("run-%d", imageNumber.Add(1))}
	c.args = append(append(append([]string{"run", "--detach", "--name", c.Name}, options...),
		image), command...)
	t.Cleanup(func() {
		if t.Failed() {
			printed, _ := e.finally("podman", "logs", c.Name)
			t.Logf("%s printed:\n%s", c.Name, LastLines(printed, 60))
		}
		if out, err := e.finally("podman", "rm", "--force", "--ignore", "--time", "0", "--volumes",
			c.Name); err != nil {
			t.Errorf("podman rm: %v\n%s", err, out)
		}
	})
	return c
}

func (c *Container) Start(t *testing.T) {
	t.Helper()
	c.started++
	if c.E.Run(t, "podman", "container", "exists", c.Name).Status == 0 {
		c.E.OK(t, "podman", "start", c.Name)
		return
	}
	c.E.OK(t, "podman", c.args...)
}

func (c *Container) Exec(t *testing.T, args ...string) Result {
	t.Helper()
	return c.E.Run(t, "podman", append([]string{"exec", c.Name}, args...)...)
}

func (c *Container) Inspect(t *testing.T, format string) string {
	t.Helper()
	return c.E.OK(t, "podman", "inspect", "--format", format, c.Name)
}

func (c *Container) Running(t *testing.T) bool {
	return c.Inspect(t, "{{.State.Running}}") ==
		"true"
}
func (c *Container) PID(t *testing.T) string { return c.Inspect(t, "{{.State.Pid}}") }
func (c *Container) Log(t *testing.T) string { return c.E.OK(t, "podman", "logs", c.Name) }
func (c *Container) starts() int             { return c.started }

func (c *Container) Stop(t *testing.T) int {
	t.Helper()
	c.E.OK(t, "podman", "kill", "--signal", "TERM", c.Name)
	return c.Wait(t)
}

// Wait waits for the end and returns the exit status.
func (c *Container) Wait(t *testing.T) int {
	t.Helper()
	status := testtool.Must(strconv.Atoi(c.E.OK(t, "podman", "wait", c.Name)))(t)
	return status
}

// bundle is a sandbox that runc alone runs, like a runtime under Kubernetes. Here we make the
// configuration ourselves.
type bundle struct {
	e       *Engine
	dir, id string
	cmd     *exec.Cmd // of the last start
}

// NewBundle unpacks an image and makes a configuration for it: the image's user, entry point and
// command, a read-only root file system, no capabilities, no new privileges, a tmpfs at /tmp, and
// work as the work directory. netns is the path of a network namespace; "" means the host's.
func (e *Engine) NewBundle(t *testing.T, image, work, netns string, env ...string) *bundle {
	t.Helper()
	b := &bundle{e: e, dir: t.TempDir(), id: fmt.Sprintf("runc-%d", imageNumber.Add(1))}
	e.OK(t, "buildah", "from", "--quiet", "--name", b.id, image)
	root := e.OK(t, "buildah", "mount", b.id)
	t.Cleanup(func() {
		if b.cmd != nil && b.cmd.ProcessState == nil {
			_, _ = e.finally("runc", "--root", e.path("runc"), "kill", b.id, "KILL")
			_ = b.cmd.Wait()
		}
		if t.Failed() {
			t.Logf("%s printed:\n%s", b.id, LastLines(b.Log(t), 60))
		}
	})

	var images []struct {
		User   string
		Config struct{ Entrypoint, Cmd, Env []string }
	}
	require.NoError(t, json.Unmarshal([]byte(e.OK(t, "podman", "image", "inspect", image)),
		&images))
	require.Len(t, images, 1)
	require.Equal(t, "107:107", images[0].User)
	e.OK(t, "runc", "spec", "--bundle", b.dir)
	path := filepath.Join(b.dir, "config.json")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var spec map[string]any
	require.NoError(t, json.Unmarshal(text, &spec))
	process := spec["process"].(map[string]any)
	delete(process, "rlimits")
	process["terminal"] = false
	process["user"] = map[string]any{"uid": 107, "gid": 107}
	process["args"] = append(images[0].Config.Entrypoint, images[0].Config.Cmd...)
	process["env"] = append(images[0].Config.Env, env...)
	process["capabilities"] = map[string]any{}
	process["noNewPrivileges"] = true
	spec["root"] = map[string]any{"path": root, "readonly": true}
	spec["mounts"] = append(spec["mounts"].([]any),
		map[string]any{"destination": "/tmp", "type": "tmpfs", "source": "tmpfs",
			"options": []string{"nosuid", "nodev", "noexec", "mode=1777"}},
		map[string]any{"destination": "/var/lib/kubevirt-disk", "type": "bind", "source": work,
			"options": []string{"rbind", "rw", "nosuid", "nodev"}})
	namespaces := []any{map[string]any{"type": "pid"}, map[string]any{"type": "ipc"},
		map[string]any{"type": "uts"}, map[string]any{"type": "mount"}}
	if netns != "" {
		namespaces = append(namespaces, map[string]any{"type": "network", "path": netns})
	}
	spec["linux"].(map[string]any)["namespaces"] = namespaces
	text, err = json.Marshal(spec)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, text, 0o600))
	return b
}

func (b *bundle) runc(t *testing.T, args ...string) Result {
	t.Helper()
	return b.e.Run(t, "runc", append([]string{"--root", b.e.path("runc")}, args...)...)
}

func (b *bundle) Start(t *testing.T) {
	t.Helper()
	out := testtool.Must(os.Create(filepath.Join(b.dir, "log")))(t)
	defer out.Close()
	b.cmd = exec.Command("runc", "--root", b.e.path("runc"), "run", "--bundle", b.dir, b.id)
	b.cmd.Env = b.e.env
	b.cmd.Stdout, b.cmd.Stderr = out, out
	require.NoError(t, b.cmd.Start())
	testtool.Within(t, Timeout, func() bool { return b.Running(t) }, "runc has started it")
}

func (b *bundle) Exec(t *testing.T, args ...string) Result {
	t.Helper()
	return b.runc(t, append([]string{"exec", b.id}, args...)...)
}

func (b *bundle) state(t *testing.T) (pid int, status string) {
	t.Helper()
	var state struct {
		PID    int `json:"pid"`
		Status string
	}
	if r := b.runc(t, "state", b.id); r.Status == 0 {
		require.NoError(t, json.Unmarshal([]byte(r.Output), &state))
	}
	return state.PID, state.Status
}

func (b *bundle) Running(t *testing.T) bool {
	_, status := b.state(t)
	return status == "running"
}

func (b *bundle) PID(t *testing.T) string {
	pid, _ := b.state(t)
	return strconv.Itoa(pid)
}

func (b *bundle) Log(t *testing.T) string {
	text := testtool.Must(os.ReadFile(filepath.Join(b.dir, "log")))(t)
	return string(text)
}

func (b *bundle) starts() int { return 1 }

func (b *bundle) Stop(t *testing.T) int {
	t.Helper()
	require.Zero(t, b.runc(t, "kill", b.id, "TERM").Status)
	_ = b.cmd.Wait() // ProcessState has the status
	return b.cmd.ProcessState.ExitCode()
}

// Network is the network of a container, and the address to reach it.
type Network struct {
	Path string // of the network namespace; "": the host's
	Host string // the address at which a client reaches it
}

// firstSubnet usually keeps overlapping runs apart.
var firstSubnet = rand.IntN(1 << 15)

// Namespace makes a network namespace, like a pod's, and links it to the host's.
func Namespace(t *testing.T) Network {
	t.Helper()
	Need(t, "ip")
	number := imageNumber.Add(1)
	// The block for benchmarks (RFC 2544), which nothing else routes. The test's own number keeps
	// the subnets of a run apart.
	subnet := (firstSubnet + int(number)) % (1 << 15)
	base := fmt.Sprintf("198.%d.%d.", 18+subnet>>14, subnet>>6&255)
	last := subnet & 63 * 4
	ours, theirs := base+strconv.Itoa(last+1), base+strconv.Itoa(last+2)
	name := fmt.Sprintf("kd%d-%d", os.Getpid(), number)
	link := name[2:]
	OK(t, "ip", "netns", "add", name)
	t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", name).Run() })
	OK(t, "ip", "link", "add", "h"+link, "type", "veth", "peer", "name", "c"+link, "netns", name)
	OK(t, "ip", "address", "add", ours+"/30", "dev", "h"+link)
	OK(t, "ip", "link", "set", "h"+link, "up")
	OK(t, "ip", "-n", name, "address", "add", theirs+"/30", "dev", "c"+link)
	OK(t, "ip", "-n", name, "link", "set", "c"+link, "up")
	OK(t, "ip", "-n", name, "link", "set", "lo", "up")
	return Network{Path: "/run/netns/" + name, Host: theirs}
}

// Option returns the network as an option of podman run.
func (n Network) Option() string {
	if n.Path == "" {
		return "--network=host"
	}
	return "--network=ns:" + n.Path
}

// Settings returns the variables that a container needs in the network. In a namespace of its own
// it needs none, because nothing else is there.
func (n Network) Settings() []string {
	if n.Path == "" {
		return []string{"LISTEN=127.0.0.1:0", "METRICS_LISTEN=127.0.0.1:0"}
	}
	return nil
}

// Portal returns the address of the container's portal.
func (n Network) Portal(t *testing.T, s Sandbox) string {
	t.Helper()
	if n.Path != "" {
		return n.Host + ":3260"
	}
	return Logged(s.Log(t), "portal", "address")
}

// DiskURL is the URL of a LUN of the default target, with the tests' credential.
func DiskURL(portal string, lun int) string {
	return fmt.Sprintf("iscsi://%s%%%s@%s/%s/%d", User, Password, portal, peers.DefaultTarget, lun)
}

// EmptyDir is a volume like a pod's: everybody may write to it, and it outlives a container.
func EmptyDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o777))
	return dir
}

// WithEnv turns variables into options of podman.
func WithEnv(variables ...string) (options []string) {
	for _, v := range variables {
		options = append(options, "--env="+v)
	}
	return options
}
