package daemon

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/options/optionstest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
	"kubevirt.io/disk/status"
)

func loopback() options.Address { return optionstest.Loopback() }

// failingDisk is a disk that fails for good when a test says so.
type failingDisk struct {
	disk.Disk
	failed *atomic.Bool
}

func (f failingDisk) WriteAt(ctx context.Context, p []byte, off int64) (int, error) {
	if f.failed.Load() {
		return 0, disk.ErrFailed
	}
	return f.Disk.WriteAt(ctx, p, off)
}

func (f failingDisk) Flush() error {
	if f.failed.Load() {
		return disk.ErrFailed
	}
	return f.Disk.Flush()
}

func TestADiskThatHasFailedIsShownEverywhere(t *testing.T) {
	failed := new(atomic.Bool)
	d := launch(t, testOptions(t, "a.raw"), func(d *Daemon) {
		d.disks.OpenInstance = func(ctx context.Context, img *image.Image, opt instance.Options) (
			*instance.Instance, error) {
			inst, err := instance.Open(ctx, img, opt)
			if err == nil {
				inst.Disk = failingDisk{inst.Disk, failed}
			}
			return inst, err
		}
	})
	d.awaitReady()
	look := func(path string) (int, string) {
		res := testtool.Must(http.Get("http://" + d.PagesAddress() + path))(t)
		defer res.Body.Close()
		var body bytes.Buffer
		require.NoError(t, testtool.Err(body.ReadFrom(res.Body)))
		return res.StatusCode, body.String()
	}
	code, _ := look("/healthz")
	require.Equal(t, http.StatusOK, code)
	_, page := look("/metrics")
	require.Contains(t, page, `kubevirt_disk_lun_failed{image="a.raw",lun="1"} 0`)

	failed.Store(true)
	code, page = look("/healthz")
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Contains(t, page, `LUN 1 ("a.raw")`)
	_, page = look("/metrics")
	require.Contains(t, page, `kubevirt_disk_lun_failed{image="a.raw",lun="1"} 1`)
	_, page = look("/status")
	require.Contains(t, page, disk.ErrFailed.Error())
	require.ErrorContains(t, d.end(), "acknowledged data may be lost", "the stop fails too")
}

// TestStopBesideAVolumeThatHangs: a volume whose storage hangs does not take the time that sessions
// and disks need at a stop.
func TestStopBesideAVolumeThatHangs(t *testing.T) {
	content := bytes.Repeat([]byte("a disk  "), 8192)
	web := registrytest.NewWeb(t)
	web.Files["/a.img"] = content
	opt := testOptions(t, "a.raw")
	opt.Streams = options.Streams{Registry: transport.Options{CA: web.CA(t)},
		CacheDir: filepath.Join(filepath.Dir(opt.WorkDir), "cache"), CacheSize: 1 << 30}
	opt.Volumes = &options.Volumes{Listen: optionstest.Loopback(), URLs: []transport.Prefix{
		testtool.Must(transport.ParsePrefix(web.Server.URL))(t)}}
	hangs, ends := make(chan struct{}), make(chan struct{})
	r := launch(t, opt, func(d *Daemon) {
		d.disks.OpenInstance = func(ctx context.Context, img *image.Image, opt instance.Options) (
			*instance.Instance, error) {
			if opt.PersistentDir == "" {
				return instance.Open(ctx, img, opt)
			}
			close(hangs)
			<-ends
			return nil, errors.New("the storage did not answer")
		}
	})
	r.awaitReady()
	req := testtool.Must(http.NewRequest(http.MethodPut,
		"http://"+r.Status().Volumes.Address+"/volume/vm", strings.NewReader(fmt.Sprintf(
			"from: {url: %q, digest: %q}", web.Server.URL+"/a.img",
			transport.DigestOf(content)))))(t)
	res := testtool.Must((&http.Client{Transport: &http.Transport{
		DisableKeepAlives: true}}).Do(req))(t)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusAccepted, res.StatusCode)
	<-hangs
	r.stop()
	testtool.Eventually(t, func() bool {
		return r.log.FilterMessage("the volumes were not closed cleanly").Len() > 0
	}, "the stop goes on")
	close(ends)
	require.NoError(t, testtool.Await(t, r.ended, "the daemon does not end"))
}

// TestDeletedVolumeFreesItsUpload: an upload of compressed data waits in memory for its next part,
// with its file open. When the volume is deleted, nothing of that stays.
func TestDeletedVolumeFreesItsUpload(t *testing.T) {
	opt := testOptions(t, "a.raw")
	opt.Volumes = &options.Volumes{Listen: optionstest.Loopback()}
	opt.Streams.CacheDir, opt.Streams.CacheSize = t.TempDir(), 1<<30
	r := start(t, opt)
	at := "http://" + r.Status().Volumes.Address + "/volume/vm"
	ask := func(method, at string, body io.Reader, want int) {
		req := testtool.Must(http.NewRequest(method, at, body))(t)
		req.Header.Set("Upload-Complete", "?0")
		res := testtool.Must((&http.Client{Transport: &http.Transport{
			DisableKeepAlives: true}}).Do(req))(t)
		require.NoError(t, res.Body.Close())
		require.Equal(t, want, res.StatusCode)
	}
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	noise := make([]byte, 4<<20)
	rand.Read(noise)
	testtool.Must(w.Write(noise))(t)
	require.NoError(t, w.Flush())
	ask(http.MethodPut, at+"/data", &packed, http.StatusCreated)
	data := filepath.Join(opt.VolumesDir(), "vm", "disk.img.upload.data")
	open := func() bool {
		all := testtool.Must(filepath.Glob("/proc/self/fd/*"))(t)
		return slices.ContainsFunc(all, func(fd string) bool {
			to, _ := os.Readlink(fd)
			return strings.TrimSuffix(to, " (deleted)") == data
		})
	}
	require.True(t, open())
	ask(http.MethodDelete, at, nil, http.StatusNoContent)
	require.False(t, open())
}

// TestVolumeWithoutISCSI: without iSCSI, an answer names no portal: another daemon may be there.
func TestVolumeWithoutISCSI(t *testing.T) {
	opt := testOptions(t, "a.raw")
	opt.Portals = nil
	opt.NBD = []options.NBDPortal{{Socket: filepath.Join(t.TempDir(), "nbd.sock")}}
	opt.Volumes = &options.Volumes{Listen: optionstest.Loopback(), Portal: "vms.example:3260"}
	opt.Streams.CacheDir = t.TempDir()
	r := start(t, opt)
	req := testtool.Must(http.NewRequest(http.MethodPut,
		"http://"+r.Status().Volumes.Address+"/volume/vm", strings.NewReader("size: 1Mi")))(t)
	res := testtool.Must((&http.Client{Transport: &http.Transport{
		DisableKeepAlives: true}}).Do(req))(t)
	defer res.Body.Close()
	text := string(testtool.Must(io.ReadAll(res.Body))(t))
	require.Contains(t, text, "state: ready")
	require.NotContains(t, text, "portal")
}

// TestTakenPagePort: a daemon that is called like the original wrapper shares a pod's network with
// others of its kind. If the port of the pages is taken, it serves without them.
func TestTakenPagePort(t *testing.T) {
	taken := testtool.Must(net.Listen("tcp4", "127.0.0.1:0"))(t)
	defer taken.Close()
	p := loopback()
	p.Port = uint16(taken.Addr().(*net.TCPAddr).Port)
	d := testtool.Must(New(testOptions(t, "a.raw")))(t)
	d.opt.Pages = &p
	require.ErrorContains(t, testtool.Err(d.servePages(t.Context())), "--metrics-listen")
	d.opt.PagesOptional = true
	closePages := testtool.Must(d.servePages(t.Context()))(t)
	closePages()

	// Any other error still counts.
	p.Addr = netip.MustParseAddr("192.0.2.1")
	require.ErrorContains(t, testtool.Err(d.servePages(t.Context())), "--metrics-listen")
}

func TestReadyTellsWhatIsMissing(t *testing.T) {
	d := testtool.Must(New(testOptions(t, "a.raw")))(t)
	require.ErrorContains(t, d.isReady(), "starting: it looks at the images, since ")
	d.set(status.StateReady)
	require.NoError(t, d.isReady())
	d.set(status.StateStopping)
	require.EqualError(t, d.isReady(), "stopping")
	d.set(status.StateOpening)
	require.ErrorContains(t, d.isReady(), "opening: it opens the disks, since ")
}
