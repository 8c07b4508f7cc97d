package durable

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/testtool"
)

// savedFile shows what a directory may look like after a power failure. A file has the content of
// its last sync, or anything if it was written to since. The names are those of the last sync of
// the directory or later ones.
type savedFile struct {
	t        *testing.T
	path     string
	allowed  []string // what the file may contain
	names    map[string]uint64
	contents map[uint64]string
	guest    func() // fills the volume
	calls    int
	failAt   int // the number of the sync that fails
}

func (s *savedFile) now() (names map[string]uint64, contents map[uint64]string) {
	names, contents = map[string]uint64{}, map[uint64]string{}
	for _, e := range testtool.Must(os.ReadDir(filepath.Dir(s.path)))(s.t) {
		st := testtool.Must(e.Info())(s.t)
		content := testtool.Must(os.ReadFile(filepath.Join(filepath.Dir(s.path), e.Name())))(s.t)
		inode := st.Sys().(*syscall.Stat_t).Ino
		names[e.Name()], contents[inode] = inode, string(content)
	}
	return names, contents
}

// sync is called in place of (*os.File).Sync.
func (s *savedFile) sync(f *os.File) error {
	s.check()
	s.guest()
	if s.calls++; s.calls == s.failAt {
		return unix.EIO
	}
	st := testtool.Must(f.Stat())(s.t)
	names, contents := s.now()
	if st.IsDir() {
		s.names = names
	} else {
		s.contents[st.Sys().(*syscall.Stat_t).Ino] = contents[st.Sys().(*syscall.Stat_t).Ino]
	}
	return nil
}

// check looks at the file as after a crash at this moment.
func (s *savedFile) check() {
	s.t.Helper()
	names, contents := s.now()
	for when, names := range map[string]map[string]uint64{"the names before": s.names,
		"the names now": names} {
		inode := names[filepath.Base(s.path)]
		stored, known := s.contents[inode]
		require.True(s.t, known, "%s: the content has not reached storage", when)
		require.True(s.t, slices.Contains(s.allowed, stored), when)
		if now, there := contents[inode]; there {
			require.Equal(s.t, stored, now, "%s: the file is being written to", when)
		}
	}
}

// TestReplacingOnAFullVolume checks that replacing a file is as safe on a full volume, at every
// moment and whichever sync fails.
func TestReplacingOnAFullVolume(t *testing.T) {
	// Each save syncs the directory, the spare and the directory again. The first one also syncs a
	// new file.
	const saves, syncs = 6, 4
	for failAt := range saves*syncs + 1 {
		dir := filetest.TinyFS(t, "256k")
		path := filepath.Join(dir, "owner")
		spare := filepath.Join(dir, SpareSuffix)
		content := []byte("first")
		require.NoError(t, Replace(nil, path, content, spare, (*os.File).Sync))
		s := &savedFile{t: t, path: path, failAt: failAt, allowed: []string{string(content)}}
		if failAt%2 == 1 { // an earlier process was killed before the swap had reached storage
			require.NoError(t, os.WriteFile(spare, content, 0))
		}
		s.names, s.contents = s.now()
		if failAt%2 == 1 {
			require.NoError(t,
				unix.Renameat2(unix.AT_FDCWD, spare, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE))
		}
		var free func()
		s.guest, free = filetest.Fill(t, dir)
		require.True(t, isFull(Replace(nil, path, filetest.Block('x', 4096), "",
			(*os.File).Sync)), "there is no space")
		for i := range saves {
			next := filetest.Block(byte('a'+i), []int{1, 4096, 9, 4000}[i%4])
			s.allowed = append(s.allowed, string(next))
			err := Replace(nil, path, next, spare, s.sync)
			s.check()
			if err == nil {
				require.Equal(t, next, testtool.Must(os.ReadFile(path))(t))
				s.allowed = []string{string(next)}
				require.Equal(t, s.names["owner"],
					func() uint64 { names, _ := s.now(); return names["owner"] }())
			} else {
				require.True(t, s.failAt > 0 && s.failAt <= s.calls, "%v", err)
				got, readErr := os.ReadFile(path)
				require.NoError(t, readErr)
				require.False(t, isFull(err) && string(got) == string(next),
					"it says that nothing has changed: %v", err)
			}
		}
		free()
		require.NoError(t, Replace(nil, path, []byte("last"), spare, (*os.File).Sync))
		st := testtool.Must(os.Stat(spare))(t)
		require.EqualValues(t, spareSize, st.Sys().(*syscall.Stat_t).Blocks*osfile.StatBlock,
			"the spare has its space again")
	}
}

// TestStoreOnAFullVolume checks that a full volume does not stop a unit from replacing its state,
// any number of times, nor from saving one new thing.
func TestStoreOnAFullVolume(t *testing.T) {
	volume := filetest.TinyFS(t, "256k")
	s := NewStore(filepath.Join(volume, "unit"), true)
	require.NoError(t, s.Save("handover", []byte("first")))
	_, free := filetest.Fill(t, volume)
	for i := range 20 {
		want := filetest.Block(byte(i), 1+i*200)
		require.NoError(t, s.Save("handover", want))
		require.Equal(t, want, testtool.Must(s.Load("handover"))(t))
	}
	require.ErrorIs(t, s.Save("handover", make([]byte, spareSize+1)), unix.ENOSPC)
	got := testtool.Must(s.Load("handover"))(t)
	require.Equal(t, filetest.Block(19, 1+19*200), got)

	require.NoError(t, s.Save("atomic-write", []byte("what was there before")))
	require.NoError(t, s.Save("atomic-write", nil))
	require.NoError(t, s.Save("handover", []byte("the spare is back")))
	free()

	filetest.Fill(t, volume)
	ephemeral := NewStore(s.dir, false)
	for i := range 3 {
		require.NoError(t, ephemeral.Save("reservations", filetest.Block(byte(i), 100)))
		got := testtool.Must(ephemeral.Load("reservations"))(t)
		require.Equal(t, filetest.Block(byte(i), 100), got)
	}
}

// TestNoSpare checks that nothing is left behind if there is no space for a spare.
func TestNoSpare(t *testing.T) {
	dir := filetest.TinyFS(t, "64k")
	spare := filepath.Join(dir, SpareSuffix)
	filetest.Put(t, dir, "most", bytes.Repeat([]byte{1}, 44<<10), 0)
	require.NoError(t, Replace(nil, filepath.Join(dir, "owner"), []byte("x"), spare,
		(*os.File).Sync))
	require.NoFileExists(t, spare)
}
