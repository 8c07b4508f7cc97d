package iscsi

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/browser"
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// pageTimeout limits the work with a browser. The machine may be slow.
const pageTimeout = 8 * time.Minute

// startBrowser starts Chromium, and ends it after the test.
func startBrowser(t *testing.T) (*browser.Browser, context.Context) {
	t.Helper()
	rig.Need(t, "chromium")
	b := testtool.Must(browser.Start(testtool.Must(exec.LookPath("chromium"))(t), t.TempDir()))(t)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	ctx, cancel := context.WithTimeout(context.Background(), pageTimeout)
	t.Cleanup(cancel)
	return b, ctx
}

// viewer is an open page, with helpers for a test.
type viewer struct {
	*browser.Page
	t   *testing.T
	ctx context.Context
}

func view(ctx context.Context, d *rig.Daemon, b *browser.Browser, path string,
	opt browser.Options) *viewer {
	d.T.Helper()
	return &viewer{testtool.Must(b.Open(ctx, "http://"+d.Metrics+path, opt))(d.T), d.T, ctx}
}

func (v *viewer) until(expression string) {
	v.t.Helper()
	require.NoError(v.t, v.Until(v.ctx, expression))
}

func (v *viewer) text(expression string) (s string) {
	v.t.Helper()
	require.NoError(v.t, v.Eval(v.ctx, "String("+expression+")", &s))
	return s
}

func (v *viewer) press(keys ...string) {
	v.t.Helper()
	for _, key := range keys {
		require.NoError(v.t, v.Press(v.ctx, key))
	}
}

// picture keeps a screenshot with the artifacts of the test.
func (v *viewer) picture(name string) {
	v.t.Helper()
	png := testtool.Must(v.Screenshot(v.ctx))(v.t)
	require.NoError(v.t, os.WriteFile(filepath.Join(v.t.ArtifactDir(), name+".png"), png, 0o644))
}

// servePageDisks serves a qcow2 image of 64 MiB with 8 MiB of data, and a raw disk of 16 MiB with
// data in the first 4 MiB.
func servePageDisks(t *testing.T) *rig.Daemon {
	t.Helper()
	rig.Need(t, "qemu-img", "qemu-io", rig.QEMUISCSI)
	dir := t.TempDir()
	image := filepath.Join(dir, "a.qcow2")
	rig.OK(t, "qemu-img", "create", "-q", "-f", "qcow2", image, "64M")
	rig.OK(t, "qemu-io", "-f", "qcow2", "-c", "write -q -P 5 0 8M", image)
	raw := filepath.Join(dir, "b.raw")
	rig.OK(t, "qemu-img", "create", "-q", "-f", "raw", raw, "16M")
	rig.OK(t, "qemu-io", "-f", "raw", "-c", "write -q -P 6 0 4M", raw)
	return rig.Start(t, rig.Config{DiskDir: dir,
		Env: map[string]string{"CHAP_USERNAME": "page-user", "CHAP_PASSWORD": "page-secret-page"}})
}

// guestIO runs commands of qemu-io at a LUN.
func guestIO(d *rig.Daemon, lun int, commands ...string) {
	d.T.Helper()
	args := []string{"--object", "secret,id=s,data=page-secret-page"}
	for _, c := range commands {
		args = append(args, "-c", c)
	}
	rig.OK(d.T, "qemu-io", append(args, "--image-opts", imageOptions(d, lun))...)
}

func imageOptions(d *rig.Daemon, lun int) string {
	return fmt.Sprintf("driver=raw,file.driver=iscsi,file.transport=tcp,file.portal=%s,"+
		"file.target=iqn.2017-01.io.kubevirt:wrapper,file.lun=%d,file.user=page-user,"+
		"file.password-secret=s,file.initiator-name=iqn.2026-01.test:page", d.Portals[0], lun)
}

// TestPageInABrowser watches the page while a guest works: changes appear without a reload, and the
// browser does not complain.
func TestPageInABrowser(t *testing.T) {
	t.Parallel()
	rig.AgainNightly(t)
	b, ctx := startBrowser(t)
	d := servePageDisks(t)
	v := view(ctx, d, b, "/", browser.Options{Width: 1280, Height: 900})
	v.until("document.getElementById('link')?.textContent == 'live'")
	require.Equal(t, "2", v.text("document.querySelectorAll('.luns tbody').length"))
	require.Equal(t, "a.qcow2", v.text("document.querySelector('.disk a').textContent"))
	v.until("document.getElementById('state1').textContent == 'ready'") // it is copied by now
	require.Equal(t, "0 B", v.text("document.getElementById('written').textContent"))
	require.Equal(t, "null", v.text("document.querySelector('.sessions')"))
	require.NoError(t, v.Eval(ctx, "window.stays = true", new(bool)))

	// The large map has 4096 cells of 16 KiB: 32 MiB is at the beginning of row 16.
	guestIO(d, 1, "write -q -P 7 32M 1M", "read -q -P 5 1M 1M", "read -q -P 7 32M 1M")
	v.until("document.getElementById('gw').getAttribute('d') == 'M0 16.5h64'")
	v.until("document.getElementById('written').textContent == '1 MiB'")
	v.until("document.getElementById('opsup1').getAttribute('d') != ''")
	v.until("document.getElementById('opsdown1').getAttribute('d') != ''")
	v.until("document.getElementById('ratetop1').textContent != '0 B/s'")
	v.until("document.getElementById('mw1').getAttribute('d') != ''")

	stay := exec.Command("qemu-io", "--object", "secret,id=s,data=page-secret-page",
		"--image-opts", imageOptions(d, 2))
	stay.Env = rig.ClientEnv()
	in := testtool.Must(stay.StdinPipe())(t)
	require.NoError(t, stay.Start())
	v.until("document.querySelector('.sessions th[scope=row]')?.textContent.trim() == " +
		"'iqn.2026-01.test:page'")
	say := func(command string) { // one at a time, as qemu-io reads them
		require.NoError(t, testtool.Err(in.Write([]byte(command+"\n"))))
	}
	say("write 0 64k")
	v.until("document.getElementById('owner2').textContent == 'iqn.2026-01.test:page'")
	say("read 0 64k")
	v.until("document.querySelector('#mr2').getAttribute('d') != '' || " +
		"document.getElementById('opsup2').getAttribute('d') != ''")
	v.picture("light-1280")
	require.NoError(t, in.Close())
	require.NoError(t, stay.Wait())
	v.until("!document.querySelector('.sessions')")
	require.Equal(t, "true", v.text("window.stays"), "the page was never loaded again")

	// With the keyboard alone.
	v.press("Tab")
	require.Equal(t, "lun1", v.text("document.activeElement.id"))
	v.until("document.activeElement.matches(':focus-visible')")
	v.press("Tab", "Enter")
	v.until("location.search == '?lun=2' && document.readyState == 'complete'")
	v.until("document.getElementById('link').textContent == 'live'")
	require.Contains(t, v.text("document.getElementById('h-one').textContent"), "b.raw")
	require.Contains(t, v.text("document.getElementById('cmd-qemu').textContent"), d.Portals[0])
	require.NoError(t, v.Eval(ctx, "(document.querySelector('[data-copy=cmd-qemu]').click(), true)",
		new(bool)))
	v.until("document.querySelector('[data-copy=cmd-qemu]').textContent != 'Copy'")

	require.Empty(t, v.Complaints())
	for _, path := range []string{"/", "/?lun=2"} {
		for _, secret := range []string{"page-secret", "page-user"} {
			require.NotContains(t, d.Get(path), secret)
		}
	}
	d.Stop()
	v.until("['the daemon has stopped', 'connection lost, trying again']" +
		".includes(document.getElementById('link').textContent)")
}

// TestPageFitsAPhone checks that nothing sticks out of a window of 360 pixels, in both colour
// schemes.
func TestPageFitsAPhone(t *testing.T) {
	t.Parallel()
	rig.AgainNightly(t)
	b, ctx := startBrowser(t)
	d := servePageDisks(t)
	guestIO(d, 1, "write -q -P 7 32M 1M")
	background := map[string]bool{}
	for _, dark := range []bool{false, true} {
		v := view(ctx, d, b, "/", browser.Options{Width: 360, Height: 740, Dark: dark})
		v.until("document.getElementById('link')?.textContent == 'live'")
		v.until("document.getElementById('opsdown1').getAttribute('d') != ''")
		require.Equal(t, "360", v.text("document.documentElement.scrollWidth"))
		background[v.text("getComputedStyle(document.body).backgroundColor")] = true
		require.Empty(t, v.Complaints())
		v.picture(fmt.Sprintf("360-dark-%v", dark))
	}
	require.Len(t, background, 2)
}

// TestPageWithoutScripts checks that the page is a table without scripts, and to a plain GET.
func TestPageWithoutScripts(t *testing.T) {
	t.Parallel()
	b, ctx := startBrowser(t)
	d := servePageDisks(t)
	v := view(ctx, d, b, "/?lun=2", browser.Options{Width: 1280, Height: 900, NoScripts: true})
	v.until("document.querySelectorAll('.luns tbody').length == 2")
	require.Contains(t, v.text("document.querySelector('.luns').innerText"), "b.raw")
	require.Equal(t, "none", v.text("getComputedStyle(document.querySelector('.copy')).display"))
	require.Empty(t, v.Complaints())
	plain := d.Get("/")
	for _, text := range []string{"<table", "a.qcow2", "b.raw", "64 MiB", "iscsiadm -m node -T"} {
		require.True(t, strings.Contains(plain, text), text)
	}
}
