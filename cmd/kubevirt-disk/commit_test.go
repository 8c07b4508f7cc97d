package main

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
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
		status, _, stderr := run(t, nil, append([]string{"push"}, args...)...)
		require.Equal(t, exitUsage, status, stderr)
		require.Contains(t, stderr, want)
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
		status, _, stderr := run(t, nil, append([]string{"commit"}, args...)...)
		require.Equal(t, exitUsage, status, stderr)
		require.Contains(t, stderr, want)
	}
	for export, want := range map[string]string{"vm.qcow2": "vm.raw", "vm.qcow2@before": "vm.raw",
		"registry.example.com/vm/fedora:42": "fedora.raw", "": "disk.raw"} {
		require.Equal(t, want, committedFile(export))
	}
}

// oneWay is a disk whose first sectors have changed: as many as the name of what they are compared
// with has letters.
type oneWay struct{ disk.Disk }

func (oneWay) Since() []disk.Snapshot { return nil }

func (oneWay) Changed(ctx context.Context, since string, off, _ int64) (bool, int64, error) {
	return off < int64(len(since))*disk.SectorSize, disk.SectorSize, nil
}

func (oneWay) Depth(ctx context.Context, off, _ int64) (int, int64, error) {
	return map[bool]int{true: disk.DepthOwn, false: disk.DepthImage}[off == 0], disk.SectorSize, nil
}

// TestCommittedOrigins: each image that has the content of a snapshot is one by what has changed
// since that, unless it has another disk's, and so is the image that the disk reads from.
func TestCommittedOrigins(t *testing.T) {
	d := committed{name: "vm.qcow2", content: oneWay{}, files: []string{"raw sha256:0"},
		snapshots: map[string]string{"sha256:1/vm.raw": "ab", "sha256:2/vm.raw": "abc",
			"sha256:3/other.raw": "a"}}
	got := map[string]int64{}
	for _, o := range d.origins(t.Context()) {
		n := int64(0)
		for changed := true; changed; n++ {
			var err error
			changed, _, err = o.Changed(n*disk.SectorSize, disk.SectorSize)
			require.NoError(t, err)
		}
		got[o.Digest+strings.Join(o.Files, ",")] = n - 1
	}
	require.Equal(t, map[string]int64{"sha256:1": 2, "sha256:2": 3, "raw sha256:0": 1}, got)
	d.files, d.snapshots = nil, nil
	require.Empty(t, d.origins(t.Context()))
}
