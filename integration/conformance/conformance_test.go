package conformance

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// transcript has the suite's output in every shape: messages before the verdict, on the line of the
// test and below it, assertions after it, and a process that ended in the middle.
const transcript = `
     CUnit - A unit testing framework for C - Version 2.1-3

Suite: CompareAndWrite
  Test: Simple ...    [SKIPPED] COMPAREANDWRITE is not implemented.
    [SKIPPED] COMPAREANDWRITE is not implemented.
passed
Suite: OrWrite
  Test: Simple ...passed
  Test: BeyondEol ...    [FAILED] ORWRITE failed with wrong sense.

    [FAILED] again
FAILED
    1. test_orwrite_beyond_eol.c:43  - CU_ASSERT_EQUAL(_r,0)
    2. test_orwrite_beyond_eol.c:44  - CU_ASSERT_EQUAL(_r,0)
  Test: Assert ...FAILED
    1. test_x.c:7  - CU_ASSERT(x)
  Test: Control-D_SENSE ...    [WARNING] BUSY_TIMEOUT_PERIOD is undefined.
passed
  Test: Partly ...    [SKIPPED] no second path
FAILED
    1. test_y.c:7  - CU_ASSERT(y)
  Test: Tidied ...passed    [FAILED] PRIN command: failed with sense.
    [FAILED] PRIN command: failed with sense.
  Test: SkippedTidied ...    [SKIPPED] not there
passed    [FAILED] PRIN command: failed with sense.
  Test: Endless ...    Sending 300 commands
`

func TestParse(t *testing.T) {
	require.Equal(t, []Result{
		{"CompareAndWrite.Simple", Skipped, "COMPAREANDWRITE is not implemented."},
		{"OrWrite.Simple", Passed, ""},
		{"OrWrite.BeyondEol", Failed, "ORWRITE failed with wrong sense."},
		{"OrWrite.Assert", Failed, "1. test_x.c:7  - CU_ASSERT(x)"},
		{"OrWrite.Control-D_SENSE", Passed, ""},
		{"OrWrite.Partly", Failed, "no second path"},
		{"OrWrite.Tidied", Passed, ""},
		{"OrWrite.SkippedTidied", Skipped, "not there"},
		{"OrWrite.Endless", Hung, ""},
	}, parse(transcript))

	complete := parse(transcript + "passed\n\nRun Summary:    Type  Total    Ran Passed Failed " +
		"Inactive\n")
	require.Equal(t, Result{"OrWrite.Endless", Passed, ""}, complete[len(complete)-1])
	require.Empty(t, parse("Failed to connect to SCSI device 0\n"))
}

func TestReadExpectations(t *testing.T) {
	got := testtool.Must(ReadExpectations(strings.NewReader(`
# comment
failed OrWrite.Simple: not built: comes later
skipped NoMedia.NoMediaSBC Inquiry.EVPD: needs a removable LUN
hung@b A.B: waits for nothing
failed@a A.B: is wrong
`), "b"))(t)
	require.Equal(t, map[string]Expectation{
		"OrWrite.Simple":     {Failed, "not built: comes later"},
		"NoMedia.NoMediaSBC": {Skipped, "needs a removable LUN"},
		"Inquiry.EVPD":       {Skipped, "needs a removable LUN"},
		"A.B":                {Hung, "waits for nothing"},
	}, got)

	for text, want := range map[string]string{
		"failed A.B":                    "A.B has no reason",
		"failed A.B:  ":                 "A.B has no reason",
		"broken A.B: x":                 `"broken" is neither`,
		"failed: x":                     "names no test",
		"failed A: x":                   `"A" is not a test name`,
		"failed A.B: x\nskipped A.B: y": "line 2: A.B is listed twice",
	} {
		_, err := ReadExpectations(strings.NewReader(text), "b")
		require.ErrorContains(t, err, want, text)
	}
}

func TestCompare(t *testing.T) {
	expected := map[string]Expectation{
		"A.Fails":         {Failed, "r"},
		"A.Skips":         {Skipped, "r"},
		"A.FailsNoMore":   {Failed, "r"},
		"A.SkipsNow":      {Failed, "r"},
		"A.FailsNow":      {Skipped, "r"},
		"A.Hangs":         {Failed, "r"},
		"A.HangsAsListed": {Hung, "r"},
		"A.HangsNoMore":   {Hung, "r"},
		"A.Gone":          {Failed, "r"},
	}
	results := []Result{
		{"A.Passes", Passed, ""},
		{"A.Fails", Failed, "d"},
		{"A.Skips", Skipped, "d"},
		{"A.FailsNoMore", Passed, ""},
		{"A.SkipsNow", Skipped, "d"},
		{"A.FailsNow", Failed, "d"},
		{"A.Hangs", Hung, "d"},
		{"A.HangsAsListed", Hung, "d"},
		{"A.HangsNoMore", Failed, "d"},
		{"A.New", Failed, "d"},
		{"A.NewSkip", Skipped, "d"},
	}
	require.Equal(t, []string{
		`A.FailsNoMore passed now: remove its line, "failed A.FailsNoMore: r"`,
		`A.SkipsNow skipped now: remove its line, "failed A.SkipsNow: r"`,
		"A.FailsNow failed but is expected as skipped: d",
		"A.Hangs hung but is expected as failed: d",
		`A.HangsNoMore failed now: remove its line, "hung A.HangsNoMore: r"`,
		"A.New failed and is not listed: d",
		"A.NewSkip skipped and is not listed: d",
		"A.Gone is listed, but the suite has no such test: remove its line",
	}, Compare(results, expected))
	require.Empty(t, Compare(results[:1], nil))
	require.Equal(t, "2 passed, 4 failed, 3 skipped, 2 hung", Count(results).String())
	require.Equal(t, "outcome 9", Outcome(9).String())
}

func TestRunNeedsTheTool(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := Run(context.Background(), Options{URLs: []string{"iscsi://127.0.0.1:1/x/1"}})
	require.ErrorContains(t, err, Tool)
}

func TestSelected(t *testing.T) {
	all := []string{"Read10.Simple", "Read10.Async", "Read16.Simple", "Sanitize.Reset"}
	for _, c := range []struct {
		name          string
		configuration Configuration
		want          []string
		err           string
	}{
		{"all", Configuration{}, all, ""},
		{"a suite", Configuration{Only: []string{"Read10"}}, all[:2], ""},
		{"a suite is no prefix", Configuration{Only: []string{"Read1"}}, nil, "no Read1"},
		{"tests", Configuration{Only: []string{"Sanitize.Reset", "Read10.Async"}},
			[]string{all[1], all[3]}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := c.configuration.Selected(all)
			if c.err != "" {
				require.ErrorContains(t, err, c.err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, c.want, got)
		})
	}
}

func TestMerge(t *testing.T) {
	all := []string{"A.Both", "A.OneSkips", "A.BothSkip", "A.OneFails", "A.OneHangs",
		"A.SkipsAndFails", "A.Nowhere", "A.OnlySecond"}
	require.Equal(t, []Result{
		{"A.Both", Passed, ""},
		{"A.OneSkips", Passed, ""},
		{"A.BothSkip", Skipped, "second: d2"},
		{"A.OneFails", Failed, "first: d"},
		{"A.OneHangs", Hung, "second: d"},
		{"A.SkipsAndFails", Failed, "second: d"},
		{"A.Nowhere", Skipped, "not run in any configuration"},
		{"A.OnlySecond", Passed, ""},
	}, Merge(all, map[string][]Result{
		"first": {
			{"A.Both", Passed, ""}, {"A.OneSkips", Skipped, "d"}, {"A.BothSkip", Skipped, "d1"},
			{"A.OneFails", Failed, "d"},
			{"A.OneHangs", Passed, ""}, {"A.SkipsAndFails", Skipped, "d"},
		},
		"second": {
			{"A.Both", Passed, ""}, {"A.OneSkips", Passed, ""}, {"A.BothSkip", Skipped, "d2"},
			{"A.OneFails", Passed, ""},
			{"A.OneHangs", Hung, "d"}, {"A.SkipsAndFails", Failed, "d"},
			{"A.OnlySecond", Passed, ""},
		},
	}))
}
