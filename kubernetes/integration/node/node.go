// Package node runs a real node of Kubernetes for tests: kubelet, containerd and kube-proxy, with
// its own control plane, in its own mount, network and PID namespaces. It changes nothing on the
// machine, and all of it ends with the test binary. It needs root.
//
// Everything that talks to the node runs inside: Kubectl, Run. There is no registry, so the images
// are given at the start. Another node can join it, with its own kubelet and containerd.
//
// While you write a test, KUBEVIRT_DISK_NODES=DIR saves the start: nodes are in DIR, stay when the
// test ends, and the next test finds them there, with all objects; its images replace those of the
// same names. `echo >DIR/node1/hold` ends a node.
package node

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

var (
	//go:embed inner.sh
	inner string
	//go:embed outer.sh
	outer string
)

// timeout is how long anything may take on a busy machine before it counts as broken.
const timeout = 6 * time.Minute

// Node is a running node, with its own control plane or with that of the node that it joined.
type Node struct {
	Dir   string // its files and logs
	name  string
	net   string // the first three numbers of its addresses
	bin   string
	plane string // Dir of the node with the control plane
	pid   int    // of the first process in the namespaces
	admin string // the settings of kubectl, in the directory of the control plane

	digests map[string]string // of the images, by their names
}

// binaries are the programs that scripts/build-kubernetes.sh --node builds.
var binaries = []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler",
	"kubectl", "kubelet", "kube-proxy", "containerd", "containerd-shim-runc-v2", "ctr"}

// mounted are the directories of the machine that a node mounts over.
var mounted = []string{"/var/lib/kubelet", "/var/lib/cni", "/var/lib/kubevirt",
	"/var/lib/kubevirt-node-labeller"}

// Start returns a node that has the images and is ready for pods. The test ends it.
func Start(t testing.TB, images ...Image) *Node {
	t.Helper()
	testtool.Needs(t, "root", os.Getuid() == 0)
	testtool.Need(t, "unshare", "nsenter", "findmnt", "runc", "iptables", "ip", "openssl",
		"dnsmasq")
	n := &Node{name: "node1", net: "10.244.0", bin: plane.Binaries(t, binaries...),
		admin: "admin.kubeconfig", digests: map[string]string{}}
	n.makeDir(t)
	n.plane = n.Dir
	archives := n.archives()
	require.NoError(t, os.MkdirAll(archives, 0o755))
	for i, image := range append(images, pauseImage(t)) {
		digest := testtool.Must(image.write(filepath.Join(archives, strconv.Itoa(i)+".tar")))(t)
		n.digests[image.Name] = digest
	}
	for _, dir := range mounted {
		require.NoError(t, os.MkdirAll(dir, 0o755))
	}
	if n.kept(t) {
		return n
	}
	n.enter(t)
	n.untilReady(t)
	return n
}

// Join returns another node of the same cluster, with the same images. A virtual cable connects the
// two nodes. The test ends it.
func (n *Node) Join(t testing.TB) *Node {
	t.Helper()
	other := &Node{name: "node2", net: "10.244.1", bin: n.bin, admin: n.admin, plane: n.plane,
		digests: n.digests}
	other.makeDir(t)
	if other.kept(t) {
		return other
	}
	other.enter(t)
	const here, there = "10.245.0.1", "10.245.0.2"
	other.ip(t, "link", "add", n.name, "type", "veth", "peer", "name", other.name, "netns",
		strconv.Itoa(n.pid))
	n.connect(t, other, here, there)
	other.connect(t, n, there, here)
	other.untilReady(t)
	return other
}

// In is the node with a namespace that kubectl uses if it is told no other one. It is made if it is
// not there, and has this label.
func (n *Node) In(t testing.TB, namespace, label string) *Node {
	t.Helper()
	n.Apply(t, fmt.Sprintf("{apiVersion: v1, kind: Namespace, metadata: {name: %s, labels: {%s}}}",
		namespace, label))
	config, err := os.ReadFile(filepath.Join(n.plane, n.admin))
	require.NoError(t, err)
	in := *n
	in.admin = namespace + ".kubeconfig"
	err = os.WriteFile(filepath.Join(n.plane, in.admin), config, 0o600)
	require.NoError(t, err)
	in.Kubectl(t, "config", "set-context", "--current", "--namespace="+namespace)
	return &in
}

// Name is the node's name in the cluster.
func (n *Node) Name() string { return n.name }

// Digest is that of an image that was given to Start.
func (n *Node) Digest(image string) string { return n.digests[image] }

// connect gives one end of a cable its address, and a route to the pods of the other node.
func (n *Node) connect(t testing.TB, to *Node, here, there string) {
	t.Helper()
	n.ip(t, "addr", "add", here, "peer", there, "dev", to.name)
	n.ip(t, "link", "set", to.name, "up")
	n.ip(t, "route", "add", to.net+".0/24", "via", there)
}

// ip changes a node's network. It runs outside the node's PID namespace.
func (n *Node) ip(t testing.TB, args ...string) {
	t.Helper()
	out, err := exec.Command("nsenter", append([]string{"-t", strconv.Itoa(n.pid), "-n", "--",
		"ip"}, args...)...).CombinedOutput()
	require.NoError(t, err, "ip %s\n%s", strings.Join(args, " "), out)
}

// archives is the directory of the images for all nodes.
func (n *Node) archives() string { return filepath.Join(n.plane, "images") }

// enter starts the first process of a node.
func (n *Node) enter(t testing.TB) {
	t.Helper()
	require.NoError(t, os.Mkdir(filepath.Join(n.Dir, "log"), 0o755))
	cmd := exec.Command("bash", "-c", outer)
	cmd.Env = append(os.Environ(), "NODE="+n.name, "NET="+n.net, "RUN="+n.Dir, "PLANE="+n.plane,
		"BIN="+n.bin, "IMAGES="+n.archives(), "INNER="+inner, "GATES="+plane.Gates(),
		// A kubelet removes unknown pods below its own cgroup.
		"CGROUP=/kubevirt-disk"+strings.ReplaceAll(n.Dir, "/", "-"))
	// It has to see the test's end, also if that is a signal to its group.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	hold, err := n.hold(cmd)
	require.NoError(t, err)
	said, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	require.NoError(t, err)
	if os.Getenv(keepEnv) == "" {
		t.Cleanup(func() { n.stop(t, cmd, hold) })
	}
	var unshare int
	require.NoError(t, testtool.Err(fmt.Fscan(said, &unshare)))
	n.until(t, n.name+" has its namespaces", func() bool {
		n.pid = child(unshare)
		return n.pid != 0
	})
	err = os.WriteFile(filepath.Join(n.Dir, "pid"), []byte(strconv.Itoa(n.pid)), 0o644)
	require.NoError(t, err)
}

// hold gives outer.sh a standard input that ends with the test, or, for a node that stays, one that
// does not end.
func (n *Node) hold(cmd *exec.Cmd) (io.WriteCloser, error) {
	if os.Getenv(keepEnv) == "" {
		return cmd.StdinPipe()
	}
	path := filepath.Join(n.Dir, "hold")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		return nil, err
	}
	fifo, err := os.OpenFile(path, os.O_RDWR, 0)
	cmd.Stdin = fifo
	return fifo, err
}

// kept says whether the node is one that stayed. It then imports the images that are new.
func (n *Node) kept(t testing.TB) bool {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(n.Dir, "pid"))
	if err != nil {
		return false
	}
	n.pid = testtool.Must(strconv.Atoi(string(data)))(t)
	require.True(t, alive(n.pid), "%s has a node that has ended: remove it", n.Dir)
	n.untilReady(t)
	imported, err := os.Stat(filepath.Join(n.Dir, "imported"))
	require.NoError(t, err)
	found, err := filepath.Glob(filepath.Join(n.archives(), "*.tar"))
	require.NoError(t, err)
	now := time.Now()
	for _, archive := range found {
		info, err := os.Stat(archive)
		if err == nil && info.ModTime().Before(imported.ModTime()) {
			continue
		}
		out, err := n.Command(context.Background(), "ctr", "-n", "k8s.io", "images", "import",
			"--snapshotter", "overlayfs", archive).CombinedOutput()
		require.NoError(t, err, "import\n%s", out)
	}
	require.NoError(t, os.Chtimes(filepath.Join(n.Dir, "imported"), now, now))
	return true
}

func (n *Node) untilReady(t testing.TB) {
	t.Helper()
	n.until(t, n.name+" is ready", func() bool {
		_, err := os.Stat(filepath.Join(n.Dir, "ready"))
		return err == nil
	})
}

// keepEnv names a directory for nodes that stay.
const keepEnv = "KUBEVIRT_DISK_NODES"

// makeDir makes the node's directory. It has a short path, because sockets are in it, and is on a
// disk, because containers' overlays are.
func (n *Node) makeDir(t testing.TB) {
	t.Helper()
	var err error
	if keep := os.Getenv(keepEnv); keep != "" {
		n.Dir = filepath.Join(keep, n.name)
		err = os.MkdirAll(n.Dir, 0o755)
	} else {
		n.Dir, err = os.MkdirTemp("", "node-")
	}
	require.NoError(t, err)
}

// child returns the first child of a process, or 0.
func child(pid int) int {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(data), " ")
	one, _ := strconv.Atoi(first) // 0: none yet
	return one
}

// stop ends the node.
func (n *Node) stop(t testing.TB, cmd *exec.Cmd, hold io.WriteCloser) {
	if t.Failed() {
		t.Logf("the logs of the node are in %s/log", n.Dir)
		fmt.Fprintln(hold, "keep")
	}
	hold.Close()
	_ = cmd.Wait() // its status is that of the last thing that it removed
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

func (n *Node) until(t testing.TB, what string, met func() bool) {
	t.Helper()
	testtool.Within(t, timeout, met, what)
}

// Command runs a program of the machine inside the namespaces, with kubectl's settings and path.
func (n *Node) Command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"-t", strconv.Itoa(n.pid), "-m",
		"-n", "-p", "--"}, args...)...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+filepath.Join(n.plane, n.admin),
		"PATH="+n.bin+":"+os.Getenv("PATH"), "HOME="+n.Dir)
	cmd.WaitDelay = time.Second
	return cmd
}

// Kubectl runs kubectl as the administrator, and fails the test if that fails.
func (n *Node) Kubectl(t testing.TB, args ...string) string {
	t.Helper()
	out, err := n.TryKubectl("", args...)
	require.NoError(t, err, "kubectl %s\n%s", strings.Join(args, " "), out)
	return out
}

// TryKubectl is Kubectl with a standard input, and it may fail.
func (n *Node) TryKubectl(stdin string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	cmd := n.Command(ctx, append([]string{"kubectl"}, args...)...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// Kill kills a container of this node, by its ID in the status of its pod, as a lack of memory
// would.
func (n *Node) Kill(t testing.TB, id string) {
	t.Helper()
	out, err := n.Command(t.Context(), "ctr", "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL",
		strings.TrimPrefix(id, "containerd://")).CombinedOutput()
	require.NoError(t, err, "kill %s\n%s", id, out)
}

// KillKubelet kills the node's kubelet, and returns when another one runs.
func (n *Node) KillKubelet(t testing.TB) {
	t.Helper()
	file := filepath.Join(n.Dir, "kubelet.pid")
	former, err := os.ReadFile(file)
	require.NoError(t, err)
	out, err := n.Command(t.Context(), "kill", "-9", strings.TrimSpace(string(former))).
		CombinedOutput()
	require.NoError(t, err, "%s", out)
	n.until(t, "the kubelet runs again", func() bool {
		now, err := os.ReadFile(file)
		return err == nil && string(now) != string(former) && len(now) > 0
	})
}

// Apply applies objects in YAML.
func (n *Node) Apply(t testing.TB, text string) {
	t.Helper()
	if out, err := n.TryKubectl(text, "apply", "-f", "-"); err != nil {
		t.Fatalf("kubectl apply: %v\n%s\n%s", err, out, text)
	}
}
