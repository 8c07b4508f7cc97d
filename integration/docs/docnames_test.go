package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

// codeSpan is a span of code in a paragraph.
var codeSpan = regexp.MustCompile("`([^`\n]+)`")

// goName is what looks like a Go name: a path of identifiers, or one with a capital inside.
var goName = regexp.MustCompile(`^[A-Za-z]\w*(\.[A-Za-z]\w*)*(\(\))?$`)

// goFile is what looks like a file of ours.
var goFile = regexp.MustCompile(`^[\w/-]+\.go$`)

// declared returns every name that Go code of ours declares, and the names of its packages.
func declared(t *testing.T) (names, packages map[string]bool) {
	t.Helper()
	names, packages = map[string]bool{}, map[string]bool{}
	for _, file := range trackedFiles(t, "*.go") {
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join("..", "..", file), nil,
			parser.SkipObjectResolution)
		require.NoError(t, err)
		packages[strings.TrimSuffix(parsed.Name.Name, "_test")] = true
		ast.Inspect(parsed, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				names[n.Name.Name] = true
			case *ast.TypeSpec:
				names[n.Name.Name] = true
			case *ast.ValueSpec:
				for _, name := range n.Names {
					names[name.Name] = true
				}
			case *ast.Field:
				for _, name := range n.Names {
					names[name.Name] = true
				}
			}
			return true
		})
	}
	return names, packages
}

// trackedFiles are the files of the repository that match, relative to its root.
func trackedFiles(t *testing.T, patterns ...string) []string {
	t.Helper()
	rig.Need(t, "git")
	args := append([]string{"ls-files", "--cached", "--others", "--exclude-standard", "--"},
		patterns...)
	cmd := exec.Command("git", args...)
	cmd.Dir = "../.."
	out := testtool.Must(cmd.Output())(t)
	return slices.DeleteFunc(strings.Fields(string(out)), func(file string) bool {
		_, err := os.Lstat(filepath.Join("..", "..", file))
		return err != nil // removed, and not yet committed
	})
}

// TestNamesInDocs looks up the Go names and files that the documents write in code font, so that a
// document does not tell of code that is gone. The pages for those who work on the code may write
// any name; elsewhere, only tests and names with one of our packages before them are taken for Go.
func TestNamesInDocs(t *testing.T) {
	t.Parallel()
	names, packages := declared(t)
	files := map[string]bool{}
	for _, file := range trackedFiles(t, "*.go") {
		for file := file; file != ""; _, file, _ = strings.Cut(file, "/") {
			files[file] = true
		}
	}
	looked := 0
	for _, page := range trackedFiles(t, "*.md") {
		ours := strings.HasPrefix(page, "docs/decisions") || page == "docs/architecture.md" ||
			page == "docs/testing.md"
		for _, span := range codeSpan.FindAllStringSubmatch(rig.ReadFile(t, "../../"+page), -1) {
			name := span[1]
			if goFile.MatchString(name) {
				looked++
				assert.True(t, files[name], "%s names %s, which is no file", page, name)
				continue
			}
			if !goName.MatchString(name) || strings.HasPrefix(name, "zstd.") { // a library
				continue
			}
			parts := strings.Split(strings.TrimSuffix(name, "()"), ".")
			if packages[parts[0]] && len(parts) > 1 {
				parts = parts[1:]
				if !unicode.IsUpper(rune(parts[0][0])) && !ours {
					continue // a file, or a key of a chart
				}
			} else if !strings.HasPrefix(name, "Test") &&
				(!ours || !slices.ContainsFunc(parts, mixed)) {
				continue
			}
			looked++
			for _, part := range parts {
				assert.True(t, names[part], "%s writes `%s`, and nothing is called %s", page, name,
					part)
			}
		}
	}
	require.Greater(t, looked, 50, "the documents have names of code")
}

// mixed reports whether a word has a capital after a small letter, as few words but Go's have.
func mixed(word string) bool {
	small := false
	for _, r := range word {
		if small && unicode.IsUpper(r) {
			return true
		}
		small = small || unicode.IsLower(r)
	}
	return false
}

// needed is a claim that a version is needed.
var needed = regexp.MustCompile(
	`\b(Go|Kubernetes|KubeVirt)\b[^.|]{0,20}\b(1\.\d+)( or| and)? (later|newer|above|higher)`)

// TestVersionsInOnePlace: docs/start.md says which versions are needed, and no other page does, so
// that there are never two answers. What Go builds it is also in go.mod, and what compiles the
// sources may be said where they are built.
func TestVersionsInOnePlace(t *testing.T) {
	const place = "docs/start.md"
	mod := rig.ReadFile(t, "../../go.mod")
	start := rig.ReadFile(t, "../../"+place)
	goVersion := regexp.MustCompile(`(?m)^go (1\.\d+)`).FindStringSubmatch(mod)[1]
	require.Contains(t, start, "| Go "+goVersion+" or later |")
	require.Contains(t, start, "| Kubernetes | ")
	require.Contains(t, start, "| KubeVirt | ")
	looked := 0
	for _, page := range trackedFiles(t, "*.md") {
		if page == place || strings.HasPrefix(page, "docs/decisions") ||
			strings.HasPrefix(page, "integration/evidence") || page == "CHANGELOG.md" {
			continue // what was so at some time
		}
		text := strings.Join(strings.Fields(rig.ReadFile(t, "../../"+page)), " ")
		for _, claim := range needed.FindAllStringSubmatch(text, -1) {
			looked++
			require.Equal(t, "Go "+goVersion, claim[1]+" "+claim[2],
				"%s: %q belongs into %s: link to it", page, claim[0], place)
		}
	}
	require.Positive(t, looked)
}

func TestVersionsInOnePlaceBites(t *testing.T) {
	for text, want := range map[string]bool{
		"Kubernetes 1.36 and later":           true,
		"Kubernetes has to be 1.24 or later.": true,
		"KubeVirt 1.7 or newer":               true,
		"Go 1.26 or later":                    true,
		"Kubernetes is later than we thought": false,
		"KubeVirt 1.9 has plugins":            false,
	} {
		require.Equal(t, want, needed.MatchString(text), text)
	}
}

// TestExamplesAsWritten: what no other test can run is complete.
func TestExamplesAsWritten(t *testing.T) {
	examples := os.DirFS("../../examples")
	require.NoError(t, fs.WalkDir(examples, ".", func(name string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		text := string(testtool.Must(fs.ReadFile(examples, name))(t))
		if strings.Contains(text, "chapAuthDiscovery: true") {
			var beside strings.Builder
			for _, other := range testtool.Must(fs.Glob(examples, path.Dir(name)+"/*.*"))(t) {
				beside.Write(testtool.Must(fs.ReadFile(examples, other))(t))
			}
			assert.Contains(t, beside.String(), "discovery.sendtargets.auth.password=",
				"%s: the kubelet asks for the target with a credential, too", name)
		}
		if strings.HasSuffix(name, ".sh") && strings.Contains(text, "pipefail") {
			assert.NotRegexp(t, `\| *grep -\w*q`, text, "%s: grep -q ends before the command "+
				"that it reads from, which then fails of SIGPIPE", name)
		}
		return nil
	}))
}
