package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
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
		"a failed go command counts once": {
			stream: `{"Action":"command-failed"}` + "\n" + `{"Action":"command-failed"}` + "\n",
			want:   []string{"\nfailed go test, without a failed test\n"},
			totals: "0 passed, 1 failed, 0 skipped",
		},
		"a program that failed is named": {
			stream:  `{"Action":"program-failed","Package":"build.sh x","Output":"testdata/log"}` + "\n",
			want:    []string{"FAIL  build.sh x\n", "line 2\n", "line 21\nfailed build.sh x\n"},
			wantNot: []string{"line 1\n"},
			totals:  "0 passed, 0 failed, 0 skipped",
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

// TestStreams: several streams are read at the same time, and count together. Two may test the same
// package: the end of it in one of them is not its end in the other.
func TestStreams(t *testing.T) {
	dir := t.TempDir()
	one, two := filepath.Join(dir, "one"), filepath.Join(dir, "two")
	for _, path := range []string{one, two} {
		require.NoError(t, unix.Mkfifo(path, 0o600))
	}
	var out bytes.Buffer
	sum := newSummary(&out)
	ended := testtool.Go(func() error { return readAll(sum, []string{one, two}) })
	write := func(f *os.File, text string) {
		_, err := f.WriteString(text)
		require.NoError(t, err)
	}
	first, err := os.OpenFile(one, os.O_WRONLY, 0)
	require.NoError(t, err)
	second, err := os.OpenFile(two, os.O_WRONLY, 0)
	require.NoError(t, err)
	write(second, `{"Action":"output","Package":"p","Test":"TestB","Output":"in the second\n"}`+"\n")
	write(first, `{"Action":"fail","Package":"p","Test":"TestA"}
{"Action":"fail","Package":"p"}
`)
	require.NoError(t, first.Close())
	write(second, `{"Action":"pass","Package":"p","Test":"TestB"}
{"Action":"pass","Package":"p"}
`)
	require.NoError(t, second.Close())
	require.NoError(t, <-ended)
	sum.finish()
	require.NotContains(t, out.String(), "in the second")
	const end = "failed p TestA\n1 passed, 1 failed, 0 skipped\n"
	require.True(t, strings.HasSuffix(out.String(), end), out.String())
	require.ErrorIs(t, readAll(sum, []string{filepath.Join(dir, "missing")}), os.ErrNotExist)
}
