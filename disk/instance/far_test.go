package instance

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/disktest/sourcetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
)

// openFar opens a raw image that lies far away.
func openFar(t *testing.T, content []byte, digest string) (*image.Image, *sourcetest.Far) {
	t.Helper()
	source := sourcetest.New(content, sourcetest.Options{Digest: digest})
	open := func(context.Context, string) (image.Source, error) { return source, nil }
	img := testtool.Must(image.OpenSource(t.Context(), "a.raw", open, image.Options{}))(t)
	t.Cleanup(func() { img.Close() })
	return img, source
}

// startFar makes a disk of a raw image that lies far away.
func startFar(t *testing.T, content []byte, digest string, opt Options) (*Instance,
	*sourcetest.Far) {
	t.Helper()
	img, source := openFar(t, content, digest)
	inst := testtool.Must(Open(t.Context(), img, opt))(t)
	t.Cleanup(func() { inst.Close() })
	return inst, source
}

// TestFarImageIsKnownByItsDigest starts disks again, over an image with the same digest and with
// another one.
func TestFarImageIsKnownByItsDigest(t *testing.T) {
	content := filetest.Sample(8<<20, 1)
	for _, mode := range []CopyMode{CopyOnWrite, CopyOnRead, CopyClone} {
		for _, persistent := range []bool{false, true} {
			opt := Options{WorkDir: t.TempDir(), Mode: mode}
			if persistent {
				opt = Options{PersistentDir: t.TempDir(), Mode: mode}
			}
			first, source := startFar(t, content, "sha256:1", opt)
			require.True(t, disk.Far(first.Disk))
			first.copies.done.Wait()
			stats := source.Stats()
			if mode == CopyClone {
				require.Equal(t, int64(512<<10+512+2*disk.LongBlock+len(content)), stats.Bytes,
					"opened, asked for its blocks, and copied once")
				require.Equal(t, 1, stats.Closed)
				settle(t, first)
			} else {
				require.Equal(t, 3, stats.Reads, "opened, asked for its blocks, and not hashed")
			}
			want := bytes.Clone(content)
			copy(want[5000:], "written by the guest")
			filetest.Write(t, first, want[4096:8192], 4096)
			require.NoError(t, first.Close())
			require.Equal(t, "sha256:1", stateOf(t, first).Chain[0].Digest)

			again, source := startFar(t, content, "sha256:1", opt)
			require.True(t, again.kept)
			require.Equal(t, first.Identity, again.Identity)
			require.Equal(t, 2, source.Stats().Reads, "nothing is hashed")
			require.Equal(t, -1,
				filetest.FirstDifference(want, filetest.ReadAll(t, again, again.Size())))
			require.NoError(t, again.Close())

			other, _ := openFar(t, content, "sha256:2")
			inst, err := Open(t.Context(), other, opt)
			if persistent {
				require.ErrorAs(t, err, new(*PersistentError))
				require.ErrorContains(t, err, `"a.raw" is sha256:2 now, and was sha256:1`)
				continue
			}
			require.NoError(t, err)
			require.False(t, inst.kept)
			require.Equal(t, -1,
				filetest.FirstDifference(content, filetest.ReadAll(t, inst, inst.Size())))
			require.NoError(t, inst.Close())
		}
	}
}

// TestStateOfAFileIsNoStateOfADigest reads the state that an earlier version has saved.
func TestStateOfAFileIsNoStateOfADigest(t *testing.T) {
	content := filetest.Sample(1<<20, 1)
	path := filetest.Put(t, t.TempDir(), "a.raw", content, 0)
	opt := Options{WorkDir: t.TempDir()}
	first, _ := start(t, path, opt)
	settle(t, first)
	require.NoError(t, first.Close())
	text := filetest.Content(t, first.dir.state())
	require.NotContains(t, string(text), "digest")
	require.Regexp(t, `"xxh3":"[0-9a-f]{16}","dev":\d+,"ino":\d+,"mtime":\d+,"ctime":\d+}`,
		string(text))

	// The same content, from far away: it is read once, and known by its digest from then on.
	again, source := startFar(t, content, "sha256:1", opt)
	require.True(t, again.kept)
	require.Greater(t, source.Stats().Bytes, int64(len(content)))
	require.NoError(t, again.Close())
	require.Equal(t, "sha256:1", stateOf(t, first).Chain[0].Digest)
	third, source := startFar(t, content, "sha256:1", opt)
	require.True(t, third.kept)
	require.Less(t, source.Stats().Bytes, int64(len(content)))
	require.NoError(t, third.Close())
}

// TestFarImageWithoutADigest is hashed beside the guest, even after its source was out of reach.
func TestFarImageWithoutADigest(t *testing.T) {
	content := filetest.Sample(5<<20, 1)
	opt := Options{WorkDir: t.TempDir(), Mode: CopyOnWrite, HeadTimeout: time.Millisecond}
	img, source := openFar(t, content, "")
	source.Cut()
	inst := testtool.Must(Open(t.Context(), img, opt))(t)
	testtool.Eventually(t, func() bool { return source.Waiting() > 0 }, "a read waits")
	source.Mend()
	inst.copies.done.Wait()
	require.NoError(t, inst.Close())
	s := stateOf(t, inst)
	near := openGood(t, filetest.Put(t, t.TempDir(), "a.raw", content, 0))
	want := testtool.Must(near.Fingerprint(t.Context(), near.Hashes(nil), NewWorkers().hashing))(t)
	require.Equal(t, want[0].Hash, s.Chain[0].Hash)
}

// TestStopWhileAFarImageIsOutOfReach closes a disk that waits for its image.
func TestStopWhileAFarImageIsOutOfReach(t *testing.T) {
	content := filetest.Sample(8<<20, 1)
	opt := Options{PersistentDir: t.TempDir(), HeadTimeout: time.Millisecond}
	for _, digest := range []string{"sha256:1", ""} {
		img, source := openFar(t, content, digest)
		source.Cut()
		inst := testtool.Must(Open(t.Context(), img, opt))(t)
		testtool.Eventually(t, func() bool { return source.Waiting() > 0 }, "a read waits")
		require.NoError(t, inst.Close())
		require.Zero(t, source.Waiting())
		require.Equal(t, 1, source.Stats().Closed)
		s := stateOf(t, inst)
		require.False(t, s.Complete)
		require.Empty(t, s.Chain[0].Hash)
		opt.PersistentDir = t.TempDir()
	}
}

func TestFarImageIsNotServedInPlace(t *testing.T) {
	img, _ := openFar(t, filetest.Sample(1<<20, 1), "sha256:1")
	_, err := Open(t.Context(), img,
		Options{Mode: CopyNone, WorkDir: t.TempDir(), Log: zap.NewNop()})
	require.ErrorAs(t, err, new(*UnsupportedModeError))
	require.ErrorContains(t, err, "not a file of this machine")
}
