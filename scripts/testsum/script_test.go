package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// fakeGo is a go command whose packages and tests are made up. A test run notes its packages, and
// waits until the build beside it has begun.
const fakeGo = `#!/bin/bash
case $1 in
list)
	[[ $2 == -f ]] || exit 0
	for package in "${@:4}"; do
		case $package in
		./...)
			case $PWD in
			*/kubernetes) printf "$PWD/%s\n" claim integration/node ;;
			*) printf "$PWD/%s\n" chap target libvirt integration/{nbd,kubevirt} ;;
			esac
			;;
		./integration/...) printf "$PWD/%s\n" integration/node ;;
		esac
	done
	;;
build) cp "$TESTSUM" bin/testsum ;;
test)
	root=${PWD%/kubernetes}
	echo "$* cgo=$CGO_ENABLED${KUBEVIRT_DISK_GENERATION:+ with $KUBEVIRT_DISK_GENERATION}" >>"$root/tests"
	until [ -e "$root/building" ]; do sleep 0.01; done
	echo '{"Action":"pass","Package":"p","Test":"TestA"}'
	echo '{"Action":"pass","Package":"p"}'
	touch "$root/tested"
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
func script(t *testing.T, testsum, parts, build, install, beside string, args ...string) (out,
	tests string, err error) {
	t.Helper()
	dir := t.TempDir()
	text, err := os.ReadFile("../test.sh")
	require.NoError(t, err)
	for name, content := range map[string]string{"scripts/test.sh": string(text), "go": fakeGo,
		"scripts/race-packages":    "target\n",
		"scripts/build-clients.sh": "#!/bin/bash\necho /clients\n",
		"scripts/generations":      "# releases\nlater\n",
		"kubernetes/go.mod":        "module m\n",
		"target/a_test.go":         "//go:build !race\n\nfunc TestPlain(t *testing.T) {}\n",
		"libvirt/a_test.go":        "//go:build !race\n\nfunc TestOther(t *testing.T) {}\n",
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
		"BUILD_INSTALLED=./build2;./build2 again", "PARTS="+parts, "INSTALL=./install",
		"BESIDE=./beside", "CC=bash", "KUBEVIRT_DISK_REQUIRE_TOOLS=")
	printed, err := cmd.CombinedOutput()
	noted, _ := os.ReadFile(filepath.Join(dir, "tests")) // none: no test ran
	return string(printed), string(noted), err
}

// TestScript: tests run while what the last of them need is built, and what fails beside them fails
// all of it, with its reason near the end.
func TestScript(t *testing.T) {
	testsum := command(t)
	out, tests, err := script(t, testsum, "main cluster", "", "", "echo all fine")
	require.NoError(t, err, out)
	for _, command := range []string{"./build what", "./build2", "./build2 again"} {
		require.Contains(t, out, "ok    "+command+"\n")
	}
	require.Contains(t, out, "all fine\nok    ./beside\n")
	require.True(t, strings.HasSuffix(out, "6 passed, 0 failed, 0 skipped\n"), out)
	runs := strings.Split(strings.TrimSpace(tests), "\n")
	require.Len(t, runs, 6)
	ran := func(pattern string) {
		t.Helper()
		require.Equal(t, 1, len(slices.DeleteFunc(slices.Clone(runs), func(run string) bool {
			return !regexp.MustCompile(pattern).MatchString(run)
		})), "%s in:\n%s", pattern, tests)
	}
	ran(`-race \./target cgo=1$`)
	ran(`-run \^\(TestPlain\)\$ \./target cgo=0$`)
	ran(`-p \d+ (\./(libvirt|chap|integration/nbd) ){3}cgo=0$`)
	ran(`-p \d+ \./claim \./integration/node cgo=0$`)
	ran(`-p \d+ \./integration/kubevirt cgo=0$`)
	ran(`-p \d+ \./integration/iscsi \./integration/nbd cgo=0 with /clients/later$`)
	require.Contains(t, out, "ok    p with later")

	out, _, err = script(t, testsum, "", "for i in {1..99}; do echo line $i; done; exit 1", "", "")
	require.Error(t, err)
	for _, command := range []string{"./build what", "./build2", "./build2 again"} {
		require.Contains(t, out, "FAIL  "+command+"\n")
		require.Contains(t, out, "\nfailed "+command+"\n")
	}
	require.Contains(t, out, "line 99\n")
	require.NotContains(t, out, "line 79\n")
	require.True(t, strings.HasSuffix(out, "\n4 passed, 0 failed, 0 skipped\n"), out)

	out, _, err = script(t, testsum, "", "", "", "echo a finding; exit 1")
	require.Error(t, err)
	require.Contains(t, out, "a finding\nFAIL  ./beside\n")
	require.Contains(t, out, "\nfailed ./beside\n4 passed,")

	out, tests, err = script(t, testsum, "", "", "echo no network; exit 1", "")
	require.Error(t, err)
	require.Contains(t, out, "no network")
	require.Empty(t, tests)
}

// TestScriptOfPackages: named packages are tested, and no others. RACE chooses the detector.
func TestScriptOfPackages(t *testing.T) {
	testsum := command(t)
	for race, parts := range map[string]string{"": "", "no": "cluster"} {
		t.Setenv("RACE", race)
		out, tests, err := script(t, testsum, parts, "", "", "", "./chap", "./disk")
		require.NoError(t, err, out)
		require.Contains(t, tests, " ./chap ./disk cgo=")
		require.Equal(t, race != "no", strings.Contains(tests, "-race"))
		require.True(t, strings.HasSuffix(out, "1 passed, 0 failed, 0 skipped\n"), out)
	}
	t.Setenv("RACE", "yes")
	out, tests, err := script(t, testsum, "main cluster", "", "", "")
	require.NoError(t, err, out)
	require.Equal(t, 4, strings.Count(tests, "-race "), tests)
	require.Regexp(t, `-run \^\((TestOther|TestPlain|\|){3}\)\$ (\./(target|libvirt) ){2}cgo=0\n`, tests)
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
