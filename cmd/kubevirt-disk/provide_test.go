package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

// provided is a place with an image, and a directory that the file is made in.
type provided struct {
	place
	t    *testing.T
	to   string // without the extension
	file string
}

func newProvided(t *testing.T) *provided {
	p := &provided{place: newPlace(t, "a.raw"), t: t}
	p.to = filepath.Join(t.TempDir(), "vm", "disk")
	p.file = p.to + ".raw"
	return p
}

// start runs provide and waits for the ready file.
func (p *provided) start(args ...string) *process {
	p.t.Helper()
	env := []string{"DISK_DIR=" + filepath.Join(p.dir, "disk"), "READY_FILE=" + p.readyFile(),
		"COPY_PATH=" + p.to}
	run := launch(p.t, binary(p.t), env, append([]string{"provide"}, args...)...)
	// A run that was killed has left its ready file, which this run removes before the disk.
	run.until("the disk is ready", func() bool {
		return run.logged("the disk is ready", "path") != nil || run.logged(keptDisk, "path") != nil
	})
	run.until("the ready file is there", func() bool { return exists(p.readyFile()) })
	return run
}

const keptDisk = "the disk of an earlier run is kept, with what was written to it"

// leftovers are the files beside the provided one.
func (p *provided) leftovers() (names []string) {
	p.t.Helper()
	entries := testtool.Must(os.ReadDir(filepath.Dir(p.to)))(p.t)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func (p *provided) content() []byte {
	p.t.Helper()
	return testtool.Must(os.ReadFile(p.file))(p.t)
}

func TestProvide(t *testing.T) {
	p := newProvided(t)
	run := p.start()
	require.Equal(t, bytes.Repeat([]byte{1}, 4096), p.content())
	st := testtool.Must(os.Stat(p.file))(t)
	owner := st.Sys().(*syscall.Stat_t).Uid
	if os.Geteuid() == 0 {
		require.EqualValues(t, 107, owner)
		require.Equal(t, os.FileMode(0o660), st.Mode())
	} else {
		require.Equal(t, os.FileMode(0o644), st.Mode())
	}
	require.EqualValues(t, 1, st.Sys().(*syscall.Stat_t).Nlink, "the image has its own file")

	t.Run("it is removed at the end", func(t *testing.T) {
		require.Equal(t, exitDone, run.terminate())
		require.Empty(t, p.leftovers())
		require.NoFileExists(t, p.readyFile())
	})
	t.Run("it ends when the file is removed", func(t *testing.T) {
		run := p.start()
		require.NoError(t, os.Remove(p.file))
		require.Equal(t, exitDone, run.status())
		require.Empty(t, p.leftovers())
		require.NoFileExists(t, p.readyFile())
	})
	t.Run("what has replaced it stays", func(t *testing.T) {
		run := p.start()
		other := filepath.Join(filepath.Dir(p.to), "other")
		require.NoError(t, os.WriteFile(other, []byte("precious"), 0o600))
		require.NoError(t, os.Rename(other, p.file))
		require.Equal(t, exitDone, run.status())
		require.Equal(t, "precious", string(p.content()))
		require.Equal(t, []string{"disk.raw"}, p.leftovers())

		status, _, stderr := run2(t, p)
		require.Equal(t, exitFailed, status)
		require.Contains(t, stderr, "exists already")
		require.Equal(t, "precious", string(p.content()))
		require.Equal(t, []string{"disk.raw"}, p.leftovers())
		require.NoError(t, os.Remove(p.file))
	})
}

// run2 runs provide until it ends by itself.
func run2(t *testing.T, p *provided, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	return run(t, []string{"DISK_DIR=" + filepath.Join(p.dir, "disk"),
		"READY_FILE=" + p.readyFile(), "COPY_PATH=" + p.to},
		append([]string{"provide"}, args...)...)
}

// TestProvideSurvivesAKill keeps what a guest has written, and does not keep the file of another
// image.
func TestProvideSurvivesAKill(t *testing.T) {
	p := newProvided(t)
	p.start().kill()
	written := bytes.Repeat([]byte{9}, 4096)
	f := testtool.Must(os.OpenFile(p.file, os.O_WRONLY, 0))(t)
	require.NoError(t, testtool.Err(f.Write(written)))
	require.NoError(t, f.Close())

	run := p.start()
	require.NotNil(t, run.logged(keptDisk, "path"))
	require.Equal(t, written, p.content())

	status, _, stderr := run2(t, p)
	require.Equal(t, exitFailed, status, "two runs for one file")
	require.Contains(t, stderr, "another running daemon")
	fails(t, []string{"DISK_DIR=" + filepath.Join(p.dir, "disk"), "READY_FILE=",
		"COPY_PATH=" + p.to}, exitFailed, "is in use by process", "provide")
	require.FileExists(t, p.file)
	run.kill()

	image := filepath.Join(p.dir, "disk", "a.raw")
	require.NoError(t, os.WriteFile(image, bytes.Repeat([]byte{7}, 4096), 0o644))
	status, _, stderr = run2(t, p)
	require.Equal(t, exitFailed, status)
	require.Contains(t, stderr, "was made of another image")
	require.Equal(t, written, p.content())

	// Somebody removes it, as the message says.
	require.NoError(t, os.Remove(p.file))
	run = p.start()
	require.Equal(t, bytes.Repeat([]byte{7}, 4096), p.content())

	// A run that was killed has left an unfinished file.
	run.kill()
	require.NoError(t, os.Rename(p.file, p.file+".partial"))
	run = p.start()
	require.Equal(t, bytes.Repeat([]byte{7}, 4096), p.content())
	require.Equal(t, exitDone, run.terminate())
	require.Empty(t, p.leftovers())
}

// TestProvideReadOnly makes a read-only disk that shares the storage of the image.
func TestProvideReadOnly(t *testing.T) {
	p := newProvided(t)
	p.to = filepath.Join(p.dir, "vm", "disk") // on the same file system
	p.file = p.to + ".raw"
	image := filepath.Join(p.dir, "disk", "a.raw")
	require.NoError(t, os.Chmod(image, 0o444))
	run := p.start("--read-only")
	how := run.logged("the disk is ready", "how")
	require.Contains(t, []any{"reflink", "hard link"}, how)
	st := testtool.Must(os.Stat(p.file))(t)
	require.Zero(t, st.Mode()&0o222, "nobody is invited to write")
	run.kill()
	run = p.start("--read-only")
	require.Equal(t, exitDone, run.terminate())
	require.Empty(t, p.leftovers())
	require.Equal(t, bytes.Repeat([]byte{1}, 4096), testtool.Must(os.ReadFile(image))(t))
	st = testtool.Must(os.Stat(image))(t)
	require.Equal(t, os.FileMode(0o444), st.Mode())
}

func TestProvideRefuses(t *testing.T) {
	p := newProvided(t)
	second := filepath.Join(p.dir, "disk", "b.raw")
	require.NoError(t, os.WriteFile(second, make([]byte, 4096), 0o644))
	status, _, stderr := run2(t, p)
	require.Equal(t, exitFailed, status)
	for _, part := range []string{"a.raw, b.raw", "--image-path (IMAGE_PATH)"} {
		require.Contains(t, stderr, part)
	}
	require.NoDirExists(t, filepath.Dir(p.to))
	for _, flag := range []string{"--image-path=" + second, "--disk-dir=" + p.dir} {
		status, _, stderr = run2(t, p, second, flag)
		require.Equal(t, exitUsage, status)
		require.Contains(t, stderr, "cannot be combined with an image as argument")
	}
	run := p.start(second)
	require.Equal(t, make([]byte, 4096), p.content())
	require.Equal(t, exitDone, run.terminate())

	for _, c := range []struct {
		to   string
		want string
	}{{"", "--to (COPY_PATH)"}, {p.to + "/", "the name of a directory"},
		{filepath.Join(p.dir, "disk", "x"), "is in the directory of the image"}} {
		p.to = c.to
		status, _, stderr = run2(t, p, second)
		require.NotEqual(t, exitDone, status)
		require.Contains(t, stderr, c.want)
	}
}

// TestProvideOnAFullDisk leaves nothing on a file system without room.
func TestProvideOnAFullDisk(t *testing.T) {
	p := newProvided(t)
	p.to = filepath.Join(filetest.TinyFS(t, "1m"), "disk")
	image := filepath.Join(p.dir, "disk", "a.raw")
	require.NoError(t, os.WriteFile(image, bytes.Repeat([]byte{1}, 2<<20), 0o644))
	status, _, stderr := run2(t, p)
	require.Equal(t, exitFailed, status)
	require.Contains(t, stderr, "make room or use a larger volume")
	require.Empty(t, p.leftovers())
	require.NoFileExists(t, p.readyFile())

	// A hole takes no room.
	require.NoError(t, os.WriteFile(image, nil, 0o644))
	require.NoError(t, os.Truncate(image, 8<<20))
	run := p.start()
	require.Equal(t, exitDone, run.terminate())
	require.Empty(t, p.leftovers())
}

// TestProvideAsTheWrapper starts the program as the callers of the original file wrapper do.
func TestProvideAsTheWrapper(t *testing.T) {
	p := newProvided(t)
	wrapper := filepath.Join(t.TempDir(), "entry-point.sh")
	require.NoError(t, os.Symlink(binary(t), wrapper))
	run := launch(t, wrapper, []string{"DISK_DIR=" + filepath.Join(p.dir, "disk"),
		"READY_FILE=" + p.readyFile(), "COPY_PATH=" + p.to,
		"IMAGE_PATH=" + filepath.Join(p.dir, "disk", "a.raw")})
	run.until("the ready file is there", func() bool { return exists(p.readyFile()) })
	require.Equal(t, bytes.Repeat([]byte{1}, 4096), p.content())
	require.Equal(t, exitDone, run.terminate())
}

// newBtrfs mounts a file system that can share the space of files.
func newBtrfs(t *testing.T) (dir string) {
	t.Helper()
	testtool.Need(t, "mkfs.btrfs", "mount", "umount")
	testtool.Needs(t, "root (to mount a file system)", os.Geteuid() == 0)
	file, dir := filepath.Join(t.TempDir(), "btrfs"), t.TempDir()
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.NoError(t, os.Truncate(file, 256<<20))
	out, err := exec.Command("mkfs.btrfs", "-q", file).CombinedOutput()
	require.NoError(t, err, "%s", out)
	out, err = exec.Command("mount", "-o", "loop", file, dir).CombinedOutput()
	testtool.Needs(t, fmt.Sprintf("a kernel with btrfs and loop devices: %s", out), err == nil)
	t.Cleanup(func() { require.NoError(t, exec.Command("umount", dir).Run()) })
	return dir
}

// TestProvideReflink shares the image's storage until somebody writes, where the file system can.
func TestProvideReflink(t *testing.T) {
	dir := newBtrfs(t)
	content := filetest.Sample(32<<20, 1)
	image := filetest.Put(t, filepath.Join(dir, "images"), "a.raw", content, 0)
	for _, args := range [][]string{{image}, {image, "--read-only"}} {
		p := newProvided(t)
		p.to = filepath.Join(dir, "vm", "disk")
		p.file = p.to + ".raw"
		before := freeBytes(t, dir)
		run := p.start(args...)
		require.Equal(t, "reflink", run.logged("the disk is ready", "how"))
		require.True(t, bytes.Equal(content, p.content()))
		require.Less(t, before-freeBytes(t, dir), int64(len(content)/4), "it is a copy")
		if len(args) == 1 {
			f := testtool.Must(os.OpenFile(p.file, os.O_WRONLY, 0))(t)
			_, err := f.WriteAt([]byte("written"), 4096)
			require.NoError(t, errors.Join(err, f.Close()))
			now := testtool.Must(os.ReadFile(image))(t)
			require.True(t, bytes.Equal(content, now), "the image has changed")
		}
		require.Equal(t, exitDone, run.terminate())
		require.Empty(t, p.leftovers())
	}
}

// freeBytes is the free space of a file system after everything is written.
func freeBytes(t *testing.T, dir string) int64 {
	t.Helper()
	d := testtool.Must(os.Open(dir))(t)
	defer d.Close()
	require.NoError(t, unix.Syncfs(int(d.Fd())))
	var st unix.Statfs_t
	require.NoError(t, unix.Statfs(dir, &st))
	return int64(st.Bfree) * int64(st.Bsize)
}
