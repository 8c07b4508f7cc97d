package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/pages"
)

// brokenDisk is a disk whose flush fails or hangs.
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

// testNames are the names of settings that the tests expect in messages.
var testNames = map[Setting]Name{
	SettingImageDir:  {"--disk-dir", "DISK_DIR"},
	SettingPortals:   {"--listen", "LISTEN"},
	SettingPort:      {"--port", "PORT"},
	SettingPages:     {"--metrics-listen", "METRICS_LISTEN"},
	SettingReadyFile: {"--ready-file", "READY_FILE"},
	SettingCopyMode:  {"--copy-mode", "COPY_MODE"},
	SettingDisks:     {`"disks" in the file`, ""},
}

// loopback returns an address with a free port of this machine.
func loopback() Address { return Address{Addr: netip.AddrFrom4([4]byte{127, 0, 0, 1})} }

// newTestDaemon makes a daemon without a target that shows a disk as served.
func newTestDaemon(t *testing.T, d disk.Disk) *Daemon {
	t.Helper()
	daemon, err := New(Options{
		Images: Images{Dir: t.TempDir()}, WorkDir: t.TempDir(), Portals: []Address{loopback()},
		TargetName: "iqn.2020-01.x", Names: testNames,
	})
	require.NoError(t, err)
	settings := DiskSettings{LUN: 1, CopyMode: instance.CopyNone}
	all, err := daemon.disks.add(Disk{Name: "a.raw", DiskSettings: settings})
	require.NoError(t, err)
	daemon.disks.opened(all[0], &instance.Instance{Disk: d})
	daemon.disks.serves(all...)
	daemon.measure()
	daemon.set(pages.StateReady)
	return daemon
}

func TestADiskThatHasFailedIsShownEverywhere(t *testing.T) {
	b := &brokenDisk{}
	d := newTestDaemon(t, b)
	people, err := d.newPage()
	require.NoError(t, err)
	defer people.Wait()
	defer people.Stop()
	ts := httptest.NewServer(d.pages(people, zap.NewNop()))
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
	require.ErrorContains(t, d.flushDisks(t.Context()), "acknowledged data may be lost",
		"the stop fails too")
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

// TestDisksAreClosedAtOnce: closing a disk may wait for its background reads, and all disks share
// the time of a stop. So they are closed at the same time.
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
		case <-time.After(time.Minute):
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

// TestTooFewDescriptors checks that the error says how many descriptors the disks need.
func TestTooFewDescriptors(t *testing.T) {
	d := newTestDaemon(t, &brokenDisk{})
	too := d.explainDescriptors(&os.PathError{Op: "open", Path: "x", Err: syscall.EMFILE})
	require.ErrorIs(t, too, syscall.EMFILE)
	require.ErrorContains(t, too, "1 disks take, up to 2, and one more")
	clone := d.disks.all()[0]
	clone.progress = new(image.Progress)
	require.ErrorContains(t, d.explainDescriptors(syscall.EMFILE), "up to 4, and")
	clone.dir = "/volume"
	require.ErrorContains(t, d.explainDescriptors(syscall.EMFILE), "up to 5, and")
	require.Equal(t, syscall.ENOSPC, d.explainDescriptors(syscall.ENOSPC))
}

// TestTakenPagePort: a daemon that is called like the original wrapper shares a pod's network with
// others of its kind. If the port of the pages is taken, it serves without them.
func TestTakenPagePort(t *testing.T) {
	taken, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	p := loopback()
	p.Port = uint16(taken.Addr().(*net.TCPAddr).Port)
	d := newTestDaemon(t, &brokenDisk{})
	d.opt.Pages = &p
	_, err = d.servePages(t.Context())
	require.ErrorContains(t, err, "--metrics-listen")
	d.opt.PagesOptional = true
	closePages, err := d.servePages(t.Context())
	require.NoError(t, err)
	closePages()

	// Any other error still counts.
	p.Addr = netip.MustParseAddr("192.0.2.1")
	_, err = d.servePages(t.Context())
	require.ErrorContains(t, err, "--metrics-listen")
}

func TestReadyTellsWhatIsMissing(t *testing.T) {
	d := newTestDaemon(t, &brokenDisk{})
	require.NoError(t, d.isReady())
	d.set(pages.StateStopping)
	require.EqualError(t, d.isReady(), "stopping")
	d.set(pages.StateOpening)
	require.EqualError(t, d.isReady(), "opening")
}
