package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/peers"
)

// TestFloor checks that the floor does the work that is measured: every byte of a write is in the
// file, and reads come from there.
func TestFloor(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		require.NotEqual(t, "1", os.Getenv("KUBEVIRT_DISK_REQUIRE_TOOLS"), "gcc is required")
		t.Skip("needs gcc")
	}
	const size = 4 << 20
	raw := filepath.Join(t.TempDir(), "lun.raw")
	require.NoError(t, os.WriteFile(raw, make([]byte, size), 0o600))
	floor, err := peers.StartFloor(t.TempDir(), raw)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, floor.Stop()) })
	for _, load := range []generatorLoad{
		{bytes: 4 << 10, depth: 1, sessions: 1, luns: 1},
		{bytes: 4 << 10, depth: 32, sessions: 4, luns: 1},
		{bytes: 256 << 10, depth: 16, sessions: 2, luns: 1},
		{bytes: 256 << 10, depth: 16, sessions: 1, luns: 1, write: true, step: 256 << 10},
	} {
		load.size = size
		done, err := generate(t.Context(), load, floor.URL, 100*time.Millisecond)
		require.NoError(t, err, load.String())
		require.Positive(t, done.operations, load.String())
	}
	content, err := os.ReadFile(raw)
	require.NoError(t, err)
	want := make([]byte, 256<<10)
	for i := range want {
		want[i] = byte(i * 7)
	}
	require.True(t, bytes.Equal(want, content[:256<<10]),
		"the generator's writes are in the file")
	// A read beyond the end fails: the connection ends, and the load says so.
	beyond := generatorLoad{bytes: 4096, depth: 1, sessions: 1, luns: 1, size: size << 20}
	_, err = generate(t.Context(), beyond, floor.URL, 50*time.Millisecond)
	require.Error(t, err)
}
