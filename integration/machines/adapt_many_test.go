package machines

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// manyFiles writes a container image with a layer of empty files in one directory, as docker saves
// it. It makes the headers itself, because archive/tar is slow with the race detector.
func manyFiles(t *testing.T, file string, files int) {
	t.Helper()
	const digits = "0000000"
	var header bytes.Buffer
	require.NoError(t, tar.NewWriter(&header).WriteHeader(&tar.Header{Typeflag: tar.TypeReg,
		Mode: 0o644, Name: "many/" + digits}))
	name, sumAt := bytes.Index(header.Bytes(), []byte(digits)), 148
	sum, err := strconv.ParseInt(string(header.Bytes()[sumAt:sumAt+6]), 8, 64)
	require.NoError(t, err)

	f, err := os.Create(file)
	require.NoError(t, err)
	defer f.Close()
	w := tar.NewWriter(f)
	entry := func(name string, size int) {
		require.NoError(t, w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Mode: 0o644,
			Name: name, Size: int64(size)}))
	}
	const together = 1000
	entry("layer.tar", files*header.Len()+1024)
	id := sha256.New()
	out := io.MultiWriter(w, id)
	for i := 0; i < files; i += together {
		block := bytes.Repeat(header.Bytes(), together)
		for j := range together {
			h, more := block[j*header.Len():], sum
			for k, digit := range fmt.Appendf(nil, "%0*d", len(digits), i+j) {
				h[name+k] = digit
				more += int64(digit - '0')
			}
			copy(h[sumAt:], fmt.Appendf(nil, "%06o", more))
		}
		_, err := out.Write(block)
		require.NoError(t, err)
	}
	_, err = out.Write(make([]byte, 1024))
	require.NoError(t, err)
	for name, text := range map[string]string{
		"config.json": fmt.Sprintf(`{"os":"linux","architecture":%q,"config":{"Cmd":["sh"]},`+
			`"rootfs":{"type":"layers","diff_ids":["sha256:%x"]}}`, runtime.GOARCH, id.Sum(nil)),
		"manifest.json": `[{"Config":"config.json","Layers":["layer.tar"]}]`,
	} {
		entry(name, len(text))
		_, err := io.WriteString(w, text)
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
}

var peakMemory = regexp.MustCompile(`VmHWM:\s+(\d+) kB`)

// TestAMillionFiles serves an image of a million empty files in one directory. The daemon makes the
// levels within 256 MiB, and e2fsck finds no error. A binary with the race detector needs more
// memory, so this one is built without it.
func TestAMillionFiles(t *testing.T) {
	testtool.NeedNightly(t)
	rig.Need(t, "e2fsck", "qemu-img")
	dir := t.TempDir()
	path := filepath.Join(dir, "kubevirt-disk")
	build := exec.Command("go", "build", "-o", path, "./cmd/kubevirt-disk")
	build.Dir = "../.."
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	image := filepath.Join(dir, "image.tar")
	manyFiles(t, image, 1000000)

	cache := filepath.Join(dir, "cache")
	d := rig.Start(t, rig.Config{Binary: path, DiskDir: t.TempDir(),
		Env: map[string]string{"CONTAINER_IMAGE": "docker-archive:" + image, "CACHE_DIR": cache}})
	found := peakMemory.FindStringSubmatch(rig.ReadFile(t, fmt.Sprintf("/proc/%d/status", d.PID())))
	require.Len(t, found, 2)
	peak, err := strconv.Atoi(found[1])
	require.NoError(t, err)
	t.Logf("%d MiB", peak>>10)
	require.Less(t, peak, 256<<10)

	top, err := filepath.Glob(filepath.Join(cache, "levels", "image-*.qcow2"))
	require.NoError(t, err)
	require.Len(t, top, 1)
	requireClean(t, rawOf(t, top[0]))
}
