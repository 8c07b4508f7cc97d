package docs

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// maxFileLines is the largest number of lines of a Go file. With short files, a folder listing is a
// table of contents.
const maxFileLines = 500

// outsideLibraries are the packages that own their process: commands and the tests' programs. The
// rules below apply to all others.
var outsideLibraries = []string{"cmd/...", "scripts/...", "integration/...", "examples/..."}

// TestLibrarySource checks that the packages below cmd behave like libraries: they never end the
// process, do nothing at import, and have no logger of their own.
func TestLibrarySource(t *testing.T) {
	checked := 0
	for _, pkg := range listPackages(t) {
		if coversAny(outsideLibraries, pkg.ImportPath) {
			continue
		}
		for _, name := range pkg.GoFiles {
			checked++
			fset := token.NewFileSet()
			file := testtool.Must(parser.ParseFile(fset, filepath.Join(pkg.Dir, name), nil,
				parser.SkipObjectResolution|parser.ParseComments))(t)
			if ast.IsGenerated(file) {
				continue
			}
			for _, violation := range sourceViolations(fset, file) {
				t.Errorf("%s/%s: %s", pkg.ImportPath, name, violation)
			}
		}
	}
	require.NotZero(t, checked)
}

// TestFileLength checks the length of every Go file that people write, tests included.
func TestFileLength(t *testing.T) {
	for _, pkg := range listPackages(t) {
		for _, path := range testtool.Must(filepath.Glob(filepath.Join(pkg.Dir, "*.go")))(t) {
			fset := token.NewFileSet()
			file := testtool.Must(parser.ParseFile(fset, path, nil,
				parser.SkipObjectResolution|parser.ParseComments))(t)
			if ast.IsGenerated(file) {
				continue
			}
			if lines := fset.File(file.FileStart).LineCount(); lines > maxFileLines {
				t.Errorf("%s/%s has %d lines, more than %d: split it by subject",
					pkg.ImportPath, filepath.Base(path), lines, maxFileLines)
			}
		}
	}
}

// TestServersRefuseForeignPages: whoever makes an HTTP server puts http.CrossOriginProtection in
// front of it. Otherwise any page can change what is served through a browser that reaches it.
func TestServersRefuseForeignPages(t *testing.T) {
	servers := 0
	for _, pkg := range listPackages(t) {
		if coversAny([]string{"scripts/...", "integration/...", "examples/..."}, pkg.ImportPath) {
			continue
		}
		for _, name := range pkg.GoFiles {
			text := testtool.Must(os.ReadFile(filepath.Join(pkg.Dir, name)))(t)
			if !httpServer.Match(text) {
				continue
			}
			servers++
			if !bytes.Contains(text, []byte("CrossOriginProtection")) {
				t.Errorf("%s/%s makes an HTTP server without http.CrossOriginProtection",
					pkg.ImportPath, name)
			}
		}
	}
	require.NotZero(t, servers)
}

// TestOnePlaceReadsYAML: what others write is read where it is bounded.
func TestOnePlaceReadsYAML(t *testing.T) {
	readers := 0
	for _, pkg := range listPackages(t) {
		if coversAny([]string{"scripts/...", "integration/..."}, pkg.ImportPath) {
			continue
		}
		for _, name := range pkg.GoFiles {
			text := testtool.Must(os.ReadFile(filepath.Join(pkg.Dir, name)))(t)
			if !yamlReader.Match(text) {
				continue
			}
			if readers++; pkg.ImportPath != "internal/plainyaml" {
				t.Errorf("%s/%s reads YAML: package internal/plainyaml does, within bounds",
					pkg.ImportPath, name)
			}
		}
	}
	require.NotZero(t, readers)
}

// yamlReader finds what reads YAML.
var yamlReader = regexp.MustCompile(`yaml\.(New(Strict)?Decoder|Unmarshal(Strict)?|YAMLToJSON)\w*\(`)

// httpServer finds what makes a server of net/http.
var httpServer = regexp.MustCompile(`http\.Server\{|http\.(ListenAnd)?Serve(TLS)?\(`)

func TestSourceRulesBite(t *testing.T) {
	const source = `package p

import (
	"log"
	"os"

	"go.uber.org/zap"
)

var logger = zap.NewNop()
var other *zap.Logger
var table = []int{1}

func init() {}

func f() {
	log.Println("x")
	zap.L().Info("x")
	os.Exit(1)
	panic("x")
}

type t struct{}

func (t) init() { defer func() { panic(recover()) }() }
`
	fset := token.NewFileSet()
	file := testtool.Must(parser.ParseFile(fset, "p.go", source, parser.SkipObjectResolution))(t)
	require.Equal(t, []string{
		"line 10: a logger as package variable: take it in the options",
		"line 11: a logger as package variable: take it in the options",
		"line 14: an init function: do it in a constructor",
		"line 17: log.Println: a library has no logger of its own",
		"line 18: zap.L: a library has no logger of its own",
		"line 19: os.Exit: return an error, the command decides",
		"line 20: panic: return an error",
	}, sourceViolations(fset, file))
}

// abortsRequest reports whether a panic is the one by which net/http ends a request without an
// answer. There is no other way.
func abortsRequest(call *ast.CallExpr) bool {
	with, ok := call.Args[0].(*ast.SelectorExpr)
	return ok && with.Sel.Name == "ErrAbortHandler"
}

// sourceViolations returns one sentence for each violation in a file.
func sourceViolations(fset *token.FileSet, file *ast.File) []string {
	var found []string
	report := func(node ast.Node, format string, args ...any) {
		found = append(found, fmt.Sprintf("line %d: ", fset.Position(node.Pos()).Line)+
			fmt.Sprintf(format, args...))
	}
	for _, decl := range file.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			if decl.Recv == nil && decl.Name.Name == "init" {
				report(decl, "an init function: do it in a constructor")
			}
		case *ast.GenDecl:
			for _, spec := range decl.Specs {
				if value, ok := spec.(*ast.ValueSpec); ok && decl.Tok == token.VAR &&
					mentionsLogger(value) {
					report(value, "a logger as package variable: take it in the options")
				}
			}
		}
	}
	// A function that recovers passes on what is not for it.
	passed := map[ast.Node]bool{}
	ast.Inspect(file, func(node ast.Node) bool {
		if function, ok := node.(*ast.FuncLit); ok {
			calls := map[string][]ast.Node{}
			ast.Inspect(function.Body, func(node ast.Node) bool {
				if call, ok := node.(*ast.CallExpr); ok {
					if name, ok := call.Fun.(*ast.Ident); ok {
						calls[name.Name] = append(calls[name.Name], call)
					}
				}
				return true
			})
			for _, call := range calls["panic"] {
				passed[call] = len(calls["recover"]) > 0
			}
		}
		call, ok := node.(*ast.CallExpr)
		if !ok {
			return true
		}
		switch fun := call.Fun.(type) {
		case *ast.Ident:
			if fun.Name == "panic" && !passed[call] && !abortsRequest(call) {
				report(call, "panic: return an error")
			}
		case *ast.SelectorExpr:
			pkg, ok := fun.X.(*ast.Ident)
			if !ok {
				return true
			}
			switch name := pkg.Name + "." + fun.Sel.Name; {
			case name == "os.Exit":
				report(call, "os.Exit: return an error, the command decides")
			case pkg.Name == "log" && packageLevelLog(fun.Sel.Name), name == "zap.L",
				name == "zap.S", name == "zap.ReplaceGlobals":
				report(call, "%s: a library has no logger of its own", name)
			}
		}
		return true
	})
	return found
}

// packageLevelLog reports whether a function of package log writes to its global logger. A method
// of a variable named log does not.
func packageLevelLog(function string) bool {
	for _, prefix := range []string{"Print", "Fatal", "Panic"} {
		rest, ok := strings.CutPrefix(function, prefix)
		if ok && (rest == "f" || rest == "ln" || rest == "" && prefix == "Print") {
			return true
		}
	}
	return false
}

// mentionsLogger reports whether the type or the value of a variable is a zap, log or slog logger.
func mentionsLogger(spec *ast.ValueSpec) bool {
	found := false
	ast.Inspect(spec, func(node ast.Node) bool {
		if _, isFunc := node.(*ast.FuncLit); isFunc {
			return false
		}
		if sel, ok := node.(*ast.SelectorExpr); ok {
			if pkg, ok := sel.X.(*ast.Ident); ok {
				switch pkg.Name + "." + sel.Sel.Name {
				case "zap.Logger", "zap.SugaredLogger", "zap.New", "zap.NewNop", "zap.L", "zap.S",
					"log.Logger", "log.New", "slog.Logger", "slog.New", "slog.Default":
					found = true
				}
			}
		}
		return true
	})
	return found
}

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

// TestSourceRulesOfTests: tests wait in one way, which is patient, tells what was there instead,
// and asks in the goroutine of the test.
func TestSourceRulesOfTests(t *testing.T) {
	checked := 0
	for _, pkg := range listPackages(t) {
		for _, path := range testtool.Must(filepath.Glob(filepath.Join(pkg.Dir, "*_test.go")))(t) {
			checked++
			fset := token.NewFileSet()
			file := testtool.Must(parser.ParseFile(fset, path, nil, parser.SkipObjectResolution))(t)
			for _, violation := range waitingViolations(fset, file) {
				t.Errorf("%s/%s: %s", pkg.ImportPath, filepath.Base(path), violation)
			}
		}
	}
	require.NotZero(t, checked)
}

func TestSourceRulesOfTestsBite(t *testing.T) {
	const source = `package p

func f() {
	require.Eventually(t, met, time.Minute, time.Second)
	assert.EventuallyWithT(t, met, time.Minute, time.Second)
	testtool.Eventually(t, met)
	for end := time.Now().Add(time.Minute); !met(); time.Sleep(time.Second) {
		require.True(t, time.Now().Before(end))
	}
	for !met() && time.Since(began) < time.Minute {
		if other {
			time.Sleep(time.Second)
		}
	}
	for range 10 { // slow, and not waiting
		time.Sleep(time.Second)
	}
	for range 10 {
		go func() { time.Sleep(time.Second) }()
		began = time.Now()
	}
}
`
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, "p_test.go", source, parser.SkipObjectResolution)
	require.NoError(t, err)
	require.Equal(t, []string{
		"line 4: require.Eventually: use testtool.Eventually",
		"line 5: assert.EventuallyWithT: use testtool.Eventually",
		"line 7: a loop that waits until a time: use testtool.Eventually",
		"line 10: a loop that waits until a time: use testtool.Eventually",
	}, waitingViolations(fset, file))
}

// waitingViolations returns one sentence for each place where a test waits in its own way.
func waitingViolations(fset *token.FileSet, file *ast.File) []string {
	var found []string
	report := func(node ast.Node, format string, args ...any) {
		found = append(found, fmt.Sprintf("line %d: ", fset.Position(node.Pos()).Line)+
			fmt.Sprintf(format, args...)+": use testtool.Eventually")
	}
	ast.Inspect(file, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.ForStmt:
			if calls := callsOf(node); calls["time.Sleep"] &&
				(calls["time.Now"] || calls["time.Since"]) {
				report(node, "a loop that waits until a time")
			}
		case *ast.CallExpr:
			name := calledName(node)
			if pkg, function, _ := strings.Cut(name, "."); (pkg == "require" || pkg == "assert") &&
				strings.HasPrefix(function, "Eventually") {
				report(node, "%s", name)
			}
		}
		return true
	})
	return found
}

// callsOf returns which functions of packages a statement calls itself, not in functions that it
// defines.
func callsOf(statement ast.Node) map[string]bool {
	calls := map[string]bool{}
	ast.Inspect(statement, func(node ast.Node) bool {
		if call, ok := node.(*ast.CallExpr); ok {
			calls[calledName(call)] = true
		}
		_, function := node.(*ast.FuncLit)
		return !function
	})
	return calls
}

// calledName returns the name of a called function, like "time.Now", or nothing.
func calledName(call *ast.CallExpr) string {
	if selector, ok := call.Fun.(*ast.SelectorExpr); ok {
		if pkg, ok := selector.X.(*ast.Ident); ok {
			return pkg.Name + "." + selector.Sel.Name
		}
	}
	return ""
}
