package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestServePersistentDisks fills a volume, uses it again, keeps or refuses it with another image,
// and serves it without an image.
func TestServePersistentDisks(t *testing.T) {
	l := newPlace(t, "a.raw")
	volume := t.TempDir()
	env := append(l.env, "PERSISTENT_DIR="+volume)
	serve := func(env ...string) *process {
		p := launch(t, binary(t), env, "serve")
		p.untilReady(l)
		return p
	}
	p := serve(env...)
	serial := p.logged("serving a LUN", "serial")
	p.until("it is complete", func() bool {
		return p.logged("the disk is complete, the image is not needed any more", "lun") != nil
	})
	require.Equal(t, exitDone, p.terminate())
	disk := filepath.Join(volume, "disk.img")
	content := testtool.Must(os.ReadFile(disk))(t)
	require.Equal(t, bytes.Repeat([]byte{1}, 4096), content,
		"raw, as a volume of that kind holds it")

	// The file beside the disk is not an image, and is not inspected as one.
	require.FileExists(t, disk+".state")
	stdout, _ := works(t, nil, "inspect", volume)
	require.Contains(t, stdout, `"`+disk+`"`)
	require.Equal(t, 1, strings.Count(stdout, "servable"), stdout)

	// Another image is refused, and the disk does not change.
	image := filepath.Join(l.dir, "disk", "a.raw")
	require.NoError(t, os.WriteFile(image, bytes.Repeat([]byte{9}, 4096), 0o644))
	stderr := fails(t, env, exitFailed, disk, "serve")
	require.Contains(t, stderr, "another image")
	require.Contains(t, stderr, "--on-image-change=keep")
	p = serve(append(env, "ON_IMAGE_CHANGE=keep")...)
	require.Equal(t, serial, p.logged("serving a LUN", "serial"))

	// The error of a second daemon on the volume names the first one.
	stderr = fails(t, append(env, "READY_FILE=", "WORK_DIR="+t.TempDir(), "ON_IMAGE_CHANGE=keep"),
		exitFailed, "is in use by process", "serve")
	require.Contains(t, stderr, volume)
	require.Equal(t, exitDone, p.terminate())

	// Serve it without an image, and larger.
	require.NoError(t, os.Remove(image))
	p = serve(append(env, "SIZE=1Mi")...)
	require.Equal(t, serial, p.logged("serving a LUN", "serial"))
	require.EqualValues(t, 1<<20, p.logged("serving a LUN", "size_bytes"))
	require.Equal(t, exitDone, p.terminate())
	fails(t, append(env, "SIZE=512Ki"), exitFailed, "never made smaller", "serve")
	after := testtool.Must(os.ReadFile(disk))(t)
	require.True(t, bytes.Equal(append(content, make([]byte, 1<<20-4096)...), after))

	// Several images have directories of their own, and never take the disk of a single image.
	for _, name := range []string{"a.raw", "b.raw"} {
		require.NoError(t, os.WriteFile(filepath.Join(l.dir, "disk", name),
			bytes.Repeat([]byte{3}, 4096), 0o644))
	}
	fails(t, env, exitFailed, "volumes of their own", "serve")
	several := t.TempDir()
	p = serve(append(l.env, "PERSISTENT_DIR="+several)...)
	require.Equal(t, exitDone, p.terminate())
	for _, name := range []string{"a.raw", "b.raw"} {
		require.FileExists(t, filepath.Join(several, name, "disk.img"))
	}

	// A disk that is already on the volume is served as it is.
	own := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(own, "disk.img"), bytes.Repeat([]byte{7}, 8192),
		0o600))
	require.NoError(t, os.Remove(filepath.Join(l.dir, "disk", "b.raw")))
	p = serve(append(l.env, "PERSISTENT_DIR="+own)...)
	require.EqualValues(t, 8192, p.logged("serving a LUN", "size_bytes"))
	require.Equal(t, exitDone, p.terminate())
}

// TestServeRefusesAVolumeThatIsNotThere checks every source of the setting: a slip in the volume's
// name must not lose a disk with the pod.
func TestServeRefusesAVolumeThatIsNotThere(t *testing.T) {
	l := newPlace(t, "a.raw", "b.raw")
	missing := filepath.Join(l.dir, "volume")
	file, dangling := filepath.Join(l.dir, "file"), filepath.Join(l.dir, "dangling")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.NoError(t, os.Symlink(missing, dangling))
	for _, c := range []struct {
		env  []string
		args []string
		want []string
	}{
		{env: []string{"PERSISTENT_DIR=" + missing}, want: []string{missing, "does not exist"}},
		{env: []string{"PERSISTENT_DIR=" + missing, "VOLUMES_LISTEN=127.0.0.1:0"},
			want: []string{missing, "does not exist"}},
		{args: []string{"--persistent-dir=" + missing + "/deep"},
			want: []string{missing, "does not exist"}},
		{args: []string{"--config=" + yamlFile(t, "persistent-dir: "+missing)},
			want: []string{missing, "does not exist"}},
		{env: []string{"PERSISTENT_DIR=" + dangling}, want: []string{dangling, "does not exist"}},
		{env: []string{"PERSISTENT_DIR=" + file}, want: []string{file, "is not a directory"}},
		{env: []string{"PERSISTENT_DIR=" + file + "/deep"},
			want: []string{file, "is not a directory"}},
	} {
		status, _, stderr := run(t, append(l.env, c.env...),
			append([]string{"serve"}, c.args...)...)
		require.Equal(t, exitFailed, status, stderr)
		for _, part := range append(c.want, "--persistent-dir (PERSISTENT_DIR)",
			"mount the volume") {
			require.Contains(t, stderr, part)
		}
		require.NoDirExists(t, missing)
	}
	// The daemon makes the directories below the volume itself. It also makes a work directory,
	// which does not outlive the pod anyway.
	volume := t.TempDir()
	p := l.serve(t, "PERSISTENT_DIR="+volume, "WORK_DIR="+filepath.Join(l.dir, "another", "work"))
	require.Equal(t, exitDone, p.terminate())
	require.FileExists(t, filepath.Join(volume, "b.raw", "disk.img"))
}

// TestServeRemovesWhatIsLeftOfAnImageThatIsGone checks that only the daemon that left files removes
// them.
func TestServeRemovesWhatIsLeftOfAnImageThatIsGone(t *testing.T) {
	l := newPlace(t, "a.raw", "b.raw")
	work := t.TempDir()
	env := append(l.env, "WORK_DIR="+work, "LEFTOVERS=remove")
	p := launch(t, binary(t), env, "serve")
	p.untilReady(l)
	require.Equal(t, exitDone, p.terminate())
	require.NoError(t, os.Remove(filepath.Join(l.dir, "disk", "b.raw")))

	p = launch(t, binary(t), append(env, "LISTEN=127.0.0.2:0"), "serve")
	p.untilReady(l)
	p.until("it is kept", func() bool {
		return p.logged("a disk in the work directory has no image here and is kept because "+
			"another daemon may need it", "directory") != nil
	})
	require.Equal(t, exitDone, p.terminate())
	require.DirExists(t, filepath.Join(work, "b.raw"))

	p = launch(t, binary(t), env, "serve")
	p.untilReady(l)
	p.until("it is removed", func() bool {
		return p.logged("removed the disk of an image that is gone", "image") == "b.raw"
	})
	require.Equal(t, exitDone, p.terminate())
	require.NoDirExists(t, filepath.Join(work, "b.raw"))
	require.DirExists(t, filepath.Join(work, "a.raw"))
}

// TestServeKeepsWhatGuestsWrote: a directory that a person has named keeps the disk of an image
// that is renamed, away for a start, or changed by a byte. It is found again when the image is
// back.
func TestServeKeepsWhatGuestsWrote(t *testing.T) {
	l := newPlace(t, "a.raw", "b.raw")
	env := append(l.env, "WORK_DIR="+t.TempDir())
	image := filepath.Join(l.dir, "disk", "b.raw")
	content := testtool.Must(os.ReadFile(image))(t)
	serve := func(says string) (serials map[string]string) {
		p := launch(t, binary(t), env, "serve")
		p.untilReady(l)
		p.until("it says "+says, func() bool { return strings.Contains(p.stderr.String(), says) })
		require.Equal(t, exitDone, p.terminate())
		serials = map[string]string{}
		for _, e := range p.entries() {
			if e["msg"] == "serving a LUN" {
				serials[e["image"].(string)] = e["serial"].(string)
			}
		}
		return serials
	}
	first := serve("")
	for what, c := range map[string]struct{ away, back func() error }{
		"renamed": {func() error { return os.Rename(image, image+".raw") },
			func() error { return os.Rename(image+".raw", image) }},
		"away": {func() error { return os.Remove(image) },
			func() error { return os.WriteFile(image, content, 0o644) }},
		"changed": {func() error {
			return os.WriteFile(image, append([]byte{content[0] ^ 1}, content[1:]...), 0o644)
		}, func() error { return os.WriteFile(image, content, 0o644) }},
	} {
		require.NoError(t, c.away())
		for range 2 {
			without := serve("--leftovers=remove")
			require.Equal(t, first["a.raw"], without["a.raw"], what)
			require.NotEqual(t, first["b.raw"], without["b.raw"], what)
		}
		require.NoError(t, c.back())
		again := serve("")
		require.Equal(t, first["a.raw"], again["a.raw"], what)
		require.Equal(t, first["b.raw"], again["b.raw"], what)
	}
}
