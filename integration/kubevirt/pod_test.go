package kubevirt

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
)

// launcherPrograms is the directory of KubeVirt's virt-launcher and of its clients: those of 1.7.0.
func launcherPrograms(t *testing.T) string {
	t.Helper()
	return programsOf(t, "launcher")
}

// programsOf is that of a module, from which scripts/build-launcher.sh builds them. While the
// script runs, they are waited for. `make test` leaves out this room, and `make test-cluster` runs
// it.
func programsOf(t *testing.T, module string) string {
	t.Helper()
	sum := sha256.New()
	for _, name := range []string{"../" + module + "/go.mod", "../" + module + "/go.sum",
		"../" + module + "/client/main.go", "../../scripts/build-launcher.sh"} {
		_, _ = io.WriteString(sum, rig.ReadFile(t, name))
	}
	place := os.Getenv("KUBEVIRT_DISK_LAUNCHER")
	if place == "" {
		place = filepath.Join("..", "..", "cache", "launcher")
	}
	dir, err := filepath.Abs(filepath.Join(place, fmt.Sprintf("%x", sum.Sum(nil))[:16]))
	require.NoError(t, err)
	testtool.Built(t, "scripts/build-launcher.sh "+module, dir, "client", "virt-launcher")
	return dir
}

// launcherPod is what a launcher pod has in common: the volume of the hook sidecars' sockets. It
// also is one of these sidecars.
type launcherPod struct {
	t      *testing.T
	hooks  string
	name   string // of the sidecar's container
	module string // of the launcher: see programsOf
	// network is a process in the pod's network; nil: the launcher has one of its own, and the
	// sidecars that of the machine.
	network *process
	plugins string // the volume of the sockets of plugins; "": there is none
}

// hooksDir is where the containers of a launcher pod have the volume of the hooks' sockets.
const hooksDir = "/var/run/kubevirt-hooks"

func newLauncherPod(t *testing.T) *launcherPod {
	t.Helper()
	rig.Need(t, "libvirtd", rig.QEMUDriver, "virsh", "qemu-system-x86_64", "qemu-img", "unshare",
		"setpriv")
	rig.NeedRoot(t)
	return (&launcherPod{t: t, hooks: rig.SharedDir(t), module: "launcher"}).withSidecar(0)
}

// withSidecar is the pod as one more hook sidecar.
func (p *launcherPod) withSidecar(number int) *launcherPod {
	p.t.Helper()
	another := new(*p)
	another.name = fmt.Sprintf("hook-sidecar-%d", number)
	// Kubernetes makes the directory of a subPath for everybody, too.
	require.NoError(p.t, os.Mkdir(another.own(), 0o777))
	require.NoError(p.t, os.Chmod(another.own(), 0o777))
	return another
}

// own is the sidecar's, or the plugin's, part of the volume.
func (p *launcherPod) own() string {
	if p.plugins != "" {
		return filepath.Join(p.plugins, p.name)
	}
	return filepath.Join(p.hooks, p.name)
}

// at is where its container has that.
func (p *launcherPod) at() string {
	if p.plugins != "" {
		return filepath.Join("/run/kubevirt-plugin", p.name)
	}
	return "/run/kubevirt-hooks"
}

// process is one of a pod's containers.
type process struct {
	t      *testing.T
	name   string
	cmd    *exec.Cmd
	ended  chan struct{}
	output output
}

// output collects what a process prints, and can be read meanwhile.
type output struct {
	sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.Lock()
	defer o.Unlock()
	return o.text.Write(b)
}

func (o *output) String() string {
	o.Lock()
	defer o.Unlock()
	return o.text.String()
}

// begin starts a command, which is killed at the end of the test.
func begin(t *testing.T, name string, env []string, args ...string) *process {
	t.Helper()
	p := &process{t: t, name: name, cmd: exec.Command(args[0], args[1:]...),
		ended: make(chan struct{})}
	p.cmd.Env, p.cmd.Dir = rig.ClientEnv(env...), "/"
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(t, p.cmd.Start())
	go func() {
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("%s printed last:\n%s", name, rig.LastLines(p.output.String(), 60))
		}
	})
	return p
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(s), p.name)
}

// kill ends it at once, if it runs.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

func (p *process) running() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// wait waits for the end and returns the exit status; -1: a signal ended it.
func (p *process) wait() int {
	p.t.Helper()
	testtool.Within(p.t, rig.Timeout, func() bool { return !p.running() }, "%s ends", p.name)
	return p.cmd.ProcessState.ExitCode()
}

// says waits until it has printed a text.
func (p *process) says(text string) {
	p.t.Helper()
	testtool.Eventually(p.t, func() bool {
		return strings.Contains(p.output.String(), text) || !p.running()
	}, "%s says %q", p.name, text)
	require.Contains(p.t, p.output.String(), text)
}

// sidecarScript is a container without a root file system of its own: its namespace of mounts has
// the hooks' volume where KubeVirt mounts it, and QEMU's user has no rights.
const sidecarScript = `set -eu
mount --make-rprivate /
own=$1
at=$2
shift 2
mount --bind "$own" /mnt
mount -t tmpfs tmpfs /run
mkdir -p "$at"
mount --bind /mnt "$at"
umount /mnt
cd /
exec setpriv --reuid 107 --regid 107 --clear-groups --no-new-privs --bounding-set -all \
	--inh-caps -all --pdeathsig KILL "$@"`

// sidecar starts kubevirt-disk as the pod's hook sidecar.
func (p *launcherPod) sidecar(settings []string, args ...string) *process {
	p.t.Helper()
	program := testtool.Must(rig.Binary())(p.t)
	require.NoError(p.t, os.Chmod(filepath.Dir(program), 0o755))
	// KubeVirt sets the variables that begin with XDG in all containers of user 107.
	env := append([]string{"CONTAINER_NAME=" + p.name, "LOG_FORMAT=json",
		"XDG_CACHE_HOME=/var/run/kubevirt-private", "XDG_CONFIG_HOME=/var/run/kubevirt-private",
		"XDG_RUNTIME_DIR=/var/run",
		"GORACE=" + peers.RaceOptions}, settings...)
	return begin(p.t, p.name, env, p.inNetwork(append([]string{"unshare", "-m", "bash", "-c",
		sidecarScript, "sidecar", p.own(), p.at(), program, "serve"}, args...)...)...)
}

// sockets are the files in the sidecar's part of the volume that the launcher takes for hooks.
func (p *launcherPod) sockets() (found []string) {
	p.t.Helper()
	for _, e := range testtool.Must(os.ReadDir(p.own()))(p.t) {
		if !e.IsDir() {
			found = append(found, filepath.Join(p.own(), e.Name()))
		}
	}
	return found
}

// launcher is KubeVirt's launcher with its machine.
type launcher struct {
	*process
	dir string
	vmi map[string]any
}

// launch starts the launcher of an instance, which waits for the pod's sidecar. Without an instance
// it then waits for virt-handler.
func (p *launcherPod) launch(vmi map[string]any) *launcher {
	p.t.Helper()
	program := filepath.Join(programsOf(p.t, p.module), "virt-launcher")
	script := testtool.Must(filepath.Abs("../launcher/run.sh"))(p.t)
	l := &launcher{dir: rig.SharedDir(p.t), vmi: vmi}
	file := os.DevNull
	if vmi != nil {
		file = vmiFile(p.t, vmi)
	}
	sidecars := testtool.Must(os.ReadDir(p.hooks))(p.t)
	l.process = begin(p.t, "virt-launcher", []string{"PLUGIN_SOCKETS=" + p.plugins},
		rig.Clients.InRoot(p.inNetwork("unshare", "-m", "-n", "-p", "-f", "--mount-proc",
			"--kill-child", script, program, l.dir, file, p.hooks, "--name", "vm",
			"--namespace", "default", "--uid", vmiUID, "--qemu-timeout", "4m",
			"--grace-period-seconds", "240", "--hook-sidecars", strconv.Itoa(len(sidecars)))...)...)
	p.t.Cleanup(func() {
		if text, _ := os.ReadFile(l.file(qemuLog)); p.t.Failed() {
			p.t.Logf("QEMU printed last:\n%s", rig.LastLines(string(text), 60))
		}
	})
	return l
}

// qemuLog is what QEMU prints, and why it was ended, below /run.
const qemuLog = "kubevirt-private/libvirt/qemu/log/default_vm.log"

// shareNetwork gives the pod's containers one network, as those of Kubernetes have.
func (p *launcherPod) shareNetwork() {
	p.t.Helper()
	rig.Need(p.t, "nsenter", "ip")
	p.network = begin(p.t, "network", nil, "unshare", "-n", "bash", "-c",
		"ip link set lo up && echo up && exec sleep infinity")
	p.network.says("up")
}

// inNetwork is a command in the pod's network, if it has one.
func (p *launcherPod) inNetwork(args ...string) []string {
	if p.network == nil {
		return args
	}
	args = slices.DeleteFunc(args, func(a string) bool { return a == "-n" })
	return append([]string{"nsenter", "-n", "-t", strconv.Itoa(p.network.cmd.Process.Pid)}, args...)
}

// file is a path below /run, as the host reaches it.
func (l *launcher) file(name string) string { return filepath.Join(l.dir, "run", name) }

// virsh asks the launcher's libvirt, which knows users by their number.
func (l *launcher) virsh(args ...string) (string, error) {
	l.t.Helper()
	return rig.AsQEMU(l.t, "virsh", append([]string{"-c",
		"qemu+unix:///session?socket=" + l.file("libvirt/libvirt-sock")}, args...)...)
}

// untilPaused waits until QEMU has paused the guest because of an error of its disk.
func (l *launcher) untilPaused() {
	l.t.Helper()
	testtool.Eventually(l.t, func() bool {
		out, err := l.virsh("domstate", "--reason", "default_vm")
		return err == nil && strings.Contains(out, "paused (I/O error)")
	}, "the guest is paused")
}

// domain is the running domain as libvirt has it.
func (l *launcher) domain() string {
	l.t.Helper()
	out, err := l.virsh("dumpxml", "default_vm")
	require.NoError(l.t, err, out)
	return out
}

// stop ends the machine as Kubernetes and KubeVirt do: the launcher gets SIGTERM, and virt-handler
// has the guest shut itself down. Then the launcher waits most of a minute for virt-handler.
//
// Nobody receives the launcher's events here, so it looks for its machine every 10 seconds only.
// SIGTERM before that ends it without a word to the guest.
func (l *launcher) stop() {
	l.t.Helper()
	l.says("Monitoring loop")
	pid := strconv.Itoa(l.cmd.Process.Pid)
	children := strings.Fields(rig.ReadFile(l.t, filepath.Join("/proc", pid, "task", pid,
		"children")))
	require.Len(l.t, children, 1)
	first := testtool.Must(strconv.Atoi(children[0]))(l.t)
	require.NoError(l.t, syscall.Kill(first, syscall.SIGTERM))
	r := l.handler("stop", l.vmi)
	require.Zero(l.t, r.Status, r)
}
