package main

import (
	"bytes"
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
	"kubevirt.io/disk/target/targettest"
)

// TestSnapshotCommands keeps, serves, lists, goes back to and forgets what disks hold, beside the
// guest and over the kill of the daemon.
func TestSnapshotCommands(t *testing.T) {
	const guest, other = "iqn.2020-01.test:guest", "iqn.2020-01.test:other"
	l := newPlace(t, "a.raw", "b.raw")
	env := []string{"PERSISTENT_DIR=" + t.TempDir(), "COPY_MODE=copy-on-write"}
	p := l.serve(t, env...)
	work := []string{"WORK_DIR=" + filepath.Join(l.dir, "work")}
	ask := func(want int, args ...string) string {
		t.Helper()
		status, stdout, stderr := run(t, work, append([]string{"snapshot"}, args...)...)
		require.Equal(t, want, status, "%s%s", stdout, stderr)
		return stdout + stderr
	}
	list := func(args ...string) (all []status.Snapshot) {
		t.Helper()
		text := ask(exitDone, append([]string{"list", "--json"}, args...)...)
		require.NoError(t, json.Unmarshal([]byte(text), &all), text)
		return all
	}
	block := func(b byte) []byte { return bytes.Repeat([]byte{b}, 512) }
	read := func(s *targettest.Session, lun uint16, lba uint32) byte {
		t.Helper()
		require.NoError(t, testtool.Err(s.ClearAttention(lun))) // that LUNs come and go
		data := s.MustGood(t, targettest.Read10(lun, lba, 1)).Data
		require.Equal(t, block(data[0]), data)
		return data[0]
	}
	require.Equal(t, "there is no snapshot\n", ask(exitDone, "list"))

	s := p.login(guest, 1, 2)
	s.MustGood(t, targettest.Write10(1, 1, block(11)))
	s.MustGood(t, targettest.Write10(2, 1, block(21)))
	require.Contains(t, ask(exitDone, "create", "a.raw", "first"), `took the snapshot "first"`)
	s.MustGood(t, targettest.Write10(1, 1, block(12)))
	require.Contains(t, ask(exitDone, "create", "1", "both", "--also=b.raw"), `LUN 2 ("b.raw")`)
	s.MustGood(t, targettest.Write10(1, 1, block(13)))
	s.MustGood(t, targettest.Write10(2, 1, block(23)))
	ask(exitDone, "create", "b.raw")
	all := list()
	require.Len(t, all, 4)
	for i, want := range []string{"a.raw first", "a.raw both", "b.raw both"} {
		require.Equal(t, want, all[i].Disk+" "+all[i].Name)
	}
	require.Equal(t, int64(4096), all[0].Size)
	require.Equal(t, all[3].Created.UTC().Format("2006"), all[3].Name[:4], "named by the time")
	require.Len(t, list("1"), 2)
	table := strings.Split(strings.TrimSpace(ask(exitDone, "list", "b.raw")), "\n")
	require.Len(t, table, 3)
	require.Equal(t, "DISK NAME CREATED SIZE USED LUN", strings.Join(strings.Fields(table[0]), " "))
	for _, lun := range []uint16{1, 2} {
		require.Equal(t, byte(lun), read(s, lun, 0), "of the image")
	}

	// A snapshot is a LUN that nobody writes, whatever happens to its disk.
	require.Contains(t, ask(exitDone, "serve", "a.raw", "first"), `LUN 3 is the snapshot "first"`)
	require.Contains(t, ask(exitDone, "serve", "a.raw", "first"), "LUN 3", "again")
	require.Equal(t, uint16(3), list("a.raw")[0].Served)
	of := p.login(other, 3)
	require.Equal(t, byte(11), read(of, 3, 1))
	require.Equal(t, byte(1), read(of, 3, 0))
	of.MustFail(t, targettest.Write10(3, 0, block(1)), "07/27/00")
	require.Contains(t, ask(exitFailed, "delete", "a.raw", "first"), "is LUN 3")
	ask(exitDone, "unserve", "a.raw", "first")
	of.MustFail(t, targettest.Read10(3, 0, 1), "05/25/00")
	require.Contains(t, ask(exitFailed, "unserve", "a.raw", "first"), "is no LUN")

	for _, c := range []struct {
		status int
		said   string
		args   string
	}{
		{exitFailed, `there is no disk "c.raw": use a LUN or one of "a.raw", "b.raw"`, "create c.raw"},
		{exitFailed, `LUN 1 ("a.raw") is named twice`, "create a.raw x --also=1"},
		{exitFailed, "first", "create a.raw first"},
		{exitFailed, "no/name", "create a.raw no/name"},
		{exitFailed, "missing", "delete a.raw missing"},
		{exitFailed, "missing", "revert a.raw missing"},
		{exitFailed, "missing", "serve a.raw missing"},
		{exitFailed, "is used by " + guest + ": stop its machine first", "revert a.raw first"},
		{exitUsage, "usage is", "create"},
		{exitUsage, "usage is", "revert a.raw"},
		{exitUsage, "unknown command", "take a.raw"},
		{exitUsage, "say what to do", ""},
		{exitUsage, "there is no daemon to ask", "list --control-socket="},
	} {
		require.Contains(t, ask(c.status, strings.Fields(c.args)...), c.said, c.args)
	}
	require.Len(t, list(), 4)
	require.Equal(t, byte(13), read(s, 1, 1))

	// All of it survives the daemon.
	p.kill()
	p = l.serve(t, env...)
	require.Len(t, list(), 4)
	s = p.login(guest, 1, 2)
	require.Equal(t, byte(13), read(s, 1, 1))
	require.Equal(t, byte(23), read(s, 2, 1))
	require.NoError(t, s.Close())
	ask(exitDone, "revert", "a.raw", "first")
	require.Len(t, list("a.raw"), 2)
	s = p.login(guest, 1, 2)
	require.Equal(t, byte(11), read(s, 1, 1))
	require.Equal(t, byte(23), read(s, 2, 1))
	s.MustGood(t, targettest.Write10(1, 2, block(14)))
	for _, snapshot := range list() {
		ask(exitDone, "delete", snapshot.Disk, snapshot.Name)
	}
	require.Empty(t, list())
	require.Equal(t, byte(11), read(s, 1, 1))
	require.Equal(t, byte(14), read(s, 1, 2))
	require.Equal(t, byte(1), read(s, 1, 0))
	require.Equal(t, exitDone, p.terminate())
	p = l.serve(t, env...)
	s = p.login(guest, 1, 2)
	require.Equal(t, byte(11), read(s, 1, 1))
	require.Equal(t, byte(14), read(s, 1, 2))
	require.Equal(t, byte(23), read(s, 2, 1))
}

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
			said: "no snapshot was taken; and --after has failed: exit status 4: undo what"},
		{name: "no/name", before: frozen, after: thawed, status: exitFailed,
			said: "the name is not valid", log: "frozen\nthawed\n"},
		{name: "good", before: frozen, after: thawed, status: exitFailed,
			said: `the disk "a.raw" already has a snapshot "good"`},
		{name: "x", before: frozen, after: thawed, more: "--also=c.raw", status: exitFailed,
			said: `there is no disk "c.raw"`},
		{name: "x", before: frozen, after: thawed, more: "--time-limit=0s", status: exitUsage,
			said: "--time-limit: 0s is too short"},
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
		"and was stopped: undo what")
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
