package transport

import (
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

func mustURL(t *testing.T, text string) *url.URL {
	return testtool.Must(url.Parse(text))(t)
}

// TestUnfinished: the notes belong to one push at a time, and are forgotten after some days.
func TestUnfinished(t *testing.T) {
	dir := t.TempDir()
	a := rememberUpload(dir, "host/vm", "sha256:1")
	require.NotNil(t, a)
	require.Nil(t, a.location())
	require.Nil(t, rememberUpload(dir, "host/vm", "sha256:1"), "another process sends it")
	for _, repository := range []string{"host/other", "other/vm"} {
		other := rememberUpload(dir, repository, "sha256:1")
		require.NotNil(t, other)
		other.close()
	}
	at := mustURL(t, "https://host/v2/vm/blobs/uploads/1?_state=abc&x=1")
	a.remember(mustURL(t, at.String()+"and-much-longer"))
	a.remember(at)
	a.close()
	a = rememberUpload(dir, "host/vm", "sha256:1")
	require.Equal(t, at, a.location())
	a.close()
	names := testtool.Must(os.ReadDir(dir))(t)
	require.Len(t, names, 1)
	forgetOld(dir, time.Now().Add(time.Hour))
	names = testtool.Must(os.ReadDir(dir))(t)
	require.Empty(t, names)

	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	none := rememberUpload(filepath.Join(file, "below"), "host/vm", "sha256:1")
	require.Nil(t, none)
	none.remember(at) // of nothing
	none.forget()
	none.close()
}

// TestNextPiece: pieces take some seconds each.
func TestNextPiece(t *testing.T) {
	for _, c := range []struct {
		size int64
		took time.Duration
		want int64
	}{
		{firstPiece, 0, 2 * firstPiece},
		{largestPiece, 0, largestPiece},
		{2 * firstPiece, 2 * time.Second, 2 * firstPiece},
		{2 * firstPiece, 5 * time.Second, firstPiece},
		{firstPiece, time.Minute, firstPiece},
	} {
		require.Equal(t, c.want, nextPiece(c.size, c.took))
	}
}
