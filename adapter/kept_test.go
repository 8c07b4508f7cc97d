package adapter

import (
	"errors"
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
)

// TestKeptLevels: a level counts with its state, is removed only when nobody uses it, and is made
// again. The order of use is known: a lower level counts as used after the levels above it.
func TestKeptLevels(t *testing.T) {
	dir := t.TempDir()
	none, err := List(filepath.Join(dir, "missing"))
	require.NoError(t, err)
	require.Empty(t, none)

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

	used, err := os.Open(filepath.Join(dir, d.Levels[0].File))
	require.NoError(t, err)
	defer used.Close()
	require.NoError(t, unix.Flock(int(used.Fd()), unix.LOCK_SH))
	all, err := List(dir)
	require.NoError(t, err)
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
			require.NoError(t, k.Remove())
		}
	}
	// the level that is used, its state, and what is not ours
	require.Len(t, filetest.Names(t, dir), 3)

	again := build(t, dir, img)
	require.Equal(t, d.Path, again.Path)
	require.NotEqual(t, before, must(os.Stat(again.Path)).ModTime())
	all, err = List(dir)
	require.NoError(t, err)
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
	made, err := flock.Claim(filepath.Join(dir, ".layer-made.v1.qcow2.partial"))
	require.NoError(t, err)
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
		f, err := flock.Claim(partial)
		require.NoError(t, err)
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
