package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestParseFio(t *testing.T) {
	done, err := parseFio(`load: some note
{"jobs": [{"jobname": "load", "error": 0, "read": {"total_ios": 500, "runtime": 250},
  "write": {"total_ios": 0, "runtime": 0}}]}`)
	require.NoError(t, err)
	require.Equal(t, client{operations: 500, elapsed: 250 * time.Millisecond}, done)
	for text, want := range map[string]string{
		"":                                   "no JSON",
		"fio: no such engine":                "no JSON",
		`{"jobs": []}`:                       "has failed",
		`{"jobs": [{"error": 5}]}`:           "has failed",
		`{"jobs": [{"error": 0}]}`:           "done nothing",
		`{"jobs": [{"error": 0}, {"a": 1}]}`: "has failed",
	} {
		_, err := parseFio(text)
		require.ErrorContains(t, err, want, text)
	}
}

// buildServer builds our server as the Makefile does, of what is compiled for other tests anyway.
func buildServer(t *testing.T, path string) {
	t.Helper()
	build := exec.Command("go", "build", "-trimpath", "-o", path, "./cmd/kubevirt-disk")
	build.Dir, build.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
}

// TestNBDServers starts each server and has fio use it.
func TestNBDServers(t *testing.T) {
	requireTools(t, map[string]string{"fio": "fio", "nbdkit": "nbdkit", "qemu-nbd": "qemu-utils"})
	dir := t.TempDir()
	s := settings{server: filepath.Join(dir, "kubevirt-disk"), cache: dir}
	buildServer(t, s.server)
	images := t.TempDir()
	require.NoError(t, makeContent(filepath.Join(images, "disk.raw"), nbdSize))
	for _, one := range s.nbdServers() {
		t.Run(one.name, func(t *testing.T) {
			require.NoError(t, one.start(dir, images))
			defer func() { require.NoError(t, one.stop()) }()
			l := nbdLoads()[1]
			require.NoError(t, one.measure(t.Context(), l, 100*time.Millisecond))
			require.Positive(t, one.rates[l.name][0])
		})
	}
}
