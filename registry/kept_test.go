package registry

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestKeptFollowsNoLink: what is kept beside a disk lies where others may be able to write. A link
// in its place, or in that of a file in it, leads nowhere.
func TestKeptFollowsNoLink(t *testing.T) {
	dir, foreign := t.TempDir(), t.TempDir()
	link := filepath.Join(dir, "disk.img.source")
	require.NoError(t, os.Symlink(foreign, link))
	require.Error(t, testtool.Err(newKeptSource(nil, link)))

	require.NoError(t, os.Remove(link))
	k := testtool.Must(newKeptSource(nil, link))(t)
	defer k.dir.Close()
	file := filepath.Join(foreign, "file")
	require.NoError(t, os.WriteFile(file, []byte("keep"), 0o600))
	require.NoError(t, os.Symlink(file, filepath.Join(link, "name.partial")))
	require.NoError(t, k.write("name", []byte("new")))
	text := testtool.Must(k.read("name", 10))(t)
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
	k := testtool.Must(newKeptSource(nil, filepath.Join(t.TempDir(), "kept")))(t)
	defer k.dir.Close()
	ref := parsed(t, "registry.example.com/vm/a:1")
	want := record{Reference: ref.String(), Digest: digestOf([]byte("manifest"))}
	text := testtool.Must(json.Marshal(want))(t)
	name := recordName(ref.String())
	require.NoError(t, k.write(name, text))
	got := testtool.Must(k.loadRecord(ref))(t)
	require.Equal(t, want, got)

	require.NoError(t, k.saveRecord(want))
	got = testtool.Must(k.loadRecord(ref))(t)
	require.Equal(t, want, got)
	text = testtool.Must(k.read(name, maxRecord))(t)
	require.NoError(t, k.write(name, flipped(text, len(text)/2)))
	require.ErrorContains(t, testtool.Err(k.loadRecord(ref)), "cannot be read")
}
