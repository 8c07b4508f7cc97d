package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/pages"
)

// brokenDisk is a disk of which a flush has failed, or hangs.
type brokenDisk struct {
	failed, closed atomic.Bool
	hang           chan struct{}
}

func (b *brokenDisk) ReadAt(p []byte, _ int64) (int, error) { return len(p), nil }
func (b *brokenDisk) WriteAt(p []byte, _ int64) (int, error) {
	if b.failed.Load() {
		return 0, disk.ErrFailed
	}
	return len(p), nil
}
func (b *brokenDisk) Flush() error {
	if b.hang != nil {
		<-b.hang
	}
	if b.failed.Load() {
		return disk.ErrFailed
	}
	return nil
}
func (b *brokenDisk) Size() int64  { return 512 }
func (b *brokenDisk) Close() error { b.closed.Store(true); return nil }

func newTestDaemon(t *testing.T, d disk.Disk) *daemon {
	t.Helper()
	daemon := newDaemon(&config{targetName: "iqn.2020-01.x"}, zap.NewNop())
	s := &servedDisk{diskSettings: diskSettings{lun: 1, copyMode: instance.CopyNone}, name: "a.raw", capacity: 512}
	daemon.state.setDisks([]*servedDisk{s})
	daemon.metrics.SetDisks(daemon.measured([]*servedDisk{s}))
	daemon.state.opened(s, &instance.Instance{Disk: d})
	daemon.state.set(pages.StateReady)
	return daemon
}

func TestADiskThatHasFailedIsShownEverywhere(t *testing.T) {
	b := &brokenDisk{}
	d := newTestDaemon(t, b)
	ts := httptest.NewServer(d.pages(zap.NewNop()))
	defer ts.Close()
	look := func(path string) (int, string) {
		res, err := http.Get(ts.URL + path)
		require.NoError(t, err)
		defer res.Body.Close()
		var body bytes.Buffer
		_, err = body.ReadFrom(res.Body)
		require.NoError(t, err)
		return res.StatusCode, body.String()
	}
	code, _ := look("/healthz")
	require.Equal(t, http.StatusOK, code)
	_, page := look("/metrics")
	require.Contains(t, page, `kubevirt_disk_lun_failed{image="a.raw",lun="1"} 0`)

	b.failed.Store(true)
	code, page = look("/healthz")
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Contains(t, page, `LUN 1 ("a.raw")`)
	_, page = look("/metrics")
	require.Contains(t, page, `kubevirt_disk_lun_failed{image="a.raw",lun="1"} 1`)
	_, page = look("/status")
	require.Contains(t, page, disk.ErrFailed.Error())
	require.ErrorContains(t, d.flushDisks(t.Context()), "acknowledged data may be lost", "a stop is no success either")
}

func TestAFlushThatHangsEndsWithTheDeadline(t *testing.T) {
	b := &brokenDisk{hang: make(chan struct{})}
	defer close(b.hang)
	d := newTestDaemon(t, b)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorContains(t, d.flushDisks(ctx), "did not end in time")
	require.False(t, b.closed.Load())
}

// Disks are closed all at once: each may wait for what it reads in the background, and a stop has one time for them all.
func TestDisksAreClosedAtOnce(t *testing.T) {
	const disks = 40
	var entered atomic.Int32
	all := make(chan struct{})
	err := forAll(disks, disks, func(i int) error {
		if entered.Add(1) == disks {
			close(all)
		}
		select {
		case <-all:
		case <-time.After(10 * time.Second):
			return errors.New("the others do not come")
		}
		if i%20 == 3 {
			return fmt.Errorf("disk %d", i)
		}
		return nil
	})
	require.EqualError(t, err, "disk 3\ndisk 23")
	require.NoError(t, forAll(0, 0, nil))
}

// Who may not open enough files is told how many the disks take.
func TestTooFewDescriptors(t *testing.T) {
	d := newTestDaemon(t, &brokenDisk{})
	too := d.explainDescriptors(&os.PathError{Op: "open", Path: "x", Err: syscall.EMFILE})
	require.ErrorIs(t, too, syscall.EMFILE)
	require.ErrorContains(t, too, "1 disks take, up to 2, and one more")
	d.state.servedDisks()[0].copyMode = instance.CopyClone
	require.ErrorContains(t, d.explainDescriptors(syscall.EMFILE), "up to 4, and")
	d.cfg.persistentDir = "/volume"
	require.ErrorContains(t, d.explainDescriptors(syscall.EMFILE), "up to 5, and")
	require.Equal(t, syscall.ENOSPC, d.explainDescriptors(syscall.ENOSPC))
}

// TestTakenPagePort: who is called as the original wrapper shares a pod's network with others of its kind, and serves without pages.
func TestTakenPagePort(t *testing.T) {
	taken, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	p, _, err := parsePortal(taken.Addr().String(), 0)
	require.NoError(t, err)
	d := newTestDaemon(t, &brokenDisk{})
	d.cfg.metricsListen = &p
	_, err = d.servePages(t.Context())
	require.ErrorContains(t, err, "--metrics-listen")
	d.pagesOptional = true
	closePages, err := d.servePages(t.Context())
	require.NoError(t, err)
	closePages()

	// Only a taken port is let pass.
	p.addr = netip.MustParseAddr("192.0.2.1")
	_, err = d.servePages(t.Context())
	require.ErrorContains(t, err, "--metrics-listen")
}

func TestReadyTellsWhatIsMissing(t *testing.T) {
	d := newTestDaemon(t, &brokenDisk{})
	require.NoError(t, d.state.ready())
	d.state.set(pages.StateStopping)
	require.EqualError(t, d.state.ready(), "stopping")
	d.state.set(pages.StateOpening)
	require.EqualError(t, d.state.ready(), "opening")
}

// TestStopDuringTheCopy: whichever of the two is first, the end is a clean one, and the next start goes on with the disk.
func TestStopDuringTheCopy(t *testing.T) {
	l := newPlace(t)
	f, err := os.Create(filepath.Join(l.dir, "disk", "big.raw"))
	require.NoError(t, err)
	block := bytes.Repeat([]byte{0xa5}, 1<<20)
	for range 256 {
		_, err := f.Write(block)
		require.NoError(t, err)
	}
	require.NoError(t, f.Close())
	p := launch(t, binary(t), l.env, "serve")
	p.until("the disk is made", func() bool { return p.logged("made a disk of the image", "lun") != nil })
	require.Equal(t, exitDone, p.terminate())
	require.NoFileExists(t, l.readyFile())
	partial, err := filepath.Glob(filepath.Join(l.dir, "work", "*", "*.partial"))
	require.NoError(t, err)
	require.Empty(t, partial)
	require.True(t, p.logged("stopped", "msg") != nil || p.logged("stopped before the LUNs were ready", "msg") != nil)
	again := l.serve(t)
	require.NotNil(t, again.logged("keeping the existing disk, with what was written to it", "lun"))
}

func TestTheFirstSignalCancelsTheSecondEnds(t *testing.T) {
	exited := make(chan int, 1)
	a := &app{exit: func(status int) { exited <- status }}
	ctx, stop := a.interruptible(t.Context(), nil)
	defer stop()
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
	select {
	case <-ctx.Done():
	case <-time.After(patience):
		t.Fatal("the first signal does nothing")
	}
	require.Empty(t, exited)
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGINT))
	select {
	case status := <-exited:
		require.Equal(t, exitFailed, status)
	case <-time.After(patience):
		t.Fatal("the second signal does nothing")
	}
}

// One request may come twice, as timeout(1) sends it to a process and then to its group: it drains all the same.
func TestOneRequestThatComesTwice(t *testing.T) {
	exited := make(chan int, 1)
	a := &app{exit: func(status int) { exited <- status }, sameRequest: time.Hour}
	ctx, stop := a.interruptible(t.Context(), nil)
	defer stop()
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
	<-ctx.Done()
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
	require.Never(t, func() bool { return len(exited) > 0 }, 50*time.Millisecond, time.Millisecond)
}

func TestAClosedTerminalIsAFirstSignal(t *testing.T) {
	if signal.Ignored(syscall.SIGHUP) {
		t.Skip("skipped: the tests were started to outlive their terminal")
	}
	exited := make(chan int, 1)
	a := &app{exit: func(status int) { exited <- status }}
	ctx, stop := a.interruptible(t.Context(), nil)
	defer stop()
	for range 2 {
		require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGHUP))
		select {
		case <-ctx.Done():
		case <-time.After(patience):
			t.Fatal("the signal does nothing")
		}
	}
	require.Never(t, func() bool { return len(exited) > 0 }, 50*time.Millisecond, time.Millisecond)
}

func TestReadyFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "healthy")
	r := readyFile{path: path}
	require.NoError(t, r.clear(), "none is there")
	require.NoError(t, r.write())
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o644), info.Mode())
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, files, 1, "nothing temporary is left")
	require.NoError(t, r.remove())
	require.NoFileExists(t, path)
	require.NoError(t, r.write(), "again")
	require.NoError(t, os.Remove(path))
	require.NoError(t, r.remove(), "somebody else was first")
	var none readyFile
	require.NoError(t, none.clear())
	require.NoError(t, none.write())
	require.NoError(t, none.remove())

	require.NoError(t, os.MkdirAll(filepath.Join(path, "sub"), 0o755))
	require.Error(t, r.clear())
	require.Error(t, r.write())
	require.NoError(t, r.remove())
	require.DirExists(t, path, "it is not that of this daemon")
	files, err = os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, files, 1)
}

// TestReadyFileLeavesWhatIsNotItsOwn: what came into its place while the disks were made stays when the daemon fails or stops.
func TestReadyFileLeavesWhatIsNotItsOwn(t *testing.T) {
	for name, place := range map[string]func(path string) error{
		"a file":      func(path string) error { return os.WriteFile(path, []byte("precious"), 0o644) },
		"a like file": func(path string) error { return os.WriteFile(path, []byte("reader"), 0o644) },
		"a directory": func(path string) error { return os.Mkdir(path, 0o755) },
		"a link":      func(path string) error { return os.Symlink("/nowhere", path) },
		"a pipe":      func(path string) error { return unix.Mkfifo(path, 0o644) },
	} {
		for _, ready := range []bool{false, true} {
			path := filepath.Join(t.TempDir(), "healthy")
			r := readyFile{path: path}
			require.NoError(t, r.clear())
			if ready {
				require.NoError(t, r.write())
				require.NoError(t, os.Remove(path))
			}
			require.NoError(t, place(path))
			if !ready {
				require.ErrorContains(t, r.write(), "would take the place of", name)
			}
			require.NoError(t, r.remove(), name)
			_, err := os.Lstat(path)
			require.NoError(t, err, name)
		}
	}
}

// TestReadyFileIsRemovedWhateverItHolds: a person who has written into it leaves no probe that takes a stopped daemon for ready.
func TestReadyFileIsRemovedWhateverItHolds(t *testing.T) {
	r := readyFile{path: filepath.Join(t.TempDir(), "healthy")}
	require.NoError(t, r.write())
	require.NoError(t, os.WriteFile(r.path, []byte("yes"), 0o644))
	require.NoError(t, r.remove())
	require.NoFileExists(t, r.path)
}

// TestReadyFileOfTwo: whoever of two daemons becomes ready first has the file, and the other one neither takes it over nor removes it.
func TestReadyFileOfTwo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "healthy")
	first, second := readyFile{path: path}, readyFile{path: path}
	require.NoError(t, first.clear())
	require.NoError(t, second.clear(), "both start")
	require.NoError(t, first.write())
	for _, take := range []func() error{second.write, second.clear} {
		err := take()
		require.ErrorContains(t, err, "another daemon, which is running")
		require.ErrorContains(t, err, "--ready-file (READY_FILE)")
	}
	require.NoError(t, second.remove())
	require.FileExists(t, path)
	require.NoError(t, first.remove())
	require.NoFileExists(t, path)

	require.NoError(t, first.write())
	require.NoError(t, first.made.Close()) // as by kill -9
	require.NoError(t, second.clear())
	require.NoFileExists(t, path)
}

// TestReadyFileWithoutSpace lets files grow to three bytes only, which is as a full file system. The limit is that of a process, and so
// one of its own: this one may have to write a log for go test meanwhile.
func TestReadyFileWithoutSpace(t *testing.T) {
	const limited = "KUBEVIRT_DISK_TEST_LIMITED"
	if os.Getenv(limited) == "" {
		cmd := exec.Command(os.Args[0], "-test.v", "-test.run=^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), limited+"=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "--- PASS: "+t.Name())
		return
	}
	dir := t.TempDir()
	r := readyFile{path: filepath.Join(dir, "healthy")}
	require.NoError(t, r.clear())
	var before unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_FSIZE, &before))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 3, Max: before.Max}))
	err := r.write()
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &before))
	require.ErrorIs(t, err, unix.EFBIG)
	require.ErrorContains(t, err, "--ready-file (READY_FILE)")
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
	require.NoError(t, r.remove())
}

func TestReadyFileInNoDirectory(t *testing.T) {
	r := readyFile{path: filepath.Join(t.TempDir(), "none", "healthy")}
	err := r.clear()
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.ErrorContains(t, err, "--ready-file (READY_FILE)")
}

func TestLogFormats(t *testing.T) {
	var b bytes.Buffer
	require.Equal(t, logJSON, logConfig{}.resolve(&b).format, "a pipe gets JSON")
	newLogger(logConfig{}, zapcore.WarnLevel, &b).Info("quiet")
	require.Empty(t, b.String())
	newLogger(logConfig{}, zapcore.WarnLevel, &b).Warn("loud", zap.Error(errors.New("two\nlines")))
	require.Contains(t, b.String(), `"msg":"loud"`)
	require.Contains(t, b.String(), `"error":"two\nlines"`)
	b.Reset()
	newLogger(logConfig{format: logConsole}, zapcore.InfoLevel, &b).Info("hello", zap.Int("lun", 1))
	require.Contains(t, b.String(), `INFO  hello  {"lun": 1}`)
}

// TestMessagesCommandNoTerminal: the name of an image, or what a daemon elsewhere answers, neither moves the cursor nor turns the text around.
func TestMessagesCommandNoTerminal(t *testing.T) {
	var b bytes.Buffer
	a := &app{stderr: &b}
	require.Equal(t, exitFailed, a.report(&failure{errors.New("LUN 1 (größe\x1b[2J\r\x9b\u009b\u202e\x00\"'.raw):\n  bad, \uFFFD")}))
	require.Equal(t, `kubevirt-disk: LUN 1 (größe\x1b[2J\r\x9b\u009b\u202e\x00"'.raw):`+"\n  bad, \uFFFD\n", b.String())
}
