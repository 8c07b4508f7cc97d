package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

// TestServeWithACommand: the command runs while the disks can be used, and its exit status is the
// daemon's. Nothing is printed but what it prints, and nothing stays.
func TestServeWithACommand(t *testing.T) {
	env := apartFromOthers(t)
	_, paths := namedPlace(t, "a.raw", "b c.raw")
	for name, c := range map[string]struct {
		args   []string // behind serve
		status int
		stdout string
		stderr string
	}{
		"done": {args: []string{paths[0], "--", "echo", "one two", "three"},
			stdout: "one two three\n"},
		"with words of its own": {args: []string{paths[0], "--", "printf", "<%s>",
			"", "PASSWORD=x"}, stdout: "<><PASSWORD=x>"},
		"failed": {args: []string{paths[0], "--", "sh", "-c", "echo no >&2; exit 7"}, status: 7,
			stderr: "no\n"},
		"killed": {args: []string{paths[0], "--", "sh", "-c", "kill -9 $$"}, status: 137,
			stderr: "kubevirt-disk: the command was ended by a signal: killed\n"},
		"pipe": {args: []string{paths[0], "--", "sh", "-c", "kill -PIPE $$"}, status: 141,
			stderr: "kubevirt-disk: the command was ended by a signal: broken pipe\n"},
		"not found": {args: []string{paths[0], "--", "no-such-command"}, status: exitNotFound,
			stderr: "kubevirt-disk: there is no command \"no-such-command\"\n"},
		"not executable": {args: []string{paths[0], "--", paths[0]}, status: exitNotRun,
			stderr: "kubevirt-disk: the command cannot be run: exec: \"" + paths[0] +
				"\": permission denied\n"},
		"of a directory": {args: []string{"--disk-dir=" + filepath.Dir(paths[0]), "--", "sh",
			"-c", "echo ${uri%%[?]*} ${uri2%%[?]*}"},
			stdout: "nbd+unix:///a.raw nbd+unix:///b%20c.raw\n"},
		"chosen": {args: []string{paths[0], "--nbd=127.0.0.1:0", "--iscsi=false", "--", "sh", "-c",
			"echo ${nbd%:*} [$iscsi]"}, stdout: "nbd://127.0.0.1 []\n"},
		"nothing": {args: []string{paths[0], "--"}, status: exitUsage,
			stderr: "kubevirt-disk: wrong configuration: --: names no command: write serve " +
				"IMAGE... -- COMMAND\n"},
		"no iSCSI": {args: []string{paths[0], "--iscsi=false", "--", "x", "{iscsi2}"},
			status: exitUsage, stderr: "kubevirt-disk: wrong configuration: {iscsi}: there is no " +
				"iSCSI: --iscsi has turned it off\n"},
		"wrong portal": {args: []string{paths[0], "--listen=bad", "--", "x", "{iscsi}"},
			status: exitUsage, stderr: "kubevirt-disk: wrong configuration: --listen: \"bad\" is " +
				"not an address: want 0.0.0.0:3260, [::1]:3260, or :3260 for all addresses\n"},
		"in the background": {args: []string{paths[0], "--fork", "--", "true"}, status: exitUsage,
			stderr: "kubevirt-disk: wrong configuration: --fork: does not wait, and a command is " +
				"waited for: leave one out\n"},
	} {
		t.Run(name, func(t *testing.T) {
			status, stdout, stderr := apart(t, env, append([]string{"serve"}, c.args...)...)
			require.Equal(t, c.status, status, stderr)
			require.Equal(t, c.stdout, stdout)
			require.Equal(t, c.stderr, stderr)
		})
	}
	status, stdout, stderr := apart(t, append(env, "CHAP_USERNAME=vm", "CHAP_PASSWORD="+testSecret),
		"serve", paths[1], paths[0], "--", "sh", "-c",
		`echo "$0 $1 $2"; env | grep -E '^(uri|nbd|iscsi)2?=' | sort; ps -o args= -p $PPID`,
		"{uri}", "{nbd2}", "<{iscsi}>")
	require.Zero(t, status, stderr)
	lines := strings.Split(stdout, "\n")
	words := strings.Fields(lines[0])
	require.Regexp(t, `^nbd\+unix:///b%20c\.raw\?socket=/?.*nbd\.sock$`, words[0])
	require.Regexp(t, `^nbd\+unix:///a\.raw\?socket=.*nbd\.sock$`, words[1])
	require.Regexp(t, `^<iscsi://vm@127\.0\.0\.1:\d+/iqn\.[^/]*/1>$`, words[2])
	require.Contains(t, lines, "uri="+words[0])
	require.Contains(t, lines, "nbd2="+words[1])
	require.Contains(t, lines, "iscsi="+strings.Trim(words[2], "<>"))
	require.NotContains(t, stdout, testSecret)
	left, err := filepath.Glob(filepath.Join(strings.TrimPrefix(env[0], "XDG_RUNTIME_DIR="),
		"kubevirt-disk", "[ds]*-*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// TestDisksOfOneName: each disk has an address of its own, although two servers call theirs alike.
func TestDisksOfOneName(t *testing.T) {
	now := &status.Status{NBDPortals: []string{"unix:/s"},
		LUNs: []status.LUN{{LUN: 1, Image: "a"}, {LUN: 2, Image: "a"}, {LUN: 3, Image: "b"}}}
	got := variablesOf(now, "")
	require.Equal(t, map[string]string{
		"nbd": "nbd+unix:///1?socket=%2Fs", "uri": "nbd+unix:///1?socket=%2Fs",
		"nbd2": "nbd+unix:///2?socket=%2Fs", "uri2": "nbd+unix:///2?socket=%2Fs",
		"nbd3": "nbd+unix:///b?socket=%2Fs", "uri3": "nbd+unix:///b?socket=%2Fs",
	}, got)
}

// TestCommandGetsSignals: a signal is the command's, which decides what comes of it.
func TestCommandGetsSignals(t *testing.T) {
	env := apartFromOthers(t)
	_, paths := namedPlace(t, "a.raw")
	for s, want := range map[syscall.Signal]int{syscall.SIGTERM: 11, syscall.SIGINT: 12,
		syscall.SIGHUP: 13, syscall.SIGUSR1: 14, syscall.SIGQUIT: 15} {
		p := launch(t, binary(t), env, "serve", paths[0], "--", "sh", "-c",
			`for s in TERM:11 INT:12 HUP:13 USR1:14 QUIT:15; do trap "exit ${s#*:}" ${s%:*}; done
			echo begun; while kill -0 $PPID; do sleep 0.01; done`)
		p.until("it runs", func() bool { return p.stdout.String() == "begun\n" })
		require.NoError(t, p.cmd.Process.Signal(s))
		require.Equal(t, want, p.status(), s)
	}
}

// TestServeInTheBackground: --fork returns when the disks can be used, and says why if they cannot.
func TestServeInTheBackground(t *testing.T) {
	env := apartFromOthers(t)
	l, paths := namedPlace(t, "a.raw")
	file := filepath.Join(l.dir, "pid")
	serve := func(args ...string) (int, string, string) {
		return apart(t, append(env, "PORT=0"), append([]string{"serve", "--fork"}, args...)...)
	}
	status, stdout, stderr := serve("--pid-file="+file, paths[0])
	require.Zero(t, status, stderr)
	require.Empty(t, stderr)
	text := testtool.Must(os.ReadFile(file))(t)
	var pid int
	require.NoError(t, testtool.Err(fmt.Sscanf(string(text), "%d\n", &pid)))
	ended := false
	defer func() {
		if !ended {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}()
	require.Contains(t, stdout, fmt.Sprintf("kill %d ends it.", pid))
	_, listed, _ := apart(t, env, "ps")
	require.Contains(t, listed, fmt.Sprintf("\n%d ", pid))
	other, _, why := serve("--pid-file="+file, paths[0])
	require.Equal(t, exitFailed, other)
	require.Contains(t, why, "the place of the file of another running daemon")
	require.Equal(t, text, testtool.Must(os.ReadFile(file))(t))
	for fd := range 3 {
		to := testtool.Must(os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", pid, fd)))(t)
		require.Equal(t, os.DevNull, to)
	}
	p := &process{t: t}
	require.NoError(t, syscall.Kill(pid, syscall.SIGTERM))
	p.until("it has ended", func() bool { return !exists(fmt.Sprintf("/proc/%d", pid)) })
	ended = true
	require.NoFileExists(t, file)

	pipe := filepath.Join(l.dir, "pipe") // which seems to be empty, as /dev/null does
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	for want, args := range map[string][]string{
		"1 something that is not a regular file": {"--pid-file=" + pipe, paths[0]},
		"2 does not exist":                       {"missing.raw"},
		"1 of a file with other content":         {"--pid-file=" + paths[0], paths[0]},
		"1 no such file or directory":            {"--pid-file=" + l.dir + "/no/pid", paths[0]},
		"1 is a text file, not a disk":           {"/etc/passwd"},
	} {
		status, stdout, stderr := serve(args...)
		require.Equal(t, want[:1], fmt.Sprint(status), stderr)
		require.Contains(t, stderr, want[2:])
		require.Empty(t, stdout)
	}
	_, listed, _ = apart(t, env, "ps")
	require.Equal(t, "no daemon of this user is running\n", listed)
}

// TestNoPIDFileAfterTheEnd: a daemon that is stopped while it becomes usable leaves no PID file.
func TestNoPIDFileAfterTheEnd(t *testing.T) {
	var b background
	b.pid.Path = filepath.Join(t.TempDir(), "pid")
	require.NoError(t, b.end())
	require.NoError(t, b.usable())
	require.NoFileExists(t, b.pid.Path)
}

// apartFromOthers is an environment in which no daemon is found but those that have it, too.
func apartFromOthers(t *testing.T) []string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "kd-") // a socket's path must be short
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return []string{"XDG_RUNTIME_DIR=" + dir, "TMPDIR=" + dir, "XDG_CACHE_HOME=" + dir,
		"METRICS_LISTEN=127.0.0.1:0"}
}

// TestCommandsFindTheDaemon: without a word about where it is, the only daemon of the user is
// asked. Of two, one has to be named. One that was killed is none.
func TestCommandsFindTheDaemon(t *testing.T) {
	env := apartFromOthers(t)
	ask := func(want int, args ...string) string {
		t.Helper()
		status, stdout, stderr := run(t, env, args...)
		require.Equal(t, want, status, "%s%s", stdout, stderr)
		return stdout + stderr
	}
	require.Equal(t, "no daemon of this user is running\n", ask(exitDone, "ps"))
	require.Equal(t, "[]\n", ask(exitDone, "ps", "--json"))
	for _, one := range env[:2] { // the runtime directories
		name, value, _ := strings.Cut(one, "=")
		t.Setenv(name, value)
	}
	command := new(cobra.Command)
	command.SetContext(t.Context())
	usual := testtool.Must(new(app).asker(command).socket(nil))(t)
	require.Equal(t, "/var/lib/kubevirt-disk/control.sock", usual) // somebody may have it here

	_, paths := namedPlace(t, "a.raw", "b.raw")
	p := serveNamed(t, append(env, "PORT=0"), paths...)
	lines := strings.Split(strings.TrimSpace(ask(exitDone, "ps")), "\n")
	require.Len(t, lines, 3)
	require.Equal(t, "PID LUN DISK SIZE STATE OWNER SOCKET",
		strings.Join(strings.Fields(lines[0]), " "))
	pid := fmt.Sprint(p.cmd.Process.Pid)
	require.Equal(t, []string{pid, "2", "b.raw", "8", "KiB", "ready", "-"},
		strings.Fields(lines[2])[:7])
	require.Equal(t, "no initiator is logged in\n", ask(exitDone, "sessions"))
	require.Contains(t, ask(exitDone, "snapshot", "create", "b.raw", "one"), "took the snapshot")
	require.Contains(t, ask(exitFailed, "handover", "--lun=7", "--finish"), "7")
	require.Contains(t, ask(exitFailed, "kick", "--session=9"), "there is no session 9")
	require.Contains(t, ask(exitUsage, "sessions", "--control-socket="), "no daemon to ask")
	for want, args := range map[string][]string{
		"a.raw\tLUN 1, 4 KiB\nb.raw\tLUN 2, 8 KiB\n:4\n": {"snapshot", "create", ""},
		"one\t2":                   {"snapshot", "delete", "b.raw", ""},
		"1\ta.raw\n2\tb.raw\n:4\n": {"handover", "--lun", ""},
	} {
		require.Contains(t, ask(exitDone, append([]string{"__complete"}, args...)...), want)
	}

	_, others := namedPlace(t, "c.raw")
	q := serveNamed(t, append(env, "PORT=0"), others...)
	said := ask(exitFailed, "sessions")
	require.Contains(t, said, "2 daemons of this user are running: say which one is meant:")
	require.Contains(t, said, fmt.Sprintf("(PID %s, a.raw, b.raw)", pid))
	require.Contains(t, said, fmt.Sprintf("(PID %d, c.raw)", q.cmd.Process.Pid))
	said = ask(exitDone, "__complete", "snapshot", "create", "")
	require.Contains(t, said, "a.raw\tLUN 1, 4 KiB\nb.raw\tLUN 2, 8 KiB\nc.raw\tLUN 1")
	require.Contains(t, said, "choose one with --control-socket")
	var all []runningDaemon
	require.NoError(t, json.Unmarshal([]byte(ask(exitDone, "ps", "--json")), &all))
	require.Len(t, all, 2)
	require.Equal(t, "c.raw", all[1].Status.LUNs[0].Image)
	require.Equal(t, "no initiator is logged in\n",
		ask(exitDone, "sessions", "--control-socket="+all[1].Socket))

	q.kill()
	require.Equal(t, "no initiator is logged in\n", ask(exitDone, "sessions"))
	require.NoDirExists(t, filepath.Dir(all[1].Socket))
	require.Equal(t, exitDone, p.terminate())
	require.NoDirExists(t, filepath.Dir(all[0].Socket))
}
