package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestHookCheck: the examples are right, and say so; what is wrong in a file is all said at once.
func TestHookCheck(t *testing.T) {
	const examples = "../../examples/kubevirt"
	for name, parts := range map[string][]string{
		"throwaway": {"the files in /disk of registry.example.com/vms/fedora:42",
			"gone when the machine stops", "boot order 1", "A drain stops the machine"},
		"stays":    {"on the claim stays-disk, at /data"},
		"existing": {"those of quay.io/containerdisks/fedora:42, fetched by"},
		"claim":    {"VirtualMachine claim has no hook sidecar"},
	} {
		path, err := filepath.Abs(filepath.Join(examples, name+".yaml"))
		require.NoError(t, err)
		stdout, stderr := works(t, nil, "hook", "--check", path)
		require.Empty(t, stderr)
		for _, part := range parts {
			require.Contains(t, stdout, part)
		}
	}

	moves, err := os.ReadFile(filepath.Join(examples, "moves.yaml"))
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "moves.yaml")
	require.NoError(t, os.WriteFile(path, moves, 0o600))
	status, stdout, stderr := run(t, nil, "hook", "--check", path)
	require.Equal(t, exitFailed, status)
	require.Contains(t, stderr,
		"VMIdentitySet moves: spec.image still has the digest of the example")
	require.Contains(t, stdout, "that of the VMIdentitySet moves")
	require.NoError(t, os.WriteFile(path,
		[]byte(strings.Replace(string(moves), "@sha256:a8", "@sha256:b8", 1)), 0o600))
	status, stdout, stderr = run(t, nil, "hook", "--check", path)
	require.Equal(t, exitDone, status, stderr)
	require.Contains(t, stdout, "if the set has attachment: Service")

	for _, page := range []string{"kubevirt.md", "kubernetes-identities.md"} {
		text, err := os.ReadFile(filepath.Join("../../docs", page))
		require.NoError(t, err)
		lines := strings.SplitAfter(string(text), "\n")
		first := slices.IndexFunc(lines, func(line string) bool {
			return strings.HasSuffix(line, "apiVersion: kubevirt.io/v1\n")
		})
		require.Positive(t, first, page)
		indent := strings.Repeat(" ", strings.Index(lines[first], "api"))
		end := slices.IndexFunc(lines[first:], func(line string) bool {
			return line == "\n" || line == "```\n" || !strings.HasPrefix(line, indent)
		})
		require.Positive(t, end, page)
		path := filepath.Join(t.TempDir(), "page.yaml")
		require.NoError(t, os.WriteFile(path,
			[]byte(strings.ReplaceAll("\n"+strings.Join(lines[first:first+end], ""),
				"\n"+indent, "\n")), 0o600))
		stdout, _ := works(t, nil, "hook", "--check", path)
		require.Contains(t, stdout, "hook-sidecar-0", page)
	}

	bad := filepath.Join(t.TempDir(), "bad.yaml")
	require.NoError(t, os.WriteFile(bad, []byte(strings.Join([]string{
		`{apiVersion: v1, kind: Secret}`,
		`{apiVersion: kubevirt.io/v1, kind: VirtualMachineInstance, metadata: {name: a, annotations: {` +
			`hooks.kubevirt.io/hookSidecars: '[{"image": "i", "args": ["serve", "--imag=x"]}]', ` +
			`disk.kubevirt.io/bus: ide}}}`,
		`{apiVersion: kubevirt.io/v1, kind: VirtualMachineInstance, metadata: {name: b, annotations: {` +
			`hooks.kubevirt.io/hookSidecars: '[{"image": "i", "args": ["pull"]}]'}}}`,
	}, "\n---\n")), 0o600))
	status, _, stderr = run(t, nil, "hook", "--check", bad)
	require.Equal(t, exitFailed, status)
	for _, part := range []string{"VirtualMachineInstance a", `"ide" is unknown`,
		"unknown flag: --imag", "VirtualMachineInstance b", `the first one is "pull"`} {
		require.Contains(t, stderr, part)
	}
	for text, want := range map[string]string{
		"hello\n":                         "line 1: this is no manifest",
		"kind: A\n---\n# note\nhello\n":   "line 4: this is no manifest",
		"---\nkind: A\n---\nkind: B\n\tc": "line 4: found a tab",
		"kind: A\nkind: A\n":              "line 2: \"kind\" is already defined",
	} {
		require.NoError(t, os.WriteFile(bad, []byte(text), 0o600))
		fails(t, nil, exitFailed, want, "hook", "--check", bad)
	}
	require.NoError(t, os.WriteFile(bad, []byte("kind: Secret"), 0o600))
	fails(t, nil, exitFailed, "no machine of KubeVirt", "hook", "--check", bad)
	fails(t, nil, exitUsage, "name a manifest", "hook")
}
