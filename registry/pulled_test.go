package registry

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/registry/cache"
)

// TestPulledCounts: fetched images count, and are removed only when nobody serves them.
func TestPulledCounts(t *testing.T) {
	l := newLying(t)
	content := noise(80, 3<<20)
	l.Tags["1"] = l.Image(t, gzipped(t, tarOf(t, tarFile{Name: "disk/a.img", Content: content})))
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	others := Others(s.opt.CacheDir)
	none, err := others()
	require.NoError(t, err)
	require.Empty(t, none)

	st, err := s.client.Stream(t.Context(), l.ref(t, "vm/a:1"), s.opt)
	require.NoError(t, err)
	all, err := others()
	require.NoError(t, err)
	require.Len(t, all, 2)
	require.InDelta(t, 2.25*(1<<20), all[0].Bytes, 1<<20, "a quarter of it is holes")
	require.Less(t, all[1].Bytes, all[0].Bytes/8, all[1].Name)
	require.True(t, all[1].Used.After(all[0].Used), "what is smaller is kept longer")
	for _, o := range all {
		require.False(t, o.Used.IsZero())
		require.ErrorIs(t, o.Remove(), cache.ErrInUse)
	}

	// The remains of a process that was killed while it fetched count, too.
	killed := filepath.Join(s.opt.CacheDir, pulledDir, "sha256-00")
	require.NoError(t, os.Mkdir(killed+".partial", 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(killed+".partial", "x"), content, 0o600))
	require.NoError(t, os.WriteFile(killed+".lock", nil, 0o600))
	all, err = others()
	require.NoError(t, err)
	require.Len(t, all, 3)

	require.NoError(t, st.Close())
	for _, o := range all {
		require.NoError(t, o.Remove())
	}
	all, err = others()
	require.NoError(t, err)
	require.Empty(t, all)

	// It is fetched again when it is needed.
	img := s.disk(t, s.open(t, l.ref(t, "vm/a:1")), "a.img")
	require.True(t, bytes.Equal(content, contentOf(t, img)))
}

// TestPulledRemovedMeanwhile removes the image between two starts that share a cache.
func TestPulledRemovedMeanwhile(t *testing.T) {
	l := newLying(t)
	l.Tags["1"] = l.Image(t, gzipped(t, tarOf(t, tarFile{Name: "disk/a.img",
		Content: noise(81, 1<<20)})))
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	done := make(chan error)
	go func() {
		var err error
		for range 20 {
			st, e := s.client.Stream(t.Context(), l.ref(t, "vm/a:1"), s.opt)
			if err = e; err == nil {
				err = st.Close()
			}
			if err != nil {
				break
			}
		}
		done <- err
	}()
	for {
		select {
		case err := <-done:
			require.NoError(t, err)
			return
		default:
		}
		all, err := Others(s.opt.CacheDir)()
		require.NoError(t, err)
		for _, o := range all {
			if err := o.Remove(); !errors.Is(err, cache.ErrInUse) {
				require.NoError(t, err)
			}
		}
	}
}

// TestFilesThatAreNoDisks: empty and hidden files beside a disk refuse no image, however that is
// read.
func TestFilesThatAreNoDisks(t *testing.T) {
	content := noise(82, 1<<20)
	others := []tarFile{{Name: "disk/.keep"}, {Name: "disk/README"},
		{Name: "disk/.gitignore", Content: []byte("*\n")},
		{Name: "disk/._a.qcow2", Content: noise(83, 4096)}}
	all := append([]tarFile{{Name: "disk/a.img", Content: content}}, others...)
	for name, layers := range map[string][][]byte{
		"one layer":         {tarOf(t, all...)},
		"a compressed one":  {gzipped(t, tarOf(t, all...))},
		"two":               {tarOf(t, all[0]), gzipped(t, tarOf(t, others...))},
		"two, an empty one": {tarOf(t, all[0]), gzipped(t, tarOf(t, others[0]))},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLying(t)
			l.Tags["1"] = l.Image(t, layers...)
			c := newClient(t, l.options())
			s := newStreaming(t, c, t.TempDir(), t.TempDir())
			disks := s.once(t, l.ref(t, "vm/a:1"), func(_ string, img *image.Image) {
				require.True(t, bytes.Equal(content, contentOf(t, img)))
			})
			require.Equal(t, []string{"a.img"}, namesOfDisks(disks))
			dir := t.TempDir()
			_, _, err := c.Pull(t.Context(), l.ref(t, "vm/a:1"), dir, PullOptions{})
			require.NoError(t, err)
			onlyFile(t, dir, "a.img", content)
			to := filepath.Join(t.TempDir(), "disk.img")
			_, _, err = c.Pull(t.Context(), l.ref(t, "vm/a:1"), to, PullOptions{})
			require.NoError(t, err)
		})
	}
}
