package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// checkTree is a module in which others import leaf: with code, with a test, and over a package
// between them. The integration is left out, because it takes long.
var checkTree = map[string]string{
	"go.mod":                "module kubevirt.io/disk\n\ngo 1.24\n",
	"leaf/leaf.go":          "package leaf\n",
	"leaf/testdata/x/y":     "data\n",
	"middle/middle.go":      "package middle\n\nimport _ \"kubevirt.io/disk/leaf\"\n",
	"top/top.go":            "package top\n",
	"top/top_test.go":       "package top\n\nimport _ \"kubevirt.io/disk/middle\"\n",
	"alone/alone.go":        "package alone\n",
	"registry/x.go":         "package registry\n\nimport _ \"kubevirt.io/disk/leaf\"\n",
	"integration/x.go":      "package integration\n",
	"integration/x_test.go": "package integration_test\n\nimport _ \"kubevirt.io/disk/leaf\"\n",
	"README.md":             "read me\n",
	"kubernetes/go.mod": "module kubevirt.io/disk/kubernetes\n\ngo 1.24\n\n" +
		"require kubevirt.io/disk v0.0.0\n\nreplace kubevirt.io/disk => ../\n",
	"kubernetes/api/x.go": "package api\n\nimport _ \"kubevirt.io/disk/leaf\"\n",
	"kubernetes/pod/x.go": "package pod\n\nimport _ \"kubevirt.io/disk/kubernetes/api\"\n",
	"scripts/lint.sh":     "#!/bin/bash\necho linted\n",
	"scripts/test.sh":     "#!/bin/bash\n$BESIDE\necho $MODULE race=$RACE tested \"$@\"\n",
}

// TestCheck: the packages that changed are tested, and those that import them, even if only a test
// does. What takes long is left out by name.
func TestCheck(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(content), 0o755))
	}
	run := func(name string, args ...string) string {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOFLAGS=", "BASE=", "GIT_CONFIG_GLOBAL=/dev/null")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		return string(out)
	}
	commit := func() {
		t.Helper()
		run("git", "add", "-A")
		run("git", "-c", "user.name=x", "-c", "user.email=x@localhost", "commit", "-qm", "x",
			"--allow-empty")
	}
	for name, content := range checkTree {
		write(name, content)
	}
	text, err := os.ReadFile("../check.sh")
	require.NoError(t, err)
	write("scripts/check.sh", string(text))
	run("git", "init", "-q")
	commit()

	below := []string{"leaf", "middle", "registry", "top"}
	tests := map[string]struct {
		changed      string
		tested, left []string
	}{
		"a leaf":               {"leaf/leaf.go", below, []string{"integration"}},
		"its data":             {"leaf/testdata/x/y", below, []string{"integration"}},
		"a new file":           {"middle/new.go", []string{"middle", "top"}, nil},
		"one of several":       {"registry/x.go", []string{"registry"}, nil},
		"what nobody imports":  {"alone/alone.go", []string{"alone"}, nil},
		"no package":           {"README.md", nil, nil},
		"only the integration": {"integration/x.go", nil, []string{"integration"}},
		"the other module": {"kubernetes/api/x.go",
			[]string{"kubernetes/api", "kubernetes/pod"}, nil},
	}
	for what, tt := range tests {
		t.Run(what, func(t *testing.T) {
			commit() // the last commit is not that of another subtest
			before := checkTree[tt.changed]
			if before == "" {
				before = "package " + filepath.Dir(tt.changed) + "\n"
			}
			write(tt.changed, before+"\n// changed\n")
			for _, when := range []string{"uncommitted", "committed"} {
				out := run(filepath.Join(dir, "scripts/check.sh"))
				require.Contains(t, out, "linted\n", when)
				if tt.tested == nil {
					require.NotContains(t, out, "tested", when)
				} else {
					module := "."
					if strings.HasPrefix(tt.changed, "kubernetes/") {
						module = "kubernetes"
					}
					require.Contains(t, out, module+" race=no tested -short kubevirt.io/disk/"+
						strings.Join(tt.tested, " kubevirt.io/disk/")+"\n", when)
				}
				for _, left := range tt.left {
					require.Regexp(t, "left out, because they take long:.* "+left+"\\b", out, when)
				}
				if when == "uncommitted" {
					commit()
				}
			}
		})
	}
}
