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
	requireTools(t, "iscsi-ls", "qemu-img", qemuISCSI)
	portal := freePortal(t)
	_, port, _ := strings.Cut(portal, ":")
	const wwn = "iqn.2017-01.io.kubevirt:my-disk"
	d := start(t, config{diskDir: diskDir(t, 8<<20), env: map[string]string{
		"LISTEN": "127.0.0.1", "PORT": port, "WWN": wwn, "USERNAME": testUser,
		"PASSWORD": testPassword}})
	require.Equal(t, []string{portal}, d.Portals)
	list := okEnv(t, []string{"LIBISCSI_CHAP_USERNAME=" + testUser,
		"LIBISCSI_CHAP_PASSWORD=" + testPassword}, "iscsi-ls", d.portalURL())
	require.Contains(t, list, "Target:"+wwn)
	ok(t, "qemu-img", "info", fmt.Sprintf("iscsi://%s%%%s@%s/%s/1", testUser, testPassword, portal,
		wwn))
}

// TestQEMUSurvivesARestart stops the daemon while QEMU writes, and starts it again at the same
// address. QEMU logs in again by itself and completes its work.
func TestQEMUSurvivesARestart(t *testing.T) {
	t.Parallel()
	requireTools(t, "qemu-img", qemuISCSI)
	dir, state := diskDir(t, 32<<20), t.TempDir()
	env := with(chapEnv, "LISTEN", freePortal(t))
	c := config{diskDir: dir, stateDir: state, env: env}
	for name, stop := range map[string]func(*daemon){"SIGTERM": (*daemon).stop,
		"kill -9": (*daemon).kill} {
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
func writeOverARestart(t *testing.T, c config, stop func(*daemon)) (rest int) {
	t.Helper()
	d := start(t, c)
	bench := exec.CommandContext(t.Context(), "qemu-img", "bench", "-w", "-f", "raw", "-c", "60000",
		"-d", "8", "-s", "4096",
		"--pattern=0x5a", d.chapURL(testUser, testPassword, 1))
	bench.Env = clientEnv()
	var out strings.Builder
	bench.Stdout, bench.Stderr = &out, &out
	require.NoError(t, bench.Start())
	ended := make(chan error, 1)
	go func() { ended <- bench.Wait() }()
	d.until("QEMU writes", func() bool { return d.operations("write") > 1000 })
	stop(d)

	d = start(t, c)
	select {
	case err := <-ended:
		require.NoError(t, err, out.String())
	case <-time.After(2 * clientTimeout):
		bench.Process.Kill()
		t.Fatalf("qemu-img has not ended: %s", out.String())
	}
	require.Contains(t, out.String(), "Run completed")
	rest = d.operations("write")
	ok(t, "qemu-io", "-f", "raw", "-c", "read -P 0x5a 0 32M", d.chapURL(testUser, testPassword, 1))
	d.stop()
	return rest
}

// TestSeveralClients: three of libiscsi's load generators read different LUNs at once, over both
// address families.
func TestSeveralClients(t *testing.T) {
	t.Parallel()
	requireTools(t, "iscsi-perf")
	dir := t.TempDir()
	makeRaw(t, filepath.Join(dir, "a.raw"), 8<<20)
	makeRaw(t, filepath.Join(dir, "b.raw"), 8<<20)
	d := start(t, config{diskDir: dir,
		env: map[string]string{"LISTEN": "127.0.0.1:0," + secondLoopback(),
			"ACCESS_MODE": "write-shared"}})
	require.Len(t, d.Portals, 2)
	results := make(chan result)
	for i := range 3 {
		url := fmt.Sprintf("iscsi://%s/%s/%d", d.Portals[i%2], peers.DefaultTarget, 1+i%2)
		go func() {
			results <- client(t, nil, "iscsi-perf", "-i",
				fmt.Sprintf("iqn.2026-01.test:client-%d", i), "-r", "-b", "8", "-m", "16", "-t",
				"1", url)
		}()
	}
	for range 3 {
		r := <-results
		require.Zero(t, r.status, "%s", r)
		require.Contains(t, r.output, "finished")
	}
	metrics := d.get("/metrics")
	for i := range 3 {
		require.Contains(t, metrics,
			fmt.Sprintf(
				`kubevirt_disk_operations_total{initiator="iqn.2026-01.test:client-%d",lun="%d",operation="read",status="good"}`, i, 1+i%2))
	}
}

// TestAccessModes writes, or tries to, in the modes for several initiators.
func TestAccessModes(t *testing.T) {
	t.Parallel()
	requireTools(t, "qemu-io", qemuISCSI)
	for _, c := range []struct {
		mode   string
		writes bool
	}{{"write-shared", true}, {"read-shared", false}} {
		t.Run(c.mode, func(t *testing.T) {
			d := start(t, config{diskDir: diskDir(t, 8<<20),
				env: map[string]string{"ACCESS_MODE": c.mode}})
			first := loginTo(t, d, "iqn.2026-01.test:first")
			require.True(t, do(t, first, readBlock(1, 0)).Good())
			ok(t, "qemu-io", "-r", "-f", "raw", "-c", "read 0 64k", d.url(1))
			r := client(t, nil, "qemu-io", "-f", "raw", "-c", "write -P 1 0 64k", d.url(1))
			require.Equal(t, c.writes, r.status == 0, "%s", r)
		})
	}
}

// TestStatusPages checks what an operator sees while a client is logged in, and that health checks
// answer.
func TestStatusPages(t *testing.T) {
	t.Parallel()
	requireTools(t)
	d := start(t, config{diskDir: diskDir(t, 8<<20)})
	s := loginTo(t, d, "iqn.2026-01.test:watched")
	require.True(t, do(t, s, readBlock(1, 0)).Good())
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
	require.NoError(t, json.Unmarshal([]byte(d.get("/status")), &status))
	require.Equal(t, "ready", status.State)
	require.True(t, status.Ready)
	require.Equal(t, peers.DefaultTarget, status.TargetName)
	require.Len(t, status.LUNs, 1)
	require.Equal(t, "disk.raw", status.LUNs[0].Image)
	require.EqualValues(t, 8<<20, status.LUNs[0].Size)
	require.True(t, status.LUNs[0].Ready)
	require.Len(t, status.Sessions, 1)
	require.Equal(t, "iqn.2026-01.test:watched", status.Sessions[0].Initiator)

	path, err := binary()
	require.NoError(t, err)
	for _, args := range [][]string{{"healthcheck"}, {"healthcheck", "--live"}} {
		okEnv(t, []string{"METRICS_LISTEN=" + d.Metrics, "READY_FILE=" + d.ReadyFile}, path,
			args...)
	}
	logout(t, s)
	d.stop()
	require.NotZero(t, client(t, []string{"METRICS_LISTEN=" + d.Metrics}, path,
		"healthcheck").status)
}

// TestStopWhileCopying stops a daemon that has just begun to copy an image. It exits with 0, and
// the next start continues.
func TestStopWhileCopying(t *testing.T) {
	t.Parallel()
	requireTools(t, "qemu-img")
	source := filepath.Join(t.TempDir(), "source.raw")
	makeRaw(t, source, 256<<20)
	dir, state := t.TempDir(), t.TempDir()
	makeQcow2(t, source, filepath.Join(dir, "big.qcow2"), "", true)
	path, err := binary()
	require.NoError(t, err)
	serve := exec.Command(path, "serve")
	serve.Env = clientEnv("DISK_DIR="+dir, "WORK_DIR="+filepath.Join(state, "work"),
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

	d := start(t, config{diskDir: dir, stateDir: state})
	if haveTool(qemuISCSI) {
		require.Contains(t, ok(t, "qemu-img", "compare", "-f", "raw", "-F", "raw", source,
			d.url(1)), "identical")
	}
}
