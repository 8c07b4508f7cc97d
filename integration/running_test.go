package integration

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target"
)

// runningTarget is a target in this process, because LUNs do not come and go in the daemon yet.
type runningTarget struct {
	*target.Server
	inUse  *serving.Disks
	portal string
}

// resizable is a disk in memory that can change its size.
type resizable struct {
	*disktest.Memory
	size atomic.Int64
}

func (d *resizable) Size() int64 { return d.size.Load() }

const runningSize = 64 << 20

// runningLUN is a LUN on an empty disk of its own.
func runningLUN(number uint16, id uint64) (serving.Options, *resizable) {
	d := &resizable{Memory: disktest.NewMemory(4 * runningSize)}
	d.size.Store(runningSize)
	identity := disk.Identity{
		Serial: fmt.Sprintf("running-%d", id),
		NAA:    [8]byte{0x30, 6: byte(id >> 8), 7: byte(id)},
	}
	return serving.Options{Number: number, Name: "running", Disk: d, Identity: identity,
		Access: serving.AccessWriteShared}, d
}

func (s *runningTarget) add(t *testing.T, number uint16, id uint64) *resizable {
	t.Helper()
	l, d := runningLUN(number, id)
	require.NoError(t, s.inUse.Add(l))
	return d
}

// remove removes a LUN and waits until its disk is released.
func (s *runningTarget) remove(t *testing.T, number uint16) {
	t.Helper()
	released, err := s.inUse.Remove(number)
	require.NoError(t, err)
	<-released
}

// monitor drives a QEMU with a SCSI controller and no guest, over its monitor.
type monitor struct {
	t   *testing.T
	in  io.Writer
	out *bufio.Scanner
	nbd string // the socket of its NBD server
}

func startMonitor(t *testing.T) *monitor {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "qemu-system-x86_64", "-S", "-M", "q35", "-nodefaults",
		"-display", "none", "-m", "64", "-device", "virtio-scsi-pci,id=scsi0", "-qmp", "stdio")
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	m := &monitor{t: t, in: in, out: bufio.NewScanner(out), nbd: filepath.Join(t.TempDir(), "nbd")}
	require.True(t, m.out.Scan(), "the greeting")
	m.good("qmp_capabilities", nil)
	m.good("nbd-server-start", map[string]any{"addr": map[string]any{"type": "unix",
		"data": map[string]any{"path": m.nbd}}})
	return m
}

// do executes a command and returns its result, or its error.
func (m *monitor) do(command string, arguments map[string]any) (string, error) {
	m.t.Helper()
	request := map[string]any{"execute": command}
	if arguments != nil {
		request["arguments"] = arguments
	}
	text, err := json.Marshal(request)
	require.NoError(m.t, err)
	_, err = m.in.Write(append(text, '\n'))
	require.NoError(m.t, err)
	for m.out.Scan() {
		var answer struct {
			Return json.RawMessage `json:"return"`
			Error  *struct {
				Desc string `json:"desc"`
			} `json:"error"`
		}
		require.NoError(m.t, json.Unmarshal(m.out.Bytes(), &answer))
		switch {
		case answer.Error != nil:
			return "", fmt.Errorf("%s: %s", command, answer.Error.Desc)
		case answer.Return != nil:
			return string(answer.Return), nil
		}
	}
	m.t.Fatalf("%s: QEMU has ended: %v", command, m.out.Err())
	return "", nil
}

func (m *monitor) good(command string, arguments map[string]any) string {
	m.t.Helper()
	answer, err := m.do(command, arguments)
	require.NoError(m.t, err)
	return answer
}

// plug gives a LUN to the machine, and exports it over NBD, so that the test can read and write in
// place of a guest.
func (m *monitor) plug(s *runningTarget, lun int) {
	m.t.Helper()
	node := fmt.Sprintf("node%d", lun)
	m.good("blockdev-add", iscsiNode(s, lun))
	m.good("device_add", map[string]any{"driver": "scsi-hd", "id": fmt.Sprintf("disk%d", lun),
		"drive": node, "bus": "scsi0.0", "share-rw": true})
	m.export(lun)
}

func (m *monitor) export(lun int) {
	m.t.Helper()
	node := fmt.Sprintf("node%d", lun)
	m.good("block-export-add", map[string]any{"type": "nbd", "id": "export-" + node,
		"node-name": node, "writable": true})
}

// withdraw ends an export and waits for its end, because an exported disk cannot be resized.
func (m *monitor) withdraw(lun int) {
	m.t.Helper()
	m.good("block-export-del",
		map[string]any{"id": fmt.Sprintf("export-node%d", lun), "mode": "hard"})
	testtool.Within(m.t, guestCommand, func() bool {
		return !strings.Contains(m.good("query-block-exports", nil),
			fmt.Sprintf("export-node%d", lun))
	}, "the export of LUN %d has ended", lun)
}

func iscsiNode(s *runningTarget, lun int) map[string]any {
	return map[string]any{"driver": "iscsi", "node-name": fmt.Sprintf("node%d", lun), "lun": lun,
		"transport": "tcp", "portal": s.portal, "target": target.DefaultTargetName}
}

// unplug removes a LUN from the machine.
func (m *monitor) unplug(lun int) {
	m.t.Helper()
	m.withdraw(lun)
	m.good("device_del", map[string]any{"id": fmt.Sprintf("disk%d", lun)})
	var err error
	testtool.Within(m.t, guestCommand, func() bool {
		_, err = m.do("blockdev-del", map[string]any{"node-name": fmt.Sprintf("node%d", lun)})
		return err == nil
	}, "LUN %d is unplugged: %v", lun, func() any { return err })
}

// io runs a qemu-io command on a disk of the machine.
func (m *monitor) io(lun int, command string) (output string, status int) {
	m.t.Helper()
	url := fmt.Sprintf("nbd+unix:///node%d?socket=%s", lun, m.nbd)
	r := client(m.t, nil, "qemu-io", "-f", "raw", "-c", command, url)
	return r.output, r.status
}

// works writes a pattern to a disk of the machine and reads it back.
func (m *monitor) works(lun, pattern int, at int64) {
	m.t.Helper()
	for _, command := range []string{"write", "read"} {
		output, status := m.io(lun, fmt.Sprintf("%s -P %d %d 64k", command, pattern, at))
		require.Zero(m.t, status, output)
		require.NotContains(m.t, output, "ailed")
	}
}

// until waits until a job has that status, and dismisses it if it has ended.
func (m *monitor) until(job, status string) {
	m.t.Helper()
	testtool.Within(m.t, guestCommand, func() bool {
		jobs := m.good("query-jobs", nil)
		require.NotContains(m.t, jobs, `"error"`)
		if status == `"concluded"` && !strings.Contains(jobs, `"`+job+`"`) {
			return true // QEMU has dismissed it itself
		}
		return strings.Contains(jobs, status)
	}, "the job is %s", status)
}
