package ext4

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// diskFile is a disk that levels are written to, one after the other. It checks how they are
// written.
type diskFile struct {
	t       testing.TB
	file    *os.File
	written map[int64]bool // blocks of this level
	// hollow drops the content that is written to a sparse file: e2fsck does not read it.
	hollow bool
}

func newDisk(t testing.TB) *diskFile {
	t.Helper()
	f := testtool.Must(os.Create(filepath.Join(t.TempDir(), "disk")))(t)
	t.Cleanup(func() { f.Close() })
	return &diskFile{t: t, file: f}
}

func (d *diskFile) WriteAt(p []byte, off int64) (int, error) {
	if off%BlockSize != 0 || len(p)%BlockSize != 0 {
		return 0, fmt.Errorf("%d bytes at %d are no blocks", len(p), off)
	}
	if d.hollow && p[0] == 'x' {
		return len(p), nil
	}
	for b := off / BlockSize; b < (off+int64(len(p)))/BlockSize; b++ {
		if d.written[b] {
			return 0, fmt.Errorf("block %d is written twice", b)
		}
		d.written[b] = true
	}
	return d.file.WriteAt(p, off)
}

// level writes a level and checks the file system.
func (d *diskFile) level(w *Writer, change func()) {
	d.t.Helper()
	d.written = make(map[int64]bool)
	w.Begin(d)
	change()
	require.NoError(d.t, w.Finish())
	require.NoError(d.t, d.file.Truncate(w.Size()))
	d.check()
}

// check runs e2fsck, which must find nothing.
func (d *diskFile) check() {
	d.t.Helper()
	testtool.Need(d.t, "e2fsck")
	out, err := exec.Command("e2fsck", "-fn", d.file.Name()).CombinedOutput()
	text := string(out)
	require.NoError(d.t, err, "e2fsck: %s", text)
	for _, sign := range []string{"Fix?", "IGNORED", "differ", "WARNING", "Clear?"} {
		require.NotContains(d.t, text, sign)
	}
}

// debugfs runs one request of debugfs.
func (d *diskFile) debugfs(request string) string {
	d.t.Helper()
	testtool.Need(d.t, "debugfs")
	cmd := exec.Command("debugfs", "-R", request, d.file.Name())
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	return string(testtool.Must(cmd.Output())(d.t, "debugfs: %s", stderr.String()))
}

// cat returns the content of a file.
func (d *diskFile) cat(name string) string {
	d.t.Helper()
	return d.debugfs("cat \"" + name + "\"")
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func text4k(text string, n int) io.Reader { return strings.NewReader(strings.Repeat(text, n)) }
