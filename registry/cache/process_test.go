package cache

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// The arguments of a child process of a test.
const (
	childDir = "CACHE_TEST_DIR" // of the cache
	childLog = "CACHE_TEST_LOG" // gets a byte for each fetch
	// childMost is how many fetches the child may begin; empty: any number. After them it hangs.
	childMost = "CACHE_TEST_MOST"
)

const childSize = segmentSize + 11*testChunk + 77 // two segments, and a short chunk

// child reads a whole blob in a random order and checks it.
func child() {
	log, err := os.OpenFile(os.Getenv(childLog), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		panic(err)
	}
	most, err := strconv.ParseInt(cmp.Or(os.Getenv(childMost), "1000000"), 10, 64)
	if err != nil {
		panic(err)
	}
	c, err := Open(os.Getenv(childDir), Options{})
	if err != nil {
		panic(err)
	}
	var begun atomic.Int64
	b, err := c.Blob(BlobOptions{Digest: testDigest, Size: childSize, ChunkSize: testChunk,
		Verify: verifyContent(testChunk),
		Fetch: func(_ context.Context, p []byte, off int64) error {
			if begun.Add(1) > most {
				time.Sleep(time.Hour)
			}
			if _, err := log.Write([]byte{'.'}); err != nil {
				return err
			}
			time.Sleep(500 * time.Microsecond)
			fillContent(p, off)
			return nil
		}})
	if err != nil {
		panic(err)
	}
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for _, chunk := range rand.Perm((childSize + testChunk - 1) / testChunk) {
				off := int64(chunk) * testChunk
				p := make([]byte, b.length(int64(chunk)))
				if _, err := b.ReadAt(context.Background(), p, off); err != nil {
					panic(err)
				}
				if !bytes.Equal(p, contentAt(off, int64(len(p)))) {
					panic(fmt.Sprintf("wrong content at %d", off))
				}
			}
		})
	}
	readers.Wait()
	c.touch()
	if n := c.Stats().Unsaved; n > 0 {
		panic(fmt.Sprintf("%d chunks could not be written to the cache", n))
	}
	if err := c.Close(); err != nil {
		panic(err)
	}
}

type family struct {
	dir, log string
}

func newFamily(t *testing.T) family {
	f := family{dir: t.TempDir(), log: filepath.Join(t.TempDir(), "log")}
	require.NoError(t, os.WriteFile(f.log, nil, 0o600))
	return f
}

func (f family) start(t *testing.T, env ...string) (*exec.Cmd, *bytes.Buffer) {
	cmd, out := f.command(os.Args[0], env...)
	require.NoError(t, cmd.Start())
	return cmd, out
}

func (f family) command(program string, env ...string) (*exec.Cmd, *bytes.Buffer) {
	cmd := exec.Command(program)
	cmd.Env = append(append(os.Environ(), childDir+"="+f.dir, childLog+"="+f.log), env...)
	out := new(bytes.Buffer)
	cmd.Stdout, cmd.Stderr = out, out
	return cmd, out
}

func (f family) fetches(t *testing.T) int {
	return int(testtool.Must(os.Stat(f.log))(t).Size())
}

const childChunks = (childSize + testChunk - 1) / testChunk

func TestProcessesFetchOnce(t *testing.T) {
	f := newFamily(t)
	var all []*exec.Cmd
	var outs []*bytes.Buffer
	for range 6 {
		cmd, out := f.start(t)
		all, outs = append(all, cmd), append(outs, out)
	}
	for i, cmd := range all {
		require.NoError(t, cmd.Wait(), outs[i])
	}
	require.Equal(t, childChunks, f.fetches(t))
}

func TestKilledProcesses(t *testing.T) {
	f := newFamily(t)
	const kills = 5
	for n := range kills {
		before := f.fetches(t)
		// At a busy moment, the child could have everything before this process has seen a fetch.
		cmd, _ := f.start(t, fmt.Sprintf("%s=%d", childMost, 20*n+8))
		testtool.Eventually(t, func() bool { return f.fetches(t) > before+20*n })
		require.NoError(t, cmd.Process.Kill())
		_ = cmd.Wait() // it was killed
	}
	cmd, out := f.start(t)
	require.NoError(t, cmd.Wait(), out)
	// Fetches that were under way when a process died are repeated, by 4 readers at most.
	require.LessOrEqual(t, f.fetches(t), childChunks+kills*4)
}

// TestUsersShare has two users of one group share a cache, under a mask that takes the group's
// right to write: what one of them has fetched, the other one need not fetch.
func TestUsersShare(t *testing.T) {
	testtool.Needs(t, "root (to start processes of other users)", os.Geteuid() == 0)
	const group = 5000
	program := filepath.Join(t.TempDir(), "child")
	require.NoError(t, os.WriteFile(program, filetest.Content(t, os.Args[0]), 0o755))
	mask := syscall.Umask(0o022)
	defer syscall.Umask(mask)
	first := func(uid uint32) *syscall.Credential {
		return &syscall.Credential{Uid: uid, Gid: group}
	}
	further := func(uid uint32) *syscall.Credential {
		return &syscall.Credential{Uid: uid, Gid: uid, Groups: []uint32{group}}
	}
	for name, c := range map[string]struct {
		mode fs.FileMode
		user func(uid uint32) *syscall.Credential
		make bool // the first of them makes the directory
	}{
		"whose first group it is":  {0o770, first, false},
		"that is one of theirs":    {0o770, further, false},
		"by the directory":         {0o770 | fs.ModeSetgid, further, false},
		"in a new directory":       {0o770, further, true},
		"in everybody's directory": {0o777, first, true},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFamily(t)
			openToAll(t, f.dir, f.log, program)
			require.NoError(t, os.Chmod(f.log, 0o666))
			if c.mode.Perm() != 0o777 {
				require.NoError(t, os.Chown(f.dir, 0, group))
			}
			require.NoError(t, os.Chmod(f.dir, c.mode))
			if c.make {
				f.dir = filepath.Join(f.dir, "new", "cache")
			}
			read := func(uid uint32, fetches int) {
				cmd, out := f.command(program)
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.user(uid)}
				require.NoError(t, cmd.Run(), out)
				require.Equal(t, fetches, f.fetches(t), out)
			}
			read(4001, childChunks)
			read(4002, childChunks)
			all := filepath.Join(f.dir, version, "*", "*", "0")
			segments := testtool.Must(filepath.Glob(all))(t)
			require.NoError(t, os.Remove(segments[0]))
			read(4002, childChunks+segmentSize/testChunk)
			read(4001, childChunks+segmentSize/testChunk)
			require.NoError(t, filepath.WalkDir(f.dir, func(path string, d fs.DirEntry,
				err error) error {
				require.NoError(t, err)
				info := testtool.Must(d.Info())(t)
				require.Equal(t, uint32(group), info.Sys().(*syscall.Stat_t).Gid, path)
				require.EqualValues(t, 0o060, info.Mode()&0o060, path)
				require.True(t, !d.IsDir() || info.Mode()&fs.ModeSetgid == c.mode&fs.ModeSetgid)
				return nil
			}))
		})
	}
}

// openToAll lets every user reach the files.
func openToAll(t *testing.T, paths ...string) {
	t.Helper()
	for _, path := range paths {
		for dir := filepath.Dir(path); dir != filepath.Clean(os.TempDir()) && dir != "/"; {
			require.NoError(t, os.Chmod(dir, 0o755))
			dir = filepath.Dir(dir)
		}
	}
}
