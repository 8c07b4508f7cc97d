package adapter

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/testtool"
)

// TestKeptLevels: a level counts with its state, is removed only when nobody uses it, and is made
// again. The order of use is known: a lower level counts as used after the levels above it.
func TestKeptLevels(t *testing.T) {
	dir := t.TempDir()
	require.Empty(t, testtool.Must(List(filepath.Join(dir, "missing")))(t))

	img := imageOf(layerOf(t, file("a", "x")), layerOf(t, file("b", "y")))
	d := build(t, dir, img)
	want := digestOf(must(os.ReadFile(d.Path)))
	left := filepath.Join(dir, ".layer-left.v1.state.1"+partialSuffix)
	require.NoError(t, os.WriteFile(left, []byte("left"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "another"), nil, 0o600))
	for i, l := range d.Levels { // as if it were long ago
		when := time.Now().Add(time.Duration(-i-1) * time.Hour)
		require.NoError(t, os.Chtimes(filepath.Join(dir, l.File), when, time.Time{}))
	}
	before := must(os.Stat(d.Path)).ModTime()

	used := testtool.Must(os.Open(filepath.Join(dir, d.Levels[0].File)))(t)
	defer used.Close()
	require.NoError(t, unix.Flock(int(used.Fd()), unix.LOCK_SH))
	all := testtool.Must(List(dir))(t)
	require.Len(t, all, 4)
	for _, k := range all {
		require.Positive(t, k.Bytes)
		switch k.Path {
		case used.Name():
			require.Len(t, k.files, 2)
			require.WithinDuration(t, time.Now(), k.Used, time.Minute)
			require.ErrorIs(t, k.Remove(), ErrInUse)
		case left:
			require.NoError(t, k.Remove())
		default:
			require.Greater(t, time.Since(k.Used), time.Hour)
			locked := testtool.Must(k.lock())(t)
			how := testtool.Must(unix.FcntlInt(locked.Fd(), unix.F_GETFL, 0))(t)
			require.Equal(t, unix.O_RDWR, how&unix.O_ACCMODE, "NFS locks nothing else")
			require.NoError(t, locked.Close())
			require.NoError(t, k.Remove())
		}
	}
	// the level that is used, its state, and what is not ours
	require.Len(t, filetest.Names(t, dir), 3)

	again := build(t, dir, img)
	require.Equal(t, d.Path, again.Path)
	require.NotEqual(t, before, must(os.Stat(again.Path)).ModTime())
	all = testtool.Must(List(dir))(t)
	slices.SortFunc(all, func(a, b Kept) int { return a.Used.Compare(b.Used) })
	require.Equal(t, again.Path, all[0].Path, "the top level is removed first")
	require.Equal(t, want, digestOf(must(os.ReadFile(again.Path))))
}

// TestWhatKilledMakersLeave: a maker of levels removes the files that killed makers have left, even
// those of images that have changed since. It leaves files that others are about to write.
func TestWhatKilledMakersLeave(t *testing.T) {
	dir := t.TempDir()
	img := imageOf(layerOf(t, file("a", "x")))
	own := "." + build(t, t.TempDir(), img).Levels[0].File + partialSuffix
	kept := map[string]bool{own: false, ".layer-gone.v1.qcow2.partial": false,
		".layer-gone.v1.state.1234.partial": false, ".another": true, "another.partial": true,
		".another.partial": true}
	for name := range kept {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), make([]byte, 1<<20), 0o600))
	}
	made := testtool.Must(flock.Claim(t.Context(),
		filepath.Join(dir, ".layer-made.v1.qcow2.partial")))(t)
	defer made.Close()
	build(t, dir, img)
	for name, stays := range kept {
		require.Equal(t, stays, exists(filepath.Join(dir, name)), name)
	}
	require.FileExists(t, made.Name())
}

// TestRemovedWhileMade: several that remove a level, or the remains of making it, take nothing from
// somebody who makes and uses it meanwhile.
func TestRemovedWhileMade(t *testing.T) {
	dir := t.TempDir()
	name := "layer-a" + suffix
	level, partial := filepath.Join(dir, name), filepath.Join(dir, "."+name+partialSuffix)
	done := make(chan struct{})
	var removing sync.WaitGroup
	for _, path := range []string{level, partial, level, partial} {
		kept := Kept{Path: path, files: []string{filepath.Base(path)}}
		removing.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				if err := kept.Remove(); err != nil && !errors.Is(err, ErrInUse) {
					t.Error(err)
				}
			}
		})
	}
	for end := time.Now().Add(time.Second); time.Now().Before(end) && !t.Failed(); {
		f := testtool.Must(flock.Claim(t.Context(), partial))(t)
		if exists(level) {
			assert.NoError(t, os.Remove(partial))
		} else {
			assert.NoError(t, os.Rename(partial, level))
			for range 20 { // it is locked as by a user
				assert.True(t, exists(level))
			}
		}
		assert.NoError(t, f.Close())
	}
	close(done)
	removing.Wait()
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

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
