package machines

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"libvirt.org/go/libvirtxml"

	"kubevirt.io/disk/integration/guest"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/libvirt"
)

// writerScript writes block after block to the disk, each past every cache, and prints the number
// of each. It tries each block only once.
const writerScript = `
until test -b /dev/sda; do sleep 0.1; done
n=0
while test $n -lt 100000; do
	if printf '%-512s' "block $n" |
		dd of=/dev/sda bs=512 seek=$n conv=notrunc,fsync oflag=direct 2>/dev/null; then
		echo "wrote $n"
	else
		echo "refused $n"
	fi
	n=$((n + 1))
done
`

// buildWriter makes the guest that writes, and returns its kernel and its initramfs.
func buildWriter(t *testing.T, dir string) (kernel, initrd string) {
	t.Helper()
	kernel, initrd, err := guest.Build(dir, guest.Options{
		Init: writerScript, Modules: []string{"virtio_pci", "virtio_scsi", "sd_mod"},
		CacheDir: filepath.Join("..", "..", "cache", "guest"),
	})
	guest.Made(t, err)
	return kernel, initrd
}

// writerDisk makes the image that the guest writes to, which is served in place, and returns its
// path.
func writerDisk(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk", "vm.raw")
	rig.MakeRaw(t, path, 64<<20)
	return path
}

// requireBlocks checks that the image has the first n blocks as the guest wrote them.
func requireBlocks(t *testing.T, image string, n int) {
	t.Helper()
	content := testtool.Must(os.ReadFile(image))(t)
	for i := range n {
		want := fmt.Sprintf("%-512s", fmt.Sprintf("block %d", i))
		require.Equal(t, want, string(content[i*512:(i+1)*512]))
	}
}

// migration follows a section of a document, in the directory dir.
type migration struct {
	t    *testing.T
	doc  *rig.Document
	dir  string
	vars string // put before every block
	env  []string
	next int // the next block of the section
}

const migrationSection = "Try it with two QEMUs"

// block returns the next block of the section, which must contain the word about.
func (m *migration) block(about string) string {
	m.t.Helper()
	text := m.doc.Section(m.t, migrationSection, m.next)
	m.next++
	require.Contains(m.t, text, about)
	return text
}

// command prepares the next block as a command. The guest's console goes to the file console.
func (m *migration) command(about, console string) *exec.Cmd {
	m.t.Helper()
	vars := m.vars + "guest=\"$guest -serial file:" + console + "\"\n"
	cmd := exec.Command("bash", "-c", "set -e\n"+vars+m.block(about))
	cmd.Dir, cmd.Env = m.dir, m.env
	return cmd
}

// sh runs the next block to its end.
func (m *migration) sh(about string) (output string, status int) {
	m.t.Helper()
	out, err := m.command(about, "none").CombinedOutput()
	if err != nil {
		require.ErrorAs(m.t, err, new(*exec.ExitError))
		return string(out), 1
	}
	return string(out), 0
}

// machine starts the QEMU of the next block, and connects to its monitor.
func (m *migration) machine(name, about string) *qmp {
	m.t.Helper()
	return startQEMU(m.t, m.command(about, name+".console"), m.dir, name)
}

// startQEMU runs a command that starts QEMU, and connects to its monitor. The monitor and the
// console have the machine's name in the directory.
func startQEMU(t *testing.T, cmd *exec.Cmd, dir, name string) *qmp {
	t.Helper()
	// A shell and QEMU are one process group, so that killing the group ends QEMU.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	require.NoError(t, cmd.Start())
	q := &qmp{t: t, name: name, ended: make(chan struct{}),
		console: filepath.Join(dir, name+".console")}
	go func() {
		_ = cmd.Wait()
		close(q.ended)
	}()
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-q.ended
		if t.Failed() {
			t.Logf("%s: QEMU printed %q; its guest printed last:\n%s",
				name, out.String(), rig.LastLines(q.said(), 20))
		}
	})
	q.connect(filepath.Join(dir, name+".qmp"))
	return q
}

// qmp is a running QEMU.
type qmp struct {
	t       *testing.T
	name    string
	ended   chan struct{}
	console string // file
	conn    net.Conn
	answers *bufio.Scanner
}

func (q *qmp) connect(path string) {
	q.t.Helper()
	q.until("QEMU listens", func() bool {
		conn, err := net.Dial("unix", path)
		q.conn = conn
		return err == nil
	})
	q.t.Cleanup(func() { q.conn.Close() })
	q.answers = bufio.NewScanner(q.conn)
	require.True(q.t, q.answers.Scan(), "QEMU greets")
	q.ask(`{"execute": "qmp_capabilities"}`)
}

// ask sends a command and returns its answer.
func (q *qmp) ask(command string) map[string]any {
	q.t.Helper()
	require.NoError(q.t, q.conn.SetDeadline(time.Now().Add(rig.Timeout)))
	require.NoError(q.t, testtool.Err(fmt.Fprintln(q.conn, command)))
	for q.answers.Scan() {
		var answer struct {
			Return any            `json:"return"`
			Error  map[string]any `json:"error"`
			Event  string         `json:"event"`
		}
		require.NoError(q.t, json.Unmarshal(q.answers.Bytes(), &answer))
		if answer.Event != "" {
			continue
		}
		require.Empty(q.t, answer.Error, "%s: %s", q.name, command)
		object, _ := answer.Return.(map[string]any)
		return object
	}
	require.Fail(q.t, "QEMU is gone", "%s: %s: %v", q.name, command, q.answers.Err())
	return nil
}

// until waits for a condition on this machine.
func (q *qmp) until(what string, holds func() bool) {
	q.t.Helper()
	testtool.Within(q.t, rig.GuestCommand, func() bool {
		if holds() {
			return true
		}
		select {
		case <-q.ended:
			require.Fail(q.t, "QEMU has ended", "%s, before %s", q.name, what)
		default:
		}
		return false
	}, "%s: %s", q.name, what)
}

// said is what the guest has printed on this machine.
func (q *qmp) said() string {
	text, err := os.ReadFile(q.console)
	if err != nil {
		return ""
	}
	return strings.ReplaceAll(string(text), "\r\n", "\n")
}

// says waits until the guest has printed the word for n blocks.
func (q *qmp) says(word string, n int) {
	q.t.Helper()
	q.until(fmt.Sprintf("the guest %s %d blocks", word, n), func() bool {
		return len(rig.BlocksSaid(q.said(), word)) >= n
	})
}

// TestLiveMigration follows docs/live-migration.md: a guest that writes moves from one QEMU to
// another, together with the LUN.
func TestLiveMigration(t *testing.T) {
	t.Parallel() // a guest has one processor
	rig.Need(t, "bash", "qemu-system-x86_64", "qemu-io", rig.QEMUISCSI, "apt-get", "dpkg-deb")
	dir := t.TempDir()
	kernel, initrd := buildWriter(t, dir)
	image := writerDisk(t)
	state := t.TempDir()
	d := rig.Start(t, rig.Config{DiskDir: filepath.Dir(image), StateDir: state,
		Env: map[string]string{
			"CHAP_USERNAME": "vm", "CHAP_PASSWORD": rig.Password, "COPY_MODE": "none",
		}})
	require.NoError(t, os.WriteFile(filepath.Join(dir, "password"), []byte(rig.Password), 0o600))
	path := rig.Program(t)
	m := &migration{t: t, doc: rig.ReadDocument(t, "../docs/live-migration.md"), dir: dir}
	m.env = rig.ClientEnv("WORK_DIR="+filepath.Join(state, "work"),
		"PATH="+filepath.Dir(path)+":"+os.Getenv("PATH"))
	m.vars = "guest='-accel tcg -m " + guest.MemorySize(256) + " -nodefaults -no-user-config" +
		" -display none -no-reboot -kernel " + kernel + " -initrd " + initrd +
		" -append console=ttyS0'\n" +
		strings.Replace(m.block("portal="), "127.0.0.1:3260", d.Portals[0], 1)

	const first, second = "iqn.2017-01.io.kubevirt:node-1:vm", "iqn.2017-01.io.kubevirt:node-2:vm"
	source := m.machine("source", "initiator-name=$source")
	source.says("wrote", 20)
	out, status := m.sh("--to")
	require.Zero(t, status, out)
	require.Contains(t, out, second)
	destination := m.machine("destination", "-incoming")
	before := len(rig.BlocksSaid(source.said(), "wrote"))
	source.says("wrote", before+20)
	require.Empty(t, destination.said())

	commands := strings.Split(strings.TrimSpace(m.block("migrate")), "\n")
	require.Len(t, commands, 2)
	source.ask(commands[0])
	source.until("completed", func() bool {
		status := source.ask(commands[1])["status"]
		require.NotEqual(t, "failed", status)
		return status == "completed"
	})
	destination.until("running", func() bool {
		return destination.ask(`{"execute": "query-status"}`)["status"] == "running"
	})
	require.Equal(t, "postmigrate", source.ask(`{"execute": "query-status"}`)["status"])
	out, status = m.sh("--finish")
	require.Zero(t, status, out)
	require.Contains(t, out, "the former one, "+first+", is fenced")
	require.Contains(t, d.Get("/status"), first)

	out, status = m.sh("qemu-io")
	require.NotZero(t, status, out)
	require.Contains(t, out, "write failed: Input/output error")
	destination.says("wrote", 20)
	require.Empty(t, rig.BlocksSaid(destination.said(), "refused"))

	// The first machine resumes the guest that it still has in its memory. That guest may print
	// once more that it wrote a block.
	said := source.said()
	source.ask(strings.TrimSpace(m.block("cont")))
	source.says("refused", 3)
	wrote, refused := rig.BlocksSaid(source.said(), "wrote"), rig.BlocksSaid(source.said(),
		"refused")
	require.LessOrEqual(t, len(wrote), len(rig.BlocksSaid(said, "wrote"))+1,
		"the first machine has written after the handover")
	require.Equal(t, len(wrote), refused[0])
	source.ask(strings.TrimSpace(m.block("quit")))
	<-source.ended
	require.Empty(t, m.doc.Blocks[migrationSection][m.next:],
		"the test must follow every block of the document")

	destination.says("wrote", 50)
	destination.ask(`{"execute": "quit"}`)
	<-destination.ended
	require.Empty(t, rig.BlocksSaid(destination.said(), "refused"))
	d.Stop()
	wrote = rig.BlocksSaid(said+destination.said(), "wrote")
	for i, n := range wrote {
		require.Equal(t, i, n, "the guest lost a block, or wrote one twice")
	}
	requireBlocks(t, image, len(wrote))
}

// TestLibvirtMigration follows docs/live-migration.md with two libvirt daemons. A domain that
// writes moves from one to the other, where its disk has another initiator name.
func TestLibvirtMigration(t *testing.T) {
	testtool.NeedNightly(t)
	t.Parallel()
	rig.Need(t, append(libvirtTools, "bash")...)
	node1, node2 := startLibvirtd(t), startLibvirtd(t)
	kernel, initrd := buildWriter(t, node1.dir)
	image, state := writerDisk(t), t.TempDir()
	d := rig.Start(t, rig.Config{DiskDir: filepath.Dir(image), StateDir: state,
		Env: map[string]string{
			"CHAP_USERNAME": "vm", "CHAP_PASSWORD": rig.Password, "COPY_MODE": "none",
		}})
	path := rig.Program(t)
	xml := func(node string, args ...string) string {
		args = append([]string{"xml", "--status-url=http://" + d.Metrics}, args...)
		return rig.OKEnv(t, []string{"NODE_NAME=" + node}, path, args...)
	}
	for _, node := range []*libvirtd{node1, node2} {
		node.defineSecret(xml("", "--secret"), rig.Password)
	}
	const first, second = "iqn.2017-01.io.kubevirt:node-1:vm", "iqn.2017-01.io.kubevirt:node-2:vm"
	disk := func(node string) string {
		return xml(node, "--domain=vm", "--chap-username=vm", "--target-dev=sda")
	}
	require.Equal(t, strings.Replace(disk("node-1"), first, second, 1), disk("node-2"),
		"the XML must differ only in the initiator name")

	console := node1.listen("console")
	document := domainXML(t, disk("node-1"), kernel, initrd, console.Addr().String())
	document = strings.Replace(document, "<name>guest<", "<name>vm<", 1)
	for _, node := range []*libvirtd{node1, node2} {
		t.Cleanup(func() { _, _ = node.tryVirsh("destroy", "vm") }) // it outlives its libvirtd
	}
	node1.virsh("define", node1.file("domain.xml", document))
	node1.virsh("start", "vm")
	before := readConsole(t, console)
	for range 20 {
		before.Until(t, "wrote ")
	}

	doc := rig.ReadDocument(t, "../docs/live-migration.md")
	cmd := exec.CommandContext(t.Context(), "bash", "-c",
		"set -e\n"+doc.Section(t, "With libvirt", 0))
	cmd.Dir = t.TempDir()
	cmd.Env = rig.ClientEnv("WORK_DIR="+filepath.Join(state, "work"),
		"PATH="+filepath.Dir(path)+":"+os.Getenv("PATH"),
		"LIBVIRT_DEFAULT_URI="+node1.uri(), "source="+first, "destination="+second,
		"node2="+node2.uri()+" --migrateuri tcp:127.0.0.1 --listen-address 127.0.0.1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "LUN 1 is open to "+second)
	require.Contains(t, string(out), "the former one, "+first+", is fenced")
	require.Contains(t, d.Get("/status"), first)

	after := readConsole(t, console)
	var last string
	for range 20 {
		last = after.Until(t, "wrote ")
	}
	_, err = node1.tryVirsh("dominfo", "vm")
	require.Error(t, err, "the domain must be gone from the first machine")
	for _, options := range [][]string{nil, {"--inactive"}} {
		var domain libvirtxml.Domain
		shown := node2.virsh(append([]string{"dumpxml", "vm"}, options...)...)
		require.NoError(t, domain.Unmarshal(shown))
		_, device := testtool.Must2(libvirt.FromDisk(&domain.Devices.Disks[0]))(t)
		require.Equal(t, second, device.Initiator)
	}
	node2.virsh("destroy", "vm")
	d.Stop()
	require.NotContains(t, strings.Join(append(before.Seen, after.Seen...), "\n"), "refused")
	requireBlocks(t, image, testtool.Must(strconv.Atoi(last))(t)+1)
}
