package sources

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/options/optionstest"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/transport"
)

// TestLevelsCountInTheCache: the cache counts the levels of container images towards its size, with
// and without a directory for them.
func TestLevelsCountInTheCache(t *testing.T) {
	dir := t.TempDir()
	levels := filepath.Join(dir, "levels")
	s := &Sources{opt: &options.Options{Streams: options.Streams{CacheDir: dir},
		Containers: options.Containers{Dir: levels}}}
	others, err := s.othersInCache()
	require.NoError(t, err)
	require.Empty(t, others)

	require.NoError(t, os.Mkdir(levels, 0o755))
	level := filepath.Join(levels, "layer-0123.v1.qcow2")
	require.NoError(t, os.WriteFile(level, make([]byte, 1<<20), 0o644))
	others, err = s.othersInCache()
	require.NoError(t, err)
	require.Len(t, others, 1)
	require.Equal(t, level, others[0].Name)
	require.GreaterOrEqual(t, others[0].Bytes, int64(1<<20))

	require.NoError(t, os.WriteFile(filepath.Join(dir, "pulled"), nil, 0o644))
	others, err = s.othersInCache()
	require.Error(t, err, "no fetched image can be looked at")
	require.Len(t, others, 1)
	require.NoError(t, others[0].Remove())
	require.NoFileExists(t, level)
}

// TestConversionIsLogged: the log says that a container image becomes a disk, and when it has
// become one. If its levels exist, the log says only the latter.
func TestConversionIsLogged(t *testing.T) {
	core, log := observer.New(zap.InfoLevel)
	client, err := registry.New(transport.Options{})
	require.NoError(t, err)
	defer client.Close()
	dir := t.TempDir()
	s := &Sources{client: client, opt: &options.Options{WorkDir: filepath.Join(dir, "work"),
		Containers: options.Containers{Dir: filepath.Join(dir, "levels")}, Log: zap.New(core)}}
	ref := optionstest.SavedImage(t)
	const begins, ends = "a container image becomes a disk", "a container image is served as a disk"
	for _, want := range [][]string{{begins, ends}, {ends}} {
		found, err := s.findContainer(context.Background(), ref)
		require.NoError(t, err)
		require.NoError(t, found.Image.Close())
		var messages []string
		for _, e := range log.TakeAll() {
			messages = append(messages, e.Message)
			require.Equal(t, ref.String(), e.ContextMap()["reference"])
			_, timed := e.ContextMap()["took"]
			require.Equal(t, e.Message == ends && len(want) > 1, timed)
		}
		require.Equal(t, want, messages)
	}
}
