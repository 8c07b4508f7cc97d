package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

// namedPlace is a place for "serve IMAGE...": its environment only says where the cache is, and
// picks free ports.
func namedPlace(t *testing.T, images ...string) (l place, paths []string) {
	t.Helper()
	l = newPlace(t, images...)
	l.env = []string{"XDG_CACHE_HOME=" + filepath.Join(l.dir, "cache"), "PORT=0",
		"METRICS_LISTEN=127.0.0.1:0"}
	for _, name := range images {
		paths = append(paths, filepath.Join(l.dir, "disk", name))
	}
	return l, paths
}

func serveNamed(t *testing.T, env []string, args ...string) *process {
	t.Helper()
	p := launch(t, binary(t), env, append([]string{"serve"}, args...)...)
	p.until("it says how to log in",
		func() bool { return strings.Contains(p.stdout.String(), "Ctrl-C ends it.") })
	return p
}

// TestServeNamedImages: the LUNs are in the order of the arguments, and nothing stays.
func TestServeNamedImages(t *testing.T) {
	l, paths := namedPlace(t, "a.raw", "b.raw", "c.raw")
	_, before := os.Lstat("/tmp/healthy") // of another daemon on this machine
	p := serveNamed(t, l.env, paths[2], paths[0])
	for _, part := range []string{
		`LUN 1  "c.raw"  12 KiB`, `LUN 2  "a.raw"  4 KiB`, "without a password",
		"iscsi-ls -s iscsi://127.0.0.1:", "iscsiadm -m discovery",
		"/iqn.2017-01.io.kubevirt:wrapper/1", "The images are not changed",
		"which is removed at the end; --work-dir=DIR keeps them", "/status",
	} {
		require.Contains(t, p.stdout.String(), part)
	}
	_, status := p.page("/status")
	require.Contains(t, status, `"copy_mode": "copy-on-write"`)
	require.NotContains(t, status, "b.raw")
	left, err := filepath.Glob(filepath.Join(l.dir, "cache", "kubevirt-disk", temporaryPrefix+"*"))
	require.NoError(t, err)
	require.Len(t, left, 1)
	work := left[0]
	require.FileExists(t, filepath.Join(work, "a.raw", "disk.raw"))
	require.Contains(t, p.stdout.String(), work)
	done, _ := works(t, l.env, "handover", "--lun=1", "--to="+second,
		"--control-socket="+work+"/control.sock")
	require.Contains(t, done, "LUN 1 is open to")
	if before != nil {
		require.NoFileExists(t, "/tmp/healthy")
	}
	require.Equal(t, exitDone, p.terminate())
	require.NoDirExists(t, left[0])
	require.Len(t, testtool.Must(os.ReadDir(filepath.Join(l.dir, "disk")))(t), 3)
}

// TestHintsBehindNAT: a discovery names no address then, and iscsi-ls lists nothing.
func TestHintsBehindNAT(t *testing.T) {
	l, paths := namedPlace(t, "a.raw")
	p := serveNamed(t, append(l.env, "BEHIND_NAT=true"), paths...)
	said := func() string { return p.stdout.String() + p.stderr.String() }
	testtool.Eventually(t, func() bool { // the log may come after the guide
		return strings.Contains(said(), "qemu-img info iscsi://127.0.0.1:")
	})
	require.NotContains(t, said(), "iscsi-ls")
	require.Equal(t, exitDone, p.terminate())
}

// TestServeNamedImagesTwice: two daemons do not get in each other's way, and the next start removes
// the files of a killed one.
func TestServeNamedImagesTwice(t *testing.T) {
	l, paths := namedPlace(t, "a.raw")
	first := serveNamed(t, l.env, paths...)
	killed := serveNamed(t, l.env, paths...)
	cache := filepath.Join(l.dir, "cache", "kubevirt-disk")
	count := func() int {
		entries := testtool.Must(os.ReadDir(cache))(t)
		return len(entries)
	}
	require.Equal(t, 2, count())
	killed.kill()
	require.Equal(t, 2, count())
	next := serveNamed(t, l.env, paths...)
	require.Equal(t, 2, count(), "of the first and the next")
	require.Equal(t, exitDone, first.terminate())
	require.Equal(t, exitDone, next.terminate())
	require.Zero(t, count())
}

// TestTemporaryDirectoryWithoutAWritableCache, as where the home directory is mounted read-only.
func TestTemporaryDirectoryWithoutAWritableCache(t *testing.T) {
	cache, tmp := t.TempDir(), t.TempDir()
	// Nobody, not even root, makes a directory in this one.
	require.NoError(t, os.Symlink("/proc/self", filepath.Join(cache, "kubevirt-disk")))
	t.Setenv("XDG_CACHE_HOME", cache)
	t.Setenv("TMPDIR", tmp)
	own := testtool.Must(temporaryDir())(t)
	require.Equal(t, tmp, filepath.Dir(own.Path))
	require.NoError(t, own.Remove())
	require.NoDirExists(t, own.Path)
}

// TestServeNamedImagesWithoutACache, as in a container: it uses the system's temporary directory.
func TestServeNamedImagesWithoutACache(t *testing.T) {
	l, paths := namedPlace(t, "a.raw")
	p := serveNamed(t, append(l.env, "XDG_CACHE_HOME=", "TMPDIR="+l.dir), paths...)
	require.Contains(t, p.stdout.String(), `"`+l.dir+"/kubevirt-disk-")
	require.Equal(t, exitDone, p.terminate())
	require.Empty(t, testtool.Must(filepath.Glob(l.dir+"/kubevirt-disk-*"))(t))
}

// TestServeNamedImagesSettings: settings win over the defaults for a person at a terminal.
func TestServeNamedImagesSettings(t *testing.T) {
	l, paths := namedPlace(t, "a.raw")
	work, volume, ready := filepath.Join(l.dir, "work"), filepath.Join(l.dir, "volume"),
		filepath.Join(l.dir, "ready")
	require.NoError(t, os.Mkdir(volume, 0o755))
	for _, c := range []struct {
		flags []string
		said  string
		mode  string
		kept  string
	}{
		{[]string{"--work-dir=" + work, "--ready-file=" + ready},
			"Writes stay in \"" + work + "\", for the next start", "clone",
			work + "/a.raw/disk.raw"},
		{[]string{"--persistent-dir=" + volume}, "Writes stay in \"" + volume + "\".",
			"clone", volume + "/disk.img"},
		{[]string{"--copy-mode=none"}, "writes go to the images themselves", "none",
			paths[0]},
		{[]string{"--copy-mode=copy-on-read"}, "removed at the end", "copy-on-read", paths[0]},
	} {
		p := serveNamed(t, append(l.env, "CHAP_USERNAME=vm", "CHAP_PASSWORD="+testSecret,
			"LISTEN=127.0.0.1"), append(c.flags, paths...)...)
		require.Contains(t, p.stdout.String(), c.said)
		require.Contains(t, p.stdout.String(), "iscsi://vm@127.0.0.1:")
		require.Contains(t, p.stdout.String(), "\nPage: http://127.0.0.1:")
		require.NotContains(t, p.stdout.String(), testSecret)
		_, status := p.page("/status")
		require.Contains(t, status, `"copy_mode": "`+c.mode+`"`)
		require.Equal(t, exitDone, p.terminate())
		require.FileExists(t, c.kept)
		// A later daemon of an image directory does not remove the disks of named images.
		if c.flags[0] == "--work-dir="+work {
			other := newPlace(t, "z.raw")
			q := other.serve(t, "WORK_DIR="+work)
			require.Equal(t, exitDone, q.terminate())
			require.FileExists(t, c.kept)
		}
	}
}

// TestServeNamedImagesThatWillNotDo lists all that is wrong at once.
func TestServeNamedImagesThatWillNotDo(t *testing.T) {
	l, paths := namedPlace(t, "a.raw")
	notes, dir := filepath.Join(l.dir, "notes.txt"), filepath.Join(l.dir, "disk")
	require.NoError(t, os.WriteFile(notes, []byte("buy milk\n"), 0o644))
	empty := filepath.Join(l.dir, "empty.raw")
	require.NoError(t, os.WriteFile(empty, nil, 0o644))
	again := filepath.Join(l.dir, "a.raw")
	require.NoError(t, os.WriteFile(again, bytes.Repeat([]byte("data"), 1024), 0o644))
	for name, c := range map[string]struct {
		args   []string
		status int
		want   []string
	}{
		"several": {[]string{notes, paths[0], empty}, exitFailed,
			[]string{"2 images cannot be served:",
				"is a text file, not a disk image; name a disk image instead", "empty.raw",
				"is empty"}},
		"nothing of that name": {[]string{l.dir + "/missing.raw", "x.raw"}, exitUsage,
			[]string{"2 errors",
				`/missing.raw" does not exist: name images that are there, or their directory with --disk-dir`, `"x.raw" does not exist`,
				"or one in a registry or at an address with --image"}},
		"a file as an image": {[]string{"--image=" + paths[0]}, exitUsage,
			[]string{"is a file, and no reference: name a disk without this setting"}},
		"two of one name": {[]string{paths[0], again}, exitFailed,
			[]string{`have the same name`, again}},
		"one twice": {[]string{paths[0], paths[0]}, exitFailed,
			[]string{"is named twice: leave one out"}},
		"a directory": {[]string{dir}, exitUsage,
			[]string{`"` + dir + `" is a directory: --disk-dir=` + dir +
				" serves the images in it"}},
		"standard input": {[]string{"-"}, exitUsage,
			[]string{"cannot be read from standard input"}},
		"a directory too": {[]string{"--disk-dir=" + dir, paths[0]}, exitUsage,
			[]string{"--disk-dir: cannot be combined with images as arguments"}},
		"a credential": {[]string{"CHAP_PASSWORD=geheim"}, exitUsage,
			[]string{"CHAP credentials come from the environment"}},
		"nothing": {[]string{""}, exitUsage, []string{"an argument is empty"}},
		"disks beside images": {[]string{"--work-dir=" + dir, paths[0]}, exitUsage,
			[]string{"is also the directory of the images"}},
		"volume beside images": {[]string{"--persistent-dir=" + dir, paths[0]}, exitUsage,
			[]string{"is also the directory of the images"}},
	} {
		status, stdout, stderr := run(t, append(l.env, "LOG_FORMAT=console"),
			append([]string{"serve"}, c.args...)...)
		require.Equal(t, c.status, status, "%s: %s", name, stderr)
		require.Empty(t, stdout, name)
		for _, part := range c.want {
			require.Contains(t, stderr, part, name)
		}
		require.NotContains(t, stderr, "geheim")
	}
	left := testtool.Must(filepath.Glob(filepath.Join(l.dir, "cache", "kubevirt-disk", "*")))(t)
	require.Empty(t, left)
}

// TestTooLittleSpace: if a copy of the image does not fit, the message names a copy mode that needs
// less space.
func TestTooLittleSpace(t *testing.T) {
	testtool.Needs(t, "root (to mount a small file system)", os.Geteuid() == 0)
	l := newPlace(t, "a.raw")
	require.NoError(t, os.WriteFile(filepath.Join(l.dir, "disk", "a.raw"),
		bytes.Repeat([]byte("data"), 1<<20), 0o644))
	work := t.TempDir()
	if err := unix.Mount("tmpfs", work, "tmpfs", 0, "size=2m"); err != nil {
		t.Skipf("needs to mount a small file system: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(work, unix.MNT_DETACH) })
	fails(t, append(l.env, "WORK_DIR="+work), exitFailed, "--copy-mode=copy-on-write (COPY_MODE)",
		"serve")
	p := l.serve(t, "WORK_DIR="+work, "COPY_MODE=copy-on-write")
	require.Equal(t, exitDone, p.terminate())
}

// TestPathsAreQuoted checks that messages show where a name with spaces begins and ends.
func TestPathsAreQuoted(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "my images")
	bad := filepath.Join(dir, "a b.raw")
	require.NoError(t, os.Mkdir(dir, 0o755))
	quoted := `"` + dir + `"`
	check := func(want string, args ...string) {
		_, _, stderr := run(t, []string{"METRICS_LISTEN=127.0.0.1:0", "PORT=0", "READY_FILE="},
			args...)
		require.Contains(t, told(stderr), want, args)
	}
	check("no disk image in "+quoted, "serve", "--disk-dir="+dir)
	check("no disk image in "+quoted, "inspect", dir)
	check(quoted+" cannot be read", "serve", "--config="+dir)
	check(`no daemon answers at "`+dir+`/control.sock"`, "handover", "--lun=1", "--finish",
		"--work-dir="+dir)
	require.NoError(t, os.WriteFile(bad, []byte("x"), 0o644))
	check("1 file in "+quoted+" cannot be served: \"a b.raw\": has a size", "serve",
		"--disk-dir="+dir)
	check(`"`+bad+`" has a size of 1 bytes`, "inspect", dir)
	check(`"`+bad+`" is not a directory`, "serve", "--disk-dir="+bad)
	check(`"a b.raw": has a size`, "convert", bad, filepath.Join(dir, "out.raw"))
	require.NoError(t, os.WriteFile(bad, make([]byte, 512), 0o644))
	check(`destination "`+dir+`/a b.raw" is the image "a b.raw" itself`, "convert", "--force", bad,
		bad)
	check(`"`+bad+`" exists already`, "convert", bad, bad)
	check(`the ready file `+quoted, "serve", "--ready-file="+dir, "--disk-dir="+dir,
		"--work-dir="+dir+"/work")
}
