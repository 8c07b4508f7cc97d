package integration

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/peers"
)

// TestOriginalWrapperCallers starts the daemon like the first KubeVirt releases started the
// original wrapper: with a port, a target name and a credential in the environment, and the image
// as LUN 1.
func TestOriginalWrapperCallers(t *testing.T) {
	t.Parallel()
	Need(t, "iscsi-ls", "qemu-img", QEMUISCSI)
	portal := FreePortal(t)
	_, port, _ := strings.Cut(portal, ":")
	const wwn = "iqn.2017-01.io.kubevirt:my-disk"
	d := Start(t, Config{DiskDir: DiskDir(t, 8<<20), Env: map[string]string{
		"LISTEN": "127.0.0.1", "PORT": port, "WWN": wwn, "USERNAME": User,
		"PASSWORD": Password}})
	require.Equal(t, []string{portal}, d.Portals)
	list := OKEnv(t, []string{"LIBISCSI_CHAP_USERNAME=" + User,
		"LIBISCSI_CHAP_PASSWORD=" + Password}, "iscsi-ls", d.PortalURL())
	require.Contains(t, list, "Target:"+wwn)
	OK(t, "qemu-img", "info", fmt.Sprintf("iscsi://%s%%%s@%s/%s/1", User, Password, portal,
		wwn))
}

// TestQEMUSurvivesARestart stops the daemon while QEMU writes, and starts it again at the same
// address. QEMU logs in again by itself and completes its work.
func TestQEMUSurvivesARestart(t *testing.T) {
	t.Parallel()
	Need(t, "qemu-img", QEMUISCSI)
	dir, state := DiskDir(t, 32<<20), t.TempDir()
	env := with(CHAPEnv, "LISTEN", FreePortal(t))
	c := Config{DiskDir: dir, StateDir: state, Env: env}
	for name, stop := range map[string]func(*Daemon){"SIGTERM": (*Daemon).Stop,
		"kill -9": (*Daemon).Crash} {
		t.Run(name, func(t *testing.T) {
			// On a busy machine QEMU may have written everything before the test stops the daemon.
			for try := 1; writeOverARestart(t, c, stop) == 0; try++ {
				require.Less(t, try, 10, "QEMU always finished before the restart")
			}
		})
	}
}

// writeOverARestart makes QEMU write while a daemon is stopped and started again. It returns how
// many writes the second daemon received.
func writeOverARestart(t *testing.T, c Config, stop func(*Daemon)) (rest int) {
	t.Helper()
	d := Start(t, c)
	bench := exec.CommandContext(t.Context(), "qemu-img", "bench", "-w", "-f", "raw", "-c", "60000",
		"-d", "8", "-s", "4096",
		"--pattern=0x5a", d.CHAPURL(User, Password, 1))
	bench.Env = ClientEnv()
	var out strings.Builder
	bench.Stdout, bench.Stderr = &out, &out
	require.NoError(t, bench.Start())
	ended := make(chan error, 1)
	go func() { ended <- bench.Wait() }()
	d.Until("QEMU writes", func() bool { return d.Operations("write") > 1000 })
	stop(d)

	d = Start(t, c)
	select {
	case err := <-ended:
		require.NoError(t, err, out.String())
	case <-time.After(2 * Timeout):
		bench.Process.Kill()
		t.Fatalf("qemu-img has not ended: %s", out.String())
	}
	require.Contains(t, out.String(), "Run completed")
	rest = d.Operations("write")
	OK(t, "qemu-io", "-f", "raw", "-c", "read -P 0x5a 0 32M", d.CHAPURL(User, Password, 1))
	d.Stop()
	return rest
}

// TestSeveralClients: three of libiscsi's load generators read different LUNs at once, over both
// address families.
func TestSeveralClients(t *testing.T) {
	t.Parallel()
	Need(t, "iscsi-perf")
	dir := t.TempDir()
	MakeRaw(t, filepath.Join(dir, "a.raw"), 8<<20)
	MakeRaw(t, filepath.Join(dir, "b.raw"), 8<<20)
	d := Start(t, Config{DiskDir: dir,
		Env: map[string]string{"LISTEN": "127.0.0.1:0," + SecondLoopback(),
			"ACCESS_MODE": "write-shared"}})
	require.Len(t, d.Portals, 2)
	results := make(chan Result)
	for i := range 3 {
		url := fmt.Sprintf("iscsi://%s/%s/%d", d.Portals[i%2], peers.DefaultTarget, 1+i%2)
		go func() {
			results <- Client(t, nil, "iscsi-perf", "-i",
				fmt.Sprintf("iqn.2026-01.test:client-%d", i), "-r", "-b", "8", "-m", "16", "-t",
				"1", url)
		}()
	}
	for range 3 {
		r := <-results
		require.Zero(t, r.Status, "%s", r)
		require.Contains(t, r.Output, "finished")
	}
	metrics := d.Get("/metrics")
	for i := range 3 {
		require.Contains(t, metrics,
			fmt.Sprintf(
				`kubevirt_disk_operations_total{initiator="iqn.2026-01.test:client-%d",lun="%d",operation="read",status="good"}`, i, 1+i%2))
	}
}

// TestAccessModes writes, or tries to, in the modes for several initiators.
func TestAccessModes(t *testing.T) {
	t.Parallel()
	Need(t, "qemu-io", QEMUISCSI)
	for _, c := range []struct {
		mode   string
		writes bool
	}{{"write-shared", true}, {"read-shared", false}} {
		t.Run(c.mode, func(t *testing.T) {
			d := Start(t, Config{DiskDir: DiskDir(t, 8<<20),
				Env: map[string]string{"ACCESS_MODE": c.mode}})
			first := LoginTo(t, d, "iqn.2026-01.test:first")
			require.True(t, Do(t, first, ReadBlock(1, 0)).Good())
			OK(t, "qemu-io", "-r", "-f", "raw", "-c", "read 0 64k", d.URL(1))
			r := Client(t, nil, "qemu-io", "-f", "raw", "-c", "write -P 1 0 64k", d.URL(1))
			require.Equal(t, c.writes, r.Status == 0, "%s", r)
		})
	}
}

// TestStatusPages checks what an operator sees while a client is logged in, and that health checks
// answer.
func TestStatusPages(t *testing.T) {
	t.Parallel()
	Need(t)
	d := Start(t, Config{DiskDir: DiskDir(t, 8<<20)})
	s := LoginTo(t, d, "iqn.2026-01.test:watched")
	require.True(t, Do(t, s, ReadBlock(1, 0)).Good())
	var status struct {
		State      string
		Ready      bool
		TargetName string `json:"target_name"`
		LUNs       []struct {
			LUN   int
			Image string
			Size  int64 `json:"size_bytes"`
			Ready bool
		}
		Sessions []struct {
			Initiator string
			Remote    string
		}
	}
	require.NoError(t, json.Unmarshal([]byte(d.Get("/status")), &status))
	require.Equal(t, "ready", status.State)
	require.True(t, status.Ready)
	require.Equal(t, peers.DefaultTarget, status.TargetName)
	require.Len(t, status.LUNs, 1)
	require.Equal(t, "disk.raw", status.LUNs[0].Image)
	require.EqualValues(t, 8<<20, status.LUNs[0].Size)
	require.True(t, status.LUNs[0].Ready)
	require.Len(t, status.Sessions, 1)
	require.Equal(t, "iqn.2026-01.test:watched", status.Sessions[0].Initiator)

	path, err := Binary()
	require.NoError(t, err)
	for _, args := range [][]string{{"healthcheck"}, {"healthcheck", "--live"}} {
		OKEnv(t, []string{"METRICS_LISTEN=" + d.Metrics, "READY_FILE=" + d.ReadyFile}, path,
			args...)
	}
	Logout(t, s)
	d.Stop()
	require.NotZero(t, Client(t, []string{"METRICS_LISTEN=" + d.Metrics}, path,
		"healthcheck").Status)
}

// TestStopWhileCopying stops a daemon that has just begun to copy an image. It exits with 0, and
// the next start continues.
func TestStopWhileCopying(t *testing.T) {
	t.Parallel()
	Need(t, "qemu-img")
	source := filepath.Join(t.TempDir(), "source.raw")
	MakeRaw(t, source, 256<<20)
	dir, state := t.TempDir(), t.TempDir()
	MakeQcow2(t, source, filepath.Join(dir, "big.qcow2"), "", true)
	path, err := Binary()
	require.NoError(t, err)
	serve := exec.Command(path, "serve")
	serve.Env = ClientEnv("DISK_DIR="+dir, "WORK_DIR="+filepath.Join(state, "work"),
		"READY_FILE="+filepath.Join(state, "ready"),
		"LISTEN=127.0.0.1:0", "METRICS_LISTEN=", "LOG_FORMAT=json")
	log, err := serve.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, serve.Start())
	var said []string
	for lines := bufio.NewScanner(log); lines.Scan(); {
		said = append(said, lines.Text())
		if strings.Contains(lines.Text(), "made a disk of the image") {
			require.NoError(t, serve.Process.Signal(syscall.SIGTERM))
		}
	}
	require.NoError(t, serve.Wait(), "%s", said)
	require.Contains(t, said[len(said)-1], "stopped", "%s", said)

	d := Start(t, Config{DiskDir: dir, StateDir: state})
	if HaveTool(QEMUISCSI) {
		require.Contains(t, OK(t, "qemu-img", "compare", "-f", "raw", "-F", "raw", source,
			d.URL(1)), "identical")
	}
}
