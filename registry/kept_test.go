package registry

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestKeptFollowsNoLink: what is kept beside a disk lies where others may be able to write. A link
// in its place, or in that of a file in it, leads nowhere.
func TestKeptFollowsNoLink(t *testing.T) {
	dir, foreign := t.TempDir(), t.TempDir()
	link := filepath.Join(dir, "disk.img.source")
	require.NoError(t, os.Symlink(foreign, link))
	_, err := keep(nil, link)
	require.Error(t, err)

	require.NoError(t, os.Remove(link))
	k, err := keep(nil, link)
	require.NoError(t, err)
	defer k.dir.Close()
	file := filepath.Join(foreign, "file")
	require.NoError(t, os.WriteFile(file, []byte("keep"), 0o600))
	require.NoError(t, os.Symlink(file, filepath.Join(link, "name.partial")))
	require.NoError(t, k.write("name", []byte("new")))
	text, err := k.read("name", 10)
	require.NoError(t, err)
	require.Equal(t, "new", string(text))
	require.NoError(t, os.Rename(link, link+".away"))
	require.NoError(t, os.Symlink(foreign, link))
	require.Error(t, k.write("other", []byte("new")))
	text = bytesOf(t, file)
	require.Equal(t, "keep", string(text))
	require.Len(t, namesIn(t, foreign), 1)
}

// TestRecordOfEarlierVersion: what a tag named at first is known of a record without a checksum,
// too. A damaged record is no record.
func TestRecordOfEarlierVersion(t *testing.T) {
	k, err := keep(nil, filepath.Join(t.TempDir(), "kept"))
	require.NoError(t, err)
	defer k.dir.Close()
	ref := parsed(t, "registry.example.com/vm/a:1")
	want := record{Reference: ref.String(), Digest: digestOf([]byte("manifest"))}
	text, err := json.Marshal(want)
	require.NoError(t, err)
	name := recordName(ref.String())
	require.NoError(t, k.write(name, text))
	got, err := k.loadRecord(ref)
	require.NoError(t, err)
	require.Equal(t, want, got)

	require.NoError(t, k.saveRecord(want))
	got, err = k.loadRecord(ref)
	require.NoError(t, err)
	require.Equal(t, want, got)
	text, err = k.read(name, maxRecord)
	require.NoError(t, err)
	require.NoError(t, k.write(name, flipped(text, len(text)/2)))
	_, err = k.loadRecord(ref)
	require.ErrorContains(t, err, "cannot be read")
}
