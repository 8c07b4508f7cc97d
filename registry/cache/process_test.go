package cache

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The arguments of a child process of a test.
const (
	childDir = "CACHE_TEST_DIR" // of the cache
	childLog = "CACHE_TEST_LOG" // gets a byte for each fetch
	// childMost is how many fetches the child may begin; empty: any number. After them it hangs.
	childMost = "CACHE_TEST_MOST"
)

const childSize = 2*segmentSize + 11*testChunk + 77

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
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), childDir+"="+f.dir, childLog+"="+f.log), env...)
	out := new(bytes.Buffer)
	cmd.Stdout, cmd.Stderr = out, out
	require.NoError(t, cmd.Start())
	return cmd, out
}

func (f family) fetches(t *testing.T) int {
	st, err := os.Stat(f.log)
	require.NoError(t, err)
	return int(st.Size())
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
		require.Eventually(t, func() bool { return f.fetches(t) > before+20*n },
			time.Minute, time.Millisecond)
		require.NoError(t, cmd.Process.Kill())
		_ = cmd.Wait() // it was killed
	}
	cmd, out := f.start(t)
	require.NoError(t, cmd.Wait(), out)
	// Fetches that were under way when a process died are repeated, by 4 readers at most.
	require.LessOrEqual(t, f.fetches(t), childChunks+kills*4)
}
