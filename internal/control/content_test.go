package control

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

// fakeContent is a snapshot of which each second block is stored, and each third one has changed.
// Its bytes are the numbers of the blocks.
type fakeContent struct {
	disk.Disk
	away int // so many reads come too early
	gone bool
}

const fakeBlock, fakeBlocks = 4096, 20000

func (f *fakeContent) Size() int64  { return fakeBlock * fakeBlocks }
func (f *fakeContent) Close() error { return nil }

func (f *fakeContent) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	if f.away > 0 {
		f.away--
		return 0, disk.ErrNotNow
	}
	for i := range p {
		p[i] = byte((off + int64(i)) / fakeBlock)
	}
	return len(p), nil
}

func (f *fakeContent) Extent(ctx context.Context, off, length int64) (disk.Extent, error) {
	return disk.Extent{Length: min(length, fakeBlock), Data: off/fakeBlock%2 == 1}, nil
}

func (f *fakeContent) Since() []disk.Snapshot {
	return []disk.Snapshot{{Name: "monday", ID: "monday"}}
}

func (f *fakeContent) Changed(_ context.Context, since string, off, length int64) (bool,
	int64, error,
) {
	if since != "monday" {
		return false, 0, errors.New("there is no " + since)
	}
	return off/fakeBlock%3 == 0, min(length, fakeBlock), nil
}

func (f *fakeTarget) OpenContent(disk, snapshot string) (*Content, error) {
	if disk == "none" {
		return nil, errors.New("there is no disk none")
	}
	identity := snapshot
	if f.content.gone {
		identity = "another"
	}
	return &Content{Disk: f.content, Described: status.Content{Disk: disk, Identity: identity,
		Size: f.content.Size(), Image: []string{"sha256:0"}}}, nil
}

// TestReader reads a snapshot through a socket, with more ranges than a page has.
func TestReader(t *testing.T) {
	content := &fakeContent{away: 1}
	luns := &fakeTarget{fakeLUNs: newFakeLUNs(), content: content}
	s := New(nil, zap.NewNop())
	s.Begin(luns, luns, luns)
	path := filepath.Join(t.TempDir(), "control.sock")
	require.NoError(t, s.Listen(path))
	defer s.Close()
	c := Client{Socket: path}
	explain := func(err error) error { return fmt.Errorf("explained: %w", err) }
	_, err := c.Reader(t.Context(), "none", "s", explain)
	require.EqualError(t, err, "explained: there is no disk none")
	r := testtool.Must(c.Reader(t.Context(), "vm", "s", explain))(t)
	defer r.Close()
	require.Equal(t, status.Content{Disk: "vm", Identity: "s", Size: content.Size(),
		Image: []string{"sha256:0"}}, r.Content)

	want, got := make([]byte, 3*status.MaxContentBytes/2), make([]byte, 3*status.MaxContentBytes/2)
	content.away = 0
	_, _ = content.ReadAt(t.Context(), want, 512)
	content.away = 1 // it is asked again
	require.NoError(t, testtool.Err(r.ReadAt(t.Context(), got, 512)))
	require.True(t, bytes.Equal(want, got))

	for block := int64(0); block < fakeBlocks-3; block++ {
		e := testtool.Must(r.Extent(t.Context(), block*fakeBlock, fakeBlock))(t)
		require.Equal(t, disk.Extent{Data: block%2 == 1, Length: fakeBlock}, e)
		in, n, err := disk.Changed(t.Context(), r, "monday", block*fakeBlock+512, 2*fakeBlock)
		require.NoError(t, err)
		if block%3 == 0 {
			require.Equal(t, fmt.Sprint(true, fakeBlock-512), fmt.Sprint(in, n))
		} else {
			require.False(t, in)
			require.LessOrEqual(t, n, int64(3-block%3)*fakeBlock-512)
		}
	}
	_, _, err = disk.Changed(t.Context(), r, "tuesday", 0, 512)
	require.ErrorContains(t, err, "there is no tuesday")
	depth, n, err := r.Depth(t.Context(), 512, content.Size()-512)
	require.NoError(t, err, "what an image has not is the disk's own")
	require.Equal(t, fmt.Sprint(disk.DepthOwn, content.Size()-512), fmt.Sprint(depth, n))

	for what, bad := range map[string]string{
		"&offset=0&length=0": "no bytes", "&offset=-1&length=512": "no bytes",
		"&offset=81919999&length=512": "no bytes", "&offset=0&length=9999999": "no bytes",
	} {
		var refused *RefusedError
		err := askBy(t.Context(), r.by, "GET", status.PathContentBytes+"?disk=vm"+what, nil, nil)
		require.ErrorAs(t, err, &refused, what)
		require.Contains(t, refused.Reason, bad)
	}
	_, err = r.ReadAt(disk.AtHand, got[:512], 0)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, disk.ErrNotNow)
	content.gone = true
	_, err = r.ReadAt(t.Context(), got[:512], 0)
	require.ErrorContains(t, err, "is another one than before")
}
