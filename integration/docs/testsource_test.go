package docs

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

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
