package machines

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"kubevirt.io/disk/adapter/initrd"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// adapterImage is the name of the image that `make adapter-image` builds.
const adapterImage = "kubevirt.io:adapter"

// TestAdapterImage builds the image with the kernel for container images, as a person does, and
// checks its content. As in Kubernetes, with a read-only root and without any capability, `adapt`
// makes a machine with it, and the Deployment of the example serves a disk. The example's
// VirtualMachine boots that disk with the image's kernel, and stops by its power button.
func TestAdapterImage(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	rig.Need(t, "buildah", "podman", "runc", "qemu-system-x86_64", "apt-get", "dpkg-deb",
		rig.QEMUISCSI)
	rig.NeedRoot(t)
	e := rig.OwnEngine(t)
	printed, err := e.Make("adapter-image", "022", "KERNELFLAGS=--any")
	requireKernel(t, err)
	boot := ""
	for _, arch := range []string{"amd64", "arm64"} {
		require.Regexp(t, `(?m)^linux/`+arch+` +sha256:[0-9a-f]{64} `, printed)
		id := rig.Instance(t, e, adapterImage, arch)
		root := e.OK(t, "podman", "image", "mount", id)
		checkAdapterImage(t, e, id, arch, root)
		if arch == runtime.GOARCH {
			boot = filepath.Join(root, "boot")
		}
	}

	layout, _ := strings.CutSuffix(strings.TrimPrefix(requireContainerImage(t), "oci:"), ":web")
	image := "--volume=" + layout + ":/image:ro"
	confinement := append([]string{"--read-only-tmpfs=false", image}, rig.Hardened...)
	t.Run("adapt", func(t *testing.T) {
		out := rig.EmptyDir(t)
		args := append([]string{"run", "--rm", "--network=none", "--volume=" + out + ":/out"},
			confinement...)
		e.OK(t, "podman", append(args, adapterImage, "adapt", "oci:/image:web", "--to", "/out/vm",
			"--emulated")...)
		made := filepath.Join(out, "vm")
		for name, from := range map[string]string{"kernel": "vmlinuz", "initrd": "initrd"} {
			rig.SameFile(t, filepath.Join(boot, from), filepath.Join(made, name))
		}
		require.Contains(t, rig.ReadFile(t, filepath.Join(made, "domain.xml")),
			`"/out/vm/disk.qcow2"`)
		// It is the same as this machine makes from the image, byte for byte.
		for _, name := range sameLevels(t, adapted(t, t.TempDir()), made) {
			info := testtool.Must(os.Stat(filepath.Join(made, name)))(t)
			require.EqualValues(t, 107, info.Sys().(*syscall.Stat_t).Uid)
		}
	})
	t.Run("serve and boot", func(t *testing.T) {
		env, kernelArgs := kernelBootExample(t)
		env["CONTAINER_IMAGE"] = "oci:/image:web"
		n := rig.Namespace(t)
		options := append([]string{n.Option(), "--volume=" + rig.EmptyDir(t) + ":/data",
			"--volume=" + rig.EmptyDir(t) + ":/var/lib/kubevirt-disk"}, confinement...)
		options = append(options, rig.WithEnv(rig.Credential...)...)
		for name, value := range env {
			options = append(options, "--env="+name+"="+value)
		}
		c := e.NewContainer(t, adapterImage, options)
		c.Start(t)
		rig.UntilLogged(t, c, `"msg":"ready"`)
		rig.Confined(t, c)
		m := bootMachine(t, machineConfig{boot: boot, noNet: true, append: kernelArgs,
			disk: "format=raw,cache=none,file=" + rig.DiskURL(n.Portal(t, c), 1)})
		m.says("serving\n")
		m.powerButton()
		require.Equal(t, "42", m.exited())
		require.Zero(t, c.Stop(t))
	})
}

// checkAdapterImage checks the image for one architecture: its configuration, and its files below
// root.
func checkAdapterImage(t *testing.T, e *rig.Engine, id, arch, root string) {
	t.Helper()
	var found []struct {
		Architecture string
		Config       struct {
			User            string
			Entrypoint, Cmd []string
			Labels          map[string]string
		}
	}
	require.NoError(t, json.Unmarshal([]byte(e.OK(t, "podman", "image", "inspect", id)), &found))
	require.Len(t, found, 1)
	config := found[0].Config
	require.Equal(t, arch, found[0].Architecture)
	require.Equal(t, "107:107", config.User)
	require.Equal(t, []string{"/kubevirt-disk", "serve"}, append(config.Entrypoint, config.Cmd...))
	require.Equal(t, "Apache-2.0 AND GPL-2.0-only",
		config.Labels["org.opencontainers.image.licenses"])
	require.Equal(t, "linux", config.Labels["io.kubevirt.kernel.source-package"])

	at := func(name string) string { return filepath.Join(root, name) }
	tree := filepath.Join("..", "..", "cache", "kernel", arch)
	kernel := testtool.Must(initrd.Kernel(filepath.Join(tree, "root")))(t)
	rig.SameFile(t, kernel, at("boot/vmlinuz"))
	release := testtool.Must(rig.HoldBin())(t)
	content, err := initrd.Build(initrd.Options{KernelTree: filepath.Join(tree, "root"),
		Init: filepath.Join("..", "..", "bin", "kubevirt-disk-init-linux-"+arch)})
	release()
	require.NoError(t, err)
	require.True(t, rig.ReadFile(t, at("boot/initrd")) == string(content))
	// The licence of the kernel, and the place of its source.
	require.Contains(t, rig.ReadFile(t, at("usr/share/doc/linux/copyright")), "GPL-2")
	require.Regexp(t, `source package is\n"linux", version \S+, .*https://snapshot.debian.org/`,
		rig.ReadFile(t, at("usr/share/doc/linux/SOURCE")))
	for _, name := range []string{"boot/vmlinuz", "boot/initrd", "usr/share/doc/linux/copyright"} {
		info := testtool.Must(os.Stat(at(name)))(t)
		require.Equal(t, os.FileMode(0o644), info.Mode(), name)
		require.Zero(t, info.Sys().(*syscall.Stat_t).Uid, name)
	}
}

// kernelBootExample reads the example for KubeVirt: the environment of the container that serves
// the disk, and the command line of the kernel.
func kernelBootExample(t *testing.T) (env map[string]string, kernelArgs string) {
	t.Helper()
	env = map[string]string{}
	text := rig.ReadFile(t, filepath.Join("..", "..", "examples", "container", "kernelboot.yaml"))
	for document := range strings.SplitSeq(text, "\n---\n") {
		var object map[string]any
		require.NoError(t, yaml.Unmarshal([]byte(document), &object))
		switch object["kind"] {
		case "Deployment":
			pod := dig(t, object, "spec", "template", "spec").(map[string]any)
			for _, v := range pod["containers"].([]any)[0].(map[string]any)["env"].([]any) {
				v := v.(map[string]any)
				env[v["name"].(string)] = v["value"].(string)
			}
		case "VirtualMachine":
			kernelArgs = dig(t, object, "spec", "template", "spec", "domain", "firmware",
				"kernelBoot", "kernelArgs").(string)
		}
	}
	require.NotEmpty(t, env)
	require.NotEmpty(t, kernelArgs)
	return env, kernelArgs
}
