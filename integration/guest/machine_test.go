package guest

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestMachine runs commands in a guest. Their output comes back byte for byte and line by line,
// with their status. A command that hangs ends the machine with an error that shows the console.
func TestMachine(t *testing.T) {
	testtool.NeedNightly(t)
	requireTools(t, map[string]string{"qemu-system-x86_64": "qemu-system-x86", "apt-get": "apt",
		"dpkg-deb": "dpkg"})
	ctx, cancel := context.WithTimeout(t.Context(), bootTimeout)
	defer cancel()
	m, err := Start(ctx, MachineOptions{Dir: t.TempDir(), Guest: Options{
		Init:     "echo greeting >/tmp/init",
		CacheDir: filepath.Join("..", "..", "cache", "guest"),
	}})
	var fetch *FetchError
	if errors.As(err, &fetch) {
		skip(t, err.Error())
	}
	require.NoError(t, err)
	defer m.Close()

	for _, c := range []struct {
		script, output string
		status         int
	}{
		{"cat /tmp/init", "greeting\n", 0},
		{"echo out; echo err >&2; exit 3", "out\nerr\n", 3},
		{"printf 'no end of line'", "no end of line", 0},
		{"printf 'a\\r\\n\\004\\001b\\n\\n'", "a\r\n\x04\x01b\n\n", 0},
		{"cat <<'EOF'\n  a \\ $b\nEOF\ntrue", "  a \\ $b\n", 0},
		{"no-such-command", "/tmp/.command: 1: no-such-command: not found\n", 127},
		{"ls /sys/class/net", "eth0\nlo\n", 0},
		{": " + strings.Repeat("x", 20000) + "\necho long", "long\n", 0},
	} {
		r, err := m.Run(ctx, c.script, nil)
		require.NoError(t, err)
		require.Equal(t, Result{Output: c.output, Status: c.status}, r, c.script)
	}

	var lines []string
	_, err = m.Run(ctx, "echo 1; echo; echo 2", func(line string) { lines = append(lines, line) })
	require.NoError(t, err)
	require.Equal(t, []string{"1", "", "2"}, lines)

	short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	_, err = m.Run(short, "sleep 3600", nil)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "console")
	m.Close()
}
