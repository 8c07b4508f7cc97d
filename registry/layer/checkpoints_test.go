package layer

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/transport"
)

// checkpointsOf makes the checkpoints of a layer.
func checkpointsOf(t testing.TB, layer []byte) (file, content []byte, err error) {
	f, err := os.Create(filepath.Join(t.TempDir(), "x"))
	require.NoError(t, err)
	rec := NewRecorder(f, int64(len(layer)))
	defer rec.Close()
	desc := registrytest.Store{}.Add(layer)
	blob := transport.NewBlob(desc, func(_ context.Context, off, n int64) io.ReadCloser {
		return io.NopCloser(bytes.NewReader(layer[off : off+n]))
	})
	in, err := Open(t.Context(), blob, new(atomic.Int64), rec, 0)
	require.NoError(t, err)
	defer in.Close()
	content, err = io.ReadAll(in)
	require.NoError(t, err)
	require.NoError(t, in.Finish())
	if err = rec.Finish(desc.Size); err != nil {
		return nil, content, err
	}
	file, err = os.ReadFile(f.Name())
	require.NoError(t, err)
	return file, content, nil
}

// TestCheckpointsBounded: a layer with too much between two checkpoints gets none.
func TestCheckpointsBounded(t *testing.T) {
	layer := registrytest.Gzipped(t, registrytest.Noise(1, 2<<20))
	nothing := bytes.Repeat([]byte{0, 0, 0, 0xff, 0xff}, maxSpan/5) // stored blocks without content
	layer = bytes.Join([][]byte{layer[:10], nothing, layer[10:]}, nil)
	_, _, err := checkpointsOf(t, layer)
	require.ErrorIs(t, err, ErrNoCheckpoints)
}

// FuzzCheckpoints reads anything as a file of checkpoints, and decompresses from where it says. It
// takes the sum of the file for right.
func FuzzCheckpoints(f *testing.F) {
	layer := registrytest.Gzipped(f, append(registrytest.Noise(95, 2<<20),
		bytes.Repeat([]byte("a few words "), 1<<17)...))
	file, content, err := checkpointsOf(f, layer)
	require.NoError(f, err)
	points, err := OpenCheckpoints(bytes.NewReader(file), int64(len(file)), int64(len(layer)))
	require.NoError(f, err)
	require.Equal(f, int64(len(content)), points.Size)
	f.Add(points.Table[checkpointEntry:2*checkpointEntry], []byte("x"))
	f.Add(bytes.Repeat([]byte{0xff}, checkpointEntry), file[:200])
	f.Fuzz(func(t *testing.T, entry, states []byte) {
		table := bytes.Clone(points.Table)
		copy(table[checkpointEntry:2*checkpointEntry], entry)
		all := bytes.Clone(file)
		copy(all[len(checkpointMagic):], states)
		c := &Checkpoints{File: bytes.NewReader(all), Table: table, Size: points.Size,
			Layer: points.Layer, Chunk: points.Chunk, At: points.At}
		if c.Check() != nil {
			return
		}
		off, length := c.Span(1)
		if off < 0 || length < 0 || off+length > c.Layer {
			t.Fatalf("%d bytes at %d of %d", length, off, c.Layer)
		}
		_ = c.Read(bytes.NewReader(layer[off:off+length]), 1, make([]byte, 1<<20))
		_, _ = OpenCheckpoints(bytes.NewReader(all), int64(len(all)), c.Layer)
	})
}
