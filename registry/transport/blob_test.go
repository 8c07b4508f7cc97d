package transport

import (
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/registry/registrytest"
)

// TestFetchWaitsForItsReader: time in which nobody reads does not count as time in which nothing
// comes. Layers of container images are opened before they are read.
func TestFetchWaitsForItsReader(t *testing.T) {
	l := newLying(t)
	content := registrytest.Noise(23, 1<<20)
	desc := l.Add(content)
	l.Faults = []registrytest.Fault{registrytest.Few(1000, 100*time.Millisecond)}
	src, err := newClient(t, l.options()).Source(l.ref(t, "vm/a:1"), "")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, src.Close()) })
	b, err := src.Blob(desc)
	require.NoError(t, err)
	in := b.Stream(t.Context(), 0, desc.Size)
	defer in.Close()
	got := make([]byte, len(content))
	_, err = io.ReadFull(in, got[:1000])
	require.NoError(t, err)
	f := in.fetch
	if body, ok := f.body.(*looseBody); ok { // otherwise the cut was noticed already
		x := body.ReadCloser.(*exchange)
		require.False(t, x.timer.Stop(), "the timer runs although nobody reads")
	}
	for _, at := range []*time.Time{&f.read, &f.last, &f.tries.last} {
		*at = at.Add(-time.Hour)
	}
	_, err = io.ReadFull(in, got[1000:])
	require.NoError(t, err)
	require.Equal(t, content, got)
}
