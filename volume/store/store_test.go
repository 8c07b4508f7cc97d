package store

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/volume/api"
)

func open(t *testing.T, dir string) *Store {
	t.Helper()
	s := testtool.Must(Open(dir))(t)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func record(name string, lun uint16) Record {
	return Record{Name: name, State: StateReady, LUN: lun, Size: 1 << 20,
		Spec:    api.Spec{Size: 1 << 20, AccessMode: api.WriteExclusive, Copy: &api.Copy{}},
		Created: time.Unix(1, 0).UTC()}
}

func TestRecordsSurvive(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "above", "volumes")
	s := open(t, dir)
	one, two := record("one", 64), record("two", 65)
	require.NoError(t, s.Make(one))
	require.NoError(t, s.Make(two))
	require.ErrorIs(t, s.Make(one), os.ErrExist)
	two.Size, two.File = 2<<20, "disk.img.upload"
	require.NoError(t, s.Save(two))
	require.ErrorContains(t, testtool.Err(Open(dir)), "in use by process")
	require.NoError(t, s.Close())

	s = open(t, dir)
	all, damaged, foreign, err := s.Load()
	require.NoError(t, err)
	require.Equal(t, []Record{one, two}, all)
	require.Empty(t, damaged)
	require.Empty(t, foreign)
	require.NoError(t, os.WriteFile(filepath.Join(s.Dir("one"), "disk.img"), nil, 0o600))
	require.NoError(t, s.Remove("one"))
	require.NoError(t, s.Remove("one"))
	require.NoDirExists(t, s.Dir("one"))
}

// TestWhatAKillLeaves: an interrupted call leaves nothing, or a record. Files without a record
// belong to somebody else.
func TestWhatAKillLeaves(t *testing.T) {
	s := open(t, t.TempDir())
	make := func(name string, files ...string) {
		require.NoError(t, os.Mkdir(s.Dir(name), 0o700))
		for _, f := range files {
			require.NoError(t, os.WriteFile(filepath.Join(s.Dir(name), f), []byte("x"), 0o600))
		}
	}
	make("begun")
	make("half", recordName+durable.PartialSuffix)
	make("foreign", "data")
	make("UPPER")
	make("damaged", recordName, "disk.img")
	all, damaged, foreign, err := s.Load()
	require.NoError(t, err)
	require.Equal(t, []Record{{Name: "damaged"}}, all)
	require.Len(t, damaged, 1)
	var wrong *DamagedError
	require.ErrorAs(t, damaged["damaged"], &wrong)
	require.ErrorContains(t, wrong, "restore it from a backup")
	unread := &fs.PathError{Op: "open", Path: wrong.Path, Err: syscall.EMFILE}
	wrong.Err = fmt.Errorf("cannot be opened: %w", unread)
	require.ErrorContains(t, wrong, "the file may be intact")
	require.ElementsMatch(t, []string{"foreign", "UPPER"}, foreign)
	require.NoDirExists(t, s.Dir("begun"))
	require.NoDirExists(t, s.Dir("half"))
	require.FileExists(t, filepath.Join(s.Dir("foreign"), "data"))
	require.FileExists(t, filepath.Join(s.Dir("damaged"), "disk.img"))
}

// TestMovedDirectory: nothing is kept in another directory than the one that is locked.
func TestMovedDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "volumes")
	s := open(t, dir)
	one := record("one", 64)
	require.NoError(t, s.Make(one))
	require.NoError(t, os.Rename(dir, dir+".away"))
	require.NoError(t, os.CopyFS(dir, os.DirFS(dir+".away")))
	one.Size = 2 << 20
	require.ErrorContains(t, s.Save(one), "is not the directory any more")
	require.NoError(t, os.RemoveAll(dir))
	require.NoError(t, os.Rename(dir+".away", dir))
	require.NoError(t, s.Save(one))
}

// TestNumbers: a number comes again only after all others of its range, even if the process is
// restarted at any moment.
func TestNumbers(t *testing.T) {
	require.Equal(t, serving.MaxNumber, lastLUN, "disks are served by these numbers")
	dir := t.TempDir()
	s := open(t, dir)
	free := func(uint16) bool { return false }
	seen := map[uint16]bool{}
	for i := range lastSmall - firstLUN + 1 {
		if i%50 == 49 { // as after a kill: nothing is saved at the end
			require.NoError(t, s.Close())
			s = open(t, dir)
		}
		lun := testtool.Must(s.NextLUN(free))(t)
		require.False(t, seen[lun], "%d was given twice", lun)
		require.GreaterOrEqual(t, lun, uint16(firstLUN))
		require.LessOrEqual(t, lun, uint16(lastSmall))
		seen[lun] = true
	}
	// The small numbers are taken, so large ones follow, none of them twice.
	seen = map[uint16]bool{}
	for i := range 100 {
		if i%7 == 6 {
			require.NoError(t, s.Close())
			s = open(t, dir)
		}
		lun := testtool.Must(s.NextLUN(func(lun uint16) bool { return lun <= lastSmall }))(t)
		require.Greater(t, lun, uint16(lastSmall))
		require.False(t, seen[lun])
		seen[lun] = true
		if i%3 == 0 { // saving the small ones must not take back the large ones
			require.NoError(t, testtool.Err(s.NextLUN(free)))
		}
	}
	require.ErrorContains(t, testtool.Err(s.NextLUN(func(uint16) bool { return true })), "is taken")
	only := testtool.Must(s.NextLUN(func(lun uint16) bool { return lun != 70 }))(t)
	require.Equal(t, uint16(70), only)
	id := s.ID()
	require.NoError(t, s.Close())
	require.Equal(t, id, open(t, dir).ID())
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"version":1,"name":"one","state":"ready","file":"../x"}`))
	f.Add([]byte(`{"version":1,"name":"one","state":"ready","lun":64,"size":512}`))
	f.Fuzz(func(t *testing.T, state []byte) {
		text, err := durable.EncodeRecord(json.RawMessage(state))
		if err != nil {
			return // it is no JSON
		}
		s := open(t, t.TempDir())
		require.NoError(t, os.Mkdir(s.Dir("one"), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(s.Dir("one"), recordName), text, 0o600))
		all, damaged, _, err := s.Load()
		require.NoError(t, err)
		require.Len(t, all, 1)
		r := all[0]
		if damaged["one"] != nil {
			return
		}
		require.Equal(t, "one", r.Name)
		require.NotContains(t, r.File, "/")
		require.GreaterOrEqual(t, r.Size, int64(0))
	})
}
