package rig

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

// RunningTarget is a target in this process, because LUNs do not come and go in the daemon yet.
type RunningTarget struct {
	*target.Server
	InUse  *serving.Disks
	Portal string
}

// resizable is a disk in memory that can change its size.
type resizable struct {
	*disktest.Memory
	Now atomic.Int64
}

func (d *resizable) Size() int64 { return d.Now.Load() }

const RunningSize = 64 << 20

// RunningLUN is a LUN on an empty disk of its own.
func RunningLUN(number uint16, id uint64) (serving.Options, *resizable) {
	d := &resizable{Memory: disktest.NewMemory(4 * RunningSize)}
	d.Now.Store(RunningSize)
	identity := disk.Identity{
		Serial: fmt.Sprintf("running-%d", id),
		NAA:    [8]byte{0x30, 6: byte(id >> 8), 7: byte(id)},
	}
	return serving.Options{Number: number, Name: "running", Disk: d, Identity: identity,
		Access: serving.AccessWriteShared}, d
}

func (s *RunningTarget) Add(t *testing.T, number uint16, id uint64) *resizable {
	t.Helper()
	l, d := RunningLUN(number, id)
	require.NoError(t, s.InUse.Add(l))
	return d
}

// Remove removes a LUN and waits until its disk is released.
func (s *RunningTarget) Remove(t *testing.T, number uint16) {
	t.Helper()
	released := testtool.Must(s.InUse.Remove(number))(t)
	<-released
}

// Monitor drives a QEMU with a SCSI controller and no guest, over its monitor.
type Monitor struct {
	t   *testing.T
	in  io.Writer
	out *bufio.Scanner
	nbd string // the socket of its NBD server
}

func StartMonitor(t *testing.T) *Monitor {
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
	m := &Monitor{t: t, in: in, out: bufio.NewScanner(out), nbd: filepath.Join(t.TempDir(), "nbd")}
	require.True(t, m.out.Scan(), "the greeting")
	m.Good("qmp_capabilities", nil)
	m.Good("nbd-server-start", map[string]any{"addr": map[string]any{"type": "unix",
		"data": map[string]any{"path": m.nbd}}})
	return m
}

// Do executes a command and returns its result, or its error.
func (m *Monitor) Do(command string, arguments map[string]any) (string, error) {
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

func (m *Monitor) Good(command string, arguments map[string]any) string {
	m.t.Helper()
	answer := testtool.Must(m.Do(command, arguments))(m.t)
	return answer
}

// Plug gives a LUN to the machine, and exports it over NBD, so that the test can read and write in
// place of a guest.
func (m *Monitor) Plug(s *RunningTarget, lun int) {
	m.t.Helper()
	node := fmt.Sprintf("node%d", lun)
	m.Good("blockdev-add", ISCSINode(s, lun))
	m.Good("device_add", map[string]any{"driver": "scsi-hd", "id": fmt.Sprintf("disk%d", lun),
		"drive": node, "bus": "scsi0.0", "share-rw": true})
	m.Export(lun)
}

func (m *Monitor) Export(lun int) {
	m.t.Helper()
	node := fmt.Sprintf("node%d", lun)
	m.Good("block-export-add", map[string]any{"type": "nbd", "id": "export-" + node,
		"node-name": node, "writable": true})
}

// Withdraw ends an export and waits for its end, because an exported disk cannot be resized.
func (m *Monitor) Withdraw(lun int) {
	m.t.Helper()
	m.Good("block-export-del",
		map[string]any{"id": fmt.Sprintf("export-node%d", lun), "mode": "hard"})
	testtool.Within(m.t, GuestCommand, func() bool {
		return !strings.Contains(m.Good("query-block-exports", nil),
			fmt.Sprintf("export-node%d", lun))
	}, "the export of LUN %d has ended", lun)
}

func ISCSINode(s *RunningTarget, lun int) map[string]any {
	return map[string]any{"driver": "iscsi", "node-name": fmt.Sprintf("node%d", lun), "lun": lun,
		"transport": "tcp", "portal": s.Portal, "target": target.DefaultTargetName}
}

// Unplug removes a LUN from the machine.
func (m *Monitor) Unplug(lun int) {
	m.t.Helper()
	m.Withdraw(lun)
	m.Good("device_del", map[string]any{"id": fmt.Sprintf("disk%d", lun)})
	var err error
	testtool.Within(m.t, GuestCommand, func() bool {
		_, err = m.Do("blockdev-del", map[string]any{"node-name": fmt.Sprintf("node%d", lun)})
		return err == nil
	}, "LUN %d is unplugged: %v", lun, func() any { return err })
}

// IO runs a qemu-io command on a disk of the machine.
func (m *Monitor) IO(lun int, command string) (output string, status int) {
	m.t.Helper()
	url := fmt.Sprintf("nbd+unix:///node%d?socket=%s", lun, m.nbd)
	r := Client(m.t, nil, "qemu-io", "-f", "raw", "-c", command, url)
	return r.Output, r.Status
}

// Works writes a pattern to a disk of the machine and reads it back.
func (m *Monitor) Works(lun, pattern int, at int64) {
	m.t.Helper()
	for _, command := range []string{"write", "read"} {
		output, status := m.IO(lun, fmt.Sprintf("%s -P %d %d 64k", command, pattern, at))
		require.Zero(m.t, status, output)
		require.NotContains(m.t, output, "ailed")
	}
}

// Until waits until a job has that status, and dismisses it if it has ended.
func (m *Monitor) Until(job, status string) {
	m.t.Helper()
	testtool.Within(m.t, GuestCommand, func() bool {
		jobs := m.Good("query-jobs", nil)
		require.NotContains(m.t, jobs, `"error"`)
		if status == `"concluded"` && !strings.Contains(jobs, `"`+job+`"`) {
			return true // QEMU has dismissed it itself
		}
		return strings.Contains(jobs, status)
	}, "the job is %s", status)
}
