package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/flock"
	"kubevirt.io/disk/internal/testtool"
)

// TestPushOntoUsage: what makes no sense is refused before anything is read.
func TestPushOntoUsage(t *testing.T) {
	ref := "127.0.0.1:1/vm:1"
	for want, args := range map[string][]string{
		"name the image with --onto": {"--onto-file=old.raw", "--base=none", "a.raw", ref},
		"takes one file":             {"--onto=127.0.0.1:1/vm:0", "a.raw", "b.raw", ref},
		"--onto: ":                   {"--onto=NO/vm:0", "a.raw", ref},
		"--squash is about":          {"--squash", "--base=none", "a.raw", ref},
		"name the base image":        {"--base=", "a.raw", ref},
		"leave out --base":           {"--artifact", "--base=none", "a.raw", ref},
		"and --onto":                 {"--artifact", "--onto=127.0.0.1:1/vm:0", "a.raw", ref},
	} {
		fails(t, nil, exitUsage, want, append([]string{"push"}, args...)...)
	}
}

// TestCommitUsage: what makes no sense is refused before the daemon is asked.
func TestCommitUsage(t *testing.T) {
	uri, ref := "nbd+unix:///vm?socket=/none.sock", "127.0.0.1:1/vm:1"
	for want, args := range map[string][]string{
		"say either --onto":   {uri, ref},
		"or --flat":           {uri, ref, "--flat", "--onto=127.0.0.1:1/vm:0"},
		"say either":          {ref, "--persistent-dir=/none"},
		"name the base image": {uri, ref, "--flat", "--base="},
		"--squash is about":   {uri, ref, "--flat", "--base=none", "--squash"},
		"of this machine":     {"nbds://disks.example.com/vm", ref, "--flat", "--base=none"},
		"the disk: ":          {"nbd+tcp://x/vm", ref, "--flat", "--base=none"},
		"name the disk":       {ref, "--flat", "--base=none"},
		"names no snapshot":   {"vm@", ref, "--flat", "--base=none"},
		"leave one out":       {uri, ref, "--flat", "--base=none", "--persistent-dir=/none"},
		"is about a disk in":  {"vm", ref, "--flat", "--base=none", "--image=" + ref},
		"--compress":          {uri, ref, "--flat", "--base=none", "--compress=gzip"},
	} {
		fails(t, nil, exitUsage, want, append([]string{"commit"}, args...)...)
	}
}

// TestDigestFile: a file that has something other than a digest is not replaced, as its name may be
// mistyped, and nothing is fetched or stored first.
func TestDigestFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a.raw")
	image := bytes.Repeat([]byte("disk"), 1024)
	for _, text := range [][]byte{image, []byte("sha256:1"), image[:72]} {
		require.NoError(t, os.WriteFile(file, text, 0o644))
		for _, args := range [][]string{
			{"pull", "127.0.0.1:1/a:1", filepath.Join(t.TempDir(), "b.raw")},
			{"sign", "127.0.0.1:1/a:1"}, {"commit", "a.raw", "127.0.0.1:1/a:1"},
		} {
			fails(t, nil, exitUsage, "has something other than a digest",
				append(args, "--digest-file="+file)...)
		}
		require.ErrorContains(t, writeDigest(file, "sha256:2"), "something other")
		now, err := os.ReadFile(file)
		require.NoError(t, err)
		require.True(t, bytes.Equal(text, now))
	}
	digest := "sha256:" + strings.Repeat("0", 64)
	for _, text := range []string{"", digest, digest + "\n"} {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o644))
		require.NoError(t, checkDigestFile(file))
		require.NoError(t, writeDigest(file, digest))
	}
	require.NoError(t, writeDigest(os.DevNull, digest))
}

// TestWhatAKilledCommandLeaves: what a killed command has fetched goes with the next one, but not
// what a running one needs.
func TestWhatAKilledCommandLeaves(t *testing.T) {
	cleanEnv(t)
	t.Setenv("TMPDIR", t.TempDir())
	ref, raw := memoryRegistry(t)+"/vm/a:", filepath.Join(t.TempDir(), "a.raw")
	content := bytes.Repeat([]byte("content."), 32<<10)
	require.NoError(t, os.WriteFile(raw, content, 0o600))
	require.Contains(t, saidOf(t, exitDone, "push", "--base=none", raw, ref+"1"), "sha256:")
	require.NoError(t, os.WriteFile(raw, append([]byte("new"), content[3:]...), 0o600))
	for _, args := range [][]string{{"push", "--onto=" + ref + "1", raw, ref + "2"},
		{"inspect", ref + "1"}} {
		running := testtool.Must(flock.TemporaryDir())(t)
		killed := strings.TrimRight(running.Path, "0123456789") + "0"
		require.NoError(t, os.Mkdir(killed, 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(killed, ".lock"), nil, 0o600))
		saidOf(t, exitDone, args...)
		require.NoDirExists(t, killed, args[0])
		require.DirExists(t, running.Path, args[0])
		require.NoError(t, running.Remove())
	}
	require.Empty(t, testtool.Must(os.ReadDir(os.TempDir()))(t))
}
