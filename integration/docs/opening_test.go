package docs

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestNothingWaitsForAPipe: opening a path that somebody else has filled waits for ever if a named
// pipe is there, and no signal ends that. So nothing of the product opens a path for reading but by
// internal/osfile, which looks first.
func TestNothingWaitsForAPipe(t *testing.T) {
	// These read what the kernel, a package of Debian, a machine of ours or the caller has, or know
	// pipes.
	except := []string{"internal/osfile", "internal/testtool", "adapter/init", "adapter/initrd",
		"cmd/kubevirt-disk/main.go", "internal/cli/settings/file.go",
		"pages/hosts.go", "volume/client"}
	waits := []string{"os.Open", "os.ReadFile", "os.OpenRoot", "os.OpenInRoot", "os.DirFS"}
	root := "../.."
	files := token.NewFileSet()
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		name, _ := filepath.Rel(root, path)
		switch {
		case err != nil:
			return err
		case d.IsDir() && (strings.HasPrefix(d.Name(), ".") && name != "." ||
			slices.Contains([]string{"integration", "kubernetes/integration", "examples", "scripts",
				"testdata"}, name) ||
			slices.Contains(except, name)):
			return filepath.SkipDir
		case !strings.HasSuffix(name, ".go"), strings.HasSuffix(name, "_test.go"),
			strings.Contains(name, "test/"), slices.Contains(except, name):
			return nil
		}
		file, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) == 0 {
				return true
			}
			of, ok := call.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			by, _ := of.X.(*ast.Ident)
			inRoot := of.Sel.Name == "Open" && len(call.Args) == 1 && by == nil &&
				strings.HasSuffix(textOf(files, of.X), "root")
			if by != nil {
				inRoot = of.Sel.Name == "Open" && len(call.Args) == 1 && by.Name == "root"
			}
			known := strings.HasPrefix(textOf(files, call.Args[0]), `"/`) ||
				strings.Contains(textOf(files, call.Args[0]), `"/proc/`) ||
				strings.Contains(textOf(files, call.Args[0]), `"/sys/`)
			if by != nil && slices.Contains(waits, by.Name+"."+of.Sel.Name) && !known || inRoot {
				t.Errorf("%s: %s waits if a named pipe is there: use internal/osfile",
					files.Position(call.Pos()), textOf(files, call))
			}
			return true
		})
		return nil
	}))
}

// textOf is the source of a node.
func textOf(files *token.FileSet, n ast.Node) string {
	var out bytes.Buffer
	_ = printer.Fprint(&out, files, n) // it was parsed from text
	return out.String()
}
