package iscsi

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

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
	b := startBench(t, d.CHAPURL(rig.User, rig.Password, 1))
	d.Until("QEMU writes", func() bool { return d.Operations("write") > 1000 })
	stop(d)

	d = rig.Start(t, c)
	b.completes()
	rest = d.Operations("write")
	rig.OK(t, "qemu-io", "-f", "raw", "-c", "read -P 0x5a 0 32M", d.CHAPURL(rig.User, rig.Password,
		1))
	d.Stop()
	return rest
}

// bench is a QEMU that writes in the background. It ends when everything is written.
type bench struct {
	t     *testing.T
	cmd   *exec.Cmd
	out   strings.Builder
	ended chan error
}

func startBench(t *testing.T, url string) *bench {
	t.Helper()
	b := &bench{t: t, ended: make(chan error, 1)}
	b.cmd = exec.CommandContext(t.Context(), "qemu-img", "bench", "-w", "-f", "raw",
		"-c", "60000", "-d", "8", "-s", "4096", "--pattern=0x5a", url)
	b.cmd.Env = rig.ClientEnv()
	b.cmd.Stdout, b.cmd.Stderr = &b.out, &b.out
	require.NoError(t, b.cmd.Start())
	go func() { b.ended <- b.cmd.Wait() }()
	return b
}

func (b *bench) completes() {
	b.t.Helper()
	select {
	case err := <-b.ended:
		require.NoError(b.t, err, b.out.String())
	case <-time.After(2 * rig.Timeout):
		b.cmd.Process.Kill()
		b.t.Fatalf("qemu-img has not ended: %s", b.out.String())
	}
	require.Contains(b.t, b.out.String(), "Run completed")
}

// TestKickedQEMU ends QEMU's session while it writes. QEMU logs in again by itself, and no write is
// missing.
func TestKickedQEMU(t *testing.T) {
	t.Parallel()
	rig.Need(t, "qemu-img", "qemu-io", rig.QEMUISCSI)
	program := testtool.Must(rig.Binary())(t)
	state := t.TempDir()
	d := rig.Start(t, rig.Config{DiskDir: rig.DiskDir(t, 32<<20), StateDir: state,
		Env: rig.CHAPEnv})
	work := "WORK_DIR=" + filepath.Join(state, "work")
	type session struct {
		Initiator string
		TSIH      uint16
		LUNs      []uint16
		Written   int64 `json:"bytes_written"`
	}
	sessions := func() (all []session) {
		list := rig.OKEnv(t, []string{work}, program, "sessions", "--json")
		require.NoError(t, json.Unmarshal([]byte(list), &all))
		return all
	}
	ended := map[uint16]bool{}
	// On a busy machine, QEMU may have written everything before the test sees or ends its session.
	for try := 1; len(ended) == 0; try++ {
		require.Less(t, try, 10, "QEMU always finished first")
		b := startBench(t, d.CHAPURL(rig.User, rig.Password, 1))
		for range 3 {
			var now []session
			d.Until("QEMU is logged in and writes", func() bool {
				now = sessions()
				return len(now) == 1 && !ended[now[0].TSIH] && now[0].Written > 1<<20 ||
					len(b.ended) > 0
			})
			if len(b.ended) > 0 {
				break
			}
			require.Equal(t, []uint16{1}, now[0].LUNs)
			r := rig.Client(t, []string{work}, program, "kick", "--initiator", now[0].Initiator)
			if r.Status == 0 {
				ended[now[0].TSIH] = true
			} else {
				t.Log(r) // the session may be over by now
			}
		}
		b.completes()
	}
	rig.OK(t, "qemu-io", "-f", "raw", "-c", "read -P 0x5a 0 32M", d.CHAPURL(rig.User, rig.Password,
		1))
	d.UntilSaid(`"reason":"kicked"`)
}
