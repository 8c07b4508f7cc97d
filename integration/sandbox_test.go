package integration

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

// sandbox is a container that podman or runc runs. After a stop it may be started again.
type sandbox interface {
	start(t *testing.T)
	exec(t *testing.T, args ...string) result
	running(t *testing.T) bool
	pid(t *testing.T) string
	log(t *testing.T) string
	// starts returns how many starts the log covers.
	starts() int
	// stop sends SIGTERM and returns the exit status.
	stop(t *testing.T) int
}

// untilReady asks like the original wrapper's callers, until the LUNs can be used. It also waits
// for the log, because podman's monitor may write it after the ready file appears.
func untilReady(t *testing.T, s sandbox) {
	t.Helper()
	testtool.Within(t, clientTimeout, func() bool {
		return s.exec(t, "cat", "/tmp/healthy").status == 0 &&
			strings.Count(s.log(t), `"msg":"ready"`) >= s.starts() || !s.running(t)
	}, "it is ready or has ended")
	require.True(t, s.running(t), "it has ended:\n%s", s.log(t))
}

// untilLogged waits until the log contains a text.
func untilLogged(t *testing.T, s sandbox, text string) {
	t.Helper()
	testtool.Within(t, clientTimeout, func() bool { return strings.Contains(s.log(t), text) },
		"%s is logged: %s", text, func() any { return s.log(t) })
}

// logged returns a field of the last entry with a message, from a log of JSON lines.
func logged(log, message, field string) (value string) {
	for line := range strings.Lines(log) {
		var entry map[string]any
		if json.Unmarshal([]byte(line), &entry) == nil && entry["msg"] == message {
			value = fmt.Sprint(entry[field])
		}
	}
	return value
}

// container is a sandbox that podman runs.
type container struct {
	e    *engine
	name string
	args []string // of podman: run and what follows

	started int // how often; all starts share one log
}

// newContainer prepares a container of an image with additional options for podman run. command
// follows the image.
func (e *engine) newContainer(t *testing.T, image string, options []string,
	command ...string) *container {
	t.Helper()
	c := &container{e: e, name: fmt.Sprintf("run-%d", imageNumber.Add(1))}
	c.args = append(append(append([]string{"run", "--detach", "--name", c.name}, options...),
		image), command...)
	t.Cleanup(func() {
		if t.Failed() {
			printed, _ := e.finally("podman", "logs", c.name)
			t.Logf("%s printed:\n%s", c.name, lastLines(printed, 60))
		}
		if out, err := e.finally("podman", "rm", "--force", "--ignore", "--time", "0", "--volumes",
			c.name); err != nil {
			t.Errorf("podman rm: %v\n%s", err, out)
		}
	})
	return c
}

func (c *container) start(t *testing.T) {
	t.Helper()
	c.started++
	if c.e.run(t, "podman", "container", "exists", c.name).status == 0 {
		c.e.ok(t, "podman", "start", c.name)
		return
	}
	c.e.ok(t, "podman", c.args...)
}

func (c *container) exec(t *testing.T, args ...string) result {
	t.Helper()
	return c.e.run(t, "podman", append([]string{"exec", c.name}, args...)...)
}

func (c *container) inspect(t *testing.T, format string) string {
	t.Helper()
	return c.e.ok(t, "podman", "inspect", "--format", format, c.name)
}

func (c *container) running(t *testing.T) bool {
	return c.inspect(t, "{{.State.Running}}") ==
		"true"
}
func (c *container) pid(t *testing.T) string { return c.inspect(t, "{{.State.Pid}}") }
func (c *container) log(t *testing.T) string { return c.e.ok(t, "podman", "logs", c.name) }
func (c *container) starts() int             { return c.started }

func (c *container) stop(t *testing.T) int {
	t.Helper()
	c.e.ok(t, "podman", "kill", "--signal", "TERM", c.name)
	return c.wait(t)
}

// wait waits for the end and returns the exit status.
func (c *container) wait(t *testing.T) int {
	t.Helper()
	status, err := strconv.Atoi(c.e.ok(t, "podman", "wait", c.name))
	require.NoError(t, err)
	return status
}

// bundle is a sandbox that runc alone runs, like a runtime under Kubernetes. Here we make the
// configuration ourselves.
type bundle struct {
	e       *engine
	dir, id string
	cmd     *exec.Cmd // of the last start
}

// newBundle unpacks an image and makes a configuration for it: the image's user, entry point and
// command, a read-only root file system, no capabilities, no new privileges, a tmpfs at /tmp, and
// work as the work directory. netns is the path of a network namespace; "" means the host's.
func (e *engine) newBundle(t *testing.T, image, work, netns string, env ...string) *bundle {
	t.Helper()
	b := &bundle{e: e, dir: t.TempDir(), id: fmt.Sprintf("runc-%d", imageNumber.Add(1))}
	e.ok(t, "buildah", "from", "--quiet", "--name", b.id, image)
	root := e.ok(t, "buildah", "mount", b.id)
	t.Cleanup(func() {
		if b.cmd != nil && b.cmd.ProcessState == nil {
			_, _ = e.finally("runc", "--root", e.path("runc"), "kill", b.id, "KILL")
			_ = b.cmd.Wait()
		}
		if t.Failed() {
			t.Logf("%s printed:\n%s", b.id, lastLines(b.log(t), 60))
		}
	})

	var images []struct {
		User   string
		Config struct{ Entrypoint, Cmd, Env []string }
	}
	require.NoError(t, json.Unmarshal([]byte(e.ok(t, "podman", "image", "inspect", image)),
		&images))
	require.Len(t, images, 1)
	require.Equal(t, "107:107", images[0].User)
	e.ok(t, "runc", "spec", "--bundle", b.dir)
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

func (b *bundle) runc(t *testing.T, args ...string) result {
	t.Helper()
	return b.e.run(t, "runc", append([]string{"--root", b.e.path("runc")}, args...)...)
}

func (b *bundle) start(t *testing.T) {
	t.Helper()
	out, err := os.Create(filepath.Join(b.dir, "log"))
	require.NoError(t, err)
	defer out.Close()
	b.cmd = exec.Command("runc", "--root", b.e.path("runc"), "run", "--bundle", b.dir, b.id)
	b.cmd.Env = b.e.env
	b.cmd.Stdout, b.cmd.Stderr = out, out
	require.NoError(t, b.cmd.Start())
	testtool.Within(t, clientTimeout, func() bool { return b.running(t) },
		"runc has started it")
}

func (b *bundle) exec(t *testing.T, args ...string) result {
	t.Helper()
	return b.runc(t, append([]string{"exec", b.id}, args...)...)
}

func (b *bundle) state(t *testing.T) (pid int, status string) {
	t.Helper()
	var state struct {
		PID    int `json:"pid"`
		Status string
	}
	if r := b.runc(t, "state", b.id); r.status == 0 {
		require.NoError(t, json.Unmarshal([]byte(r.output), &state))
	}
	return state.PID, state.Status
}

func (b *bundle) running(t *testing.T) bool {
	_, status := b.state(t)
	return status == "running"
}

func (b *bundle) pid(t *testing.T) string {
	pid, _ := b.state(t)
	return strconv.Itoa(pid)
}

func (b *bundle) log(t *testing.T) string {
	text, err := os.ReadFile(filepath.Join(b.dir, "log"))
	require.NoError(t, err)
	return string(text)
}

func (b *bundle) starts() int { return 1 }

func (b *bundle) stop(t *testing.T) int {
	t.Helper()
	require.Zero(t, b.runc(t, "kill", b.id, "TERM").status)
	_ = b.cmd.Wait() // ProcessState has the status
	return b.cmd.ProcessState.ExitCode()
}

// network is the network of a container, and the address to reach it.
type network struct {
	path string // of the network namespace; "": the host's
	host string // the address at which a client reaches it
}

// firstSubnet usually keeps overlapping runs apart.
var firstSubnet = rand.IntN(1 << 15)

// namespace makes a network namespace, like a pod's, and links it to the host's.
func namespace(t *testing.T) network {
	t.Helper()
	requireTools(t, "ip")
	number := imageNumber.Add(1)
	// The block for benchmarks (RFC 2544), which nothing else routes. The test's own number keeps
	// the subnets of a run apart.
	subnet := (firstSubnet + int(number)) % (1 << 15)
	base := fmt.Sprintf("198.%d.%d.", 18+subnet>>14, subnet>>6&255)
	last := subnet & 63 * 4
	ours, theirs := base+strconv.Itoa(last+1), base+strconv.Itoa(last+2)
	name := fmt.Sprintf("kd%d-%d", os.Getpid(), number)
	link := name[2:]
	ok(t, "ip", "netns", "add", name)
	t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", name).Run() })
	ok(t, "ip", "link", "add", "h"+link, "type", "veth", "peer", "name", "c"+link, "netns", name)
	ok(t, "ip", "address", "add", ours+"/30", "dev", "h"+link)
	ok(t, "ip", "link", "set", "h"+link, "up")
	ok(t, "ip", "-n", name, "address", "add", theirs+"/30", "dev", "c"+link)
	ok(t, "ip", "-n", name, "link", "set", "c"+link, "up")
	ok(t, "ip", "-n", name, "link", "set", "lo", "up")
	return network{path: "/run/netns/" + name, host: theirs}
}

// option returns the network as an option of podman run.
func (n network) option() string {
	if n.path == "" {
		return "--network=host"
	}
	return "--network=ns:" + n.path
}

// settings returns the variables that a container needs in the network. In a namespace of its own
// it needs none, because nothing else is there.
func (n network) settings() []string {
	if n.path == "" {
		return []string{"LISTEN=127.0.0.1:0", "METRICS_LISTEN=127.0.0.1:0"}
	}
	return nil
}

// portal returns the address of the container's portal.
func (n network) portal(t *testing.T, s sandbox) string {
	t.Helper()
	if n.path != "" {
		return n.host + ":3260"
	}
	return logged(s.log(t), "portal", "address")
}

// lunURL is the URL of a LUN of the default target, with the tests' credential.
func lunURL(portal string, lun int) string {
	return fmt.Sprintf("iscsi://%s%%%s@%s/%s/%d", testUser, testPassword, portal,
		peers.DefaultTarget, lun)
}

// emptyDir is a volume like a pod's: everybody may write to it, and it outlives a container.
func emptyDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o777))
	return dir
}

// withEnv turns variables into options of podman.
func withEnv(variables ...string) (options []string) {
	for _, v := range variables {
		options = append(options, "--env="+v)
	}
	return options
}
