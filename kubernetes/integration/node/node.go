// Package node runs a real node of Kubernetes for tests: kubelet, containerd and kube-proxy, with
// its own control plane, in its own mount, network and PID namespaces. It changes nothing on the
// machine, and all of it ends with the test binary. It needs root.
//
// Everything that talks to the node runs inside: Kubectl, Run. There is no registry, so the images
// are given at the start. Another node can join it, with its own kubelet and containerd.
package node

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

//go:embed inner.sh
var inner []byte

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

	digests map[string]string // of the images, by their names
}

// binaries are the programs that scripts/build-kubernetes.sh --node builds.
var binaries = []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler",
	"kubectl", "kubelet", "kube-proxy", "containerd", "containerd-shim-runc-v2", "ctr"}

// Start returns a node that has the images and is ready for pods. The test ends it. Two started
// nodes would have the same cgroups, so a second node has to join the first.
func Start(t testing.TB, images ...Image) *Node {
	t.Helper()
	if os.Getuid() != 0 {
		if testtool.Required() {
			t.Fatal("a node needs root")
		}
		t.Skip("needs root")
	}
	testtool.Need(t, "unshare", "nsenter", "findmnt", "runc", "iptables", "ip", "openssl")
	n := &Node{Dir: workDir(t), name: "node1", net: "10.244.0", bin: plane.Binaries(t, binaries...),
		digests: map[string]string{}}
	n.plane = n.Dir
	archives := n.archives()
	if err := os.Mkdir(archives, 0o755); err != nil {
		t.Fatal(err)
	}
	for i, image := range append(images, pauseImage(t)) {
		digest, err := image.write(filepath.Join(archives, strconv.Itoa(i)+".tar"))
		if err != nil {
			t.Fatal(err)
		}
		n.digests[image.Name] = digest
	}
	for _, dir := range []string{"/var/lib/kubelet", "/var/lib/cni"} {
		if err := os.MkdirAll(dir, 0o755); err != nil { // the node mounts over it
			t.Fatal(err)
		}
	}
	n.enter(t)
	n.untilReady(t)
	return n
}

// Join returns another node of the same cluster, with the same images. A virtual cable connects the
// two nodes. The test ends it.
func (n *Node) Join(t testing.TB) *Node {
	t.Helper()
	other := &Node{Dir: workDir(t), name: "node2", net: "10.244.1", bin: n.bin, plane: n.plane,
		digests: n.digests}
	other.enter(t)
	const here, there = "10.245.0.1", "10.245.0.2"
	other.ip(t, "link", "add", n.name, "type", "veth", "peer", "name", other.name, "netns",
		strconv.Itoa(n.pid))
	n.connect(t, other, here, there)
	other.connect(t, n, there, here)
	other.untilReady(t)
	return other
}

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
	if err != nil {
		t.Fatalf("ip %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// archives is the directory of the images for all nodes.
func (n *Node) archives() string { return filepath.Join(n.plane, "images") }

// enter starts the first process of a node.
func (n *Node) enter(t testing.TB) {
	t.Helper()
	if err := os.Mkdir(filepath.Join(n.Dir, "log"), 0o755); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(n.Dir, "log/inner.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command("unshare", "-m", "-n", "-p", "-f", "--mount-proc", "--kill-child", "--",
		"bash", "-c", string(inner))
	cmd.Env = append(os.Environ(), "NODE="+n.name, "NET="+n.net, "RUN="+n.Dir, "PLANE="+n.plane,
		"BIN="+n.bin, "IMAGES="+n.archives())
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.stop(t, cmd) })
	n.until(t, n.name+" has its namespaces", func() bool {
		n.pid = child(cmd.Process.Pid)
		return n.pid != 0
	})
}

func (n *Node) untilReady(t testing.TB) {
	t.Helper()
	n.until(t, n.name+" is ready", func() bool {
		_, err := os.Stat(filepath.Join(n.Dir, "ready"))
		return err == nil
	})
}

// workDir has a short path, because sockets are in it, and is on a disk, because containers'
// overlays are.
func workDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "node-")
	if err != nil {
		t.Fatal(err)
	}
	return dir
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

// stop ends the first process, and with it all other processes in the namespaces.
func (n *Node) stop(t testing.TB, cmd *exec.Cmd) {
	_ = cmd.Process.Kill() // it may have ended
	_ = cmd.Wait()
	if n.pid != 0 {
		for deadline := time.Now().Add(timeout); alive(n.pid) && time.Now().Before(deadline); {
			time.Sleep(10 * time.Millisecond)
		}
	}
	own := []string{"kubepods", "k8s.io"}
	if n.plane != n.Dir {
		own = []string{"kubevirt-disk-" + n.name} // as inner.sh names it
	}
	for _, name := range own {
		cgroups, _ := filepath.Glob("/sys/fs/cgroup/*/" + name)
		for _, dir := range cgroups {
			removeCgroup(dir)
		}
	}
	if t.Failed() {
		t.Logf("the logs of the node are in %s/log", n.Dir)
		return
	}
	if err := os.RemoveAll(n.Dir); err != nil {
		t.Log(err)
	}
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

// removeCgroup removes a cgroup and those below it, which no longer have processes.
func removeCgroup(dir string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() {
			removeCgroup(filepath.Join(dir, e.Name()))
		}
	}
	_ = syscall.Rmdir(dir) // for a moment, it may still have a process
}

func (n *Node) until(t testing.TB, what string, met func() bool) {
	t.Helper()
	testtool.Within(t, timeout, met, what)
}

// Command runs a program of the machine inside the namespaces, with kubectl's settings and path.
func (n *Node) Command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"-t", strconv.Itoa(n.pid), "-m",
		"-n", "-p", "--"}, args...)...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+filepath.Join(n.plane, "admin.kubeconfig"),
		"PATH="+n.bin+":"+os.Getenv("PATH"), "HOME="+n.Dir)
	cmd.WaitDelay = time.Second
	return cmd
}

// Kubectl runs kubectl as the administrator, and fails the test if that fails.
func (n *Node) Kubectl(t testing.TB, args ...string) string {
	t.Helper()
	out, err := n.TryKubectl("", args...)
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
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

// Apply applies objects in YAML.
func (n *Node) Apply(t testing.TB, text string) {
	t.Helper()
	if out, err := n.TryKubectl(text, "apply", "-f", "-"); err != nil {
		t.Fatalf("kubectl apply: %v\n%s\n%s", err, out, text)
	}
}
