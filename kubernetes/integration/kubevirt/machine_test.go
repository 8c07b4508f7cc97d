package kubevirt

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/internal/testtool"
)

// machine is a VirtualMachineInstance that runs, in one pod.
type machine struct {
	c    *cluster
	t    *testing.T
	name string
	uid  string
	pod  corev1.Pod

	waits int // the result of unresponsive after the last migration that phase made again
}

// running waits until a machine runs and its guest has booted.
func (c *cluster) running(t *testing.T, name string) *machine {
	t.Helper()
	m := &machine{c: c, t: t, name: name}
	t.Cleanup(m.explain)
	m.boots()
	return m
}

// boots waits until the machine runs, and its guest has booted: after its end, another instance.
func (m *machine) boots() {
	m.t.Helper()
	began, former := time.Now(), m.uid
	m.c.until(m.t, m.name+" is Running", func() bool {
		out, err := m.c.TryKubectl("", "get", "vmi", m.name, "-o",
			"jsonpath={.metadata.uid} {.status.phase}")
		uid, phase, _ := strings.Cut(out, " ")
		if err != nil || uid == former {
			return false
		}
		require.NotEqual(m.t, "Failed", phase)
		return phase == "Running"
	})
	took := time.Since(began)
	m.find()
	m.c.until(m.t, m.name+" has booted", func() bool {
		// What is sent too early is lost. So it is sent again soon, but a slow guest may answer.
		limit := min(max(time.Since(began)/10, time.Second), 10*time.Second)
		out, err := m.try("true", limit)
		return err == nil && out == ""
	})
	m.t.Logf("%s is Running on %s after %.1f s, and has booted after %.1f s", m.name,
		m.pod.Spec.NodeName, took.Seconds(), time.Since(began).Seconds())
}

// find finds the pod in which the machine is now.
func (m *machine) find() {
	m.t.Helper()
	m.uid = m.c.Kubectl(m.t, "get", "vmi", m.name, "-o", "jsonpath={.metadata.uid}")
	on := m.c.Kubectl(m.t, "get", "vmi", m.name, "-o", "jsonpath={.status.nodeName}")
	text := m.c.Kubectl(m.t, "get", "pods", "-l", "kubevirt.io/created-by="+m.uid,
		"--field-selector", "status.phase=Running,spec.nodeName="+on, "-o", "json")
	var pods corev1.PodList
	require.NoError(m.t, json.Unmarshal([]byte(text), &pods))
	require.Len(m.t, pods.Items, 1, m.name)
	m.pod = pods.Items[0]
}

// qemu is the version of the QEMU that runs the machine, without its last number.
func (m *machine) qemu() string {
	m.t.Helper()
	said := m.c.Kubectl(m.t, "exec", m.pod.Name, "-c", "compute", "--", "qemu-system-x86_64",
		"--version")
	return regexp.MustCompile(`version (\d+\.\d+)`).FindStringSubmatch(said)[1]
}

// container is the ID of a container of the machine's pod.
func (m *machine) container(name string) string {
	m.t.Helper()
	for _, status := range m.pod.Status.ContainerStatuses {
		if status.Name == name {
			return strings.TrimPrefix(status.ContainerID, "containerd://")
		}
	}
	m.t.Fatalf("%s has no container %s", m.pod.Name, name)
	return ""
}

// answer matches what the guest's console answers to a command.
var answer = regexp.MustCompile(`(?s)begin \d+\n(.*?)\n?\nstatus (\d+)\n`)

// try has the guest's shell run one line, and returns what it prints. A status other than 0 is an
// error. limit is how long the guest may take to begin: what is sent before its shell runs is lost.
func (m *machine) try(line string, limit time.Duration) (string, error) {
	path := filepath.Join(m.c.at(m.pod.Spec.NodeName).Dir, "kubelet/pods", string(m.pod.UID),
		"volumes/kubernetes.io~empty-dir/private", m.uid, "virt-serial0")
	ctx, cancel := context.WithTimeout(m.t.Context(), timeout)
	defer cancel()
	console, err := socket.DialUnix(ctx, path)
	if err != nil {
		return "", err
	}
	defer console.Close()
	mark := fmt.Sprintf("begin %d\n", time.Now().UnixNano())
	if _, err := io.WriteString(console, "echo "+mark[:len(mark)-1]+"; "+line+"\n"); err != nil {
		return "", err
	}
	var seen strings.Builder
	buffer := make([]byte, 64<<10)
	for {
		if err := console.SetReadDeadline(time.Now().Add(limit)); err != nil {
			return "", err
		}
		n, err := console.Read(buffer)
		if err != nil {
			return "", fmt.Errorf("%w: %q", err, seen.String())
		}
		seen.WriteString(strings.ReplaceAll(string(buffer[:n]), "\r", ""))
		_, text, found := strings.Cut(seen.String(), mark)
		if !found {
			continue
		}
		limit = timeout
		if parts := answer.FindStringSubmatch(mark + text); parts != nil {
			if parts[2] != "0" {
				return parts[1], fmt.Errorf("status %s: %s", parts[2], parts[1])
			}
			return strings.TrimSpace(parts[1]), nil
		}
	}
}

// run is try, which must succeed.
func (m *machine) run(line string) string {
	m.t.Helper()
	return testtool.Must(m.try(line, timeout))(m.t, "%s: %s", m.name, line)
}

// sum is the SHA-256 of the guest's whole disk.
func (m *machine) sum(device string) string {
	m.t.Helper()
	return strings.Fields(m.run("sha256sum " + device))[0]
}

// begin is the SHA-256 of as much of a larger disk as the image has.
func (m *machine) begin(device string) string {
	m.t.Helper()
	return strings.Fields(m.run(fmt.Sprintf("head -c %d %s | sha256sum", diskSize, device)))[0]
}

// firstWrite is the sector of the first write of a machine that writes: behind its files.
const firstWrite = (diskSize - 16<<20) / 512

// write has the guest write the numbers from 1 on into a sector each, one after the other, each
// flushed to storage.
func (m *machine) write(device string) {
	m.t.Helper()
	m.run(fmt.Sprintf(`rm -f /tmp/stop; (i=0; until [ -e /tmp/stop ]; do i=$((i+1)); echo $i | `+
		`dd of=%s bs=512 seek=$((%d+i)) conv=sync,fsync 2>/dev/null || echo $i >>/tmp/failed; `+
		`echo $i >/tmp/now; mv /tmp/now /tmp/written; done; touch /tmp/stopped) `+
		`>/dev/null 2>&1 </dev/null & true`, device, firstWrite))
	m.writes(1)
}

// writes waits until the guest has written this many sectors more, and returns how many there are.
func (m *machine) writes(more int) (have int) {
	m.t.Helper()
	first := -1
	m.c.until(m.t, m.name+" writes", func() bool {
		out, err := m.try("cat /tmp/written", 10*time.Second)
		if err != nil {
			return false
		}
		have = testtool.Must(strconv.Atoi(out))(m.t)
		if first < 0 {
			first = have
		}
		return have >= first+more
	})
	return have
}

// found ends the writing, and compares all of it with what the disk has, past the guest's cache. It
// returns how many writes there were. None has failed.
func (m *machine) found(device string) int {
	m.t.Helper()
	m.run("touch /tmp/stop; until [ -e /tmp/stopped ]; do sleep 0.1; done; rm /tmp/stopped")
	require.Empty(m.t, m.run("cat /tmp/failed 2>/dev/null || true"), "writes that failed")
	have := testtool.Must(strconv.Atoi(m.run("cat /tmp/written")))(m.t)
	m.has(device, have)
	m.t.Logf("%s: %d of %[2]d writes found", m.name, have)
	return have
}

// has compares the first writes with what the disk has, past the guest's cache.
func (m *machine) has(device string, writes int) {
	m.t.Helper()
	m.run(fmt.Sprintf(`seq 1 %d >/tmp/want; dd if=%s bs=512 skip=%d count=%[1]d iflag=direct `+
		`2>/dev/null | tr -d '\000' | cmp - /tmp/want`, writes, device, firstWrite+1))
}

// copies has the guest write blocks of 64 KiB, and compares what is read, past its cache.
func (m *machine) copies(device string, first, blocks int) {
	m.t.Helper()
	m.run(fmt.Sprintf("dd if=/dev/urandom of=/tmp/new bs=64k count=%d 2>/dev/null; "+
		"dd if=/tmp/new of=%s bs=64k seek=%d oflag=direct conv=fsync 2>/dev/null; dd if=%[2]s "+
		"bs=64k skip=%[3]d count=%[1]d iflag=direct 2>/dev/null | cmp - /tmp/new",
		blocks, device, first))
}

// ends begins to watch the machine's pod. What it returns waits until the pod is gone, and compares
// the exit statuses of its containers with 0.
func (m *machine) ends() (wait func()) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), timeout)
	cmd := m.c.Command(ctx, "kubectl", "get", "pod", m.pod.Name, "--watch", "-o", "json",
		"--output-watch-events")
	out := testtool.Must(cmd.StdoutPipe())(m.t)
	require.NoError(m.t, cmd.Start())
	events := json.NewDecoder(out)
	var event struct {
		Type   string
		Object corev1.Pod
	}
	require.NoError(m.t, events.Decode(&event)) // the watch has begun
	began := time.Now()
	return func() {
		m.t.Helper()
		defer func() {
			cancel()
			_ = cmd.Wait() // it was killed
		}()
		for event.Type != "DELETED" {
			event.Object = corev1.Pod{}
			require.NoError(m.t, events.Decode(&event), "the pod %s is not gone", m.pod.Name)
		}
		m.t.Logf("%s is gone after %.1f s", m.pod.Name, time.Since(began).Seconds())
		for _, status := range event.Object.Status.ContainerStatuses {
			require.NotNil(m.t, status.State.Terminated, status.Name)
			require.Zero(m.t, status.State.Terminated.ExitCode, status.Name)
		}
	}
}

// delete deletes the machine, and waits for the end of its pod.
func (m *machine) delete(kind string) {
	m.t.Helper()
	wait := m.ends()
	m.c.Kubectl(m.t, "delete", kind, m.name, "--wait=false")
	wait()
}

// explain logs the state of the machine if the test failed.
func (m *machine) explain() {
	if !m.t.Failed() {
		return
	}
	m.c.tell(m.t, "describe", "vmi", m.name)
	m.c.tell(m.t, "get", "pods", "-o", "wide")
	for _, c := range m.pod.Spec.Containers {
		m.c.tell(m.t, "logs", m.pod.Name, "-c", c.Name, "--tail=60")
	}
}

// output runs a program of this machine.
func output(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	require.NoError(t, err, "%s\n%s", strings.Join(args, " "), out)
	return string(out)
}
