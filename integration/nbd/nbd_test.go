package nbd

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/targettest"
)

// TestNBD has one disk used by NBD and by iSCSI: it has one owner, who may be handed over, listed
// and kicked, whatever it speaks; what one has written the other reads, also after kill -9.
func TestNBD(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", "qemu-io", "nbdinfo")
	program := testtool.Must(rig.Binary())(t)
	state, images := t.TempDir(), rig.DiskDir(t, 8<<20)
	volume := rig.NewVolume(t, state)
	socket := filepath.Join(t.TempDir(), "nbd.sock")
	other := filepath.Join(filepath.Dir(socket), "other.sock")
	conf := rig.Config{DiskDir: images, StateDir: state, Args: []string{"--nbd=unix:" + socket,
		"--nbd=unix:" + other, "--nbd=127.0.0.1:0", "--persistent-dir=" + volume}}
	d := rig.Start(t, conf)
	uri := func(socket string) string { return "nbd+unix:///disk.raw?socket=" + socket }
	require.Contains(t, rig.OK(t, "nbdinfo", "--list", uri(socket)), `export="disk.raw"`)
	rig.Same(t, filepath.Join(images, "disk.raw"), uri(socket))
	write := func(socket, pattern string) (int, string) {
		r := rig.Client(t, nil, "qemu-io", "-f", "raw", "-c", "write -P "+pattern+" 4k 64k",
			"-c", "flush", uri(socket))
		return r.Status, r.Output
	}
	status, out := write(socket, "7")
	require.Zero(t, status, out)

	// An initiator has the disk: nobody else may use it.
	d.UntilFree()
	const name = "iqn.2026-01.test:initiator"
	initiator := rig.LoginTo(t, d, name)
	require.Zero(t, rig.Do(t, initiator, targettest.Write10(1, 0, rig.Block(1, 1))).Status)
	status, out = write(socket, "8")
	require.NotZero(t, status, out)
	require.Contains(t, out, "Operation not permitted")

	// It is handed over to the client of the other socket, which must be there.
	held := testtool.Must(net.Dial("unix", other))(t)
	defer held.Close()
	hello := make([]byte, 18)
	require.NoError(t, testtool.Err(held.Read(hello)))
	_, err := held.Write([]byte("\x00\x00\x00\x03IHAVEOPT\x00\x00\x00\x01\x00\x00\x00\x00"))
	require.NoError(t, err)
	require.NoError(t, testtool.Err(held.Read(hello)))
	rig.Handover(t, state, 0, "--to=unix:"+other, "--for=5m")
	status, out = write(other, "9")
	require.Zero(t, status, out)
	rig.Handover(t, state, 0, "--finish")
	require.Equal(t, targettest.StatusReservationConflict,
		rig.Do(t, initiator, targettest.Write10(1, 0, rig.Block(1, 2))).Status)
	status, out = write(socket, "8")
	require.NotZero(t, status, out)
	status, out = write(other, "9")
	require.Zero(t, status, out)

	// That client is listed, and kicked.
	work := []string{"WORK_DIR=" + filepath.Join(state, "work")}
	require.Contains(t, rig.OKEnv(t, work, program, "sessions"), "unix:"+other)
	rig.OKEnv(t, work, program, "kick", "--initiator=unix:"+other)
	require.Error(t, testtool.Err(held.Read(hello)))
	d.Until("its session is gone", func() bool {
		return !strings.Contains(rig.OKEnv(t, work, program, "sessions"), "unix:"+other)
	})

	d.Crash()
	require.NoError(t, testtool.Err(os.Lstat(socket)), "a killed daemon leaves its socket")
	d = rig.Start(t, conf)
	got := rig.OK(t, "qemu-io", "-f", "raw", "-r", "-c", "read -P 9 4k 64k", uri(other))
	require.NotContains(t, strings.ToLower(got), "fail")
	d.Stop()
	require.NoFileExists(t, socket)
}

// TestNBDOnly has a daemon without iSCSI, which binds no port of it and needs no CHAP.
func TestNBDOnly(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img")
	images := rig.DiskDir(t, 1<<20)
	socket := filepath.Join(t.TempDir(), "nbd.sock")
	program := testtool.Must(rig.Binary())(t)
	cmd := exec.Command(program, "serve", filepath.Join(images, "disk.raw"), "--iscsi=false",
		"--nbd=unix:"+socket, "--metrics-listen=", "--work-dir="+t.TempDir())
	cmd.Env = rig.ClientEnv()
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	testtool.Within(t, rig.Timeout, func() bool {
		_, err := os.Lstat(socket)
		return err == nil && rig.Client(t, nil, "qemu-img", "info", "nbd+unix:///?socket="+
			socket).Status == 0
	}, "the disk is served")
	rig.Same(t, filepath.Join(images, "disk.raw"), "nbd+unix:///disk.raw?socket="+socket)
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait(), out.String())
	require.NotContains(t, out.String(), "iscsi")
	require.NoFileExists(t, socket)
}

// TestNBDPortalsThatAreRefused: nobody else may reach a portal that asks for nothing.
func TestNBDPortalsThatAreRefused(t *testing.T) {
	t.Parallel()
	rig.Need(t)
	images := rig.DiskDir(t, 1<<20)
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for address, want := range map[string]string{
		"0.0.0.0:10809":     "can be reached from elsewhere",
		"unix:":             "names no socket",
		"somewhere":         "want unix:PATH",
		"unix:" + file:      "exists and is not a socket",
		"unix:/proc/1/x/no": "NBD socket",
	} {
		_, err := rig.TryStart(t, rig.Config{DiskDir: images, Args: []string{"--nbd=" + address}})
		require.ErrorContains(t, err, want, address)
	}
	for files, want := range map[string]string{
		"--iscsi=false --listen=127.0.0.1":                      "which --iscsi has turned off",
		"--nbd-tls-cert=/c":                                     "takes three files",
		"--nbd-tls-cert=/c --nbd-tls-key=/k --nbd-client-ca=/a": "/c",
	} {
		require.ErrorContains(t, testtool.Err(rig.TryStart(t, rig.Config{DiskDir: images,
			Args: append(strings.Fields(files), "--nbd=127.0.0.1:0")})), want, files)
	}
}

// TestRelay has a daemon hand on the disk of another one, by TLS and with certificates, to clients
// that have none. The server is killed again and again while they write: no client sees an error,
// and what was written is there.
func TestRelay(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", "qemu-io", "nbdcopy")
	dir, state, images := t.TempDir(), t.TempDir(), rig.DiskDir(t, 64<<20)
	rig.MakeCertificate(t, filepath.Join(dir, "server.crt"), filepath.Join(dir, "server.key"))
	cert, key := rig.MakeClientCertificate(t, dir, "relay.example")
	port := rig.FreePort(t)
	ca := filepath.Join(dir, "server.crt")
	served := rig.Config{DiskDir: images, StateDir: state, Args: []string{
		"--persistent-dir=" + rig.NewVolume(t, state), "--nbd=127.0.0.1:" + port,
		"--nbd-tls-cert=" + ca, "--nbd-tls-key=" + filepath.Join(dir, "server.key"),
		"--nbd-client-ca=" + ca}}
	server := rig.Start(t, served)
	socket := filepath.Join(t.TempDir(), "nbd.sock")
	disk := "--disk=nbds://127.0.0.1:" + port + "/disk.raw"
	relay := rig.Start(t, rig.Config{DiskDir: t.TempDir(), Args: []string{disk,
		"--disk-tls-cert=" + cert, "--disk-tls-key=" + key, "--disk-server-ca=" + ca,
		"--nbd=unix:" + socket}})
	require.Contains(t, server.Get("/status"), `"cert:relay.example"`)
	uri := "nbd+unix:///disk.raw?socket=" + socket
	rig.Same(t, filepath.Join(images, "disk.raw"), uri)

	raw := filepath.Join(t.TempDir(), "raw")
	rig.Pattern(t, raw, 64<<20, 0x42)
	copied := make(chan rig.Result, 1)
	go func() {
		var r rig.Result
		for range 4 {
			if r = rig.Client(t, nil, "nbdcopy", "--flush", raw, uri); r.Status != 0 {
				break
			}
		}
		copied <- r
	}()
	// Not until it has copied: on a busy machine, the server would not live long enough.
	for range 6 {
		time.Sleep(300 * time.Millisecond)
		server.Crash()
		server = rig.Start(t, served)
	}
	r := <-copied
	require.Zero(t, r.Status, "%s", r)
	rig.Same(t, raw, uri)
	relay.Stop()
	server.Stop()
	rig.Same(t, raw, filepath.Join(state, "volume", "disk.img"))
}

// TestRelayThatCannotBe: what is wrong with a disk of another server is said at the start.
func TestRelayThatCannotBe(t *testing.T) {
	t.Parallel()
	rig.Need(t)
	socket := filepath.Join(t.TempDir(), "nbd.sock")
	images := rig.DiskDir(t, 1<<20)
	rig.Start(t, rig.Config{DiskDir: images, Args: []string{"--nbd=unix:" + socket}})
	uri := "nbd+unix:///disk.raw?socket=" + socket
	for _, c := range []struct{ args, want string }{
		{"--disk=nbds://u:secret@h/x", "clients are known by their certificate"},
		{"--disk=nbd://h/x", "use nbds"},
		{"--disk=nbd+unix:///other?socket=" + socket, "there is no disk"},
		{"--disk=" + uri + " --disk-server-ca=/c", "is for disks of nbds://"},
		{"--disk=" + uri + " --size=1Gi", "enlarge it there"},
		{"--disk=nbds://127.0.0.1:1/x --disk-tls-cert=/c", "takes a certificate and its key"},
	} {
		_, err := rig.TryStart(t, rig.Config{DiskDir: t.TempDir(),
			Args: strings.Fields(c.args)})
		require.ErrorContains(t, err, c.want, c.args)
		require.NotContains(t, err.Error(), "secret")
	}
}
