package main

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSendAndReceive moves a disk by the two commands, as the pods of a move do.
func TestSendAndReceive(t *testing.T) {
	from, to, secret := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "secret")
	content := bytes.Repeat([]byte("disk"), 50_000)
	require.NoError(t, os.WriteFile(filepath.Join(from, "disk.img"), content, 0o600))
	require.NoError(t, os.WriteFile(secret, []byte("a random secret\n"), 0o600))
	read, write := io.Pipe()
	sent := make(chan int, 1)
	go func() {
		sent <- run([]string{"send", from, "--listen=127.0.0.1:0", "--secret-file=" + secret},
			io.Discard, write)
		_ = write.Close()
	}()
	said := bufio.NewReader(read)
	line, err := said.ReadString('\n')
	require.NoError(t, err)
	address := strings.TrimSpace(strings.TrimPrefix(line, "waiting for a receiver at "))
	rest := make(chan string, 1)
	go func() {
		all, _ := io.ReadAll(said)
		rest <- string(all)
	}()
	var stdout, stderr bytes.Buffer
	require.Equal(t, exitDone, run([]string{"receive", address, to, "--secret-file=" + secret},
		&stdout, &stderr), stderr.String())
	require.Contains(t, stderr.String(), "the disk is in "+to)
	require.Empty(t, stdout.String())
	require.Equal(t, exitDone, <-sent)
	require.Contains(t, <-rest, "a receiver has the disk: 200000 bytes")
	got, err := os.ReadFile(filepath.Join(to, "disk.img"))
	require.NoError(t, err)
	require.True(t, bytes.Equal(content, got))

	stderr.Reset()
	require.Equal(t, exitFailed, run([]string{"receive", address, to, "--secret-file=" + secret},
		&stdout, &stderr))
	require.Contains(t, stderr.String(), "is not empty: it has disk.img")
}

func TestWrongUsageOfSendAndReceive(t *testing.T) {
	short := filepath.Join(t.TempDir(), "short")
	missing := filepath.Join(t.TempDir(), "missing")
	require.NoError(t, os.WriteFile(short, []byte("secret"), 0o600))
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"send"}, "accepts 1 arg(s)"},
		{[]string{"send", "/data"}, "--secret-file is missing"},
		{[]string{"send", "/data", "--secret-file=" + missing},
			"--secret-file: open " + missing},
		{[]string{"send", "/data", "--secret-file=" + short}, "want 12 random ones at least"},
		{[]string{"receive", "node", "/data"}, "ADDRESS: address node: missing port in address"},
	} {
		var stdout, stderr bytes.Buffer
		require.Equal(t, exitUsage, run(c.args, &stdout, &stderr), c.says)
		require.Contains(t, stderr.String(), c.says)
	}
}
