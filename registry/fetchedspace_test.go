package registry

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"os"
	"path"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/cache"
)

// TestFetchedCounts: fetched images count, and are removed only when nobody serves them.
func TestFetchedCounts(t *testing.T) {
	l := newLying(t)
	content := noise(80, 3<<20)
	l.Tags["1"] = l.Image(t, gzipped(t, tarOf(t, tarFile{Name: "disk/a.img", Content: content})))
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	others := Others(s.opt.CacheDir)
	require.Empty(t, testtool.Must(others())(t))

	st := testtool.Must(s.client.Stream(t.Context(), l.ref(t, "vm/a:1"), s.opt))(t)
	all := testtool.Must(others())(t)
	require.Len(t, all, 1)
	require.InDelta(t, 2.25*(1<<20), all[0].Bytes, 1<<20, "a quarter of it is holes")
	for _, o := range all {
		require.False(t, o.Used.IsZero())
		require.ErrorIs(t, o.Remove(), cache.ErrInUse)
	}

	// The remains of a process that was killed while it fetched count, too, and so does what
	// earlier versions have kept.
	killed := filepath.Join(s.opt.CacheDir, fetchedDir, "sha256-00")
	for _, dir := range []string{killed, killed + ".partial01234567", killed + ".seek"} {
		require.NoError(t, os.Mkdir(dir, 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "x"), content, 0o600))
	}
	require.NoError(t, os.WriteFile(killed+".digests", content, 0o600))
	require.NoError(t, os.WriteFile(killed+".lock", nil, 0o600))
	all = testtool.Must(others())(t)
	require.Len(t, all, 2)
	require.GreaterOrEqual(t, all[0].Bytes, int64(4*len(content)))

	require.NoError(t, st.Close())
	for _, o := range all {
		require.NoError(t, o.Remove())
	}
	require.Empty(t, testtool.Must(others())(t))
	require.Equal(t, []string{killed + ".lock"}, testtool.Must(filepath.Glob(killed+"*"))(t))

	// It is fetched again when it is needed.
	img := s.disk(t, s.open(t, l.ref(t, "vm/a:1")), "a.img")
	require.True(t, bytes.Equal(content, contentOf(t, img)))
}

// TestFetchedRemovedAtOnce: the disks of an image lose their name together. Of several disks that
// go one by one, a kill would leave some, with the numbers of others.
func TestFetchedRemovedAtOnce(t *testing.T) {
	root := testtool.Must(osfile.OpenShared(t.TempDir(), 0o770))(t)
	defer root.Close()
	base := fetchedDir + "/image"
	require.NoError(t, root.MkdirAll(base+rawSuffix))
	for _, disk := range []string{"a.img", "b.img"} {
		require.NoError(t, root.WriteFile(path.Join(base+rawSuffix, disk), nil, 0o600))
	}
	events := os.NewFile(uintptr(testtool.Must(unix.InotifyInit1(unix.IN_CLOEXEC))(t)), "inotify")
	defer events.Close()
	_ = testtool.Must(unix.InotifyAddWatch(int(events.Fd()),
		filepath.Join(root.Name(), base+rawSuffix), unix.IN_MOVE_SELF|unix.IN_DELETE))(t)
	require.NoError(t, removeAll(root, base))
	first := make([]byte, 4096)
	_ = testtool.Must(events.Read(first))(t)
	require.EqualValues(t, unix.IN_MOVE_SELF, binary.NativeEndian.Uint32(first[4:]))
	require.Empty(t, namesIn(t, filepath.Join(root.Name(), fetchedDir)))
	require.NoError(t, removeAll(root, base), "nothing is there")
}

// TestFetchedRemovedMeanwhile removes the image between two starts that share a cache.
func TestFetchedRemovedMeanwhile(t *testing.T) {
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
		for _, o := range testtool.Must(Others(s.opt.CacheDir)())(t) {
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
