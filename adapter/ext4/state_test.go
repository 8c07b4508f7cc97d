package ext4

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// writes records the writes of a level, in their order.
type writes []string

func (w *writes) WriteAt(p []byte, off int64) (int, error) {
	*w = append(*w, fmt.Sprint(off, string(p)))
	return len(p), nil
}

// change makes, links and removes files, each time others.
func change(t *testing.T, w *Writer, random *rand.Rand) {
	t.Helper()
	dirs := []Inode{Root}
	for i := range 60 {
		dir, name := dirs[random.IntN(len(dirs))], fmt.Sprint("f", random.IntN(90))
		attr := Attr{Mode: uint16(random.IntN(0o7777)), UID: random.Uint32N(1 << 20), Seconds: -5,
			Nanoseconds: 7}
		if i%3 == 0 {
			attr.Xattrs = map[string]string{"user.x": strings.Repeat("v", random.IntN(3)*100)}
		}
		old, there := w.Lookup(dir, name)
		switch {
		case there && w.Type(old.Inode) == TypeDir && random.IntN(3) > 0:
			dirs = append(dirs, old.Inode)
			continue
		case there:
			require.NoError(t, w.Remove(dir, name))
			dirs = []Inode{Root}
		}
		switch random.IntN(7) {
		case 0, 1:
			dirs = append(dirs, must(w.Mkdir(dir, name, attr)))
		case 2:
			must(w.Symlink(dir, name, strings.Repeat("t", 1+random.IntN(200)), attr))
		case 3:
			must(w.Mknod(dir, name, TypeBlock, 8, random.Uint32N(1<<20), attr))
		case 4:
			piece := strings.Repeat("x", holeSize) + strings.Repeat("\x00", holeSize)
			content := strings.Repeat(piece, random.IntN(7)) // with nodes in its tree of extents
			file := must(w.Create(dir, name, attr, strings.NewReader(content)))
			require.NoError(t, w.Link(dir, name+"-link", file))
			require.NoError(t, w.Remove(dir, name+"-link"))
		case 5: // a directory with an index
			many := must(w.Mkdir(dir, name, attr))
			for j := range random.IntN(300) {
				must(w.Create(many, fmt.Sprint(strings.Repeat("n", 40), j), attr,
					strings.NewReader("")))
			}
		default:
			must(w.Create(dir, name, attr, strings.NewReader(strings.Repeat("c", 5000))))
		}
	}
}

// TestStateGoesOn: a loaded Writer writes the same as the saved one, block for block and in the
// same order.
func TestStateGoesOn(t *testing.T) {
	for seed := range uint64(8) {
		w := New()
		random := rand.New(rand.NewPCG(seed, 1))
		for range 4 {
			w.Begin(nil)
			change(t, w, random)
			require.NoError(t, w.Finish())
			var state, again bytes.Buffer
			require.NoError(t, w.Save(&state))
			loaded := testtool.Must(Load(bytes.NewReader(state.Bytes())))(t)
			require.NoError(t, loaded.Save(&again))
			require.Equal(t, state.Bytes(), again.Bytes())

			next := random.Uint64()
			var want, got writes
			w.Begin(&want)
			change(t, w, rand.New(rand.NewPCG(next, 1)))
			require.NoError(t, w.Finish())
			loaded.Begin(&got)
			change(t, loaded, rand.New(rand.NewPCG(next, 1)))
			require.NoError(t, loaded.Finish())
			require.NotEmpty(t, want)
			require.True(t, slices.Equal(want, got), "seed %d", seed)
			require.Equal(t, w.Size(), loaded.Size())
		}
	}
}

// FuzzLoad: any data gives a Writer or an error.
func FuzzLoad(f *testing.F) {
	w := New()
	w.Begin(nil)
	_, _ = w.Create(Root, "file", Attr{Xattrs: map[string]string{"user.x": "y"}},
		strings.NewReader("content"))
	_, _ = w.Symlink(Root, "link", strings.Repeat("t", 100), Attr{})
	_ = w.Finish()
	var state bytes.Buffer
	require.NoError(f, w.Save(&state))
	f.Add(state.Bytes())
	f.Add(state.Bytes()[:200])
	f.Add([]byte{1, 64, 0, 12, 0, 1, 255, 255, 255, 255, 15})
	f.Fuzz(func(t *testing.T, p []byte) {
		if w, err := Load(bytes.NewReader(p)); err == nil {
			require.Greater(t, int(w.inodes.n), firstInode, "lost+found")
		}
	})
}
