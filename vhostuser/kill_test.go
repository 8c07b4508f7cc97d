package vhostuser

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/vhostuser/vhosttest"
)

// fileDisk is a disk in a file.
type fileDisk struct {
	*os.File
	size int64
}

func openFile(path string) (*fileDisk, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return &fileDisk{f, st.Size()}, nil
}

func (f *fileDisk) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	return f.File.ReadAt(p, off)
}

func (f *fileDisk) WriteAt(_ context.Context, p []byte, off int64) (int, error) {
	return f.File.WriteAt(p, off)
}

func (f *fileDisk) Flush() error { return nil }

func (f *fileDisk) Size() int64 { return f.size }

// envKilled names the file that TestMain serves in place of tests, and the socket's directory.
const envKilled = "VHOST_USER_TEST_SERVE"

func TestMain(m *testing.M) {
	if path := os.Getenv(envKilled); path != "" {
		if err := serveUntilKilled(path); err != nil {
			panic(err)
		}
		return
	}
	os.Exit(m.Run())
}

// serveUntilKilled serves a file until its standard input ends, at the latest.
func serveUntilKilled(path string) error {
	d, err := openFile(path)
	if err != nil {
		return err
	}
	disks := serving.New(serving.Config{})
	s, err := New(Options{Disks: disks, Dir: filepath.Dir(path), ReconnectDelay: -1})
	if err != nil {
		return err
	}
	err = disks.Add(serving.Options{Number: 1, Name: "a", Disk: d,
		Identity: disk.IdentityOf([18]byte{1})})
	if err != nil {
		return err
	}
	if _, err := os.Stdout.WriteString("ready\n"); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return errors.Join(err, s.Shutdown(context.Background()))
}

// startChild starts a process that serves a file.
func startChild(t *testing.T, path string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), envKilled+"="+path)
	cmd.Stderr = os.Stderr
	_, err := cmd.StdinPipe() // it ends with this process
	require.NoError(t, err)
	out := testtool.Must(cmd.StdoutPipe())(t)
	require.NoError(t, cmd.Start())
	require.Equal(t, "ready\n", testtool.Must(bufio.NewReader(out).ReadString('\n'))(t))
	return cmd
}

// TestKills: the daemon is killed again and again under a guest that writes and reads at depth, and
// comes back. The guest sees no error, what was acknowledged is there, and so is what was under
// way.
func TestKills(t *testing.T) {
	const blocks, block, workers = 256, 4096, 16
	path := filepath.Join(t.TempDir(), "disk")
	require.NoError(t, os.WriteFile(path, make([]byte, blocks*block), 0o600))
	socket := filepath.Join(filepath.Dir(path), "a.sock")
	child := startChild(t, path)
	d := testtool.Must(vhosttest.Dial(socket, vhosttest.Options{Queues: 2, QueueSize: 64}))(t)
	defer d.Close()

	var done sync.WaitGroup
	var stop atomic.Bool
	var written [workers]atomic.Uint64
	for w := range workers {
		done.Go(func() { // each has blocks of its own
			r := rand.New(rand.NewPCG(uint64(w), 1))
			var last [blocks]uint64
			p := make([]byte, block)
			for generation := uint64(1); !stop.Load(); generation++ {
				b := r.IntN(blocks/workers)*workers + w
				for off := 0; off < block; off += 8 {
					binary.LittleEndian.PutUint64(p[off:], generation)
				}
				if err := d.Write(w%2, int64(b)*block, p); err != nil {
					t.Errorf("write: %v", err)
					return
				}
				last[b] = generation
				b = r.IntN(blocks/workers)*workers + w
				if err := d.Read(w%2, int64(b)*block, p); err != nil {
					t.Errorf("read: %v", err)
					return
				}
				for off := 0; off < block; off += 8 {
					if got := binary.LittleEndian.Uint64(p[off:]); got != last[b] {
						t.Errorf("block %d has generation %d at %d: it was written with %d", b, got,
							off, last[b])
						return
					}
				}
				written[w].Store(generation)
			}
		})
	}
	for range testtool.Rounds(25, 500) {
		before := written[0].Load()
		testtool.Eventually(t, func() bool { return written[0].Load() > before || t.Failed() })
		time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond) // any moment
		require.NoError(t, child.Process.Kill())
		_ = child.Wait()
		child = startChild(t, path)
		require.NoError(t, d.Reconnect(socket))
		if t.Failed() {
			break
		}
	}
	stop.Store(true)
	done.Wait()
	require.NoError(t, child.Process.Kill())
	_ = child.Wait()
}
