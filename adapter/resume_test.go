package adapter

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/filetest"
)

var errRead = errors.New("a layer is read that is there")

// unread is an image whose lowest layers cannot be read.
func unread(layers int, archives [][]byte) Image {
	img := imageOf(archives...)
	for i := range layers {
		img.Layers[i].Open = func(context.Context) (io.ReadCloser, error) { return nil, errRead }
	}
	return img
}

func requireSameLevels(t *testing.T, want, got string, levels []Level) {
	t.Helper()
	for _, l := range levels {
		a := filetest.Content(t, filepath.Join(want, l.File))
		b := filetest.Content(t, filepath.Join(got, l.File))
		require.Equal(t, digestOf(a), digestOf(b), l.File)
	}
}

// TestLayersBelowAreNotReadAgain: above existing levels, a layer makes the same level as if all
// were made at once, and no other layer is read.
func TestLayersBelowAreNotReadAgain(t *testing.T) {
	for seed := range 12 {
		var archives [][]byte
		for _, items := range generate(t, seed, false).layers {
			archives = append(archives, layerOf(t, items...))
		}
		archives = append(archives, layerOf(t, file("new", "x")))
		below := len(archives) - 1
		whole, dir := t.TempDir(), t.TempDir()
		want := build(t, whole, imageOf(archives...))
		build(t, dir, imageOf(archives[:below]...))
		got := build(t, dir, unread(below, archives))
		require.Equal(t, want.Levels[below].File, got.Levels[below].File)
		requireSameLevels(t, whole, dir, want.Levels)
	}
}

// TestStates: only a few levels have a state. A missing level is made again from the state below
// it, and a damaged state is not used.
func TestStates(t *testing.T) {
	var archives [][]byte
	for i := range 9 {
		archives = append(archives, layerOf(t, file(fmt.Sprint("f", i), "x")))
	}
	dir, whole := t.TempDir(), t.TempDir()
	d := build(t, dir, imageOf(archives...))
	build(t, whole, imageOf(archives...))
	var with []int
	for i, l := range d.Levels[:9] {
		if _, err := os.Stat(filepath.Join(dir, stateName(l.File))); err == nil {
			with = append(with, i)
		}
	}
	require.Equal(t, []int{1, 5, 7, 8}, with)

	level := func(i int) string { return filepath.Join(dir, d.Levels[i].File) }
	require.NoError(t, os.Remove(level(6)))
	build(t, dir, unread(6, archives))
	requireSameLevels(t, whole, dir, d.Levels)

	state := filepath.Join(dir, stateName(d.Levels[5].File))
	content := filetest.Content(t, state)
	content[len(content)/2] ^= 1
	for _, damaged := range [][]byte{content, content[:100], {}} {
		require.NoError(t, os.WriteFile(state, damaged, 0o644))
		require.NoError(t, os.Remove(level(6)))
		_, err := Build(context.Background(), unread(6, archives), dir, Options{})
		require.ErrorIs(t, err, errRead)
		build(t, dir, unread(2, archives)) // there is another state
		requireSameLevels(t, whole, dir, d.Levels)
	}
}

// TestStateCounts: a state knows how much of the limits the layers below have used.
func TestStateCounts(t *testing.T) {
	below := layerOf(t, file("a", string(make([]byte, 1<<20))), file("b", ""))
	dir := t.TempDir()
	build(t, dir, imageOf(below))
	for _, opt := range []Options{{MaxBytes: 1<<20 + 100}, {MaxFiles: 2}} {
		_, err := Build(context.Background(),
			imageOf(below, layerOf(t, file("c", string(make([]byte, 200))))), dir, opt)
		require.ErrorContains(t, err, "together")
	}
}
