package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// notRaced are directories of the main part whose code starts goroutines, and which only
// `make test-nightly` tests with the race detector.
var notRaced = map[string]string{
	"adapter":            "reads one image in order",
	"cmd/kubevirt-disk":  "waits for what it starts; the packages that it calls are raced",
	"disk/image":         "tests of disk/instance use its images from several goroutines",
	"disk/qcow2":         "so they do with its disks; its own compute for a minute",
	"registry":           "computes for minutes; most of what is concurrent is in those below it",
	"registry/signature": "has a counter only because an upload wants one",
}

// TestRacePackages: `make test` runs the tests of a package with the race detector if its own code
// starts goroutines, or guards what several may use.
func TestRacePackages(t *testing.T) {
	text, err := os.ReadFile("../race-packages")
	require.NoError(t, err)
	listed := strings.Fields(string(text))
	require.True(t, slices.IsSorted(listed))
	concurrent := concurrentIn(t, "../..")
	for _, dir := range listed {
		require.Contains(t, concurrent, dir, "listed, and nothing in it is concurrent")
	}
	for _, dir := range concurrent {
		require.NotEqual(t, notRaced[dir] != "", slices.Contains(listed, dir),
			"%s is concurrent: list it in scripts/race-packages, or say here why not", dir)
	}
}

// concurrentIn returns the directories with tests in which code that is no test starts goroutines,
// or uses package sync or sync/atomic beyond pools and what is computed once.
func concurrentIn(t *testing.T, root string) (dirs []string) {
	t.Helper()
	concurrent, tested := map[string]bool{}, map[string]bool{}
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			switch name {
			case ".git", "bin", "cache", "kubernetes", "integration", "scripts":
				return fs.SkipDir
			}
			return nil
		}
		dir := filepath.Dir(name)
		switch {
		case strings.HasSuffix(name, "_test.go"):
			tested[dir] = true
		case strings.HasSuffix(name, ".go") && !concurrent[dir]:
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
			if err != nil {
				return err
			}
			concurrent[dir] = isConcurrent(file)
		}
		return nil
	})
	require.NoError(t, err)
	for dir, is := range concurrent {
		if is && tested[dir] {
			dirs = append(dirs, dir)
		}
	}
	slices.Sort(dirs)
	return dirs
}

func isConcurrent(file *ast.File) (is bool) {
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			is = true
		case *ast.SelectorExpr:
			if pkg, ok := n.X.(*ast.Ident); ok && (pkg.Name == "sync" || pkg.Name == "atomic") {
				is = is || !slices.Contains([]string{"Pool", "OnceValue", "OnceValues", "OnceFunc",
					"Once"}, n.Sel.Name)
			}
		}
		return !is
	})
	return is
}
