package machines

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
)

// TestRunContainer runs the script of `make run-container`: it builds a small image, and boots it
// with plain QEMU from its LUN. Another image is a web server that answers. SIGINT (Ctrl-C) and
// SIGTERM are the power button.
func TestRunContainer(t *testing.T) {
	t.Parallel()
	testtool.NeedNightly(t)
	rig.Need(t, "bash", "setpriv", rig.QEMUISCSI)
	ref, boot := requireContainerImage(t), requireBootFiles(t)
	path := rig.Program(t)
	e := rig.OwnEngine(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*rig.MachineTime)
	defer cancel()
	var out bytes.Buffer
	command := func(env ...string) *exec.Cmd {
		port, err := peers.FreePort()
		require.NoError(t, err)
		out.Reset()
		cmd := exec.CommandContext(ctx, filepath.Join("..", "..", "scripts", "run-container.sh"),
			path,
			boot, t.TempDir())
		cmd.Env = append(append(os.Environ(), e.Vars...), fmt.Sprint("PORT=", port))
		cmd.Env = append(cmd.Env, env...)
		cmd.Stdout, cmd.Stderr = &out, &out
		cmd.WaitDelay = rig.MachineTime
		return cmd
	}
	says := func(text string) {
		t.Helper()
		require.Contains(t, strings.ReplaceAll(out.String(), "\r\n", "\n"), text)
	}

	require.NoError(t, command("IMAGE=").Run(), "%s", &out)
	says("Hello from a container image in a virtual machine: Linux ")
	says("user 0, start 1\n")
	says("run-container: the exit status of the entry point is 7\n")

	for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		web, err := peers.FreePort()
		require.NoError(t, err)
		cmd := command("IMAGE="+ref, fmt.Sprintf("FORWARD=%d:80", web))
		require.NoError(t, cmd.Start())
		require.Empty(t, get(t, fmt.Sprintf("http://127.0.0.1:%d/", web)))
		require.NoError(t, cmd.Process.Signal(signal))
		require.NoError(t, cmd.Wait(), "%s", &out)
		says("stopped by its stop signal\n")
		says("run-container: the exit status of the entry point is 42\n")
	}
}
