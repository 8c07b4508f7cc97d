package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target/targettest"
)

// TestSessionsAndKick lists the sessions and ends them by name and by number.
func TestSessionsAndKick(t *testing.T) {
	const first, other = "iqn.2020-01.test:first", "iqn.2020-01.test:other"
	l := newPlace(t, "a.raw", "b.raw", "c.raw")
	p := l.serve(t)
	work := []string{"WORK_DIR=" + filepath.Join(l.dir, "work")}
	var open []*targettest.Session
	ask := func(want int, args ...string) string {
		t.Helper()
		for _, s := range open { // a machine that is slow must not make them silent peers
			require.NoError(t, testtool.Err(s.Ping(nil)))
		}
		status, stdout, stderr := run(t, work, args...)
		require.Equal(t, want, status, "%s%s", stdout, stderr)
		return stdout + stderr
	}
	sessions := func() (all []status.Session) {
		t.Helper()
		require.NoError(t, json.Unmarshal([]byte(ask(exitDone, "sessions", "--json")), &all))
		return all
	}
	require.Equal(t, "no initiator is logged in\n", ask(exitDone, "sessions"))
	require.Equal(t, "[]\n", ask(exitDone, "sessions", "--json"))

	one := p.login(first, 1, 2, 3)
	login := func(isid byte) *targettest.Session {
		return targettest.MustLogin(t, p.portal(), targettest.LoginOptions{
			Initiator: other, Target: wrapperTarget, ISID: [6]byte{0x80, isid}}, 2)
	}
	two, three := login(1), login(2)
	open = []*targettest.Session{one, two, three}
	one.MustGood(t, targettest.Write10(1, 0, make([]byte, 4096)))
	one.MustGood(t, targettest.Read10(3, 0, 2))
	two.MustGood(t, targettest.Read10(2, 0, 1))
	all := sessions()
	require.Len(t, all, 3)
	require.Equal(t, first, all[0].Initiator)
	require.Equal(t, []uint16{1, 3}, all[0].LUNs)
	require.EqualValues(t, 4096, all[0].BytesWritten)
	require.EqualValues(t, 1024, all[0].BytesRead)
	require.GreaterOrEqual(t, all[0].Commands, uint64(2))
	require.Equal(t, one.LocalAddr().String(), all[0].Remote)
	require.Equal(t, []uint16{2}, all[1].LUNs)
	require.Empty(t, all[2].LUNs)

	lines := strings.Split(strings.TrimSpace(ask(exitDone, "sessions")), "\n")
	require.Len(t, lines, 4)
	require.Equal(t, "SESSION INITIATOR ADDRESS LUNS SINCE COMMANDS READ WRITTEN WAITING",
		strings.Join(strings.Fields(lines[0]), " "))
	fields := strings.Fields(lines[1])
	require.Equal(t, []string{fmt.Sprint(all[0].TSIH), first, one.LocalAddr().String(), "1,3"},
		fields[:4])
	require.Equal(t, []string{"1", "KiB", "4", "KiB", "-"}, fields[6:])

	for name, args := range map[string][]string{
		"give one of":         {"kick"},
		"give one of --":      {"kick", "--initiator=" + first, "--session=1"},
		"is not a session":    {"kick", "--session=x"},
		"is not a session: ":  {"kick", "--session=0"},
		"so there is no d":    {"kick", "--session=1", "--control-socket="},
		"so there is no da":   {"sessions", "--control-socket="},
		"usage is \"kubevirt": {"sessions", "x"},
	} {
		require.Contains(t, ask(exitUsage, args...), name)
	}
	require.Contains(t, ask(exitFailed, "kick", "--session=65535"), "there is no session 65535")
	nobody := filepath.Join(t.TempDir(), "control.sock")
	text := ask(exitFailed, "sessions", "--control-socket="+nobody)
	require.Contains(t, text, nobody)
	require.NotContains(t, text, "/proc/self/fd")
	require.Contains(t, ask(exitFailed, "kick", "--initiator=iqn.2020-01.test:nobody"),
		`there is no session of "iqn.2020-01.test:nobody"`)
	require.Len(t, sessions(), 3)

	said := ask(exitDone, "kick", fmt.Sprintf("--session=%d", all[2].TSIH))
	open = open[:2]
	require.Contains(t, said, fmt.Sprintf("ended session %d of %s, from %s",
		all[2].TSIH, other, three.LocalAddr()))
	require.Contains(t, said, "logs in again by itself")
	require.NoError(t, three.ExpectClosed())
	two.MustGood(t, targettest.TestUnitReady(2))
	require.Len(t, sessions(), 2)

	// Both sessions end by name, in any letter case. The LUN is then free for the next initiator.
	three = login(2)
	three.MustFail(t, targettest.Read10(1, 0, 1), "06/29/07") // it was logged in here before
	three.MustFail(t, targettest.Read10(1, 0, 1), "status 0x18")
	said = ask(exitDone, "kick", "--initiator="+strings.ToUpper(first))
	open = nil
	require.Equal(t, 1, strings.Count(said, "ended session"))
	require.NoError(t, one.ExpectClosed())
	three.MustGood(t, targettest.Read10(1, 0, 1))
	require.Equal(t, 2, strings.Count(ask(exitDone, "kick", "--initiator="+other), "ended session"))
	require.Empty(t, sessions())
	p.login(first, 1).MustGood(t, targettest.Read10(1, 0, 1))
	p.until("it is logged", func() bool { return p.logged("session ended", "reason") == "kicked" })
	require.Equal(t, exitDone, p.terminate())
	require.Contains(t, ask(exitFailed, "sessions"), "no daemon answers")
}

// TestControlSocketOfAnotherUser checks that a socket that everybody may open does not let other
// users list or end sessions: the kernel names the user.
func TestControlSocketOfAnotherUser(t *testing.T) {
	testtool.Needs(t, "root (to be another user)", os.Geteuid() == 0)
	const nobody = 65534
	open := testtool.Must(os.MkdirTemp("", "kubevirt-disk-socket-"))(t)
	defer os.RemoveAll(open)
	require.NoError(t, os.Chmod(open, 0o755))
	program, socket := filepath.Join(open, "kubevirt-disk"), filepath.Join(open, "control.sock")
	text := testtool.Must(os.ReadFile(binary(t)))(t)
	require.NoError(t, os.WriteFile(program, text, 0o755))
	l := newPlace(t, "a.raw")
	p := l.serve(t, "CONTROL_SOCKET="+socket)
	s := p.login("iqn.2020-01.test:first", 1)
	for _, mode := range []os.FileMode{0o600, 0o777} {
		require.NoError(t, os.Chmod(socket, mode))
		for _, args := range [][]string{
			{"sessions"}, {"kick", "--session=1"}, {"handover", "--lun=1", "--cancel"},
		} {
			cmd := exec.Command(program, args...)
			cmd.Dir, cmd.Env = open, []string{"CONTROL_SOCKET=" + socket}
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody,
				Gid: nobody}}
			said, err := cmd.CombinedOutput()
			require.Error(t, err)
			require.Equal(t, exitFailed, cmd.ProcessState.ExitCode())
			want := "only the user of the daemon and root may do that"
			if mode == 0o600 {
				want = "user 65534 may not use the socket"
			}
			require.Contains(t, string(said), want)
			require.NotContains(t, string(said), "iqn.")
		}
	}
	s.MustGood(t, targettest.TestUnitReady(1))
	require.Equal(t, exitDone, p.terminate())

	// A work directory that another user has closed is named, and not a disk in it.
	closed := filepath.Join(open, "closed")
	require.NoError(t, os.Mkdir(closed, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(open, "a.raw"), make([]byte, 512), 0o644))
	cmd := exec.Command(program, "serve", "--work-dir="+closed, "--port=0", "--metrics-listen=",
		"--ready-file=", filepath.Join(open, "a.raw"))
	cmd.Dir, cmd.SysProcAttr = open, &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	said, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(said), "cannot be used by user 65534: permission denied: give that")
}

func TestPrintSessions(t *testing.T) {
	var b strings.Builder
	all := []status.Session{{Initiator: "a\x1b[2J", Discovery: true}, {Initiator: "b"}}
	require.NoError(t, printSessions(&b, all))
	require.NotContains(t, b.String(), "\x1b")
	require.Contains(t, b.String(), "(discovery)")
	require.Contains(t, b.String(), "none")
}

// TestPrintSnapshots: the name of a file may have an end of line, which makes no row of its own.
func TestPrintSnapshots(t *testing.T) {
	var b strings.Builder
	require.NoError(t, printSnapshots(&b, []status.Snapshot{{Disk: "a\nb.raw", Name: "one"}}))
	require.Equal(t, 2, strings.Count(b.String(), "\n"), b.String())
	require.Contains(t, b.String(), `a\nb.raw  one`)
}
