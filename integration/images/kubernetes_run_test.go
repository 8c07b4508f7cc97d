package images

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/integration/objects"
	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/targettest"
)

// runPod starts the disk's container as the pod says: arguments, environment, secrets, volumes and
// security context. It returns the container, and the directories of its volumes on this machine.
func runPod(t *testing.T, e *rig.Engine, image string, n rig.Network, pod *objects.PodTemplate,
	secrets map[string]map[string]string) (*rig.Container, map[string]string) {
	t.Helper()
	spec := rig.DiskContainer(t, pod)
	options := []string{n.Option()}
	for _, from := range spec.EnvFrom {
		for key, value := range secrets[from.SecretRef.Name] {
			options = append(options, rig.WithEnv(key+"="+value)...)
		}
	}
	for _, v := range spec.Env {
		options = append(options, rig.WithEnv(v.Name+"="+v.Value)...)
	}
	places := map[string]string{}
	for _, v := range pod.Spec.Volumes {
		places[v.Name] = rig.EmptyDir(t)
		if v.Secret != nil {
			for key, value := range secrets[v.Secret.SecretName] {
				require.NoError(t, os.WriteFile(filepath.Join(places[v.Name], key), []byte(value),
					0o644))
			}
		}
	}
	for _, m := range spec.VolumeMounts {
		mode := "rw"
		if m.ReadOnly {
			mode = "ro"
		}
		options = append(options, "--volume="+places[m.Name]+":"+m.MountPath+":"+mode)
	}
	if spec.SecurityContext.ReadOnlyRootFilesystem {
		// Kubernetes mounts only what the pod names.
		options = append(options, "--read-only", "--read-only-tmpfs=false")
	}
	if !*spec.SecurityContext.AllowPrivilegeEscalation {
		options = append(options, "--security-opt=no-new-privileges")
	}
	for _, c := range spec.SecurityContext.Capabilities.Drop {
		options = append(options, "--cap-drop="+c)
	}
	c := e.NewContainer(t, image, options, spec.Args...)
	c.Start(t)
	return c, places
}

// TestKubernetesExamplesRun runs the disk of each pod with podman. It sends the requests of the
// kubelet and of Prometheus, and uses the disk like the VM of the pod, or a VM elsewhere.
func TestKubernetesExamplesRun(t *testing.T) {
	t.Parallel()
	e := rig.NeedImages(t, "qemu-img", "qemu-io", "ip", rig.QEMUISCSI)
	image, _ := oneDisk(t, e)
	all := rig.ReadKubernetesExamples(t)
	for name, pod := range all.Pods {
		t.Run(name, func(t *testing.T) {
			n := rig.Namespace(t)
			image := image
			if name == "upload" {
				image = rig.BaseImage
			}
			c, places := runPod(t, e, image, n, pod, all.Secrets)
			page := func(port int, path string) int {
				answer, err := http.Get(fmt.Sprintf("http://%s:%d%s", n.Host, port, path))
				if err != nil {
					return 0
				}
				_ = answer.Body.Close()
				return answer.StatusCode
			}
			spec := rig.DiskContainer(t, pod)
			ports := map[string]int{}
			for _, p := range spec.Ports {
				ports[p.Name] = p.ContainerPort
			}
			startup := spec.StartupProbe.HTTPGet
			testtool.Within(t, rig.Timeout, func() bool {
				return page(ports[startup.Port], startup.Path) == http.StatusOK ||
					!c.Running(t)
			}, "the pod has started")
			for _, probe := range []objects.Probe{spec.StartupProbe, spec.ReadinessProbe,
				spec.LivenessProbe} {
				require.Equal(t, http.StatusOK, page(ports[probe.HTTPGet.Port], probe.HTTPGet.Path),
					probe.HTTPGet.Path)
			}
			require.Equal(t, http.StatusOK,
				page(ports["metrics"], pod.Metadata.Annotations["prometheus.io/path"]))

			secret := all.Secrets["my-fedora-chap"]
			if name == "upload" {
				uploadInto(t, n, places["data"], secret)
				require.Zero(t, c.Stop(t))
				return
			}
			if vm := pod.Spec.Containers[0]; vm.Name == "vm" {
				// QEMU's own tool opens the disk with the VM's arguments, in the pod's network.
				args := []string{"netns", "exec", filepath.Base(n.Path), "qemu-io"}
				for i, arg := range vm.Args {
					arg = strings.NewReplacer("$(CHAP_USERNAME)",
						secret[vm.Env[0].ValueFrom.SecretKeyRef.Key], vm.VolumeMounts[0].MountPath,
						places[vm.VolumeMounts[0].Name], "$(POD_UID)", name).Replace(arg)
					switch {
					case i > 0 && vm.Args[i-1] == "-object":
						args = append(args, "--object", arg)
					case i > 0 && vm.Args[i-1] == "-blockdev":
						args = append(args, "--image-opts", arg)
					}
				}
				require.Len(t, args, 8)
				rig.OK(t, "ip", append(args, "-c", "write -P 5 0 64k", "-c", "read -P 5 0 64k")...)
				require.NotZero(t,
					rig.Client(t, nil, "qemu-img", "info", rig.DiskURL(n.Host+":3260", 1)).Status,
					"only the pod may reach the disk")
			} else {
				url := fmt.Sprintf("iscsi://%s%%%s@%s:%d/iqn.2017-01.io.kubevirt:wrapper/1",
					secret["node.session.auth.username"],
					secret["node.session.auth.password"], n.Host, ports["iscsi"])
				rig.OK(t, "qemu-io", "-f", "raw", "-c", "write -P 5 0 64k", "-c", "read -P 5 0 64k",
					url)
				disk, err := os.Open(filepath.Join(places["data"], "disk.img"))
				require.NoError(t, err, "the disk must be on the volume claim")
				defer disk.Close()
				start := make([]byte, 64<<10)
				require.NoError(t, testtool.Err(disk.Read(start)))
				require.Equal(t, bytes.Repeat([]byte{5}, len(start)), start)
				migrate(t, c, n.Host, secret)
			}
			require.Zero(t, c.Stop(t))
		})
	}
}

// uploadInto uploads a disk as the example says, to the end of its port forwarding. Then the disk
// is on the claim, and the VM can log in.
func uploadInto(t *testing.T, n rig.Network, claim string, secret map[string]string) {
	t.Helper()
	rig.Need(t, "curl")
	manifest := testtool.Must(os.ReadFile("../../examples/kubernetes/upload.yaml"))(t)
	command := regexp.MustCompile(`curl -T fedora\.qcow2 (http\S+)`).FindSubmatch(manifest)
	require.NotNil(t, command)
	raw, content := rig.MakeUpload(t, 8<<20)
	image := filepath.Join(filepath.Dir(raw), "disk.qcow2")
	rig.MakeQcow2(t, raw, image, "", true)
	out := rig.OK(t, "ip", "netns", "exec", filepath.Base(n.Path), "curl", "-sS", "-T", image,
		string(command[1]))
	lun := regexp.MustCompile(`lun: (\d+)`).FindStringSubmatch(out)
	require.NotNil(t, lun, out)
	url := fmt.Sprintf("iscsi://%s%%%s@%s:3260/iqn.2017-01.io.kubevirt:wrapper/%s",
		secret["node.session.auth.username"], secret["node.session.auth.password"], n.Host, lun[1])
	rig.Same(t, raw, url)
	disk := filepath.Join(claim, "disk.img")
	testtool.Within(t, rig.Timeout, func() bool {
		got, err := os.ReadFile(disk)
		return err == nil && bytes.Equal(content, got)
	}, "the disk on the claim has the image's content")
}

// migrate hands the disk of a pod over from one initiator to another, with the commands in the
// examples.
func migrate(t *testing.T, c *rig.Container, host string, secret map[string]string) {
	t.Helper()
	const first, second = "iqn.2017-01.io.kubevirt:source", "iqn.2017-01.io.kubevirt:destination"
	readme := testtool.Must(os.ReadFile("../../examples/kubernetes/README.md"))(t)
	address := testtool.Must(net.ResolveTCPAddr("tcp", host+":3260"))(t)
	login := func(initiator string) *targettest.Session {
		return targettest.MustLogin(t, address,
			targettest.LoginOptions{Initiator: initiator, Target: peers.DefaultTarget,
				CHAP: &targettest.CHAP{Username: secret["node.session.auth.username"],
					Password: secret["node.session.auth.password"]}}, 1)
	}
	source, destination := login(first), login(second)
	require.True(t, rig.Do(t, source, rig.ReadBlock(1, 0)).Good())
	require.False(t, rig.Do(t, destination, rig.ReadBlock(1, 0)).Good())
	steps := regexp.MustCompile(`kubectl exec deploy/my-fedora-disk -- (.*)`).FindAllStringSubmatch(
		string(readme), -1)
	require.Len(t, steps, 2)
	for i, step := range steps {
		r := c.Exec(t, strings.Fields(step[1])...)
		require.Zero(t, r.Status, "%s", r)
		require.True(t, rig.Do(t, destination, rig.ReadBlock(1, 0)).Good())
		require.Equal(t, i == 0, rig.Do(t, source, rig.ReadBlock(1, 0)).Good())
	}
	rig.Logout(t, source)
	rig.Logout(t, destination)
}

// TestKubernetesSettings: the daemon knows every variable and flag of the examples. Running the
// examples shows that the credentials' variables are right.
func TestKubernetesSettings(t *testing.T) {
	rig.Need(t)
	path := rig.Program(t)
	// Lines are wrapped.
	help := strings.Join(strings.Fields(rig.OK(t, path, "serve", "--help=all")), " ")
	for name, pod := range rig.ReadKubernetesExamples(t).Pods {
		c := rig.DiskContainer(t, pod)
		for _, e := range c.Env {
			if !strings.HasPrefix(e.Name, "CHAP_") {
				require.Regexp(t, `[\[ ]`+regexp.QuoteMeta(e.Name)+`[\],]`, help, name)
			}
		}
		for i, arg := range c.Args {
			if i == 0 {
				require.Equal(t, "serve", arg)
				continue
			}
			flag, _, _ := strings.Cut(arg, "=")
			require.Contains(t, help, " "+flag+" ", name)
		}
		for _, m := range c.VolumeMounts {
			switch m.Name {
			case "work":
				require.Contains(t, help, fmt.Sprintf("[WORK_DIR] (default %q)", m.MountPath))
			case "data":
				require.Contains(t, c.Args, "--persistent-dir="+m.MountPath)
			}
		}
		for _, port := range c.Ports {
			require.Regexp(t, fmt.Sprintf(`default (0\.0\.0\.0|")?:%d\b`, port.ContainerPort), help,
				port.Name)
		}
	}
}
