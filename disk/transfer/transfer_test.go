package transfer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/disk/transfer"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
)

func secret(t *testing.T, text string) transfer.Secret {
	t.Helper()
	return testtool.Must(transfer.NewSecret([]byte(text)))(t)
}

// move moves a disk by a connection as processes do.
func move(t *testing.T, from, to string, replace bool) error {
	t.Helper()
	source, err := transfer.OpenSource(from)
	require.NoError(t, err)
	defer source.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	served := testtool.Go(func() error {
		return transfer.Serve(ctx, l, secret(t, "correct horse battery"), source,
			new(transfer.Progress), func(error) {})
	})
	target, err := transfer.OpenTarget(to, replace)
	if err == nil {
		p := new(transfer.Progress)
		err = transfer.Fetch(ctx, l.Addr().String(), secret(t, "correct horse battery"), target, p)
		require.NoError(t, target.Close())
	}
	if err != nil {
		stop()
		require.Error(t, <-served)
		return err
	}
	defer stop()
	require.NoError(t, <-served, "the sender learns that the disk is whole")
	return nil
}

// put writes a sparse file with data at some places.
func put(t *testing.T, path string, size int64, at map[int64][]byte) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	f := testtool.Must(os.Create(path))(t)
	require.NoError(t, f.Truncate(size))
	for off, data := range at {
		require.NoError(t, testtool.Err(f.WriteAt(data, off)))
	}
	require.NoError(t, f.Close())
}

// TestOverlay moves a disk of which the image has the most.
func TestOverlay(t *testing.T) {
	const size = 64 << 20
	images, from, to := t.TempDir(), t.TempDir(), t.TempDir()
	path := filepath.Join(images, "a.raw")
	put(t, path, size, map[int64][]byte{0: filetest.Sample(1<<20, 1),
		30 << 20: filetest.Sample(3<<20, 2), size - 512: filetest.Sample(512, 3)})
	open := func(dir string) *instance.Instance {
		img, err := image.Open(path, image.Options{})
		require.NoError(t, err)
		t.Cleanup(func() { _ = img.Close() })
		disk, err := instance.Open(t.Context(), img,
			instance.Options{PersistentDir: dir, Mode: instance.CopyOnWrite})
		require.NoError(t, err)
		return disk
	}
	want := make([]byte, size)
	f, err := os.Open(path)
	require.NoError(t, err)
	_, err = io.ReadFull(f, want)
	require.NoError(t, err)
	require.NoError(t, f.Close())

	disk := open(from)
	for i, w := range []struct{ off, n int64 }{{512, 4096}, {20 << 20, 1 << 20},
		{size - 4096, 1024}} {
		data := filetest.Sample(int(w.n), uint64(10+i))
		require.NoError(t, testtool.Err(disk.WriteAt(t.Context(), data, w.off)))
		copy(want[w.off:], data)
	}
	require.NoError(t, disk.Flush())
	_, err = transfer.OpenSource(from)
	require.ErrorAs(t, err, new(*durable.LockedError), "both lock the same file")
	identity := disk.Identity
	require.NoError(t, disk.Close())

	require.NoError(t, move(t, from, to, false))
	require.ErrorIs(t, testtool.Err(os.Stat(filepath.Join(to, ".receiving"))), os.ErrNotExist)
	require.LessOrEqual(t, filetest.Allocated(t, filepath.Join(to, "disk.img")), int64(4<<20),
		"what the image has is not moved")
	before, err := os.ReadFile(filepath.Join(from, "disk.img"))
	require.NoError(t, err)
	after, err := os.ReadFile(filepath.Join(to, "disk.img"))
	require.NoError(t, err)
	require.True(t, bytes.Equal(before, after))

	disk = open(to)
	defer disk.Close()
	require.Equal(t, identity, disk.Identity, "the machine sees the same disk")
	require.Equal(t, -1, filetest.FirstDifference(want, filetest.ReadAll(t, disk, size)))
}

// TestVolumesOfADaemon: a daemon that serves only volumes has locked nothing above them, and each
// disk, or the directory of all volumes while none has a disk.
func TestVolumesOfADaemon(t *testing.T) {
	for _, name := range []string{".volumes/a/disk.img.lock", ".volumes/lock"} {
		dir := disks(t)
		put(t, filepath.Join(dir, ".volumes/a/disk.img"), 1<<20, nil)
		lock := testtool.Must(durable.AcquireLock(filepath.Join(dir, name), "a"))(t)
		before := names(t, dir)
		require.ErrorAs(t, testtool.Err(transfer.OpenSource(dir)), new(*durable.LockedError))
		require.ErrorAs(t, testtool.Err(transfer.OpenTarget(dir, true)), new(*durable.LockedError))
		require.Subset(t, names(t, dir), before)
		require.NoError(t, durable.ReleaseLock(lock))
		require.NoError(t, move(t, dir, t.TempDir(), false))
	}
}

// disks makes a directory with the disks of two images, and what belongs to nobody.
func disks(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	put(t, filepath.Join(dir, "a.raw", "disk.img"), 5<<20+512, map[int64][]byte{
		100: filetest.Block('x', 10), 2<<20 - 1: filetest.Sample(70_000, 2),
		5<<20 + 500: filetest.Block('y', 12)})
	put(t, filepath.Join(dir, "a.raw", "disk.img.state"), 0, map[int64][]byte{0: []byte("state")})
	put(t, filepath.Join(dir, "a.raw", "disk.img.unit-1", "kept"), 0, nil)
	put(t, filepath.Join(dir, "b.raw", "disk.img"), 3<<20, nil)
	for _, name := range []string{"lost+found/x", ".kubevirt-disk/y", "a.raw/disk.img.partial",
		"a.raw/lock", ".receiving/z"} {
		put(t, filepath.Join(dir, name), 10, nil)
	}
	require.NoError(t, os.Chmod(filepath.Join(dir, "a.raw", "disk.img"), 0o640))
	return dir
}

// names are all files below a directory.
func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			name, _ := filepath.Rel(dir, path)
			all = append(all, name)
		}
		return err
	}))
	return all
}

// same checks what was received of disks.
func same(t *testing.T, from, to string) {
	t.Helper()
	want := []string{"a.raw/disk.img", "a.raw/disk.img.state", "a.raw/disk.img.unit-1/kept",
		"b.raw/disk.img"}
	require.Equal(t, append(want, "disk.img.lock"), names(t, to))
	for _, name := range want {
		before, err := os.ReadFile(filepath.Join(from, name))
		require.NoError(t, err)
		after, err := os.ReadFile(filepath.Join(to, name))
		require.NoError(t, err)
		require.True(t, bytes.Equal(before, after), name)
	}
	st := testtool.Must(os.Stat(filepath.Join(to, "a.raw", "disk.img")))(t)
	require.Equal(t, os.FileMode(0o640), st.Mode())
	require.LessOrEqual(t, filetest.Allocated(t, filepath.Join(to, "a.raw", "disk.img")),
		int64(5*64<<10), "holes stay holes")
}

func TestDisksOfSeveralImages(t *testing.T) {
	from, to := disks(t), t.TempDir()
	require.NoError(t, move(t, from, to, false))
	same(t, from, to)
	err := move(t, from, to, false)
	require.ErrorContains(t, err, "is not empty: it has a.raw")
	require.ErrorContains(t, err, "--replace")
	same(t, from, to)
	put(t, filepath.Join(to, "a.raw", "more"), 1, nil)
	require.NoError(t, move(t, from, to, true))
	same(t, from, to)
}

// stream is what is sent of a directory.
func stream(t *testing.T, dir string) []byte {
	t.Helper()
	source := testtool.Must(transfer.OpenSource(dir))(t)
	defer source.Close()
	var b bytes.Buffer
	require.NoError(t, source.Send(t.Context(), &b, new(transfer.Progress)))
	return b.Bytes()
}

func receive(t *testing.T, to string, r io.Reader) error {
	t.Helper()
	target := testtool.Must(transfer.OpenTarget(to, false))(t)
	defer target.Close()
	return target.Receive(t.Context(), r, new(transfer.Progress))
}

// TestStreamThatIsCutOrDamaged: what is not whole has no name, and does not hinder the next try.
func TestStreamThatIsCutOrDamaged(t *testing.T) {
	from, to := disks(t), t.TempDir()
	all := stream(t, from)
	none := func() {
		t.Helper()
		for _, name := range names(t, to) {
			require.True(t, name == "disk.img.lock" || strings.HasPrefix(name, ".receiving/"), name)
		}
	}
	cuts := []int{0, 1, len(all) - 1, len(all) - 30}
	for at := 5; at < len(all); at += len(all) / 23 {
		cuts = append(cuts, at)
	}
	for _, at := range cuts {
		require.ErrorIs(t, receive(t, to, bytes.NewReader(all[:at])), io.ErrUnexpectedEOF, at)
		none()
	}
	for _, data := range [][]byte{filetest.Block('x', 10), filetest.Block('y', 12)} {
		at := bytes.Index(all, data)
		require.Positive(t, at)
		damaged := bytes.Clone(all)
		damaged[at] ^= 1
		require.ErrorContains(t, receive(t, to, bytes.NewReader(damaged)), "differs from what was")
		none()
	}
	require.NoError(t, receive(t, to, bytes.NewReader(all)))
	same(t, from, to)
}

// TestStreamThatIsNoDisk: the other side cannot write elsewhere.
func TestStreamThatIsNoDisk(t *testing.T) {
	const head = `{"version":1,"bytes":1}` + "\n"
	for _, c := range []struct{ stream, says string }{
		{"hello\n", "sends no disk"},
		{strings.Repeat("x", 1<<20), "sends no disk"},
		{`{"version":2}` + "\n", "sends version 2, and this program knows 1"},
		{`{"version":1,"bytes":4611686018427387904}` + "\n", "use a larger volume"},
		{head + `{"name":"../x","mode":384}` + "\n", `"../x" that no disk has`},
		{head + `{"name":"/x","mode":384}` + "\n", `"/x" that no disk has`},
		{head + `{"name":"a/../../x","mode":384}` + "\n", "that no disk has"},
		{head + `{"name":".","dir":true,"mode":448}` + "\n", "that no disk has"},
		{head + `{"name":"disk.img.lock","mode":384}` + "\n", "that no disk has"},
		{head + `{"name":"x","mode":2432}` + "\n", "that no disk has"}, // set user ID
		{head + `{"name":"x","mode":384,"size":-1}` + "\n", "that no disk has"},
		{head + `{"name":"x","mode":384,"size":1}` + "\n" +
			"\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x01x", "out of place"},
	} {
		require.ErrorContains(t, receive(t, t.TempDir(), strings.NewReader(c.stream)), c.says)
	}
}

// TestOnlyOne: nobody can use a disk that is moved, and no disk is moved that is used.
func TestOnlyOne(t *testing.T) {
	dir := disks(t)
	source, err := transfer.OpenSource(dir)
	require.NoError(t, err)
	require.ErrorContains(t, testtool.Err(transfer.OpenSource(dir)), "is in use by")
	require.NoError(t, source.Close())
	to := t.TempDir()
	target, err := transfer.OpenTarget(to, false)
	require.NoError(t, err)
	require.ErrorContains(t, testtool.Err(transfer.OpenTarget(to, true)), "is in use by")
	require.NoError(t, target.Close())

	// A daemon that serves several images has locked their directories, and not the one above.
	from, served := disks(t), disks(t)
	put(t, filepath.Join(served, "a.raw", "more"), 1, nil)
	before := names(t, served)
	source, err = transfer.OpenSource(served) // as a daemon does
	require.NoError(t, err)
	require.ErrorAs(t, move(t, from, served, true), new(*durable.LockedError))
	require.Subset(t, names(t, served), before)
	require.NoError(t, source.Close())
	for i := range 40 {
		put(t, filepath.Join(served, "a.raw", fmt.Sprint("disk.img.", i)), 1, nil)
	}
	events := testtool.Must(unix.InotifyInit1(unix.IN_CLOEXEC))(t)
	defer unix.Close(events)
	_ = testtool.Must(unix.InotifyAddWatch(events, filepath.Join(served, "a.raw"),
		unix.IN_DELETE))(t)
	require.NoError(t, move(t, from, served, true))
	text := make([]byte, 4096)
	_ = testtool.Must(unix.Read(events, text))(t)
	require.Equal(t, "disk.img\x00", string(text[unix.SizeofInotifyEvent:][:9]),
		"a kill would leave the file of a disk without its state")
	require.NoFileExists(t, filepath.Join(served, "a.raw", "more"))

	_, err = transfer.OpenSource(t.TempDir())
	require.ErrorContains(t, err, "has no disk.img: name the directory of a persistent disk")
}

// TestStranger: who has another secret is told nothing, and is told nothing of.
func TestStranger(t *testing.T) {
	source, err := transfer.OpenSource(disks(t))
	require.NoError(t, err)
	defer source.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	served, told := make(chan error, 1), make(chan error, 9)
	p := new(transfer.Progress)
	go func() {
		served <- transfer.Serve(ctx, l, secret(t, "correct horse battery"), source, p,
			func(err error) { told <- err })
	}()
	to := t.TempDir()
	target, err := transfer.OpenTarget(to, false)
	require.NoError(t, err)
	defer target.Close()
	err = transfer.Fetch(ctx, l.Addr().String(), secret(t, "another secret"), target,
		new(transfer.Progress))
	require.ErrorContains(t, err, "the other side has another secret")
	require.Error(t, <-told)
	conn, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	require.NoError(t, testtool.Err(conn.Write([]byte("GET / HTTP/1.0\r\n\r\n"))))
	require.Error(t, <-told)
	require.NoError(t, conn.Close())
	require.Zero(t, p.Done())
	stop()
	require.True(t, errors.Is(<-served, context.Canceled))
	_, err = transfer.NewSecret([]byte("short"))
	require.ErrorContains(t, err, "want 12 random ones at least")
}
