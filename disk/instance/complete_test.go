package instance

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/disktest/sourcetest"
	"kubevirt.io/disk/disk/image"
)

// TestACompleteDiskNeedsNoImage opens a complete disk again without its image, by its name. A disk
// of another image, or an incomplete one, does not count.
func TestACompleteDiskNeedsNoImage(t *testing.T) {
	content := filetest.Sample(3<<20, 1)
	const digest, name = "sha256:0123", "registry.example.com/vm/a:1"
	for what, opt := range map[string]Options{
		"ephemeral":  {WorkDir: t.TempDir(), Name: name},
		"persistent": {PersistentDir: t.TempDir(), Name: name},
	} {
		t.Run(what, func(t *testing.T) {
			require.False(t, IsComplete(opt, []string{digest}), "there is no disk yet")
			img, err := image.OpenSource(t.Context(), "a.raw",
				func(context.Context, string) (image.Source, error) {
					return sourcetest.New(content, sourcetest.Options{Digest: digest}), nil
				}, image.Options{})
			require.NoError(t, err)
			incomplete := opt
			incomplete.Mode = CopyOnWrite
			inst, err := Open(t.Context(), img, incomplete)
			require.NoError(t, err)
			require.NoError(t, inst.Close())
			require.False(t, IsComplete(opt, []string{digest}), "the disk is not complete")

			img, err = image.OpenSource(t.Context(), "a.raw",
				func(context.Context, string) (image.Source, error) {
					return sourcetest.New(content, sourcetest.Options{Digest: digest}), nil
				}, image.Options{})
			require.NoError(t, err)
			inst, err = Open(t.Context(), img, opt)
			require.NoError(t, err)
			filetest.Write(t, inst, filetest.Block('w', 512), 512)
			inst.copies.done.Wait()
			require.NoError(t, inst.Close())

			require.True(t, IsComplete(opt, []string{digest}))
			require.False(t, IsComplete(opt, []string{"sha256:4567"}), "the disk has another image")
			require.False(t, IsComplete(opt, []string{digest, digest}),
				"the image had no backing file")
			require.False(t, IsComplete(opt, nil))
			if opt.PersistentDir == "" {
				other := opt
				other.Name = "registry.example.com/vm/b:1"
				require.False(t, IsComplete(other, []string{digest}))
				Sweep(t.Context(), opt.WorkDir, t.TempDir(), []string{name}, opt.Owner,
					LeftoversRemove, zap.NewNop())
			}
			again, err := Open(t.Context(), nil, opt)
			require.NoError(t, err)
			require.True(t, again.kept)
			require.Equal(t, inst.Identity, again.Identity)
			copy(content[512:], filetest.Block('w', 512))
			got := filetest.ReadAll(t, again, again.Size())
			require.Equal(t, -1, filetest.FirstDifference(content, got))
			require.NoError(t, again.Close())
			if opt.PersistentDir == "" {
				Sweep(t.Context(), opt.WorkDir, t.TempDir(), nil, opt.Owner, LeftoversRemove,
					zap.NewNop())
				_, err := os.Stat(filepath.Join(opt.WorkDir, escapeName(name)))
				require.ErrorIs(t, err, os.ErrNotExist)
			}
		})
	}
}
