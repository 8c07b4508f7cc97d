package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/bench/guests"
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

// TestVhost: guests move data by vhost-user as the tables say, and the bare loop does so without.
func TestVhost(t *testing.T) {
	requireTools(t, map[string]string{"qemu-storage-daemon": "qemu-system-common", "gcc": "gcc"})
	dir := t.TempDir()
	var raws []string
	for _, name := range []string{"a.raw", "b.raw"} {
		raws = append(raws, filepath.Join(dir, name))
		require.NoError(t, os.WriteFile(raws[len(raws)-1], make([]byte, 8<<20), 0o600))
	}
	zeroes := func(raw string) int {
		content, err := os.ReadFile(raw)
		require.NoError(t, err)
		return bytes.Count(content, []byte{0})
	}
	v := vhostQEMU("QEMU", "aio=threads")
	require.NoError(t, v.begin(dir, raws))
	t.Cleanup(func() { require.NoError(t, v.stop()) })
	l := guests.Load{Write: true, Sequential: true, Bytes: 4096, Depth: 16, Queues: 2}
	r, err := v.load(t.Context(), "writes", l, 2, 100*time.Millisecond)
	require.NoError(t, err)
	require.Len(t, r.Guests, 2)
	require.Equal(t, r.Operations, r.Guests[0]+r.Guests[1])
	require.Positive(t, r.ServerTime())
	require.Len(t, v.rates["writes"], 1)
	for _, raw := range raws {
		require.Less(t, zeroes(raw), 8<<20-4096*16)
	}
	_, err = guests.Idle(v.sockets[0], 0, time.Millisecond, v.pids)
	require.NoError(t, err)
	_, err = v.load(t.Context(), "reads", guests.Load{Bytes: 16 << 20, Depth: 1}, 1,
		time.Millisecond)
	require.Error(t, err, "the disk is smaller than a request")

	require.NoError(t, os.WriteFile(raws[0], make([]byte, 1<<20), 0o600))
	floor, err := guests.BuildFloor(dir)
	require.NoError(t, err)
	l = guests.Load{Write: true, Sequential: true, Bytes: 64 << 10, Depth: 16}
	r, err = floor.Run(t.Context(), raws[:1], l, time.Millisecond)
	require.NoError(t, err)
	require.Zero(t, r.Operations%16)
	require.Positive(t, r.Servers)
	require.Zero(t, zeroes(raws[0]), "all of the file is written")
}
