package registry

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/transport"
)

// rawImage is an image without an index that must be fetched as a whole, and its only disk.
func rawImage(t *testing.T, pack func(testing.TB, []byte) []byte) (l *lying, content []byte) {
	content = bytes.Join([][]byte{noise(60, 3<<20), make([]byte, 2<<20), noise(61, 1<<20)}, nil)
	l = newLying(t)
	l.Tags["1"] = l.Image(t, pack(t, tarOf(t, tarFile{Name: "disk/a.img", Content: content})))
	return l, content
}

func (s *streaming) fetchedDir(l *lying) string {
	name := keptName(l.Tags["1"].Digest.String()) + rawSuffix
	return filepath.Join(s.opt.CacheDir, fetchedDir, name)
}

// removeFetchedImages removes fetched images to make room.
func removeFetchedImages(t testing.TB, cacheDir string) {
	t.Helper()
	others := testtool.Must(Others(cacheDir)())(t)
	require.NotEmpty(t, others)
	for _, o := range others {
		require.NoError(t, o.Remove())
	}
}

// once serves all disks of an image, passes them to look, and stops serving.
func (s *streaming) once(t testing.TB, ref transport.Reference,
	look func(name string, img *image.Image)) (disks []StreamDisk) {
	t.Helper()
	st := testtool.Must(s.client.Stream(t.Context(), ref, s.opt))(t)
	for _, d := range st.Disks() {
		img := testtool.Must(st.Open(t.Context(), d.Name, image.Options{}))(t)
		look(d.Name, img)
		require.NoError(t, img.Close())
	}
	disks = st.Disks()
	require.NoError(t, st.Close())
	return disks
}

// builtImage is an image as other tools build it, with layers that are compressed by gzip.
func builtImage(t testing.TB) (l *lying, ref transport.Reference, layer []byte,
	want map[string][]byte) {
	raw := bytes.Join([][]byte{noise(91, 3<<20), make([]byte, 5<<20),
		bytes.Repeat([]byte("many words, "), 1<<18), noise(92, 2<<20+512)}, nil)
	base := noise(93, 4<<20)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "base.img"), base, 0o644))
	qemuImg(t, dir, "create", "-f", "qcow2", "-b", "base.img", "-F", "raw", "top.qcow2", "5M")
	top := filetest.Content(t, filepath.Join(dir, "top.qcow2"))
	packed := qcow2Of(t, raw, "-c")
	l = newLying(t)
	layer = gzipped(t, tarOf(t, tarFile{Name: "disk/odd.img", Content: raw},
		tarFile{Name: "disk/b.qcow2", Content: packed},
		tarFile{Name: "disk/top.qcow2", Content: top},
		tarFile{Name: "disk/linked.img", Kind: '1', Link: "disk/odd.img"},
		tarFile{Name: "etc/other", Content: noise(94, 1<<20)}))
	l.Tags["1"] = l.Image(t, gzipped(t, tarOf(t, tarFile{Name: "etc/passwd", Content: []byte("x")},
		tarFile{Name: "disk/base.img", Content: base},
		tarFile{Name: "disk/odd.img", Content: []byte("hidden")})), layer)
	grown := append(bytes.Clone(base), make([]byte, 1<<20)...)
	return l, l.ref(t, "vm/a:1"), layer, map[string][]byte{"odd.img": raw, "linked.img": raw,
		"b.raw": raw, "top.raw": grown}
}

// TestFetchedAgain serves disks of layers that must be fetched first. When they have been removed
// to make room, they are fetched again, and are the same.
func TestFetchedAgain(t *testing.T) {
	l, ref, layer, want := builtImage(t)
	dir, keep := t.TempDir(), t.TempDir()
	same := func(name string, img *image.Image) {
		require.False(t, img.Unverified())
		require.True(t, bytes.Equal(want[name], contentOf(t, img)), name)
	}
	s := newStreaming(t, newClient(t, l.options()), dir, keep)
	first := s.once(t, ref, same)
	require.Len(t, first, len(want))
	require.NotEmpty(t, first[0].Digests)
	l.SentSince()
	for _, keep := range []string{keep, t.TempDir()} { // the same daemon, and another one
		s = newStreaming(t, newClient(t, l.options()), dir, keep)
		require.Equal(t, first, s.once(t, ref, same))
		require.Less(t, l.SentSince(), int64(len(layer)), "it is in the cache")
		removeFetchedImages(t, dir)
		s = newStreaming(t, newClient(t, l.options()), dir, keep)
		require.Equal(t, first, s.once(t, ref, func(name string, img *image.Image) {
			same(name, img)
			if name == "odd.img" { // a hole of 5 MiB begins at 3 MiB
				e := testtool.Must(img.Extent(t.Context(), 5<<20, 1<<20))(t)
				require.False(t, e.Data)
			}
		}), "disks that were made of it are still of the same image")
		require.GreaterOrEqual(t, l.SentSince(), int64(len(layer)))
	}
}

// damages are what somebody can do to a fetched image. dir is its directory.
var damages = map[string]func(dir string) error{
	"gone":   os.RemoveAll,
	"empty":  func(dir string) error { return os.Remove(filepath.Join(dir, "a.img")) },
	"a FIFO": func(dir string) error { return fifo(filepath.Join(dir, "a.img")) },
	"a file": func(dir string) error {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
		return os.WriteFile(dir, nil, 0o600)
	},
	"a link": func(dir string) error {
		name := filepath.Join(dir, "a.img")
		if err := os.Rename(name, dir+".other"); err != nil {
			return err
		}
		return os.Symlink("/etc/passwd", name)
	},
}

func fifo(name string) error {
	if err := os.Remove(name); err != nil {
		return err
	}
	return unix.Mkfifo(name, 0o600)
}

// TestFetchedDamaged: an image whose files are gone is fetched again at the next start, beside a
// daemon that serves it, too. That one keeps what it has.
func TestFetchedDamaged(t *testing.T) {
	for what, damage := range damages {
		for _, served := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, served %t", what, served), func(t *testing.T) {
				t.Parallel()
				l, content := rawImage(t, gzipped)
				ref := l.ref(t, "vm/a:1")
				s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
				var first *image.Image
				if served {
					first = s.disk(t, s.open(t, ref), "a.img")
				} else {
					s.once(t, ref, func(string, *image.Image) {})
				}
				require.NoError(t, damage(s.fetchedDir(l)))
				other := newStreaming(t, s.client, s.opt.CacheDir, t.TempDir())
				right := func(_ string, img *image.Image) {
					require.True(t, bytes.Equal(content, contentOf(t, img)))
				}
				other.once(t, ref, right)
				if served {
					right("", first)
				}
				l.Server.Close()
				s.once(t, ref, right) // it was mended
				all := namesIn(t, filepath.Dir(s.fetchedDir(l)))
				if !served && what != "a link" {
					require.Len(t, all, 3, "the disks, their names, and the lock")
				}
			})
		}
	}
}

// TestFetchedInPart: if one of several disks is gone, all are fetched again: without it, others
// would have its number.
func TestFetchedInPart(t *testing.T) {
	l, ref, _, want := builtImage(t)
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	first := s.once(t, ref, func(string, *image.Image) {})
	for _, keep := range []string{s.opt.KeepDir, t.TempDir()} {
		require.NoError(t, os.Remove(filepath.Join(s.fetchedDir(l), "b.raw")))
		s = newStreaming(t, s.client, s.opt.CacheDir, keep)
		require.Equal(t, first, s.once(t, ref, func(name string, img *image.Image) {
			require.True(t, bytes.Equal(want[name], contentOf(t, img)), name)
		}))
	}
}

// TestFetchedKilled: what a process has left that was killed while it fetched is removed by the
// next one.
func TestFetchedKilled(t *testing.T) {
	l, content := rawImage(t, gzipped)
	s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
	left := strings.TrimSuffix(s.fetchedDir(l), rawSuffix) + ".partial01234567"
	require.NoError(t, os.MkdirAll(left, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(left, "a.img"), content[:1<<20], 0o600))
	s.once(t, l.ref(t, "vm/a:1"), func(_ string, img *image.Image) {
		require.True(t, bytes.Equal(content, contentOf(t, img)))
	})
	require.NoDirExists(t, left)
}

// TestFetchedConfined: a link in the cache leads nobody out of it.
func TestFetchedConfined(t *testing.T) {
	for name, end := range map[string]string{
		"all": "", "the lock": lockSuffix, "an image": rawSuffix, "a disk": rawSuffix + "/a.img",
	} {
		t.Run(name, func(t *testing.T) {
			l, content := rawImage(t, gzipped)
			ref := l.ref(t, "vm/a:1")
			s := newStreaming(t, newClient(t, l.options()), t.TempDir(), t.TempDir())
			link := strings.TrimSuffix(s.fetchedDir(l), rawSuffix) + end
			if end == "" {
				link = filepath.Dir(link)
			}
			require.NoError(t, os.MkdirAll(filepath.Dir(link), 0o700))
			outside := filepath.Join(t.TempDir(), "outside")
			require.NoError(t, os.Mkdir(outside, 0o700))
			foreign := filepath.Join(outside, "a.img")
			require.NoError(t, os.WriteFile(foreign, []byte("foreign"), 0o600))
			target := outside
			if end == lockSuffix || strings.HasSuffix(end, "/a.img") {
				target = foreign
			}
			require.NoError(t, os.Symlink(target, link))
			st, err := s.client.Stream(t.Context(), ref, s.opt)
			if end == "" || end == lockSuffix {
				require.ErrorContains(t, err, "escapes")
			} else {
				require.NoError(t, err)
				img := s.disk(t, st, "a.img")
				require.True(t, bytes.Equal(content, contentOf(t, img)))
				t.Cleanup(func() { require.NoError(t, st.Close()) })
			}
			_, _ = Others(s.opt.CacheDir)()
			onlyFile(t, outside, "a.img", []byte("foreign"))
		})
	}
}

// The arguments of a process of TestFetchedSharedByUsers: the image, and the cache's directory.
const (
	childRef   = "FETCHED_TEST_REF"
	childCache = "FETCHED_TEST_CACHE"
)

// TestFetchedChild is what such a process does.
func TestFetchedChild(t *testing.T) {
	if os.Getenv(childRef) == "" {
		t.Skip("only TestFetchedSharedByUsers needs it")
	}
	ref := parsed(t, os.Getenv(childRef))
	c := newClient(t, transport.Options{Insecure: []string{strings.Split(ref.String(), "/")[0]}})
	s := newStreaming(t, c, os.Getenv(childCache), filepath.Join(os.Getenv("HOME"), "keep"))
	s.once(t, ref, func(_ string, img *image.Image) {
		fmt.Println("read", digestOf(contentOf(t, img)))
	})
}

// TestFetchedSharedByUsers: what one user of a group has fetched, another one serves, removes
// and fetches again, under a mask that takes the group's right to write.
func TestFetchedSharedByUsers(t *testing.T) {
	testtool.Needs(t, "root (to start processes of other users)", os.Geteuid() == 0)
	const group = 5000
	l, content := rawImage(t, gzipped)
	home, err := os.MkdirTemp("", "users-") // t.TempDir is root's alone
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(home)) })
	require.NoError(t, os.Chmod(home, 0o755))
	program := filepath.Join(home, "child")
	require.NoError(t, os.WriteFile(program, filetest.Content(t, os.Args[0]), 0o755))
	s := &streaming{opt: StreamOptions{CacheDir: filepath.Join(home, "cache")}}
	require.NoError(t, os.Mkdir(s.opt.CacheDir, 0o700))
	require.NoError(t, os.Chown(s.opt.CacheDir, 0, group))
	require.NoError(t, os.Chmod(s.opt.CacheDir, 0o770))
	mask := syscall.Umask(0o022)
	defer syscall.Umask(mask)
	read := func(uid uint32) {
		tmp := filepath.Join(home, fmt.Sprint(uid))
		require.NoError(t, os.MkdirAll(tmp, 0o700))
		require.NoError(t, os.Chown(tmp, int(uid), int(uid)))
		cmd := exec.Command(program, "-test.run=TestFetchedChild$", "-test.v")
		cmd.Env = []string{"TMPDIR=" + tmp, "HOME=" + tmp, childCache + "=" + s.opt.CacheDir,
			childRef + "=" + l.ref(t, "vm/a:1").String()}
		cmd.Dir = tmp
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid,
			Groups: []uint32{group}}}
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "read "+digestOf(content))
	}
	read(4001)
	require.NoError(t, filepath.WalkDir(s.opt.CacheDir, func(path string, d fs.DirEntry,
		err error) error {
		require.NoError(t, err)
		info := testtool.Must(d.Info())(t)
		require.EqualValues(t, 0o060, info.Mode()&0o060, path)
		require.Equal(t, uint32(group), info.Sys().(*syscall.Stat_t).Gid, path)
		return nil
	}))
	dir := s.fetchedDir(l)
	old := time.Now().Add(-time.Hour)
	require.NoError(t, os.Chtimes(dir, old, old))
	read(4002)
	info := testtool.Must(os.Stat(dir))(t)
	require.Less(t, time.Since(info.ModTime()), time.Minute, "it notes that it is used")

	require.NoError(t, os.Remove(filepath.Join(dir, "a.img")))
	read(4002) // removes what is there, and fetches it
	l.Server.Close()
	read(4001)
}

// TestFetchedByTwo: of two processes that have fetched the disks at the same moment, the one whose
// disks have the name first keeps them there: it has begun to open them.
func TestFetchedByTwo(t *testing.T) {
	for range 300 {
		root := testtool.Must(osfile.OpenShared(t.TempDir(), 0o770))(t)
		require.NoError(t, root.Mkdir(fetchedDir))
		f := &fetchedImage{root: root, base: fetchedDir + "/image"}
		placed := make(chan error, 2)
		for _, suffix := range []string{".partial1", ".partial2"} {
			require.NoError(t, root.Mkdir(f.base+suffix))
			require.NoError(t, root.WriteFile(f.base+suffix+"/a.img", nil, 0o600))
			one := &fetchedImage{root: root, base: f.base}
			go func() { placed <- one.moveIntoPlace(f.base + suffix) }()
		}
		require.NoError(t, <-placed)
		require.NoError(t, f.find())
		first := testtool.Must(root.Stat(f.dir()))(t)
		require.NoError(t, <-placed)
		now := testtool.Must(root.Stat(f.dir()))(t)
		require.True(t, os.SameFile(first, now))
		require.Equal(t, []string{"image.raw"}, namesIn(t, filepath.Join(root.Name(), fetchedDir)))
		require.NoError(t, root.Close())
	}
}

// TestFetchedShortOfDescriptors: an image that cannot be looked for now is not one that was never
// fetched, whose files would be removed.
func TestFetchedShortOfDescriptors(t *testing.T) {
	root := testtool.Must(osfile.OpenShared(t.TempDir(), 0o770))(t)
	defer root.Close()
	f := &fetchedImage{root: root, base: fetchedDir + "/image"}
	require.NoError(t, root.Mkdir(fetchedDir))
	require.NoError(t, root.Mkdir(f.dir()))
	require.NoError(t, root.WriteFile(f.dir()+"/a.img", nil, 0o600))
	var limit unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Max: limit.Max}))
	err := f.find()
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	require.ErrorIs(t, err, unix.EMFILE)
	require.NoError(t, f.find())
}
