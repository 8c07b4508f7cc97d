package daemon

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLevelsCountInTheCache: what container images take is known to whoever keeps the cache below
// its size, with and without a directory for them.
func TestLevelsCountInTheCache(t *testing.T) {
	dir := t.TempDir()
	levels := filepath.Join(dir, "levels")
	d := &Daemon{opt: Options{Streams: Streams{CacheDir: dir},
		Containers: Containers{Dir: levels}}}
	others, err := d.othersInCache()
	require.NoError(t, err)
	require.Empty(t, others)

	require.NoError(t, os.Mkdir(levels, 0o755))
	level := filepath.Join(levels, "layer-0123.v1.qcow2")
	require.NoError(t, os.WriteFile(level, make([]byte, 1<<20), 0o644))
	others, err = d.othersInCache()
	require.NoError(t, err)
	require.Len(t, others, 1)
	require.Equal(t, level, others[0].Name)
	require.GreaterOrEqual(t, others[0].Bytes, int64(1<<20))
	require.NoError(t, others[0].Remove())
	require.NoFileExists(t, level)
}
