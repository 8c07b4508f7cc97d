package main

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSummary(t *testing.T) {
	tests := map[string]struct {
		stream  string
		want    []string // in the output
		wantNot []string
		totals  string
	}{
		"passing tests stay silent": {
			stream: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"chatter\n"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"pass","Package":"p","Elapsed":1.5}
`,
			want: []string{"ok    p 1.5s"}, wantNot: []string{"chatter"},
			totals: "1 passed, 0 failed, 0 skipped",
		},
		"a failure shows its output": {
			stream: `{"Action":"output","Package":"p","Test":"TestA","Output":"want 1, got 2\n"}
{"Action":"fail","Package":"p","Test":"TestA"}
{"Action":"fail","Package":"p"}
`,
			want: []string{"--- FAILED p TestA", "want 1, got 2", "FAIL  p",
				"\nfailed p TestA\n0 passed"},
			totals: "0 passed, 1 failed, 0 skipped",
		},
		"a skip shows its reason": {
			stream: `{"Action":"output","Package":"p","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:9: needs iscsi-ls\n"}
{"Action":"output","Package":"p","Test":"TestA","Output":"--- SKIP: TestA (0.00s)\n"}
{"Action":"skip","Package":"p","Test":"TestA"}
`,
			want:   []string{"skipped p TestA: a_test.go:9: needs iscsi-ls"},
			totals: "0 passed, 0 failed, 1 skipped",
		},
		"a package without tests is no skip": {
			stream: `{"Action":"skip","Package":"p"}` + "\n",
			totals: "0 passed, 0 failed, 0 skipped",
		},
		"a build failure counts": {
			stream: `{"ImportPath":"p","Action":"build-output","Output":"p.go:1: undefined: x\n"}
{"ImportPath":"p","Action":"build-fail"}
{"Action":"output","Package":"p","Output":"FAIL\tp [build failed]\n"}
{"Action":"fail","Package":"p","FailedBuild":"p"}
`,
			want:   []string{"undefined: x", "--- FAILED p", "\nfailed p, outside of a test\n"},
			totals: "0 passed, 1 failed, 0 skipped",
		},
		"a test that took its process down is named": {
			stream: `{"Action":"output","Package":"p","Test":"TestA","Output":"about to die\n"}
{"Action":"output","Package":"p","Output":"exit status 2\n"}
{"Action":"fail","Package":"p"}
`,
			want:   []string{"--- did not end: p TestA", "about to die", "exit status 2"},
			totals: "0 passed, 1 failed, 0 skipped",
		},
		"a test that did not end is named and shows the stacks, though another one failed": {
			stream: `{"Action":"fail","Package":"p","Test":"TestA"}
{"Action":"run","Package":"p","Test":"TestB"}
{"Action":"output","Package":"p","Test":"TestB","Output":"=== RUN   TestB\n"}
{"Action":"output","Package":"p","Test":"TestB","Output":"=== PAUSE TestB\n"}
{"Action":"run","Package":"p","Test":"TestC"}
{"Action":"output","Package":"p","Test":"TestC","Output":"panic: test timed out after 20m0s\n"}
{"Action":"output","Package":"p","Test":"TestC","Output":"goroutine 7 [sleep]:\n"}
{"Action":"fail","Package":"p"}
`,
			want: []string{"--- did not end: p TestC\npanic: test timed out", "goroutine 7 [sleep]",
				"\nfailed p TestA\nfailed p TestC, did not end\n"},
			wantNot: []string{"PAUSE"},
			totals:  "0 passed, 1 failed, 0 skipped",
		},
		"what is no event passes through": {
			stream: "go: cannot find main module\n", want: []string{"go: cannot find main module"},
			totals: "0 passed, 0 failed, 0 skipped",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			sum := newSummary(&out)
			require.NoError(t, sum.read(strings.NewReader(tt.stream)))
			sum.finish()
			for _, want := range tt.want {
				require.Contains(t, out.String(), want)
			}
			for _, not := range tt.wantNot {
				require.NotContains(t, out.String(), not)
			}
			require.True(t, strings.HasSuffix(out.String(), tt.totals+"\n"), "last line of %q",
				out.String())
		})
	}
}

// failedTest are the events of a package with one failed test and one that passed.
func failedTest(pkg string) string {
	return strings.ReplaceAll(`{"Action":"run","Package":"PKG","Test":"TestA"}
{"Action":"run","Package":"PKG","Test":"TestA/sub"}
{"Action":"fail","Package":"PKG","Test":"TestA/sub"}
{"Action":"fail","Package":"PKG","Test":"TestA"}
{"Action":"run","Package":"PKG","Test":"TestB"}
{"Action":"pass","Package":"PKG","Test":"TestB"}
{"Action":"fail","Package":"PKG"}
{"Action":"command-failed"}
`, "PKG", pkg)
}

// TestAgain: a few failed tests of real parts run again. A failure stays one if tests never ran, if
// there was a data race, or in another package.
func TestAgain(t *testing.T) {
	const (
		pass = `{"Action":"pass","Package":"p","Test":"TestA"}` + "\n"
		fail = `{"Action":"fail","Package":"p","Test":"TestA"}` + "\n"
	)
	one := failedTest(againBelow)
	tests := map[string]struct {
		stream string
		rounds []string // output of each further run of a test
		totals string
	}{
		"it was the load": {one, []string{pass, pass, pass}, "3 passed, 0 failed, 0 skipped"},
		"it fails again":  {one, []string{pass, pass, fail}, "1 passed, 2 failed, 0 skipped"},
		"nothing ran":     {one, []string{""}, "1 passed, 2 failed, 0 skipped"},
		"two tests": {one + failedTest(againBelow+"/kubernetes"),
			[]string{pass, pass, pass, pass, pass, pass}, "6 passed, 0 failed, 0 skipped"},
		"three tests": {one + failedTest(againBelow+"/a") + failedTest(againBelow+"/b"), nil,
			"3 passed, 6 failed, 0 skipped"},
		"another package": {failedTest("kubevirt.io/disk/target"), nil,
			"1 passed, 2 failed, 0 skipped"},
		"another one beside it": {one + failedTest("kubevirt.io/disk/target"), nil,
			"2 passed, 4 failed, 0 skipped"},
		"a data race": {`{"Action":"output","Package":"p","Output":"WARNING: DATA RACE\n"}` + "\n" +
			one, nil, "1 passed, 2 failed, 0 skipped"},
		"a panic": {`{"Action":"output","Package":"p","Output":"exit status 2\n"}` + "\n" +
			one, nil, "1 passed, 2 failed, 0 skipped"},
		"a test did not end": {`{"Action":"run","Package":"p","Test":"TestC"}` + "\n" + one, nil,
			"1 passed, 2 failed, 0 skipped"},
		"the go command fails": {`{"Action":"command-failed"}` + "\n", nil,
			"0 passed, 1 failed, 0 skipped"},
	}
	for what, tt := range tests {
		t.Run(what, func(t *testing.T) {
			var out bytes.Buffer
			sum := newSummary(&out)
			require.NoError(t, sum.read(strings.NewReader(tt.stream)))
			rounds := tt.rounds
			sum.again(func(n name, w io.Writer) error {
				require.Equal(t, "TestA", n.Test)
				require.NotEmpty(t, rounds)
				_, err := io.WriteString(w, rounds[0])
				rounds = rounds[1:]
				return err
			})
			require.Empty(t, rounds)
			sum.finish()
			require.True(t, strings.HasSuffix(out.String(), tt.totals+"\n"), out.String())
			require.Equal(t, strings.Contains(tt.totals, " 0 failed"),
				strings.Contains(out.String(), "unstable "+againBelow+" TestA"), out.String())
			require.NotEqual(t, strings.Contains(tt.totals, " 0 failed"),
				strings.Contains(out.String(), "\nfailed "), out.String())
		})
	}
}
