package iscsi

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

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/integration/peers"
)

// TestOriginalWrapperCallers starts the daemon like the first KubeVirt releases started the
// original wrapper: with a port, a target name and a credential in the environment, and the image
// as LUN 1.
func TestOriginalWrapperCallers(t *testing.T) {
	t.Parallel()
	rig.Need(t, "iscsi-ls", "qemu-img", rig.QEMUISCSI)
	portal := rig.FreePortal(t)
	_, port, _ := strings.Cut(portal, ":")
	const wwn = "iqn.2017-01.io.kubevirt:my-disk"
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 8<<20), Env: map[string]string{
		"LISTEN": "127.0.0.1", "PORT": port, "WWN": wwn, "USERNAME": rig.User,
		"PASSWORD": rig.Password}})
	require.Equal(t, []string{portal}, d.Portals)
	list := rig.OKEnv(t, []string{"LIBISCSI_CHAP_USERNAME=" + rig.User,
		"LIBISCSI_CHAP_PASSWORD=" + rig.Password}, "iscsi-ls", d.PortalURL())
	require.Contains(t, list, "Target:"+wwn)
	rig.OK(t, "qemu-img", "info", fmt.Sprintf("iscsi://%s%%%s@%s/%s/1", rig.User, rig.Password,
		portal,
		wwn))
}

// TestQEMUSurvivesARestart stops the daemon while QEMU writes, and starts it again at the same
// address. QEMU logs in again by itself and completes its work.
func TestQEMUSurvivesARestart(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", rig.QEMUISCSI)
	dir, state := rig.DiskDir(t, 32<<20), t.TempDir()
	env := with(rig.CHAPEnv, "LISTEN", rig.FreePortal(t))
	c := rig.Config{DiskDir: dir, StateDir: state, Env: env}
	for name, stop := range map[string]func(*rig.Daemon){"SIGTERM": (*rig.Daemon).Stop,
		"kill -9": (*rig.Daemon).Crash} {
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
func writeOverARestart(t *testing.T, c rig.Config, stop func(*rig.Daemon)) (rest int) {
	t.Helper()
	d := rig.Start(t, c)
	bench := exec.CommandContext(t.Context(), "qemu-img", "bench", "-w", "-f", "raw", "-c", "60000",
		"-d", "8", "-s", "4096",
		"--pattern=0x5a", d.CHAPURL(rig.User, rig.Password, 1))
	bench.Env = rig.ClientEnv()
	var out strings.Builder
	bench.Stdout, bench.Stderr = &out, &out
	require.NoError(t, bench.Start())
	ended := make(chan error, 1)
	go func() { ended <- bench.Wait() }()
	d.Until("QEMU writes", func() bool { return d.Operations("write") > 1000 })
	stop(d)

	d = rig.Start(t, c)
	select {
	case err := <-ended:
		require.NoError(t, err, out.String())
	case <-time.After(2 * rig.Timeout):
		bench.Process.Kill()
		t.Fatalf("qemu-img has not ended: %s", out.String())
	}
	require.Contains(t, out.String(), "Run completed")
	rest = d.Operations("write")
	rig.OK(t, "qemu-io", "-f", "raw", "-c", "read -P 0x5a 0 32M", d.CHAPURL(rig.User, rig.Password,
		1))
	d.Stop()
	return rest
}

// TestSeveralClients: three of libiscsi's load generators read different LUNs at once, over both
// address families.
func TestSeveralClients(t *testing.T) {
	t.Parallel()
	rig.Need(t, "iscsi-perf")
	dir := t.TempDir()
	rig.MakeRaw(t, filepath.Join(dir, "a.raw"), 8<<20)
	rig.MakeRaw(t, filepath.Join(dir, "b.raw"), 8<<20)
	d := rig.Start(t, rig.Config{DiskDir: dir,
		Env: map[string]string{"LISTEN": "127.0.0.1:0," + rig.SecondLoopback(),
			"ACCESS_MODE": "write-shared"}})
	require.Len(t, d.Portals, 2)
	results := make(chan rig.Result)
	for i := range 3 {
		url := fmt.Sprintf("iscsi://%s/%s/%d", d.Portals[i%2], peers.DefaultTarget, 1+i%2)
		go func() {
			results <- rig.Client(t, nil, "iscsi-perf", "-i",
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
	rig.Need(t, "qemu-io", rig.QEMUISCSI)
	for _, c := range []struct {
		mode   string
		writes bool
	}{{"write-shared", true}, {"read-shared", false}} {
		t.Run(c.mode, func(t *testing.T) {
			d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 8<<20),
				Env: map[string]string{"ACCESS_MODE": c.mode}})
			first := rig.LoginTo(t, d, "iqn.2026-01.test:first")
			require.True(t, rig.Do(t, first, rig.ReadBlock(1, 0)).Good())
			rig.OK(t, "qemu-io", "-r", "-f", "raw", "-c", "read 0 64k", d.URL(1))
			r := rig.Client(t, nil, "qemu-io", "-f", "raw", "-c", "write -P 1 0 64k", d.URL(1))
			require.Equal(t, c.writes, r.Status == 0, "%s", r)
		})
	}
}

// TestStatusPages checks what an operator sees while a client is logged in, and that health checks
// answer.
func TestStatusPages(t *testing.T) {
	t.Parallel()
	rig.Need(t)
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 8<<20)})
	s := rig.LoginTo(t, d, "iqn.2026-01.test:watched")
	require.True(t, rig.Do(t, s, rig.ReadBlock(1, 0)).Good())
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

	path, err := rig.Binary()
	require.NoError(t, err)
	for _, args := range [][]string{{"healthcheck"}, {"healthcheck", "--live"}} {
		rig.OKEnv(t, []string{"METRICS_LISTEN=" + d.Metrics, "READY_FILE=" + d.ReadyFile}, path,
			args...)
	}
	rig.Logout(t, s)
	d.Stop()
	require.NotZero(t, rig.Client(t, []string{"METRICS_LISTEN=" + d.Metrics}, path,
		"healthcheck").Status)
}

// TestStopWhileCopying stops a daemon that has just begun to copy an image. It exits with 0, and
// the next start continues.
func TestStopWhileCopying(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img")
	source := filepath.Join(t.TempDir(), "source.raw")
	rig.MakeRaw(t, source, 256<<20)
	dir, state := t.TempDir(), t.TempDir()
	rig.MakeQcow2(t, source, filepath.Join(dir, "big.qcow2"), "", true)
	path, err := rig.Binary()
	require.NoError(t, err)
	serve := exec.Command(path, "serve")
	serve.Env = rig.ClientEnv("DISK_DIR="+dir, "WORK_DIR="+filepath.Join(state, "work"),
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

	d := rig.Start(t, rig.Config{DiskDir: dir, StateDir: state})
	if rig.HaveTool(rig.QEMUISCSI) {
		rig.Same(t, source, d.URL(1))
	}
}
