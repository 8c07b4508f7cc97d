package machines

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
)

// testContainerfile is an image with two layers. Its user is in groups and is not root.
const testContainerfile = `FROM scratch
COPY etc /etc
COPY --chown=1000:1000 srv /srv
COPY container /usr/bin/container
COPY text notexecutable /usr/bin/
COPY sbin /sbin
ENV PATH=/usr/local/bin:/usr/bin COLOUR=blue
USER web
WORKDIR /srv
STOPSIGNAL SIGQUIT
ENTRYPOINT ["container"]
CMD ["web"]
`

// containerImage builds an image with buildah, once per run, and returns a reference to it.
var containerImage = sync.OnceValues(func() (ref string, err error) {
	return makeContainerImage(runtime.GOARCH)
})

func makeContainerImage(arch string) (ref string, err error) {
	dir, err := rig.DirOfRun("container")
	if err != nil {
		return "", err
	}
	for name, text := range map[string]string{
		"etc/passwd":    "root:x:0:0:root:/root:/bin/sh\nweb:x:1000:1000::/srv:/bin/sh\n",
		"etc/group":     "root:x:0:\nweb:x:1000:\nmail:x:8:web\nlog:x:9:root,web\n",
		"srv/data":      "",
		"text":          "no program",
		"notexecutable": "",
		"Containerfile": testContainerfile,
	} {
		file := filepath.Join(dir, name)
		mode := os.FileMode(0o755)
		if name == "notexecutable" {
			mode = 0o644
		}
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return dir, err
		}
		if err := os.WriteFile(file, []byte(text), mode); err != nil {
			return dir, err
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "sbin"), 0o755); err != nil {
		return dir, err
	}
	if err := os.Symlink("../usr/bin/container", filepath.Join(dir, "sbin", "init")); err != nil {
		return dir, err
	}
	ref = "oci:" + filepath.Join(dir, "image") + ":web"
	for _, args := range [][]string{
		{"go", "build", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Join(dir, "container"),
			"./integration/container"},
		{"buildah", "build", "--quiet", "--layers", "--format", "oci", "--identity-label=false",
			"--platform", "linux/" + arch, "--timestamp", "0", "--tag",
			"kubevirt-disk-test-container", dir},
		{"buildah", "push", "--quiet", "kubevirt-disk-test-container", ref},
	} {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = "../.."
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH="+arch)
		if args[0] == "buildah" {
			cmd.Args = append([]string{"buildah", "--storage-driver", "vfs",
				"--root", filepath.Join(dir, "root"), "--runroot", filepath.Join(dir, "run")},
				args[1:]...)
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			return ref, fmt.Errorf("%s: %w\n%s", cmd, err, out)
		}
	}
	return ref, nil
}

// requireContainerImage returns the reference of an image that buildah has built.
func requireContainerImage(t *testing.T) string {
	t.Helper()
	rig.Need(t, "buildah")
	return testtool.Must(containerImage())(t)
}

// adapted makes a machine of the image, with arguments of adapt, and returns its directory.
func adapted(t *testing.T, dir string, args ...string) string {
	t.Helper()
	ref, boot := requireContainerImage(t), requireBootFiles(t)
	return adaptedFrom(t, ref, boot, dir, args...)
}

func adaptedFrom(t *testing.T, ref, boot, dir string, args ...string) string {
	t.Helper()
	path := rig.Program(t)
	rig.OK(t, path, append([]string{"adapt", ref, "--to", dir, "--emulated",
		"--kernel", filepath.Join(boot, "vmlinuz"), "--initrd", filepath.Join(boot, "initrd")},
		args...)...)
	return dir
}

// bootAdapted boots a machine that adapt has made.
func bootAdapted(t *testing.T, dir string, c machineConfig) *containerMachine {
	t.Helper()
	c.disk = "format=qcow2,file=" + filepath.Join(dir, "disk.qcow2")
	return bootMachine(t, c)
}

// TestContainerImageBecomesAMachine: a program of the image sees the environment that the image
// describes, and the network's settings: from DHCP, with a renewed lease, and from an IPv6 router.
func TestContainerImageBecomesAMachine(t *testing.T) {
	t.Parallel()
	rig.Need(t, "virt-xml-validate")
	dir := adapted(t, t.TempDir(), "--size=20Gi", "--env=COLOUR=red", "--",
		"about", "lan", fmt.Sprint(lanRenewedMTU))
	domain := rig.ReadFile(t, filepath.Join(dir, "domain.xml"))
	rig.Validate(t, domain, "domain")
	m := bootAdapted(t, dir, machineConfig{netdev: newLAN(t),
		cmdline: machine.ParamNetwork + "=300"}) // seconds that the entry point may wait for it
	require.Empty(t, m.word(machine.WordRunning))
	require.Equal(t, "0", m.exited())
	console := m.console()
	require.Contains(t, console, "kubevirt-disk: the entry point has ended with status 0\n")
	a := aboutOn(t, console)
	require.NotEqual(t, 1, a.PID)
	require.Equal(t, []int{1000, 1000}, []int{a.UID, a.GID})
	require.ElementsMatch(t, []int{8, 9}, a.Groups)
	require.Equal(t, []string{"container", "about", "lan", fmt.Sprint(lanRenewedMTU)}, a.Args)
	require.Equal(t, []string{"HOME=/srv", "HOSTNAME=" + lanHostname,
		"PATH=/usr/local/bin:/usr/bin", "COLOUR=red"}, a.Env)
	require.Equal(t, "/srv", a.Dir)
	require.Equal(t, lanHostname, a.Hostname)
	require.False(t, a.Terminal)
	require.Equal(t, fmt.Sprintf("search %s\nnameserver %s\nnameserver %s\n", lanDomain, lanDNS,
		lanDNS6), a.Resolv)
	require.Contains(t, a.Hosts, fmt.Sprintf("%s\t%s\n", lanClient, lanHostname))
	require.Contains(t, a.Addresses, netip.AddrFrom4([4]byte(lanClient)))
	require.True(t, slices.ContainsFunc(a.Addresses, lanPrefix.Contains), "%v", a.Addresses)
	require.Equal(t, lanRenewedMTU, a.MTU)
	require.Empty(t, a.Stderr)
	require.EqualValues(t, 524288, a.OpenFiles.Max)
	require.Greater(t, a.DiskBytes, uint64(19<<30), "the file system has grown")
	for place, kind := range map[string]string{"/": "ext4", "/proc": "proc", "/sys": "sysfs",
		"/dev": "devtmpfs", "/dev/pts": "devpts", "/dev/shm": "tmpfs",
		"/sys/fs/cgroup": "cgroup2"} {
		require.Equal(t, kind, a.Mounts[place], place)
	}
	disk := filepath.Join(dir, "disk.qcow2")
	rig.OK(t, "qemu-img", "check", "-q", disk)
	requireClean(t, rawOf(t, disk))
}

// TestExitStatus: each way in which an entry point can end or fail to start has the same status as
// in a container runtime.
func TestExitStatus(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	dir := t.TempDir()
	for name, c := range map[string]struct {
		args   []string
		status string
		failed string
	}{
		"status":         {[]string{"--", "exit", "17"}, "17", ""},
		"not found":      {[]string{"--entrypoint=nothing"}, "127", `"nothing" is in no directory`},
		"not executable": {[]string{"--entrypoint=notexecutable"}, "126", "permission denied"},
		"no program":     {[]string{"--entrypoint=text"}, "126", "a program for this machine nor"},
		"unknown user":   {[]string{"--user=nobody"}, "126", `user "nobody" is not in`},
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, os.RemoveAll(filepath.Join(dir, "disk.qcow2")))
			adapted(t, dir, c.args...)
			m := bootAdapted(t, dir, machineConfig{noNet: true})
			if c.failed != "" {
				require.Contains(t, m.word(machine.WordFailed), c.failed)
			}
			require.Equal(t, c.status, m.exited())
			require.Contains(t, m.console(),
				"kubevirt-disk: the entry point has ended with status "+c.status+"\n")
		})
	}
}

// TestStop: a machine whose power button is pressed reacts as soon as its entry point runs. The
// entry point has the grace period to end. Meanwhile the init reaps processes without a parent.
func TestStop(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	dir := t.TempDir()
	adapted(t, dir, "--stop-signal=TERM", "--", "deaf")
	m := bootAdapted(t, dir, machineConfig{noNet: true, cmdline: machine.ParamGrace + "=1"})
	m.word(machine.WordRunning)
	m.powerButton()
	// 143: the signal came before the program ignored it.
	require.Contains(t, []string{"137", "143"}, m.exited())
	require.Contains(t, m.console(), "asked to stop")

	require.NoError(t, os.Remove(filepath.Join(dir, "disk.qcow2")))
	adapted(t, dir, "--user=0", "--", "orphans")
	m = bootAdapted(t, dir, machineConfig{noNet: true})
	require.Equal(t, "0", m.exited())
	require.Contains(t, m.console(), "zombies: 0\n")
}

// TestWebServerInAMachine: an image with a web server, served by the daemon, answers HTTP from its
// machine. When the daemon is stopped under it, the machine waits for the next one, and no write is
// lost. Its writes survive a restart of both, even if the tag is gone by then. The power button or
// the host's word ends it with its stop signal and its status, and leaves a clean disk. Its program
// is run as the daemon's options say, with the secret of a file that only the daemon can read.
func TestWebServerInAMachine(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	rig.Need(t, rig.QEMUISCSI)
	ref, boot := requireContainerImage(t), requireBootFiles(t)
	layout := filepath.Join(t.TempDir(), "image")
	rig.OK(t, "cp", "-a", strings.TrimSuffix(strings.TrimPrefix(ref, "oci:"), ":web"), layout)
	ref = "oci:" + layout + ":web"
	volume := rig.NewVolume(t, t.TempDir())
	state, portal := t.TempDir(), rig.FreePortal(t)
	secret := filepath.Join(t.TempDir(), "web.env")
	require.NoError(t, os.WriteFile(secret,
		[]byte("# for the web server\nWEB_PASSWORD=\"a b\"=c\nCOLOUR=green\n"), 0o600))
	serve := func() *rig.Daemon {
		return rig.Start(t, rig.Config{DiskDir: t.TempDir(), StateDir: state,
			Args: []string{"--env-file=" + secret, "--env=COLOUR=red", "--env=SIZE=12",
				"--user=web:mail", "--entrypoint=/usr/bin/container", "--workdir=/etc",
				"--", "about", "web"},
			Env: map[string]string{"CONTAINER_IMAGE": ref, "PERSISTENT_DIR": volume,
				"COPY_MODE": "copy-on-write", "LISTEN": portal}})
	}
	port := testtool.Must(peers.FreePort())(t)
	posted := ""
	for round := range 2 {
		d := serve()
		m := bootMachine(t, machineConfig{boot: boot, forward: port,
			disk: "format=raw,cache=none,file=" + d.URL(1)})
		m.word(machine.WordRunning)
		url := fmt.Sprintf("http://127.0.0.1:%d/", port)
		require.Equal(t, posted, get(t, url), "round %d", round)
		a := aboutOn(t, m.console())
		require.Equal(t, []string{"/usr/bin/container", "about", "web"}, a.Args)
		require.Subset(t, a.Env, []string{`WEB_PASSWORD="a b"=c`, "COLOUR=red", "SIZE=12",
			"PATH=/usr/local/bin:/usr/bin"})
		require.NotContains(t, a.Env, "COLOUR=green", "--env wins over the file")
		require.Equal(t, []int{1000, 8}, []int{a.UID, a.GID})
		require.Equal(t, "/etc", a.Dir)
		post := func(line string) error {
			response, err := http.Post(url, "text/plain", strings.NewReader(line))
			if err != nil {
				return err
			}
			if response.StatusCode != http.StatusOK {
				err = errors.New(response.Status)
			}
			return errors.Join(err, response.Body.Close())
		}
		require.NoError(t, post(fmt.Sprintf("round %d\n", round)))
		posted += fmt.Sprintf("round %d\n", round)
		require.Equal(t, posted, get(t, url))
		if round == 0 {
			d.Stop() // SIGTERM
			waits := testtool.Go(func() error { return post("meanwhile\n") })
			d = serve()
			require.NoError(t, <-waits)
			posted += "meanwhile\n"
			require.Equal(t, posted, get(t, url))
			m.powerButton()
		} else {
			require.NoError(t, testtool.Err(fmt.Fprintln(m.port, machine.WordStop)))
		}
		require.Equal(t, "42", m.exited())
		require.Contains(t, m.console(), "stopped by its stop signal\n")
		requireClean(t, rawOf(t, d.URL(1)))
		d.Stop()
		require.NoError(t, os.RemoveAll(filepath.Join(layout, "blobs")))
		require.NoError(t, os.WriteFile(filepath.Join(layout, "index.json"), []byte("{}"), 0o644))
	}
}

// get reads from a web server that is about to start.
func get(t *testing.T, url string) string {
	t.Helper()
	client := http.Client{Timeout: 10 * time.Second}
	text := ""
	testtool.Within(t, rig.MachineTime, func() bool {
		response, err := client.Get(url)
		if err != nil {
			text = err.Error()
			return false
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		text = string(body)
		return err == nil && response.StatusCode == http.StatusOK
	}, "%s answers: %s", url, func() any { return text })
	return text
}

// TestKernelBootExample: the VirtualMachine boots the files in the image kubevirt.io:adapter, with
// that image's disk.
func TestKernelBootExample(t *testing.T) {
	text := rig.ReadFile(t, filepath.Join("..", "..", "examples", "container", "kernelboot.yaml"))
	var vm map[string]any
	for document := range strings.SplitSeq(text, "\n---\n") {
		if strings.Contains(document, "kind: VirtualMachine\n") {
			require.NoError(t, yaml.Unmarshal([]byte(document), &vm))
		}
	}
	domain := dig(t, vm, "spec", "template", "spec", "domain").(map[string]any)
	boot := dig(t, domain, "firmware", "kernelBoot").(map[string]any)
	files := rig.ReadFile(t, filepath.Join("..", "..", "scripts", "build-image.sh"))
	for key, file := range map[string]string{"kernelPath": "vmlinuz", "initrdPath": "initrd"} {
		require.Equal(t, "/boot/"+file, dig(t, boot, "container", key))
		require.Contains(t, files, "/"+file+`"`)
	}
	disk := dig(t, domain, "devices", "disks").([]any)[0].(map[string]any)
	require.Contains(t, strings.Fields(boot["kernelArgs"].(string)),
		machine.ParamSerial+"="+disk["serial"].(string))
}

// dig follows keys in a document.
func dig(t *testing.T, in map[string]any, keys ...string) any {
	t.Helper()
	var value any = in
	for _, key := range keys {
		level, ok := value.(map[string]any)
		require.True(t, ok, key)
		value, ok = level[key]
		require.True(t, ok, key)
	}
	return value
}

// TestRunContainer runs the script of `make run-container`: it builds a small image, and boots it
// with plain QEMU from its LUN. Another image is a web server that answers. SIGINT (Ctrl-C) and
// SIGTERM are the power button.
func TestRunContainer(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	rig.Need(t, "bash", "setpriv", rig.QEMUISCSI)
	ref, boot := requireContainerImage(t), requireBootFiles(t)
	path := rig.Program(t)
	e := rig.OwnEngine(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*rig.MachineTime)
	defer cancel()
	var out bytes.Buffer
	command := func(env ...string) *exec.Cmd {
		port := testtool.Must(peers.FreePort())(t)
		out.Reset()
		cmd := exec.CommandContext(ctx, filepath.Join("..", "..", "scripts", "run-container.sh"),
			path, boot, t.TempDir())
		cmd.Env = append(append(os.Environ(), e.Vars...), fmt.Sprint("PORT=", port))
		cmd.Env = append(cmd.Env, env...)
		cmd.Stdout, cmd.Stderr = &out, &out
		cmd.WaitDelay = rig.MachineTime
		return cmd
	}
	says := func(text string) {
		t.Helper()
		require.Contains(t, strings.ReplaceAll(out.String(), "\r\n", "\n"), text)
	}

	require.NoError(t, command("IMAGE=").Run(), "%s", &out)
	says("Hello from a container image in a virtual machine: Linux ")
	says("user 0, start 1\n")
	says("run-container: the exit status of the entry point is 7\n")

	for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		web := testtool.Must(peers.FreePort())(t)
		cmd := command("IMAGE="+ref, fmt.Sprintf("FORWARD=%d:80", web))
		require.NoError(t, cmd.Start())
		require.Empty(t, get(t, fmt.Sprintf("http://127.0.0.1:%d/", web)))
		require.NoError(t, cmd.Process.Signal(signal))
		require.NoError(t, cmd.Wait(), "%s", &out)
		says("stopped by its stop signal\n")
		says("run-container: the exit status of the entry point is 42\n")
	}
}
