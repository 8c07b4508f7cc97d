package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target/targettest"
)

const second = "iqn.2026-01.test:destination"

func TestHandoverCommandLine(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "control.sock") // no daemon listens there
	for name, c := range map[string]struct {
		args   []string
		status int
		want   string
	}{
		"nobody is there": {[]string{"--lun=1", "--finish"}, exitFailed,
			"no daemon answers at " + strconv.Quote(socket)},
		"no directory": {[]string{"--lun=1", "--finish",
			"--control-socket=" + socket + "/none/c"}, exitFailed, "no daemon answers"},
		"where it may be": {[]string{"--lun=1", "--finish"}, exitFailed,
			"no such file or directory: is it running, with the same --work-dir (WORK_DIR) or " +
				"--control-socket"},
		"no LUN":         {[]string{"--finish"}, exitUsage, "--lun is missing"},
		"LUN 0":          {[]string{"--lun=0", "--finish"}, exitUsage, "--lun is missing"},
		"a LUN too high": {[]string{"--lun=65536", "--finish"}, exitUsage, "--lun"},
		"no action": {[]string{"--lun=1"}, exitUsage,
			"give one of --to, --finish and --cancel"},
		"an empty name": {[]string{"--lun=1", "--to="}, exitUsage, "--to is empty"},
		"two actions": {[]string{"--lun=1", "--finish", "--cancel"}, exitUsage,
			"give one of --to, --finish and --cancel"},
		"a name and another one": {[]string{"--lun=1", "--to=" + second, "--cancel"}, exitUsage,
			"give one of --to, --finish and --cancel"},
		"a time that is over": {[]string{"--lun=1", "--to=" + second, "--for=-5m"}, exitUsage,
			"--for: goes with --to"},
		"a time to finish": {[]string{"--lun=1", "--finish", "--for=5m"}, exitUsage,
			"--for: goes with --to"},
		"a negative one": {[]string{"--lun=1", "--finish", "--for=-5m"}, exitUsage,
			"--for: goes with --to"},
		"no socket": {[]string{"--lun=1", "--finish", "--control-socket="}, exitUsage,
			"--control-socket: is empty"},
		"an argument": {[]string{"--lun=1", "finish"}, exitUsage, "usage is"},
	} {
		status, stdout, stderr := run(t, []string{"CONTROL_SOCKET=" + socket},
			append([]string{"handover"}, c.args...)...)
		require.Equal(t, c.status, status, "%s: %s", name, stderr)
		require.Contains(t, stderr, c.want, name)
		require.Empty(t, stdout, name)
	}
}

// TestHandoverTellsWhatTheDaemonSays checks that a refusal is a failure with the daemon's reason.
func TestHandoverTellsWhatTheDaemonSays(t *testing.T) {
	l := newPlace(t, "a.raw")
	p := l.serve(t)
	for _, c := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"--lun=1", "--finish"}, exitFailed,
			"LUN 1 is open to nobody but its owner; open it first"},
		{[]string{"--lun=7", "--to=" + second}, exitFailed, "there is no LUN 7"},
		{[]string{"--lun=1", "--to=somebody"}, exitFailed, "is not an iSCSI name"},
		{[]string{"--lun=1", "--to=" + second, "--for=5m"}, exitDone,
			"LUN 1 is open to " + second + " too, for 5m0s"},
		{[]string{"--lun=1", "--finish"}, exitFailed, second + " is not logged in"},
		{[]string{"--lun=1", "--cancel"}, exitDone, second + " is fenced"},
	} {
		status, stdout, stderr := run(t, l.env, append([]string{"handover"}, c.args...)...)
		require.Equal(t, c.status, status, c.args)
		if status == exitDone {
			require.Contains(t, stdout, c.want, c.args)
			require.Empty(t, stderr, c.args)
			continue
		}
		require.Contains(t, stderr, c.want, c.args)
		require.Empty(t, stdout, c.args)
	}
	require.Equal(t, exitDone, p.terminate())
}

// TestHandoverOfADaemonThatMayNotBeAsked checks the messages about a daemon that refuses the user,
// or does not answer.
func TestHandoverOfADaemonThatMayNotBeAsked(t *testing.T) {
	const socket = "/work/control.sock"
	explain := func(err error) error { return explainControl(err, socket, stillBusy) }
	for _, cause := range []error{unix.EACCES, unix.EPERM} {
		err := explain(&fs.PathError{Op: "open", Path: "/work", Err: cause})
		require.EqualError(t, err, fmt.Sprintf("user %d may not use the socket %q: the daemon "+
			"accepts only its own user and root: open /work: %v", os.Geteuid(), socket, cause))
	}
	require.ErrorContains(t, explain(control.ErrStranger),
		`"/work/control.sock" is the socket of a daemon in another container`)
	require.ErrorContains(t, explain(control.ErrStranger), "--control-socket")
	late := explain(context.DeadlineExceeded)
	require.ErrorContains(t, late, stillBusy)
	require.NotContains(t, late.Error(), "no daemon answers")
	require.ErrorContains(t, explain(control.ErrUnknown), "does not know this request: is it")
	broken := &control.AnswerError{Err: fs.ErrPermission}
	require.ErrorContains(t, explain(broken), "cannot understand the daemon's answer")
}

// TestTheDaemonIsKilledWhileItIsAsked: nobody is told that no daemon was there, as it may have done
// what it was asked for.
func TestTheDaemonIsKilledWhileItIsAsked(t *testing.T) {
	for _, reads := range []int{0, 1, 4 << 10} { // unread bytes reset the connection
		path := filepath.Join(t.TempDir(), "control.sock")
		l := testtool.Must(net.Listen("unix", path))(t)
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			for c, err := l.Accept(); err == nil; c, err = l.Accept() {
				_, _ = c.Read(make([]byte, reads))
				_ = c.Close()
			}
		}()
		_, err := daemonAt(path).Kick(t.Context(), status.Kick{Session: 1})
		err = explainControl(err, path, stillBusy)
		require.ErrorContains(t, err, "has ended before it answered", reads)
		require.NotContains(t, err.Error(), "no daemon answers")
	}
}

// TestHandoverExplainsTheNameOfAQEMU checks that the message explains QEMU's default name. Nobody
// has chosen it, and its UUID is in no list of machines.
func TestHandoverExplainsTheNameOfAQEMU(t *testing.T) {
	const qemu = "LUN 1 is open to iqn.2008-11.org.linux-kvm:3c7a1ef4-1a0b-4d4e-8a6f-0d5b4f6a2b11"
	refused := explainControl(&control.RefusedError{Reason: qemu}, "/socket", stillBusy)
	for _, text := range []string{explainInitiators(qemu), refused.Error()} {
		require.Contains(t, text, qemu+"\n")
		require.Contains(t, text, "is QEMU's default")
		require.Contains(t, text, "xml --initiator-name")
	}
	require.Equal(t, "LUN 1 is open to "+second, explainInitiators("LUN 1 is open to "+second))
}

// TestServeWithoutAControlSocket checks that a daemon serves disks without a control socket. The
// log says why there is none and what to do.
func TestServeWithoutAControlSocket(t *testing.T) {
	l := newPlace(t, "a.raw")
	path := filepath.Join(l.dir, "socket")
	require.NoError(t, os.WriteFile(path, []byte("precious"), 0o600))
	p := l.serve(t, "CONTROL_SOCKET="+path)
	const said = "there is no control socket, so handover, sessions, kick, snapshot and commit " +
		"find no daemon"
	require.Contains(t, p.logged(said, "error"),
		strconv.Quote(path)+" exists and is not a socket")
	require.Contains(t, p.logged(said, "try"), "--control-socket")
	require.Equal(t, exitDone, p.terminate())
	require.FileExists(t, path)
}

// wishing is a daemon that follows the annotations of its pod.
type wishing struct {
	*process
	file string
}

// annotate replaces the file as the downward API does.
func (p *wishing) annotate(value string) {
	p.t.Helper()
	text := ""
	if value != "" {
		text = handoverAnnotation + "=" + strconv.Quote(value) + "\n"
	}
	require.NoError(p.t, os.WriteFile(p.file+".new", []byte(text), 0o600))
	require.NoError(p.t, os.Rename(p.file+".new", p.file))
}

// answer waits until the page shows what became of a request, and returns the status of the LUN.
func (p *wishing) answer(value string, ok func(h *status.HandoverOutcome) bool) status.LUN {
	p.t.Helper()
	var s status.Status
	p.until("the page tells of "+value, func() bool {
		_, body := p.page("/status")
		s = status.Status{}
		require.NoError(p.t, json.Unmarshal([]byte(body), &s))
		return s.Handover != nil && s.Handover.Asked == value && ok(s.Handover)
	})
	return s.LUNs[0]
}

// TestHandoverByAnnotation hands a LUN over and back by an annotation of the pod. A restart with
// the annotation in place changes nothing.
func TestHandoverByAnnotation(t *testing.T) {
	const first = "iqn.2020-01.test:first"
	l := newPlace(t, "a.raw")
	l.env = append(l.env, "PERSISTENT_DIR="+t.TempDir())
	p := &wishing{file: filepath.Join(t.TempDir(), "annotations")}
	require.NoError(t, os.WriteFile(p.file, nil, 0o600))
	p.process = l.serve(t, "POD_ANNOTATIONS="+p.file)
	done := func(h *status.HandoverOutcome) bool { return h.Done != "" }
	failed := func(h *status.HandoverOutcome) bool { return h.Error != "" }
	step := func(action, to string) string {
		return `{"action":"` + action + `","lun":1,"to":"` + to + `"}`
	}
	block := make([]byte, 512)
	one := p.login(first, 1)
	one.MustGood(t, targettest.Write10(1, 0, block))

	for _, wrong := range []string{"open", `{"action":"open","lun":7,"to":"` + second + `"}`,
		`{"action":"finish","lun":1}`, step("finish", second)} {
		p.annotate(wrong)
		require.Empty(t, p.answer(wrong, failed).OpenTo, wrong)
	}
	open := step("open", second)
	p.annotate(open)
	require.Equal(t, second, p.answer(open, done).OpenTo)
	two := p.login(second, 1)
	two.MustGood(t, targettest.Write10(1, 0, block))
	finish := step("finish", second)
	p.annotate(finish)
	lun := p.answer(finish, done)
	require.Equal(t, second, lun.Owner)
	require.Equal(t, []string{first}, lun.Fenced)
	one.MustFail(t, targettest.Write10(1, 0, block), "status 0x18")

	require.Equal(t, exitDone, p.terminate())
	p.process = l.serve(t, "POD_ANNOTATIONS="+p.file)
	two = p.login(second, 1)
	two.MustGood(t, targettest.Write10(1, 0, block))
	lun = p.answer(finish, func(*status.HandoverOutcome) bool { return true })
	require.Equal(t, []string{first}, lun.Fenced)

	back := step("open", first)
	p.annotate(back)
	require.Equal(t, first, p.answer(back, done).OpenTo)
	one = p.login(first, 1)
	one.MustGood(t, targettest.Write10(1, 0, block))
	cancel := step("cancel", first)
	p.annotate(cancel)
	lun = p.answer(cancel, done)
	require.Equal(t, []string{first}, lun.Fenced)
	two.MustGood(t, targettest.Write10(1, 0, block))
	// Removing the annotation does not undo the handover.
	p.annotate("")
	require.Equal(t, exitDone, p.terminate())
}
