package adapter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// smallLayers are layers of one file each.
func smallLayers(t testing.TB, n int) (archives [][]byte) {
	for i := range n {
		archives = append(archives, layerOf(t, file(fmt.Sprint("f", i), fmt.Sprint(i))))
	}
	return archives
}

// watchedArchive is an archive that reports its reads and its end.
type watchedArchive struct {
	io.Reader
	read  func() error // before the first Read
	close func()
}

func (w *watchedArchive) Read(p []byte) (int, error) {
	if read := w.read; read != nil {
		w.read = nil
		if err := read(); err != nil {
			return 0, err
		}
	}
	return w.Reader.Read(p)
}

func (w *watchedArchive) Close() error {
	w.close()
	return nil
}

// TestLayersAreOpenedAhead: while a layer is read, the next ones are open, but not all of them.
func TestLayersAreOpenedAhead(t *testing.T) {
	const layers = 8
	archives := smallLayers(t, layers)
	img := imageOf(archives...)
	var isOpen [layers]chan struct{}
	var open, most atomic.Int64
	for i := range img.Layers {
		isOpen[i] = make(chan struct{})
	}
	for i := range img.Layers {
		img.Layers[i].Open = func(context.Context) (io.ReadCloser, error) {
			now := open.Add(1)
			for old := most.Load(); now > old && !most.CompareAndSwap(old, now); {
				old = most.Load()
			}
			close(isOpen[i])
			return &watchedArchive{bytes.NewReader(archives[i]), func() error {
				for next := i + 1; next < min(i+mostOpen, layers); next++ {
					select {
					case <-isOpen[next]:
					case <-time.After(time.Minute):
						return fmt.Errorf("layer %d is not open while layer %d is read", next, i)
					}
				}
				return nil
			}, func() { open.Add(-1) }}, nil
		}
	}
	dir := t.TempDir()
	d := build(t, dir, img)
	require.Zero(t, open.Load())
	require.LessOrEqual(t, most.Load(), int64(mostOpen))
	other := t.TempDir()
	require.Equal(t, d.Levels, build(t, other, imageOf(archives...)).Levels)
	requireSameLevels(t, dir, other, d.Levels)
}

// TestOpenedAheadIsClosed: if a layer fails, archives that were opened ahead are closed, and the
// error is that of the layer. An error of Open belongs to its own layer, and the levels below stay.
func TestOpenedAheadIsClosed(t *testing.T) {
	archives := smallLayers(t, 5)
	broken := errors.New("it is broken")
	for failing := range archives {
		for _, when := range []string{"open", "read"} {
			img := imageOf(archives...)
			var open atomic.Int64
			for i := range img.Layers {
				img.Layers[i].Open = func(context.Context) (io.ReadCloser, error) {
					w := &watchedArchive{Reader: bytes.NewReader(archives[i]),
						close: func() { open.Add(-1) }}
					if i == failing && when == "open" {
						return nil, broken
					}
					if i == failing {
						w.read = func() error { return broken }
					}
					open.Add(1)
					return w, nil
				}
			}
			dir := t.TempDir()
			_, err := Build(t.Context(), img, dir, Options{})
			require.ErrorIs(t, err, broken)
			require.ErrorContains(t, err, fmt.Sprintf("layer %d, ", failing+1))
			require.Zero(t, open.Load(), "%s %d", when, failing)
			require.Len(t, testtool.Must(filepath.Glob(filepath.Join(dir, "*.qcow2")))(t), failing)
			partial := testtool.Must(filepath.Glob(filepath.Join(dir, ".*.qcow2"+partialSuffix)))(t)
			require.Empty(t, partial)
		}
	}
}

// TestLevelThatCannotBeStored: a level that cannot get its name is an error, and no level above it
// gets one.
func TestLevelThatCannotBeStored(t *testing.T) {
	archives := smallLayers(t, 3)
	img := imageOf(archives...)
	dir := t.TempDir()
	b := testtool.Must(plan(img, dir, Options{}))(t)
	inTheWay := filepath.Join(dir, b.levels[1].File)
	img.Layers[1].Open = func(context.Context) (io.ReadCloser, error) {
		return &watchedArchive{bytes.NewReader(archives[1]),
			func() error { return os.Mkdir(inTheWay, 0o755) }, func() {}}, nil
	}
	require.ErrorContains(t, testtool.Err(Build(t.Context(), img, dir, Options{})), inTheWay)
	names := testtool.Must(filepath.Glob(filepath.Join(dir, "*.qcow2")))(t)
	require.ElementsMatch(t, []string{filepath.Join(dir, b.levels[0].File), inTheWay}, names)
	require.NoError(t, os.Remove(inTheWay))
	build(t, dir, imageOf(archives...))
}
