package main

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"strings"
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
