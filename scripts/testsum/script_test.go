package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// fakeGo is a go command whose packages and tests are made up. A test run notes its packages, and
// waits until the build beside it has begun.
const fakeGo = `#!/bin/bash
case $1 in
list)
	case ${*: -1} in
	./...) printf 'kubevirt.io/disk%s\n' /chap /integration /integration/kubernetes /target ;;
	*) printf 'kubevirt.io/disk%s\n' /integration /integration/bench /integration/kubernetes ;;
	esac
	;;
build) cp "$TESTSUM" bin/testsum ;;
test)
	echo "$*" >>tests
	until [ -e building ]; do sleep 0.01; done
	echo '{"Action":"pass","Package":"p","Test":"TestA"}'
	touch tested
	;;
esac
`

// command builds this command.
func command(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "testsum")
	made, err := exec.Command("go", "build", "-o", path, ".").CombinedOutput()
	require.NoError(t, err, "%s", made)
	return path
}

// script runs scripts/test.sh in a tree of its own. Its builds wait until tests have run beside
// them.
func script(t *testing.T, testsum, build, install, beside string, args ...string) (out,
	tests string, err error) {
	t.Helper()
	dir := t.TempDir()
	text, err := os.ReadFile("../test.sh")
	require.NoError(t, err)
	for name, content := range map[string]string{"scripts/test.sh": string(text), "go": fakeGo,
		"build": "#!/bin/bash\necho builds $1\ntouch building\n" +
			"until [ -e tested ]; do sleep 0.01; done\n" + build,
		"build2": "#!/bin/bash\n[ -e installed ] || exit 1\necho builds the rest\n" +
			"until [ -e tested ]; do sleep 0.01; done\necho also\n" + build,
		"install": "#!/bin/bash\ntouch installed\n" + install,
		"beside":  "#!/bin/bash\n" + beside} {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(content), 0o755))
	}
	cmd := exec.Command(filepath.Join(dir, "scripts/test.sh"), args...)
	cmd.Env = append(os.Environ(), "GO="+dir+"/go", "TESTSUM="+testsum, "BUILD=./build what",
		"BUILD_INSTALLED=./build2", "INSTALL=./install", "BESIDE=./beside",
		"CC=bash", "KUBEVIRT_DISK_REQUIRE_TOOLS=")
	printed, err := cmd.CombinedOutput()
	noted, _ := os.ReadFile(filepath.Join(dir, "tests")) // none: no test ran
	return string(printed), string(noted), err
}

// TestScript: tests run while what the last of them need is built, and what fails beside them fails
// all of it, with its reason near the end.
func TestScript(t *testing.T) {
	testsum := command(t)
	out, tests, err := script(t, testsum, "", "", "echo all fine")
	require.NoError(t, err, out)
	require.Contains(t, out, "ok    ./build what")
	require.Contains(t, out, "ok    ./build2")
	require.Contains(t, out, "all fine\nok    ./beside")
	// Two tests run once more without the race detector.
	require.True(t, strings.HasSuffix(out, "2 passed, 0 failed, 0 skipped\n"), out)
	order := strings.Fields(strings.Split(tests, "\n")[0])
	at := func(name string) int {
		for i, arg := range order {
			if arg == "./"+name || arg == "kubevirt.io/disk/"+name {
				return i
			}
		}
		require.Fail(t, "not tested", "%s in %s", name, order)
		return 0
	}
	require.Less(t, at("chap"), at("integration"))
	require.Less(t, at("target"), at("integration"))
	require.Less(t, at("integration/bench"), at("integration/kubernetes/..."))
	require.Contains(t, tests, "-race")

	out, _, err = script(t, testsum, "for i in {1..99}; do echo line $i; done; exit 1", "", "")
	require.Error(t, err)
	for _, command := range []string{"./build what", "./build2"} {
		require.Contains(t, out, "line 99\nFAIL  "+command+", its last lines are above\n")
	}
	require.True(t, strings.HasSuffix(out, "above\n2 passed, 0 failed, 0 skipped\n"), out)
	require.NotContains(t, out, "line 79\n")

	out, _, err = script(t, testsum, "", "", "echo a finding; exit 1")
	require.Error(t, err)
	require.Contains(t, out, "a finding\nFAIL  ./beside")
	require.Contains(t, out, "FAIL  beside the tests, see above: ./beside\n2 passed,")

	out, tests, err = script(t, testsum, "", "echo no network; exit 1", "")
	require.Error(t, err)
	require.Contains(t, out, "no network")
	require.Empty(t, tests)
}

// TestScriptOfPackages: named packages are tested, and no others.
func TestScriptOfPackages(t *testing.T) {
	t.Setenv("RACE", "no")
	out, tests, err := script(t, command(t), "", "", "", "./chap", "./disk")
	require.NoError(t, err, out)
	require.True(t, strings.HasSuffix(tests, " ./chap ./disk\n"), tests)
	require.NotContains(t, tests, "-race")
	require.True(t, strings.HasSuffix(out, "1 passed, 0 failed, 0 skipped\n"), out)
}

// TestLimit: a package that hangs ends soon, and the report has the stack of what hangs. Those of
// integration have more time.
func TestLimit(t *testing.T) {
	limit, err := filepath.Abs("../limit.sh")
	require.NoError(t, err)
	dir := t.TempDir()
	for name, content := range map[string]string{
		"go.mod": "module m\n\ngo 1.24\n",
		"unit/x_test.go": "package unit\n\nimport \"testing\"\n\n" +
			"func TestHangs(t *testing.T) { var c chan int; <-c }\n",
		"integration/x_test.go": "package integration\n\n" +
			"import (\n\t\"flag\"\n\t\"testing\"\n)\n\n" +
			"func TestLimit(t *testing.T) { t.Skip(flag.Lookup(\"test.timeout\").Value) }\n",
	} {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
	}
	cmd := exec.Command("go", "test", "-json", "-timeout", "60m", "-exec", "'"+limit+"' 1s",
		"./...")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOFLAGS=")
	events, err := cmd.Output()
	require.Error(t, err)
	var out strings.Builder
	sum := newSummary(&out)
	require.NoError(t, sum.read(bytes.NewReader(events)))
	sum.finish()
	require.Contains(t, out.String(), "panic: test timed out after 1s")
	require.Contains(t, out.String(), "m/unit.TestHangs(")
	require.Contains(t, out.String(), "failed m/unit TestHangs, did not end\n")
	require.Contains(t, out.String(), "skipped m/integration TestLimit: x_test.go:8: 1h0m0s\n")
}
