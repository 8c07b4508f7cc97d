package machines

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/adapter/initrd"
	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// bootFiles makes the kernel and the initramfs that boot container images, once per run.
var bootFiles = sync.OnceValues(func() (dir string, err error) { return makeBootFiles("amd64") })

func makeBootFiles(arch string) (dir string, err error) {
	if dir, err = rig.DirOfRun("boot"); err != nil {
		return "", err
	}
	kernels, err := filepath.Abs(filepath.Join("..", "..", "cache", "kernel"))
	if err != nil {
		return dir, err
	}
	program := filepath.Join(dir, "init")
	for _, args := range [][]string{
		{"scripts/fetch-kernel.sh", "--any", arch, kernels},
		{"go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program,
			"./cmd/kubevirt-disk-init"},
	} {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = "../.."
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH="+arch)
		if out, err := cmd.CombinedOutput(); err != nil {
			return dir, fmt.Errorf("%s: %w\n%s", cmd, err, out)
		}
	}
	tree := filepath.Join(kernels, arch, "root")
	content, err := initrd.Build(initrd.Options{Init: program, KernelTree: tree})
	if err != nil {
		return dir, err
	}
	kernel, err := initrd.Kernel(tree)
	if err != nil {
		return dir, err
	}
	return dir, errors.Join(os.WriteFile(filepath.Join(dir, "initrd"), content, 0o644),
		os.Symlink(kernel, filepath.Join(dir, "vmlinuz")))
}

// requireBootFiles returns the directory with vmlinuz and initrd.
func requireBootFiles(t *testing.T) string {
	t.Helper()
	rig.Need(t, "qemu-system-x86_64", "apt-get", "dpkg-deb")
	return madeBootFiles(t, bootFiles)
}

func madeBootFiles(t *testing.T, make func() (dir string, err error)) string {
	t.Helper()
	dir, err := make()
	requireKernel(t, err)
	return dir
}

// requireKernel skips the test if a kernel could not be fetched, and fails for any other error.
func requireKernel(t *testing.T, err error) {
	t.Helper()
	if err != nil && strings.Contains(err.Error(), "fetch-kernel: apt-get") {
		testtool.Needs(t, "a network: "+err.Error(), false)
	}
	require.NoError(t, err)
}

// machineConfig describes a machine to boot.
type machineConfig struct {
	disk    string // QEMU's options of the drive, such as "file=disk.qcow2,format=qcow2"
	cmdline string // more parameters of the kernel
	append  string // the kernel's command line before them; "": machine.KernelArgs
	forward int    // a port of the host that leads to port 80; 0: none
	netdev  string // QEMU's options of another network; "": the user's
	noNet   bool
	boot    string // the directory with vmlinuz and initrd; "": bootFiles
	arm64   bool
	// firmware is a file of UEFI. "": there is none.
	firmware string
}

// containerMachine is a virtual machine that runs a container image.
type containerMachine struct {
	t     *testing.T
	dir   string
	cmd   *exec.Cmd
	qemu  *qmp
	words *bufio.Reader // from the machine's port
	port  net.Conn
}

// bootMachine starts a machine. It is killed at the end of the test if it still runs.
func bootMachine(t *testing.T, c machineConfig) *containerMachine {
	t.Helper()
	if c.boot == "" {
		c.boot = requireBootFiles(t)
	}
	// The names of sockets are short.
	dir := testtool.Must(os.MkdirTemp("", "machine-"))(t)
	t.Cleanup(func() { os.RemoveAll(dir) })
	m := &containerMachine{t: t, dir: dir}
	m.qemu = &qmp{t: t, name: "the machine", ended: make(chan struct{}), console: m.file("console")}
	qemu, board, arch := "qemu-system-x86_64", "q35", "amd64"
	if c.arm64 {
		qemu, board, arch = "qemu-system-aarch64", "virt", "arm64"
	}
	if c.append == "" {
		c.append = machine.KernelArgs(arch, machine.DefaultSerial)
	}
	args := []string{"-accel", "tcg", "-machine", board, "-cpu", "max", "-m", "256",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-kernel", filepath.Join(c.boot, "vmlinuz"), "-initrd", filepath.Join(c.boot, "initrd"),
		"-append", c.append + " " + c.cmdline,
		"-drive", "if=none,id=disk," + c.disk,
		"-device", "virtio-blk-pci,drive=disk,serial=" + machine.DefaultSerial,
		"-chardev", "file,id=console,path=" + m.file("console"), "-serial", "chardev:console",
		"-chardev", "socket,id=words,server=on,wait=off,path=" + m.file("words"),
		"-device", "virtio-serial-pci",
		"-device", "virtserialport,chardev=words,name=" + machine.Port,
		"-qmp", "unix:" + m.file("qmp") + ",server=on,wait=off"}
	if !c.noNet {
		netdev := "user,id=net"
		if c.netdev != "" {
			netdev = c.netdev
		}
		if c.forward != 0 {
			netdev += fmt.Sprintf(",hostfwd=tcp:127.0.0.1:%d-:80", c.forward)
		}
		args = append(args, "-netdev", netdev, "-device", "virtio-net-pci,netdev=net,romfile=")
	}
	if c.firmware != "" {
		args = append(args, "-bios", c.firmware)
	}
	m.cmd = exec.Command(qemu, args...)
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var printed strings.Builder
	m.cmd.Stderr = &printed
	require.NoError(t, m.cmd.Start())
	go func() {
		_ = m.cmd.Wait()
		close(m.qemu.ended)
	}()
	t.Cleanup(func() {
		m.kill()
		if t.Failed() {
			t.Logf("QEMU printed %q, the console ends:\n%s", printed.String(),
				rig.LastLines(m.console(), 40))
		}
	})
	m.port = m.connect("words")
	m.qemu.connect(m.file("qmp"))
	m.words = bufio.NewReader(m.port)
	return m
}

func (m *containerMachine) file(name string) string { return filepath.Join(m.dir, name) }

// connect reaches a socket of QEMU.
func (m *containerMachine) connect(name string) net.Conn {
	m.t.Helper()
	var conn net.Conn
	testtool.Within(m.t, rig.MachineTime, func() (ok bool) {
		var err error
		conn, err = net.Dial("unix", m.file(name))
		return err == nil
	}, "QEMU has a socket")
	m.t.Cleanup(func() { conn.Close() })
	return conn
}

// word waits for a line of the machine that begins with a word, and returns the rest of the line.
func (m *containerMachine) word(word string) string {
	m.t.Helper()
	require.NoError(m.t, m.port.SetDeadline(time.Now().Add(rig.MachineTime)))
	for {
		line, err := m.words.ReadString('\n')
		require.NoError(m.t, err, "the machine ends without the word %q", word)
		if rest, ok := strings.CutPrefix(strings.TrimSpace(line), word); ok {
			return strings.TrimSpace(rest)
		}
	}
}

// powerButton presses the power button.
func (m *containerMachine) powerButton() {
	m.t.Helper()
	m.qemu.ask(`{"execute":"system_powerdown"}`)
}

// ctrlAltDel presses Ctrl-Alt-Del.
func (m *containerMachine) ctrlAltDel() {
	m.t.Helper()
	var keys []string
	for _, key := range []string{"ctrl", "alt", "delete"} {
		keys = append(keys, fmt.Sprintf(`{"type":"qcode","data":%q}`, key))
	}
	m.qemu.ask(`{"execute":"send-key","arguments":{"keys":[` + strings.Join(keys, ",") + `]}}`)
}

// exited waits until the machine is off, and returns the exit status of its entry point.
func (m *containerMachine) exited() string {
	m.t.Helper()
	status := m.word(machine.WordExited)
	select {
	case <-m.qemu.ended:
	case <-time.After(rig.MachineTime):
		require.Fail(m.t, "the machine does not go off")
	}
	return status
}

// says waits for a text on the console.
func (m *containerMachine) says(text string) {
	m.t.Helper()
	testtool.Within(m.t, rig.MachineTime, func() bool {
		return strings.Contains(m.console(), text)
	}, "the console says %q", text) // the end of the test shows the console
}

// console returns the console's output.
func (m *containerMachine) console() string { return m.qemu.said() }

// kill pulls the plug.
func (m *containerMachine) kill() {
	_ = m.cmd.Process.Kill()
	<-m.qemu.ended
}

// aboutProgram is what the program "container about" sees of its environment.
type aboutProgram struct {
	PID, UID, GID         int
	Groups                []int
	Args, Env             []string
	Dir, Hostname         string
	Terminal              bool
	Mounts                map[string]string
	Resolv, Hosts, Stderr string
	OpenFiles             struct{ Cur, Max uint64 }
	DiskBytes             uint64
	Addresses             []netip.Addr
	MTU                   int
}

// aboutOn finds on a console what that program printed.
func aboutOn(t *testing.T, console string) (a aboutProgram) {
	t.Helper()
	start := strings.Index(console, `{"PID"`)
	require.GreaterOrEqual(t, start, 0, console)
	require.NoError(t, json.NewDecoder(strings.NewReader(console[start:])).Decode(&a))
	return a
}
