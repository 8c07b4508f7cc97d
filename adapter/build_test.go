package adapter

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/adapter/ext4"
	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/testtool"
)

func TestImageBecomesADisk(t *testing.T) {
	when := time.Unix(1<<31+5, 123456789).UTC()
	strange := item{tar.Header{Name: "usr/bin/strange", Typeflag: tar.TypeReg, Mode: 0o4751,
		Uid: 70000, Gid: 1 << 30, ModTime: when, PAXRecords: map[string]string{
			"SCHILY.xattr.user.name": "value", "SCHILY.xattr.security.capability": capability,
		}}, "content"}
	other := strange // as tools write a hard link: with the attributes of its file
	other.Name, other.Typeflag, other.Linkname = "usr/bin/other", tar.TypeLink, strange.Name
	other.content = ""
	tree := treeOf(t,
		layerOf(t, directory("usr/bin"), strange, file("etc/removed", "x"), file("etc/kept", "y"),
			link(tar.TypeSymlink, "lib", "usr/lib"), directory("usr/lib")),
		layerOf(t, file("etc/.wh.removed", ""), file("lib/new.so", "so"), other,
			item{tar.Header{Name: "dev/null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3,
				Mode: 0o666}, ""},
			item{tar.Header{Name: "run/fifo", Typeflag: tar.TypeFifo, Mode: 0o600}, ""}))
	require.Equal(t, []string{"dev", "dev/null", "etc", "etc/kept", "lib", "run", "run/fifo",
		"usr", "usr/bin", "usr/bin/other", "usr/bin/strange", "usr/lib", "usr/lib/new.so"},
		pathsOf(tree))
	require.Equal(t, node{Mode: 0o104751, UID: 70000, GID: 1 << 30, Mtime: when, Content: "content",
		Links: 2, Same: "usr/bin/other", Xattrs: map[string]string{"user.name": "value",
			"security.capability": capability}}, tree["usr/bin/strange"])
	require.Equal(t, uint64(1<<8|3), tree["dev/null"].Dev)
}

// capability is cap_net_bind_service as security.capability has it.
const capability = "\x01\x00\x00\x02\x00\x04" +
	"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

func TestTopLevelHoldsTheConfiguration(t *testing.T) {
	dir := t.TempDir()
	img := imageOf(layerOf(t, file("a", "b")))
	img.Config = []byte(`{"config": {"Cmd": ["sh"]}}`)
	d, err := Build(context.Background(), img, dir, Options{Extra: json.RawMessage(`{"x":1}`),
		Size: 20<<30 + 1})
	require.NoError(t, err)
	require.Equal(t, int64(20<<30+1<<20), d.Size)
	require.Less(t, d.Levels[1].Bytes, int64(150<<10))
	raw := flatten(t, dir, d.Levels)
	require.Equal(t, d.Size, testtool.Must(os.Stat(raw))(t).Size())
	fsck(t, raw)
	f := testtool.Must(os.Open(raw))(t)
	defer f.Close()
	var got Config
	in := io.NewSectionReader(f, ConfigOffset, MaxConfig)
	require.NoError(t, json.NewDecoder(in).Decode(&got))
	require.JSONEq(t, string(img.Config), string(got.Image))
	require.JSONEq(t, `{"x":1}`, string(got.Extra))
}

func TestImagesShareLevels(t *testing.T) {
	base := layerOf(t, file("base", strings.Repeat("b", 100000)))
	one, two := layerOf(t, file("one", "1")), layerOf(t, file("two", "2"))
	dir, other := t.TempDir(), t.TempDir()
	first := build(t, dir, imageOf(base, one))
	second := build(t, dir, imageOf(base, two))
	require.Equal(t, first.Levels[0].File, second.Levels[0].File)
	require.True(t, second.Levels[0].Cached)
	require.False(t, second.Levels[1].Cached)
	require.NotEqual(t, first.Levels[1].File, second.Levels[1].File)
	require.Equal(t, first.Levels[1].ChainID, chainID(digestOf(base), digestOf(one)))

	again := build(t, dir, imageOf(base, one))
	for _, l := range again.Levels {
		require.True(t, l.Cached, l.File)
	}
	build(t, other, imageOf(base, two))
	requireSameLevels(t, dir, other, second.Levels) // made at once, and above existing levels
}

func TestImageWithoutLayers(t *testing.T) {
	require.Empty(t, pathsOf(treeOf(t)))
}

func TestLayerThatIsNotReadToItsEndIsRefused(t *testing.T) {
	img := imageOf(layerOf(t, file("a", "b")))
	digest := errors.New("the digest is wrong")
	open := img.Layers[0].Open
	img.Layers[0].Open = func(ctx context.Context) (io.ReadCloser, error) {
		r, err := open(ctx)
		return io.NopCloser(io.MultiReader(r, failing{digest})), err
	}
	dir := t.TempDir()
	require.ErrorIs(t, testtool.Err(Build(context.Background(), img, dir, Options{})), digest)
	filetest.Empty(t, dir)
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func TestSameLevelAtOnce(t *testing.T) {
	dir := t.TempDir()
	img := imageOf(layerOf(t, file("a", strings.Repeat("x", 1<<20))),
		layerOf(t, file("b", strings.Repeat("y", 1<<20))))
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			require.NoError(t, testtool.Err(Build(context.Background(), img, dir, Options{})))
		})
	}
	group.Wait()
	require.Len(t, filetest.Names(t, dir), 5, "two layers with their states, and the top level")
}

// TestSmallLevels pins how large small changes are.
func TestSmallLevels(t *testing.T) {
	var base, apt []item
	for i := range 150 {
		dir := "usr/share/doc/package" + strings.Repeat("x", i%20) + string(rune('a'+i%26))
		for j := range 20 {
			base = append(base, file(dir+"/"+strings.Repeat("n", j+1), strings.Repeat("c", 3000)))
		}
		apt = append(apt, file(dir+"/changed", strings.Repeat("d", 2380)))
	}
	dir := t.TempDir()
	lower := layerOf(t, base...)
	d := build(t, dir, imageOf(lower, layerOf(t, file("etc/changed", strings.Repeat("z", 20<<10)))))
	require.Less(t, d.Levels[1].Bytes, int64(256<<10))
	t.Logf("a file of 20 KiB: %d KiB", d.Levels[1].Bytes>>10)
	d = build(t, dir, imageOf(lower, layerOf(t, apt...)))
	require.Less(t, d.Levels[1].Bytes, int64(3<<20))
	t.Logf("0.34 MiB in 150 places: %d KiB", d.Levels[1].Bytes>>10)
}

func TestQemuReadsTheLevels(t *testing.T) {
	testtool.Need(t, "qemu-img")
	dir := t.TempDir()
	d := build(t, dir, imageOf(layerOf(t, file("a", strings.Repeat("x", 1<<20))),
		layerOf(t, file("b", "y"))))
	for _, l := range d.Levels {
		out, err := exec.Command("qemu-img", "check", filepath.Join(dir, l.File)).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	raw := filepath.Join(dir, "raw")
	out, err := exec.Command("qemu-img", "convert", "-O", "raw", d.Path, raw).CombinedOutput()
	require.NoError(t, err, "%s", out)
	fsck(t, raw)
}

func TestBoundsOfAnImage(t *testing.T) {
	many := make([]item, 200)
	for i := range many {
		many[i] = file(strings.Repeat("f", i+1), "x")
	}
	for _, c := range []struct {
		opt     Options
		message string
		items   []item
	}{
		{Options{MaxFiles: 100}, "too many files", many},
		{Options{MaxBytes: 1 << 20}, "more than the image may expand to",
			[]item{file("a", strings.Repeat("x", 2<<20))}},
	} {
		_, err := Build(context.Background(), imageOf(layerOf(t, c.items...)), t.TempDir(), c.opt)
		require.ErrorContains(t, err, c.message)
	}
	img := imageOf()
	img.Config = []byte(`"` + strings.Repeat("x", MaxConfig) + `"`)
	_, err := Build(context.Background(), img, t.TempDir(), Options{})
	require.ErrorContains(t, err, "the image's configuration has")
	require.Zero(t, ConfigOffset%ext4.BlockSize)
}

// TestGroupSharesLevels: users of one group can take over, replace and remove what another one of
// them has made, also under a mask that takes the group's right to write.
func TestGroupSharesLevels(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o770))
	mask := syscall.Umask(0o022)
	defer syscall.Umask(mask)
	levels := filepath.Join(dir, "levels")
	_, err := Build(t.Context(), imageOf(layerOf(t, file("a", "b"))), levels, Options{})
	require.NoError(t, err)
	names := testtool.Must(os.ReadDir(levels))(t)
	require.Greater(t, len(names), 2)
	for _, path := range append(names, nil) {
		at := levels
		if path != nil {
			at = filepath.Join(levels, path.Name())
		}
		require.EqualValues(t, 0o060, testtool.Must(os.Stat(at))(t).Mode()&0o060, at)
	}
}
