package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

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
	require.Contains(t, ask(exitFailed, "sessions"), "no daemon answers at \"/var/lib/kubevirt-")

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
