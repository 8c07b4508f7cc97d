package registry

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/targettest"
)

// streaming is the configuration for an image in a registry, beside the images of a directory.
func streaming(dir, address, mode string, args ...string) rig.Config {
	return rig.Config{DiskDir: dir, Args: append([]string{"--image=" + address + "/vm/fedora:42",
		"--insecure-registry=" + address, "--copy-mode=" + mode}, args...)}
}

// TestStream serves an image that was never pulled, as LUN 2 beside one of the directory. It kills
// the registry while a client reads; the client waits and goes on when the registry is back. Then
// it kills the daemon: nothing is fetched twice, and everything that was read is there without the
// registry.
func TestStream(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img")
	raw, qcow2 := rig.NewFullDisk(t)
	for _, mode := range []string{"copy-on-write", "copy-on-read", "clone"} {
		t.Run(mode, func(t *testing.T) {
			w := rig.NewWatchedRegistry(t)
			rig.Push(t, w.Address, qcow2)
			c := streaming(rig.DiskDir(t, 1<<20), w.Proxy, mode)
			var d *rig.Daemon
			// In a busy moment, a clone may have everything before the registry is killed.
			for try, waits := 1, false; !waits; try++ {
				require.Less(t, try, 10, "the registry is always killed too late")
				c.StateDir = t.TempDir()
				d = rig.Start(t, c)
				s := rig.LoginTo(t, d, "iqn.2026-01.test:first")
				require.NoError(t, testtool.Err(s.ClearAttention(2)))
				require.True(t, rig.Do(t, s, rig.ReadBlock(2, 0)).Good())
				rig.Logout(t, s)

				w.Kill()
				read := make(chan rig.Result, 1)
				go func() {
					read <- rig.Client(t, nil, "qemu-img", "compare", "-f", "raw", "-F", "raw",
						d.URL(2), raw)
				}()
				testtool.Within(t, rig.Timeout, func() bool {
					waits = strings.Contains(d.Output(), "next try in")
					return waits || d.Complete(2)
				}, "reads wait, or the disk is complete: %s", func() any { return d.Output() })
				if waits {
					select {
					case r := <-read:
						require.Fail(t, "the client did not wait", "%s", r)
					default:
					}
				}
				w.Run(t)
				r := <-read
				require.Zero(t, r.Status, "%s", r)
				if !waits {
					d.Stop()
				}
			}

			d.Crash()
			w.Kill()
			w.Forget()
			d = rig.Start(t, c)
			rig.Same(t, raw, d.URL(2))
			require.Zero(t, w.Asked(), "everything was here")
			d.Stop()
		})
	}
}

// TestStreamClone removes the registry and the cache when the copy is complete: the disk needs
// neither.
func TestStreamClone(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img")
	raw, qcow2 := rig.NewFullDisk(t)
	for _, where := range []string{"ephemeral", "persistent"} {
		t.Run(where, func(t *testing.T) {
			w := rig.NewWatchedRegistry(t)
			rig.Push(t, w.Address, qcow2)
			cache := t.TempDir()
			c := streaming(t.TempDir(), w.Proxy, "clone", "--cache-dir="+cache)
			c.StateDir = t.TempDir()
			if where == "persistent" {
				c.Args = append(c.Args, "--persistent-dir="+rig.NewVolume(t, t.TempDir()))
			}
			d := rig.Start(t, c)
			s := rig.LoginTo(t, d, "iqn.2026-01.test:first")
			r := rig.Do(t, s, targettest.Write10(1, 7, rig.Block(7, 0x5a)))
			require.True(t, r.Good())
			rig.Logout(t, s)
			d.UntilSaid("the disk is complete")
			d.Stop()
			w.Kill()
			require.NoError(t, os.RemoveAll(cache))

			d = rig.Start(t, c)
			want := testtool.Must(os.ReadFile(raw))(t)
			copy(want[7*512:], rig.Block(7, 0x5a))
			written := filepath.Join(t.TempDir(), "written.raw")
			require.NoError(t, os.WriteFile(written, want, 0o644))
			rig.Same(t, written, d.URL(1))
			d.Stop()
		})
	}
}

// TestStreamWrongBytes: a proxy changes every chunk for a while. The daemon does not serve these
// chunks, and logs them.
func TestStreamWrongBytes(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img")
	raw, qcow2 := rig.NewFullDisk(t)
	w := rig.NewWatchedRegistry(t)
	rig.Push(t, w.Address, qcow2)
	d := rig.Start(t, streaming(t.TempDir(), w.Proxy, "copy-on-write"))
	w.Flips.Store(true)
	read := make(chan rig.Result, 1)
	go func() {
		read <- rig.Client(t, nil, "qemu-img", "compare", "-f", "raw", "-F", "raw", d.URL(1), raw)
	}()
	d.UntilSaid("wrong content was fetched, and is not served")
	w.Flips.Store(false)
	r := <-read
	require.Zero(t, r.Status, "%s", r)
	page := d.Get("/metrics")
	require.Regexp(t, `(?m)^kubevirt_disk_registry_wrong_chunks_total [1-9]`, page)
	require.Regexp(t, `(?m)^kubevirt_disk_registry_fetched_bytes_total [1-9]`, page)
}

// TestStreamRefuses: an image that cannot be served is reported at the start.
func TestStreamRefuses(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img")
	_, qcow2 := rig.NewFullDisk(t)
	s := rig.StartRegistry(t, false, "")
	rig.Push(t, s.Address, qcow2)
	for name, test := range map[string]struct {
		config rig.Config
		want   string
	}{
		"no such image": {rig.Config{Args: []string{"--image=" + s.Address + "/vm/none:1",
			"--insecure-registry=" + s.Address}}, "does not exist"},
		"without TLS": {rig.Config{Args: []string{"--image=" +
			strings.Replace(s.Address, "127.0.0.1", "0.0.0.0", 1) + "/vm/fedora:42"}},
			"--insecure-registry"},
		"no directory": {streaming("/none/such", s.Address, "clone"),
			`the image directory \"/none/such\" does not exist`},
		"in place": {streaming("", s.Address, "none"), "cannot be served in place"},
		"twice": {streaming("", s.Address, "clone", "--image="+s.Address+"/vm/fedora:42"),
			"named twice"},
		"no reference": {rig.Config{Args: []string{"--image=ftp://x/y"}},
			"write an https:// address"},
		"an unknown disk": {rig.Config{Args: []string{"--image=https://x/y"}}, "has no digest"},
		"disk settings of none": {streaming("", s.Address, "clone", "--config="+
			writeConfig(t, "disks: {other.qcow2: {lun: 7}}\n")), "there is no such image"},
	} {
		t.Run(name, func(t *testing.T) {
			c := test.config
			if c.DiskDir == "" {
				c.DiskDir = t.TempDir()
			}
			_, output := rig.Refused(t, c)
			require.Contains(t, output, test.want)
		})
	}
	c := streaming(t.TempDir(), s.Address, "clone", "--config="+writeConfig(t, fmt.Sprintf(
		"disks: {%q: {lun: 7, serial: abc}}\n", s.Address+"/vm/fedora:42")))
	d := rig.Start(t, c)
	require.Contains(t, d.Get("/status"), `"serial": "abc"`)
}

func writeConfig(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o644))
	return file
}

// TestServeImageAsAUser: a user who is not root, and has no work directory, serves an image of a
// registry from a temporary cache, and is told how to log in.
func TestServeImageAsAUser(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img", "qemu-io", rig.QEMUISCSI, "unshare", "setpriv")
	rig.NeedRoot(t)
	raw, qcow2 := newDisk(t)
	s := rig.StartRegistry(t, false, "")
	flag := "--insecure-registry=" + s.Address
	rig.MustRun(t, nil, "push", "--base=none", flag, qcow2, s.Address+"/vm/fedora:42")
	path := rig.Program(t)
	program := testtool.Must(os.ReadFile(path))(t)
	home, err := os.MkdirTemp("", "user-") // t.TempDir is root's alone
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(home)) })
	const nobody = 65534
	require.NoError(t, os.Chown(home, nobody, nobody))
	own := filepath.Join(home, "kubevirt-disk")
	require.NoError(t, os.WriteFile(own, program, 0o755))
	// The work directory of this machine's root is none of the user's.
	cmd := exec.Command("unshare", "--mount", "sh", "-c", `mount -t tmpfs -o mode=755 none /var/lib &&
		exec setpriv --reuid=$NOBODY --regid=$NOBODY --clear-groups "$@"`, "sh",
		own, "serve", flag, "--image", s.Address+"/vm/fedora:42",
		"--listen=127.0.0.1:0", "--metrics-listen=", "--ready-file=")
	cmd.Dir = home
	cmd.Env = []string{"HOME=" + home, "PATH=" + os.Getenv("PATH"), fmt.Sprint("NOBODY=", nobody)}
	out := testtool.Must(cmd.StdoutPipe())(t)
	var log bytes.Buffer
	cmd.Stderr = &log
	require.NoError(t, cmd.Start())
	url := ""
	for lines := bufio.NewScanner(out); url == "" && lines.Scan(); {
		if _, after, ok := strings.Cut(lines.Text(), "qemu-img convert -O raw "); ok {
			url, _, _ = strings.Cut(after, " ")
		}
	}
	go func() { _, _ = io.Copy(io.Discard, out) }()
	copied := filepath.Join(home, "copy.raw")
	if url != "" {
		rig.OK(t, "qemu-img", "convert", "-O", "raw", url, copied)
	}
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait(), "%s", &log)
	rig.SameFile(t, raw, copied)
	left := testtool.Must(filepath.Glob(filepath.Join(home, ".cache", "kubevirt-disk", "*")))(t)
	require.Empty(t, left)
}

// TestRegistryAway: a command that a person waits for soon says that nobody answers. A daemon that
// starts before its registry waits for it.
func TestRegistryAway(t *testing.T) {
	t.Parallel()
	rig.Need(t, "docker-registry", "qemu-img")
	raw, qcow2 := newDisk(t)
	s := rig.StartRegistry(t, false, "")
	ref, insecure := s.Address+"/vm/fedora:42", "--insecure-registry="+s.Address
	rig.MustRun(t, nil, "push", "--base=none", insecure, qcow2, ref)
	s.Kill()
	c := streaming(t.TempDir(), s.Address, "copy-on-write")
	path := rig.Program(t)
	c.Binary = path
	pages := "127.0.0.1:" + rig.FreePort(t)
	c.Env = map[string]string{"METRICS_LISTEN": pages}

	type started struct {
		d   *rig.Daemon
		err error
	}
	serving := make(chan started, 1)
	go func() {
		d, err := rig.TryStart(t, c)
		serving <- started{d, err}
	}()
	var commands sync.WaitGroup
	for _, args := range [][]string{
		{"pull", ref, filepath.Join(t.TempDir(), "a.raw")},
		{"push", "--base=none", raw, ref},
		{"adapt", ref, "--to", t.TempDir(), "--kernel", raw, "--initrd", raw},
	} {
		commands.Go(func() {
			r := rig.Run(t, nil, append(args, insecure)...)
			assert.Equal(t, 1, r.Status)
			assert.Contains(t, r.Output, "connection refused; next try in ")
			assert.Contains(t, r.Output, "without any answer: asking "+s.Address)
		})
	}
	commands.Wait()
	for _, path := range []string{"/", "/readyz", "/status"} {
		res := testtool.Must(http.Get("http://" + pages + path))(t)
		text, err := io.ReadAll(res.Body)
		require.NoError(t, errors.Join(err, res.Body.Close()))
		require.Contains(t, string(text), "waits for the registry of "+ref, path)
		require.Contains(t, string(text), "connection refused", path)
	}
	s.Run(t)
	got := <-serving
	require.NoError(t, got.err)
	require.Contains(t, got.d.Output(), "next try in")
	rig.Same(t, raw, got.d.URL(1))
}
