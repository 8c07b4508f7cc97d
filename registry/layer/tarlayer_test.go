package layer

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/registry/registrytest"
)

// TestHashEnds ends the hashing of a file while goroutines still hash parts of it: by a file that
// has become shorter, and by an interruption. One processor makes them run after the error.
func TestHashEnds(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	path := filepath.Join(t.TempDir(), "a.raw")
	for name, c := range map[string]struct {
		stop bool
		size int64 // that the file has by then
		want string
	}{
		"shorter":     {size: 3*hashStep + 5, want: "become shorter"},
		"empty":       {want: "become shorter"},
		"interrupted": {stop: true, size: 8 * hashStep, want: "canceled"},
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, os.WriteFile(path, registrytest.Noise(1, 8*hashStep), 0o600))
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			require.NoError(t, err)
			defer f.Close()
			l, err := NewDisk("disk/a.raw", f)
			require.NoError(t, err)
			require.NoError(t, f.Truncate(c.size))
			for range 20 {
				ctx := t.Context()
				if c.stop {
					ctx = &endsAfter{Context: ctx, calls: 3}
				}
				_, err = l.Hash(ctx, new(atomic.Int64))
				require.ErrorContains(t, err, c.want)
			}
		})
	}
}

// endsAfter is a context that ends at a certain call of Err.
type endsAfter struct {
	context.Context
	calls int
}

func (e *endsAfter) Err() error {
	if e.calls--; e.calls < 0 {
		return context.Canceled
	}
	return nil
}
