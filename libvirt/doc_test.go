package libvirt

import (
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The documentation is all that the author of a handler has: every name in it must exist.
func TestDocumentationNamesWhatThereIs(t *testing.T) {
	pkg := documented(t, ".")
	for place, text := range pkg.texts {
		for _, name := range mixedCase.FindAllString(text, -1) {
			require.True(t, pkg.names[name] || slices.Contains(foreign, name),
				"%s names %s, which does not exist", place, name)
		}
	}
}

// mixedCase matches words that can only be Go names: FieldError, or Field in a path such as
// LUN.Number. Ordinary words with two capitals, such as QEMU or CHAP, have no lower-case letter
// before one.
var mixedCase = regexp.MustCompile(`\b[A-Z][A-Za-z0-9]*[a-z0-9][A-Z][A-Za-z0-9]*\b`)

// foreign are names that look like Go names but are not ours.
var foreign = []string{"KubeVirt"}

// TestHandlersPageNamesWhatThereIs parses the Go code of the page, and looks for names in its text.
func TestHandlersPageNamesWhatThereIs(t *testing.T) {
	page, err := os.ReadFile("../docs/handlers.md")
	require.NoError(t, err)
	pkgs := map[string]documentation{"libvirt": documented(t, "."),
		"client": documented(t, "../volume/client"), "api": documented(t, "../volume/api")}
	require.Contains(t, pkgs["libvirt"].names, "LUN.Portals")
	for _, name := range mixedCase.FindAllString(string(page), -1) {
		known := slices.Contains(foreign, name)
		for _, pkg := range pkgs {
			known = known || pkg.names[name]
		}
		require.True(t, known, "the page names %s, which does not exist", name)
	}
	code := goCode(string(page))
	require.NotEmpty(t, code, "the page must show how to use the library")
	found := map[string]int{}
	exists := func(pkg, name string) {
		if d, ours := pkgs[pkg]; ours {
			require.True(t, d.names[name], "there is no %s.%s", pkg, name)
			found[pkg]++
		}
	}
	for _, block := range code {
		body, err := parser.ParseFile(token.NewFileSet(), "handlers.md",
			"package p\nfunc _() {\n"+block+"\n}\n", 0)
		require.NoError(t, err, block)
		ast.Inspect(body, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok {
					exists(x.Name, n.Sel.Name)
				}
			case *ast.CompositeLit:
				if of, ok := n.Type.(*ast.SelectorExpr); ok {
					for _, element := range n.Elts {
						field, ok := element.(*ast.KeyValueExpr)
						if !ok {
							continue
						}
						exists(of.X.(*ast.Ident).Name,
							of.Sel.Name+"."+field.Key.(*ast.Ident).Name)
					}
				}
			}
			return true
		})
	}
	require.Greater(t, found["libvirt"], 5)
	require.Greater(t, found["client"], 3)
	require.Greater(t, found["api"], 2)
}

// TestHandlersPageImports runs the page's commands for importing the module, in a handler's module.
// It needs no network: everything else is in the module cache of this machine.
func TestHandlersPageImports(t *testing.T) {
	page, err := os.ReadFile("../docs/handlers.md")
	require.NoError(t, err)
	root, err := filepath.Abs("..")
	require.NoError(t, err)
	cache, err := exec.Command("go", "env", "GOMODCACHE").Output()
	require.NoError(t, err)
	var recipes []string
	for _, block := range blocks(string(page)) {
		if strings.Contains(block, "go mod edit -require") || strings.Contains(block, "go get ") {
			recipes = append(recipes, block)
		}
	}
	require.Len(t, recipes, 2, "a checkout, and a proxy")
	for _, recipe := range recipes {
		if _, err := os.Stat(filepath.Join(root, ".git")); err != nil && strings.Contains(recipe,
			"git ") {
			t.Skip("these sources are not in a git repository")
		}
		place := t.TempDir()
		require.NoError(t, os.Symlink(root, filepath.Join(place, "kubevirt-disk")))
		handler := filepath.Join(place, "handler")
		require.NoError(t, os.Mkdir(handler, 0o755))
		for name, text := range map[string]string{
			"go.mod": "module example.com/handler\n\ngo 1.26\n", "main.go": handlerSource} {
			require.NoError(t, os.WriteFile(filepath.Join(handler, name), []byte(text), 0o644))
		}
		cmd := exec.Command("bash", "-euc", recipe+"\ngo run .")
		cmd.Dir = handler
		cmd.Env = append(os.Environ(), "GOENV="+place+"/env", "GOWORK=off", "GOFLAGS=-modcacherw",
			"GOSUMDB=off", "PROXY="+place+"/proxy")
		downloaded := "file://" + strings.TrimSpace(string(cache)) + "/cache/download"
		if strings.Contains(recipe, "GOPROXY") {
			// With its own module cache, so that the module comes from the proxy. The proxy is set
			// in the file, which the recipe changes.
			cmd.Env = append(cmd.Env, "GOPROXY=", "GOMODCACHE="+place+"/cache")
			require.NoError(t, os.WriteFile(place+"/env", []byte("GOPROXY="+downloaded+"\n"),
				0o644))
		} else {
			cmd.Env = append(cmd.Env, "GOPROXY="+downloaded)
		}
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s\n%s", recipe, out)
		require.Contains(t, string(out), "LUN.Number: 0 is not a disk")
	}
}

const handlerSource = `package main

import (
	"fmt"

	"kubevirt.io/disk/libvirt"
)

func main() {
	_, err := libvirt.Disk(libvirt.LUN{Portals: []libvirt.Portal{{Host: "10.0.0.5"}}}, libvirt.Device{})
	fmt.Println(err)
}
`

// goCode returns the blocks of a page that are Go code.
func goCode(page string) []string {
	return slices.DeleteFunc(blocks(page),
		func(block string) bool { return !strings.Contains(block, "err := ") })
}

// blocks returns the indented blocks of a page.
func blocks(page string) (all []string) {
	block := ""
	for line := range strings.Lines(page + "\n.\n") {
		switch code, ok := strings.CutPrefix(line, "    "); {
		case ok:
			block += code
		case strings.TrimSpace(line) != "" && block != "":
			all = append(all, block)
			block = ""
		}
	}
	return all
}

// documentation is the package's documentation.
type documentation struct {
	texts map[string]string // by the thing that they document
	// The names that exist: X, and T.X for a field or method, which X alone stands for, too.
	names map[string]bool
}

// documented parses the package in a directory.
func documented(t *testing.T, dir string) documentation {
	t.Helper()
	files := token.NewFileSet()
	var parsed []*ast.File
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".go") && !strings.HasSuffix(e.Name(), "_test.go") {
			path := filepath.Join(dir, e.Name())
			f, err := parser.ParseFile(files, path, nil, parser.ParseComments)
			require.NoError(t, err)
			parsed = append(parsed, f)
		}
	}
	pkg, err := doc.NewFromFiles(files, parsed, "kubevirt.io/disk/"+filepath.Base(dir))
	require.NoError(t, err)
	d := documentation{texts: map[string]string{"the package": pkg.Doc}, names: map[string]bool{}}
	add := func(of string, names []string, text string) {
		for _, name := range names {
			d.names[name] = true
			if of != "" {
				d.names[of+"."+name] = true
			}
		}
		d.texts[strings.Join(append([]string{of}, names...), " ")] = text
	}
	values := func(all []*doc.Value) {
		for _, v := range all {
			add("", v.Names, v.Doc)
		}
	}
	functions := func(of string, all []*doc.Func) {
		for _, f := range all {
			add(of, []string{f.Name}, f.Doc)
		}
	}
	values(pkg.Consts)
	values(pkg.Vars)
	functions("", pkg.Funcs)
	for _, typ := range pkg.Types {
		add("", []string{typ.Name}, typ.Doc)
		values(typ.Consts)
		values(typ.Vars)
		functions("", typ.Funcs)
		functions(typ.Name, typ.Methods)
		ast.Inspect(typ.Decl, func(n ast.Node) bool {
			if field, ok := n.(*ast.Field); ok {
				for _, name := range field.Names {
					add(typ.Name, []string{name.Name}, field.Doc.Text()+field.Comment.Text())
				}
			}
			return true
		})
	}
	return d
}
