package main

import (
	"bytes"
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
			want:   []string{"--- FAILED p TestA", "want 1, got 2", "FAIL  p"},
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
			want: []string{"undefined: x", "--- FAILED p"}, totals: "0 passed, 1 failed, 0 skipped",
		},
		"a test that took its process down is named": {
			stream: `{"Action":"output","Package":"p","Test":"TestA","Output":"about to die\n"}
{"Action":"output","Package":"p","Output":"exit status 2\n"}
{"Action":"fail","Package":"p"}
`,
			want:   []string{"--- did not end: p TestA", "about to die", "exit status 2"},
			totals: "0 passed, 1 failed, 0 skipped",
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
