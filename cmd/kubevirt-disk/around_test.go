package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

// TestSnapshotBetweenCommands takes snapshots between commands of a person. Without a success of
// the first one there is none, and the last one is run whatever happens.
func TestSnapshotBetweenCommands(t *testing.T) {
	l := newPlace(t, "a.raw", "b.raw")
	l.serve(t, "COPY_MODE=copy-on-write")
	dir := t.TempDir()
	env := []string{"WORK_DIR=" + filepath.Join(l.dir, "work"), "BIN=" + binary(t),
		"LOG=" + filepath.Join(dir, "log"), "FLAG=" + filepath.Join(dir, "flag")}
	log := func() string {
		text, err := os.ReadFile(filepath.Join(dir, "log"))
		if !os.IsNotExist(err) {
			require.NoError(t, err)
		}
		return string(text)
	}
	names := func() (names []string) {
		t.Helper()
		_, stdout, stderr := run(t, env, "snapshot", "list", "--json")
		var all []status.Snapshot
		require.NoError(t, json.Unmarshal([]byte(stdout), &all), stderr)
		for _, s := range all {
			names = append(names, s.Disk+" "+s.Name)
		}
		return names
	}
	create := func(name, before, after string, more ...string) []string {
		require.NoError(t, os.RemoveAll(filepath.Join(dir, "log")))
		require.NoError(t, os.RemoveAll(filepath.Join(dir, "flag")))
		args := []string{"snapshot", "create", "a.raw", name}
		if before != "" {
			args = append(args, "--before="+before)
		}
		if after != "" {
			args = append(args, "--after="+after)
		}
		return append(args, more...)
	}
	const count = `"$BIN" snapshot list --json | grep -c '"name"'`
	const frozen = "echo frozen >>\"$LOG\"; "
	const thawed = "echo thawed >>\"$LOG\""

	stdout, stderr := works(t, env, create("good", frozen+count+">>\"$LOG\"; echo to you",
		count+">>\"$LOG\"; "+thawed, "--also=b.raw")...)
	require.Equal(t, "took the snapshot \"good\" of LUN 1 (\"a.raw\") and LUN 2 (\"b.raw\")\n",
		stdout)
	require.Equal(t, "to you\n", stderr)
	require.Equal(t, "frozen\n0\n2\nthawed\n", log(), "the snapshot lies between")
	taken := []string{"a.raw good", "b.raw good"}
	require.ElementsMatch(t, taken, names())

	for _, c := range []struct {
		name, before, after string
		more                string
		status              int
		said, log           string
	}{
		{name: "x", before: frozen + "exit 3", after: thawed, status: exitFailed,
			log:  "frozen\nthawed\n",
			said: "--before has failed: exit status 3: no snapshot was taken\n"},
		{name: "x", before: frozen + "trap '' TERM; sleep 99 & wait; wait; sleep 99", after: thawed,
			more: "--time-limit=200ms", status: exitFailed, log: "frozen\nthawed\n",
			said: "--before has not ended within 200ms and was stopped: no snapshot"},
		{name: "x", before: "kill -9 $$", status: exitFailed,
			said: "--before has failed: signal: killed"},
		{name: "x", before: "false", after: "exit 4", status: exitFailed,
			said: "no snapshot was taken; and --after has failed: exit status 4: see to it"},
		{name: "no/name", before: frozen, after: thawed, status: exitFailed,
			said: "the name is not valid", log: "frozen\nthawed\n"},
		{name: "good", before: frozen, after: thawed, status: exitFailed,
			said: `the disk "a.raw" already has a snapshot "good"`},
		{name: "x", before: frozen, after: thawed, more: "--also=c.raw", status: exitFailed,
			said: `there is no disk "c.raw"`},
		{name: "x", before: frozen, after: thawed, more: "--time-limit=0s", status: exitUsage,
			said: "--time-limit: 0s is no time"},
	} {
		args := create(c.name, c.before, c.after)
		if c.more != "" {
			args = append(args, c.more)
		}
		status, stdout, stderr := run(t, env, args...)
		require.Equal(t, c.status, status, "%v: %s", c, stderr)
		require.Empty(t, stdout)
		require.Contains(t, stderr, c.said)
		require.Equal(t, c.log, log(), "%v", c)
		require.ElementsMatch(t, taken, names(), "%v", c)
	}

	code, stdout, stderr := run(t, env, create("late", frozen, "sleep 99",
		"--time-limit=300ms")...)
	require.Equal(t, exitFailed, code)
	require.Contains(t, stdout, `took the snapshot "late"`)
	require.Contains(t, stderr, "the snapshot was taken, but --after has not ended within 300ms "+
		"and was stopped: see to it")
	taken = append(taken, "a.raw late")
	require.ElementsMatch(t, taken, names())

	// Whatever happens to the command itself, the last one is run.
	for sig, said := range map[syscall.Signal]string{syscall.SIGTERM: "--before was interrupted",
		syscall.SIGINT: "--before was interrupted", syscall.SIGHUP: "--before was interrupted",
		syscall.SIGKILL: ""} {
		hold := "sleep 60" // it is ended by the signal
		if sig == syscall.SIGKILL {
			hold = "sleep 1" // nobody ends it
		}
		p := launch(t, binary(t), env, create("x", "touch \"$FLAG\"; "+hold, thawed)...)
		p.until("the first command runs", func() bool {
			_, err := os.Stat(filepath.Join(dir, "flag"))
			return err == nil
		})
		require.NoError(t, p.cmd.Process.Signal(sig))
		status := p.status()
		testtool.Eventually(t, func() bool { return log() == "thawed\n" },
			func() string { return fmt.Sprint(sig, log()) })
		if sig != syscall.SIGKILL {
			require.Equal(t, exitFailed, status)
		}
		require.Contains(t, strings.TrimSpace(p.stderr.String()), said)
		require.ElementsMatch(t, taken, names(), "%v", sig)
	}
}
