package node

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

// installing are the commands of docs/kubernetes-install.md, a script for each section.
func installing(t *testing.T) map[string]string {
	t.Helper()
	root := testtool.Must(plane.Root())(t)
	page := testtool.Must(os.ReadFile(filepath.Join(root, "docs/kubernetes-install.md")))(t)
	scripts := map[string]string{}
	for _, section := range strings.Split(string(page), "\n## ")[1:] {
		heading, _, _ := strings.Cut(section, "\n")
		number, _, found := strings.Cut(heading, ".")
		require.True(t, found, heading)
		for line := range strings.Lines(section) {
			if command, ok := strings.CutPrefix(line, "    "); ok {
				scripts[number] += command
			}
		}
	}
	require.Len(t, scripts, 4)
	return scripts
}

// TestFirstInstall walks docs/kubernetes-install.md from the sources to the first VM: the node has
// none of the images, and pulls all of them from a registry of its own. Two things differ from the
// page: QEMU's image is that of this machine, because its base image is not here, and the registry
// needs no TLS.
func TestFirstInstall(t *testing.T) {
	testtool.Need(t, "buildah", "skopeo", "docker-registry", "make", "qemu-img",
		"qemu-io", "qemu-system-x86_64")
	plane.Binaries(t, binaries...)
	scripts := installing(t)
	root := testtool.Must(plane.Root())(t)
	n := Start(t)
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
		return path
	}
	const registry = "127.0.0.1:5000"
	serve := n.Command(t.Context(), "docker-registry", "serve", write("registry.yml",
		"version: 0.1\nlog: {level: error}\nstorage: {filesystem: {rootdirectory: "+dir+
			"/registry}}\nhttp: {addr: \""+registry+"\"}\n"))
	require.NoError(t, serve.Start())
	t.Cleanup(func() {
		_ = serve.Process.Kill()
		_ = serve.Wait() // it was killed
	})
	settings := append(os.Environ(), "REGISTRY="+registry+"/vms",
		"CONTAINERS_REGISTRIES_CONF="+write("registries.conf",
			"[[registry]]\nlocation = \""+registry+"\"\ninsecure = true\n"),
		"CONTAINERS_STORAGE_CONF="+write("storage.conf", "[storage]\ndriver = \"vfs\"\n"+
			"graphroot = \""+dir+"/graph\"\nrunroot = \""+dir+"/run\"\n"),
		"BUILDAH_ISOLATION=chroot", "KUBECONFIG="+filepath.Join(n.plane, "admin.kubeconfig"),
		"PATH="+n.bin+":"+os.Getenv("PATH"))
	run := func(script string) {
		t.Helper()
		cmd := n.Command(t.Context(), "bash", "-euxo", "pipefail", "-c", "cd '"+root+"'\n"+script)
		cmd.Env = settings
		out, err := cmd.CombinedOutput()
		if err != nil {
			pods, _ := n.TryKubectl("", "describe", "pods", "--all-namespaces")
			t.Fatalf("%v\n%s\n%s", err, out, pods)
		}
	}
	build := exec.Command("bash", "-euxo", "pipefail", "-c", scripts["1"])
	build.Dir, build.Env = root, settings
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))

	disk := filepath.Join(dir, "fedora.qcow2")
	for _, args := range [][]string{{"qemu-img", "create", "-f", "qcow2", disk, "64M"},
		{"qemu-io", "-c", "write -P 9 1M 3M", disk}} {
		out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		require.NoError(t, err, string(out))
	}
	_, err = QEMUImage(t, "localhost/qemu:1").write(filepath.Join(dir, "qemu.tar"))
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(root, "examples/kubernetes/qemu/Containerfile"))
	var push []string
	for line := range strings.Lines(scripts["2"]) {
		switch {
		case strings.Contains(line, "export REGISTRY="):
		case strings.Contains(line, "buildah build"):
		case strings.Contains(line, "buildah push $REGISTRY/qemu:1"):
			push = append(push, "skopeo copy --dest-tls-verify=false oci-archive:"+dir+
				"/qemu.tar:localhost/qemu:1 docker://$REGISTRY/qemu:1\n")
		default:
			push = append(push, strings.NewReplacer(
				"manifest push", "manifest push --tls-verify=false",
				"kubevirt-disk push", "kubevirt-disk push --insecure-registry "+registry,
				"fedora.qcow2", disk).Replace(line))
		}
	}
	// The only volume of the node, with room for the disk of the example, and the class of claims
	// that name none.
	n.Apply(t, strings.ReplaceAll(volume(t, n, "first", "ReadWriteOncePod"), "20Gi", "100Gi"))
	run(strings.Join(push, "") + "echo \"$VM\" >" + dir + "/disk\n")
	vm := testtool.Must(os.ReadFile(filepath.Join(dir, "disk")))(t)
	n.containerd(t, strings.TrimSpace(string(vm)), disk)
	run(scripts["3"])
	run("export VM=$(cat " + dir + "/disk)\n" + scripts["4"])
	require.Regexp(t, `(?m)^my-vm +true `, n.Kubectl(t, "get", "vmid"))
	require.Equal(t, "True", n.Kubectl(t, "get", "vmidentityset", "my-fedora", "-o",
		"jsonpath={.status.conditions[?(@.type=='Ready')].status}"))
}

// containerd pulls what push has stored and runs it, without a kubelet: it has a namespace of its
// own, which has none of the layers. The disk is served, and the container ends by SIGTERM.
func (n *Node) containerd(t *testing.T, image, disk string) {
	t.Helper()
	ctr := func(args ...string) string {
		t.Helper()
		out, err := n.Command(t.Context(), append([]string{"ctr", "--namespace=alone"},
			args...)...).CombinedOutput()
		require.NoError(t, err, string(out))
		return string(out)
	}
	const name, listens = "disk", "127.0.0.1:10809"
	ctr("images", "pull", "--plain-http", image)
	ctr("run", "--detach", "--net-host", "--env=CHAP_USERNAME=initiator",
		"--env=CHAP_PASSWORD=a-long-password", "--env=NBD_LISTEN="+listens, image, name)
	n.until(t, "the container is ready", func() bool {
		return n.Command(t.Context(), "ctr", "--namespace=alone", "tasks", "exec",
			"--exec-id=probe", name, "cat", "/tmp/healthy").Run() == nil
	})
	out, err := n.Command(t.Context(), "qemu-img", "compare", "-f", "qcow2", "-F", "raw", disk,
		"nbd://"+listens+"/"+filepath.Base(disk)).CombinedOutput()
	require.NoError(t, err, string(out))
	ctr("tasks", "kill", name)
	n.until(t, "the container has ended", func() bool {
		return strings.Contains(ctr("tasks", "list"), "STOPPED")
	})
	ctr("tasks", "delete", name) // its exit status is the container's
	ctr("containers", "delete", name)
}
