package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// layeredImage is a container image with several layers, as docker saves it. Each replaces files of
// the one below.
func layeredImage(t *testing.T, layers int) string {
	t.Helper()
	add := func(w *tar.Writer, name string, content []byte) {
		require.NoError(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o644,
			Size: int64(len(content))}))
		require.NoError(t, testtool.Err(w.Write(content)))
	}
	var saved bytes.Buffer
	out := tar.NewWriter(&saved)
	random := rand.NewChaCha8([32]byte{4})
	var names, ids []string
	for i := range layers {
		var layer bytes.Buffer
		w := tar.NewWriter(&layer)
		for j := range 100 {
			content := make([]byte, 20000)
			_, _ = random.Read(content)
			add(w, fmt.Sprintf("d%d/f%d", j%10, j+50*i), content)
		}
		require.NoError(t, w.Close())
		name := fmt.Sprintf("%d.tar", i)
		add(out, name, layer.Bytes())
		names = append(names, name)
		ids = append(ids, fmt.Sprintf("sha256:%x", sha256.Sum256(layer.Bytes())))
	}
	encode := func(v any) []byte {
		text := testtool.Must(json.Marshal(v))(t)
		return text
	}
	add(out, "config.json", encode(map[string]any{"os": "linux", "architecture": "amd64",
		"config": map[string]any{"Cmd": []string{"/hello"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": ids}}))
	add(out, "manifest.json", encode([]map[string]any{{"Config": "config.json", "Layers": names}}))
	require.NoError(t, out.Close())
	file := filepath.Join(t.TempDir(), "layered.tar")
	require.NoError(t, os.WriteFile(file, saved.Bytes(), 0o644))
	return "docker-archive:" + file
}

// TestAdaptKilled kills adapt at any moment, again and again. What it makes when it is left alone
// is then the same as without that, and nothing else is there.
func TestAdaptKilled(t *testing.T) {
	env, ref := bootable(t), layeredImage(t, 5)
	path := filepath.Join(t.TempDir(), "vm")
	args := []string{"adapt", ref, "--to", path}
	content := func() map[string][sha256.Size]byte {
		files := testtool.Must(os.ReadDir(path))(t)
		all := map[string][sha256.Size]byte{}
		for _, f := range files {
			text := testtool.Must(os.ReadFile(filepath.Join(path, f.Name())))(t)
			all[f.Name()] = sha256.Sum256(text)
		}
		return all
	}
	binary(t) // so that this is not measured
	began := time.Now()
	works(t, env, args...)
	took, want := time.Since(began), content()

	left := 0 // files that are not complete, of killed processes
	require.NoError(t, os.RemoveAll(path))
	for killed := 0; killed < 10; {
		p := launch(t, binary(t), env, args...)
		time.Sleep(rand.N(took))
		_ = p.cmd.Process.Kill()    // it may have ended by itself
		if p.status() == exitDone { // it was sooner: make everything again
			require.NoError(t, os.RemoveAll(path))
			continue
		}
		killed++
		if _, err := os.Stat(path); err == nil {
			for name := range content() {
				if strings.HasSuffix(name, ".partial") {
					left++
				}
			}
		}
	}
	t.Logf("an undisturbed run takes %v; killed ones have left %d files", took, left)
	works(t, env, args...)
	got := content()
	require.Equal(t, slices.Sorted(maps.Keys(want)), slices.Sorted(maps.Keys(got)))
	require.Equal(t, want, got)
}
