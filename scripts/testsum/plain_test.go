package main

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPlainTests: each test that scripts/test.sh names, to run without the race detector, exists,
// and only in packages that it names, too. In any other package it would run nowhere.
func TestPlainTests(t *testing.T) {
	text, err := os.ReadFile("../test.sh")
	require.NoError(t, err)
	const last = "\nplainly="
	begin := strings.Index(string(text), "\ntests=(")
	require.Positive(t, begin)
	lists, _, found := strings.Cut(string(text)[begin:], last)
	require.True(t, found)
	out, err := exec.Command("bash", "-c",
		lists+"\necho \"${tests[*]}\"; echo \"${in[*]}\"").Output()
	require.NoError(t, err)
	tests, packages, found := strings.Cut(string(out), "\n")
	require.True(t, found)

	named := map[string]bool{}
	for _, dir := range strings.Fields(packages) {
		require.False(t, named[dir], "%s is there twice", dir)
		named[dir] = true
	}
	where := functions(t, "../..")
	for _, test := range strings.Fields(tests) {
		require.NotEmpty(t, where[test], test)
		for _, dir := range where[test] {
			require.True(t, named["./"+dir], "%s is in %s, too", test, dir)
		}
	}
}

var testFunction = regexp.MustCompile(`(?m)^func (Test\w+)\(`)

// functions returns in which directories below root there are tests of a name.
func functions(t *testing.T, root string) map[string][]string {
	t.Helper()
	where := map[string][]string{}
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (entry.Name() == "cache" || entry.Name() == ".git") &&
			filepath.Dir(path) == root:
			return fs.SkipDir
		case !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		for _, match := range testFunction.FindAllStringSubmatch(string(text), -1) {
			where[match[1]] = append(where[match[1]], filepath.ToSlash(dir))
		}
		return err
	})
	require.NoError(t, err)
	return where
}
