package daemon

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/options/optionstest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target"
	"kubevirt.io/disk/target/targettest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// running is a daemon in this process.
type running struct {
	*Daemon
	t     *testing.T
	log   *observer.ObservedLogs
	stop  context.CancelFunc
	ended chan error
}

// testOptions returns the options of a daemon with its own directory and raw images of 64 KiB.
func testOptions(t *testing.T, images ...string) options.Options {
	t.Helper()
	dir := t.TempDir()
	opt := options.Options{
		Images:        options.Images{Dir: filepath.Join(dir, "disk")},
		WorkDir:       filepath.Join(dir, "work"),
		Portals:       []options.Address{loopback()},
		Pages:         &options.Address{Addr: loopback().Addr},
		ReadyFile:     filepath.Join(dir, "ready"),
		ControlSocket: filepath.Join(dir, "work", "control.sock"),
		TargetName:    targettest.DefaultTarget,
		Table:         optionstest.Table,
	}
	require.NoError(t, os.Mkdir(opt.Images.Dir, 0o755))
	for i, name := range images {
		rawImage(t, filepath.Join(opt.Images.Dir, name), byte(i+1))
	}
	return opt
}

func rawImage(t *testing.T, path string, content byte) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte{content}, 64<<10), 0o644))
}

// launch runs a daemon until the test ends. Before it runs, it is prepared.
func launch(t *testing.T, opt options.Options, prepare ...func(*Daemon)) *running {
	t.Helper()
	core, log := observer.New(zap.DebugLevel)
	opt.Log = zap.New(core)
	d := testtool.Must(New(opt))(t)
	for _, one := range prepare {
		one(d)
	}
	ctx, stop := context.WithCancel(context.Background())
	r := &running{Daemon: d, t: t, log: log, stop: stop, ended: make(chan error, 1)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.ended <- d.Run(ctx)
	}()
	t.Cleanup(func() {
		stop()
		<-done
	})
	return r
}

// start runs a daemon until every LUN can be used.
func start(t *testing.T, opt options.Options) *running {
	t.Helper()
	r := launch(t, opt)
	r.awaitReady()
	return r
}

// awaitReady waits until every LUN can be used.
func (r *running) awaitReady() {
	r.t.Helper()
	select {
	case <-r.Ready():
	case err := <-r.ended:
		require.NoError(r.t, err)
		require.Fail(r.t, "the daemon ended before it was ready")
	case <-time.After(testtool.Timeout):
		require.Fail(r.t, "the daemon does not become ready")
	}
}

// end stops the daemon and returns the error of Run.
func (r *running) end() error {
	r.t.Helper()
	r.stop()
	return testtool.Await(r.t, r.ended, "the daemon does not end")
}

func (r *running) login(initiator string, luns ...uint16) *targettest.Session {
	r.t.Helper()
	portal := testtool.Must(netip.ParseAddrPort(r.Status().Portals[0]))(r.t)
	o := targettest.LoginOptions{Initiator: initiator}
	return targettest.MustLogin(r.t, net.TCPAddrFromAddrPort(portal), o, luns...)
}

// page fetches a page.
func (r *running) page(path string) string {
	r.t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	res, err := client.Get("http://" + r.PagesAddress() + path)
	require.NoError(r.t, err)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	require.NoError(r.t, err)
	return string(body)
}

const (
	initiatorA = "iqn.2026-01.test:a"
	initiatorB = "iqn.2026-01.test:b"
)

// TestTwoDaemonsInOneProcess lets two daemons serve images of the same name under the same LUN.
// They share nothing: no content, sessions, settings, handovers, metrics or end.
func TestTwoDaemonsInOneProcess(t *testing.T) {
	first, second := start(t, testOptions(t, "a.raw")), start(t, testOptions(t, "a.raw", "b.raw"))
	require.Len(t, first.Status().LUNs, 1)
	require.Len(t, second.Status().LUNs, 2)
	require.NotEqual(t, first.Status().LUNs[0].Serial, second.Status().LUNs[0].Serial)

	data := bytes.Repeat([]byte{0xee}, 512)
	one, other := first.login(initiatorA, 1), second.login(initiatorA, 1, 2)
	one.MustGood(t, targettest.Write10(1, 0, data))
	there := other.MustGood(t, targettest.Read10(1, 0, 1)).Data
	require.Equal(t, bytes.Repeat([]byte{1}, 512), there)

	const series = `kubevirt_disk_transferred_bytes_total{initiator="` + initiatorA +
		`",lun="1",operation="write"} `
	require.Contains(t, first.page("/metrics"), series+"512\n")
	require.NotContains(t, second.page("/metrics"), series+"512\n")
	require.NotContains(t, first.page("/metrics"), `image="b.raw"`)

	shared := options.Settings{Disk: options.DiskSettings{AccessMode: serving.AccessWriteShared}}
	done, later := testtool.Must2(first.Reload(shared))(t)
	require.Equal(t, []string{"a.raw: access-mode"}, done)
	require.Empty(t, later)
	require.Equal(t, "write-shared", first.Status().LUNs[0].AccessMode)
	require.Equal(t, "write-exclusive", second.Status().LUNs[0].AccessMode)

	ask := control.Client{Socket: second.opt.ControlSocket}
	open := status.Handover{Action: status.ActionOpen, LUN: 1, To: initiatorB}
	require.NoError(t, testtool.Err(ask.Handover(t.Context(), open)))
	require.Equal(t, initiatorB, second.Status().LUNs[0].OpenTo)
	require.Empty(t, first.Status().LUNs[0].OpenTo)
	require.NoError(t, testtool.Err(ask.Kick(t.Context(), status.Kick{Initiator: initiatorA})))
	require.NoError(t, other.ExpectClosed())
	one.MustGood(t, targettest.Write10(1, 0, data))

	require.NoError(t, first.end())
	require.NoFileExists(t, first.opt.ReadyFile)
	require.NoFileExists(t, first.opt.ControlSocket)
	require.Equal(t, status.StateStopping, first.Status().State)
	require.FileExists(t, second.opt.ReadyFile)
	require.Equal(t, "ok\n", second.page("/readyz"))
	second.login(initiatorB, 1).MustGood(t, targettest.Read10(1, 0, 1))
	require.NoError(t, second.end())

	// No acknowledged write is lost.
	again := start(t, first.opt)
	require.Equal(t, data, again.login(initiatorA, 1).MustGood(t, targettest.Read10(1, 0, 1)).Data)
	require.NoError(t, again.end())
}

func credential(user, password string) chap.Credential {
	return chap.Credential{Username: user, Secret: chap.NewSecret(password)}
}

// TestOptions checks that a missing option is an error at once, and that the others have defaults.
func TestOptions(t *testing.T) {
	whole := options.Options{
		Images: options.Images{Paths: []string{"a"}}, WorkDir: "w",
		Portals: []options.Address{loopback()}, Table: optionstest.Table,
	}
	for name, break_ := range map[string]func(o *options.Options){
		"nothing to serve":  func(o *options.Options) { o.Images = options.Images{} },
		"no work directory": func(o *options.Options) { o.WorkDir = "" },
		"no portal":         func(o *options.Options) { o.Portals = nil },
		"no table":          func(o *options.Options) { o.Table = nil },
	} {
		opt := whole
		break_(&opt)
		require.ErrorContains(t, testtool.Err(New(opt)), name)
	}
	opt := testOptions(t, "a.raw")
	d := start(t, options.Options{Images: opt.Images, WorkDir: opt.WorkDir, Portals: opt.Portals,
		Table: optionstest.Table})
	s := d.Status()
	require.Equal(t, target.DefaultTargetName, s.TargetName)
	require.Equal(t, string(instance.CopyClone), s.LUNs[0].CopyMode)
	require.Equal(t, string(serving.AccessWriteExclusive), s.LUNs[0].AccessMode)
	require.Empty(t, d.PagesAddress())
	require.ErrorIs(t, d.ReplaceCredentials(chap.Config{}), errNoCHAP)
	require.NoError(t, d.end())
}

// TestBeforeItIsReady: before the daemon is ready, calls that need the target fail. Stopping it is
// never an error.
func TestBeforeItIsReady(t *testing.T) {
	d := testtool.Must(New(testOptions(t, "a.raw")))(t)
	require.Equal(t, status.StateStarting, d.Status().State)
	require.ErrorIs(t, testtool.Err2(d.Reload(options.Settings{})), errNotReady)
	require.False(t, d.WantHandover(t.Context(),
		`{"action":"open","lun":1,"to":"`+initiatorB+`"}`))
	require.Contains(t, d.Status().Handover.Error, errNotReady.Error())
	ended, end := context.WithCancel(t.Context())
	end()
	require.NoError(t, d.Run(ended))
	require.NoFileExists(t, d.opt.ReadyFile)
	select {
	case <-d.Ready():
		require.Fail(t, "the daemon was never ready")
	default:
	}
}

// TestReplacedCredentials checks that replaced credentials count for new logins.
func TestReplacedCredentials(t *testing.T) {
	opt := testOptions(t, "a.raw")
	opt.CHAP.Initiator = credential("user", "correct-horse-battery")
	d := start(t, opt)
	require.Equal(t, "chap", d.Status().Authentication)
	portal := testtool.Must(netip.ParseAddrPort(d.Status().Portals[0]))(t)
	login := func(password string) error {
		s, err := targettest.Login(net.TCPAddrFromAddrPort(portal), targettest.LoginOptions{
			CHAP: &targettest.CHAP{Username: "user", Password: password}})
		if err == nil {
			require.NoError(t, s.Close())
		}
		return err
	}
	require.NoError(t, login("correct-horse-battery"))
	next := chap.Config{Initiator: credential("user", "staple-and-more")}
	require.NoError(t, d.ReplaceCredentials(next))
	require.Error(t, login("correct-horse-battery"))
	require.NoError(t, login("staple-and-more"))
	require.Error(t, d.ReplaceCredentials(chap.Config{}), "a daemon with CHAP keeps it")
	require.NoError(t, login("staple-and-more"))
	require.NoError(t, d.end())
}
