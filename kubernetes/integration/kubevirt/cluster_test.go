package kubevirt

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/integration/node"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

const (
	controllerImage = "docker.io/library/kubevirt.io:disk-controller"
	// As the examples name them: the base image, and a user's image FROM it.
	baseImage     = "registry.example.com/vms/disk:1"
	guestImage    = "registry.example.com/vms/fedora:42"
	streamedImage = node.RegistryAddress + "/vm/guest:1"
	// What pods of some namespaces reach by the names of registries of the examples.
	otherRegistries = "10.244.0.1:443"
	existingImage   = "/containerdisks/fedora:42"
	system          = "kubevirt-disk-system"
)

// timeout is how long anything may take on a busy machine before it counts as broken.
const timeout = 10 * time.Minute

// cluster is a whole KubeVirt on two nodes, and a namespace for the machines of a test.
type cluster struct {
	*node.Node
	other *node.Node
	raw   string // the guest's disk, as the image has it

	programs  string // the directory of scripts/build-kubevirt.sh
	namespace string
	labels    []string // of the namespace, for testdata/cluster.yaml
	qemu      string   // the version that runs the machines of the namespace
}

// in is the cluster with another namespace, which has this label besides.
func (c *cluster) in(t *testing.T, namespace, label string) *cluster {
	t.Helper()
	in := *c
	in.labels = slices.Compact(append(slices.Clip(c.labels), label))
	in.namespace, in.Node = namespace, c.In(t, namespace, strings.Join(in.labels, ", "))
	return &in
}

// The earlier Debian of scripts/build-kubevirt.sh, and its QEMU.
const (
	earlier     = "bookworm"
	earlierQEMU = "7.2"
)

// older is the cluster with a namespace whose machines have the launcher of the earlier Debian.
func (c *cluster) older(t *testing.T, namespace string) *cluster {
	t.Helper()
	in := c.in(t, namespace, "launcher: "+earlier)
	in.qemu = earlierQEMU
	return in
}

// programs is the directory that scripts/build-kubevirt.sh makes. The tests are skipped without it,
// also in CI: `make test-kubevirt` and `make test-nightly` build it.
func programs(t *testing.T) string {
	t.Helper()
	root := testtool.Must(plane.Root())(t)
	sum := sha256.New()
	for _, name := range []string{"integration/launcher/go.mod", "integration/launcher/go.sum",
		"integration/launcher/operator/main.go", "scripts/build-kubevirt.sh"} {
		sum.Write(testtool.Must(os.ReadFile(filepath.Join(root, name)))(t))
	}
	place := os.Getenv("KUBEVIRT_DISK_KUBEVIRT")
	if place == "" {
		place = filepath.Join(root, "cache/kubevirt")
	}
	dir := filepath.Join(place, fmt.Sprintf("%x", sum.Sum(nil))[:16])
	testtool.BuiltOrSkip(t, "scripts/build-kubevirt.sh", dir, "images.tar")
	return dir
}

// start brings up the nodes, and installs KubeVirt and our controller there.
func start(t *testing.T) *cluster {
	t.Helper()
	dir := programs(t)
	testtool.Need(t, "apt-get", "dpkg-deb", "mke2fs", "qemu-img")
	began := time.Now()
	said := func(what string) { t.Logf("%3.0f s: %s", time.Since(began).Seconds(), what) }
	c := &cluster{programs: dir, raw: guestDisk(t), namespace: "default", qemu: "10.0"}
	packed := filepath.Join(filepath.Dir(c.raw), "guest.qcow2")
	output(t, "qemu-img", "convert", "-c", "-O", "qcow2", c.raw, packed)
	images := append(node.BaseImage(t, map[string]string{guestImage: packed}),
		node.Archive(filepath.Join(dir, "images.tar")), node.ControllerImage(t, controllerImage))
	images = append(images, images[0].As(baseImage))
	said("the images are made")
	c.Node = node.Start(t, images...)
	said("the node is ready")
	for _, image := range images {
		if image.Name == guestImage {
			c.ServeRegistry(t, node.RegistryAddress, false, image.As(streamedImage))
			c.ServeRegistry(t, otherRegistries, true, image.As(otherRegistries+existingImage),
				image.As(otherRegistries+strings.TrimPrefix(guestImage, "registry.example.com")))
		}
	}
	out, err := c.TryKubectl("", "get", "-n", "kubevirt", "kubevirt", "kubevirt", "-o",
		"jsonpath={.status.phase}")
	there := err == nil && out == "Deployed" // the nodes have stayed
	c.Apply(t, c.manifest(t, "cluster.yaml"))
	if there {
		c.Kubectl(t, "rollout", "restart", "deployment/kubevirt-disk-controller", "-n", system)
	} else {
		c.install(t)
		c.Kubectl(t, "apply", "--server-side", "-f", controllertest.Manifest(t, "-set",
			"claims.fill=true"))
	}
	c.other = c.Join(t) // while the first one works
	said("the second node is ready")
	if !there {
		c.installed(t)
		said("KubeVirt is available")
	}
	c.Kubectl(t, "rollout", "status", "deployment/kubevirt-disk-controller", "-n", system,
		"--timeout=5m")
	said("the controller is there")
	return c
}

// install installs KubeVirt by its operator.
func (c *cluster) install(t *testing.T) {
	t.Helper()
	// KubeVirt's own parts ask for a node of the control plane.
	c.Kubectl(t, "label", "node", c.Name(), "node-role.kubernetes.io/control-plane=", "--overwrite")
	c.Kubectl(t, "apply", "--server-side", "--validate=false", "-f",
		filepath.Join(c.programs, "operator.json"))
	// It is killed if it does not listen after half a minute. On a busy machine, it never does.
	c.Kubectl(t, "patch", "deployment/virt-operator", "-n", "kubevirt", "--type=json", "-p",
		`[{"op": "remove", "path": "/spec/template/spec/containers/0/livenessProbe"}]`)
	c.Kubectl(t, "wait", "crd/kubevirts.kubevirt.io", "--for=condition=Established", "--timeout=5m")
	c.Apply(t, c.manifest(t, "kubevirt.yaml"))
}

// installed waits until KubeVirt can be used on both nodes.
func (c *cluster) installed(t *testing.T) {
	t.Helper()
	defer func() {
		if t.Failed() {
			c.tell(t, "get", "pods", "-A", "-o", "wide")
			c.tell(t, "get", "events", "-n", "kubevirt", "--sort-by=.lastTimestamp")
		}
	}()
	c.until(t, "KubeVirt is available", func() bool {
		out, err := c.TryKubectl("", "get", "-n", "kubevirt", "kubevirt", "kubevirt", "-o",
			`jsonpath={.status.conditions[?(@.type=="Available")].status}`)
		return err == nil && out == "True"
	})
	c.until(t, "machines can run on both nodes", func() bool {
		out, err := c.TryKubectl("", "get", "nodes", "-l", "kubevirt.io/schedulable=true", "-o",
			"name")
		return err == nil && len(strings.Fields(out)) == 2
	})
}

// at is the node of a name.
func (c *cluster) at(name string) *node.Node {
	if name == c.other.Name() {
		return c.other
	}
	return c.Node
}

// manifest is a file of testdata, or of examples/kubevirt, as it is.
func (c *cluster) manifest(t *testing.T, name string) string {
	t.Helper()
	root := testtool.Must(plane.Root())(t)
	for _, dir := range []string{"testdata", filepath.Join(root, "examples/kubevirt")} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err == nil {
			return string(data)
		}
		require.ErrorIs(t, err, os.ErrNotExist)
	}
	t.Fatalf("there is no manifest %s", name)
	return ""
}

// volume makes a directory on the first node, and a volume from it that is kept for this claim. It
// returns the directory. The claim of an identity is larger than its disk.
func (c *cluster) volume(t *testing.T, claim, mode string) string {
	t.Helper()
	name := c.namespace + "-" + claim
	dir := filepath.Join(c.Dir, "volumes", name)
	require.NoError(t, os.RemoveAll(dir)) // of a node that stayed
	require.NoError(t, os.MkdirAll(dir, 0o777))
	require.NoError(t, os.Chmod(dir, 0o777)) // whoever makes a local volume sets its owner
	c.Apply(t, fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolume
metadata: {name: %s}
spec:
  capacity: {storage: 30Gi}
  accessModes: [%s]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: local
  claimRef: {namespace: %[5]s, name: %[6]s}
  local: {path: %[3]s}
  nodeAffinity:
    required:
      nodeSelectorTerms:
      - matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [%[4]s]}]
`, name, mode, dir, c.Name(), c.namespace, claim))
	t.Cleanup(func() {
		c.Kubectl(t, "delete", "pvc/"+claim, "pv/"+name, "--ignore-not-found", "--wait=false")
	})
	return dir
}

// virtctl runs KubeVirt's client.
func (c *cluster) virtctl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.Command(t.Context(), append([]string{filepath.Join(c.programs, "virtctl")},
		args...)...).CombinedOutput()
	require.NoError(t, err, "virtctl %s\n%s", strings.Join(args, " "), out)
	return string(out)
}

// tell logs what kubectl says.
func (c *cluster) tell(t *testing.T, args ...string) {
	out, _ := c.TryKubectl("", args...) // the error is in out
	t.Logf("kubectl %s\n%s", strings.Join(args, " "), out)
}

func (c *cluster) until(t *testing.T, what string, met func() bool) {
	t.Helper()
	testtool.Within(t, timeout, met, what)
}

// promptLine is what the guest's console shows when it waits for a command.
const promptLine = "guest login:"

// consoleShell runs in the guest: it answers each line of the console with what that command prints
// and a line with its status. The power button switches the guest off.
const consoleShell = `stty -echo
(
	until button=$(grep -l 'Power Button' /sys/class/input/event*/device/name); do sleep 0.1; done
	button=${button%/device/name}
	dd if=/dev/input/${button##*/} of=/dev/null bs=24 count=1 2>/dev/null
	echo 'the power button is pressed'
	sync
	poweroff -f
) &
echo '` + promptLine + `'
while read -r line; do
	sh -c "$line" 2>&1
	printf '\nstatus %d\n' $?
done
`

// diskSize is that of the guest's disk. Its last 16 MiB belong to no file.
const diskSize = 64 << 20

// guestDisk makes a disk from which a small Debian boots.
func guestDisk(t *testing.T) (raw string) {
	t.Helper()
	root := testtool.Must(plane.Root())(t)
	raw = filepath.Join(t.TempDir(), "guest.raw")
	err := guest.BootDisk(raw, diskSize-16<<20, guest.Options{Init: consoleShell,
		Modules:  []string{"virtio_blk", "virtio_pci", "button", "evdev", "virtio_scsi", "sd_mod"},
		CacheDir: filepath.Join(root, "cache/guest")})
	guest.Made(t, err)
	require.NoError(t, os.Truncate(raw, diskSize))
	return raw
}

// everyday are the scenarios of all targets, on a machine where a whole KubeVirt was built. The
// others run in `make test-kubevirt` and `make test-nightly`.
var everyday = map[string]bool{"throwaway": true, "stays": true, "streamed": true}

// TestKubeVirt runs what people do with disks of ours in KubeVirt. With an older launcher run, too,
// those scenarios in which libvirt or QEMU can differ: how a disk gets into a domain, and what
// becomes of its connection. KUBEVIRT_DISK_EARLIER asks for all of them with that one alone.
func TestKubeVirt(t *testing.T) {
	c := start(t)
	clusters := []*cluster{c, c.older(t, earlier)}
	if os.Getenv("KUBEVIRT_DISK_EARLIER") != "" {
		clusters = clusters[1:]
	}
	t.Run("scenarios", func(t *testing.T) {
		// Go begins with the first, and goes on with the last and backwards: those take long.
		for _, one := range []struct {
			name     string
			scenario func(*cluster, *testing.T)
			differ   bool // if libvirt or QEMU do
		}{
			{name: "throwaway", scenario: (*cluster).throwaway, differ: true},
			{name: "streamed", scenario: (*cluster).streamed},
			{name: "existing", scenario: (*cluster).existing},
			{name: "filled", scenario: (*cluster).filled},
			{name: "replaced", scenario: (*cluster).replaced, differ: true},
			{name: "identity", scenario: (*cluster).identity},
			{name: "hotplug", scenario: (*cluster).hotplug},
			{name: "ended", scenario: (*cluster).ended},
			{name: "copied", scenario: (*cluster).copied},
			{name: "stays", scenario: (*cluster).stays},
			{name: "refused", scenario: (*cluster).refused},
			{name: "guaranteed", scenario: (*cluster).guaranteed},
			{name: "upgraded", scenario: (*cluster).upgraded},
			{name: "killed", scenario: (*cluster).killed, differ: true},
			{name: "moves", scenario: (*cluster).moves},
		} {
			for i, c := range clusters {
				name := one.name
				if i > 0 {
					if !one.differ {
						break
					}
					name += " with " + earlier
				}
				t.Run(name, func(t *testing.T) {
					if !everyday[name] {
						testtool.NeedNightly(t)
					}
					t.Parallel()
					one.scenario(c, t)
				})
			}
		}
	})
}
