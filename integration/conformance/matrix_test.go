package conformance

import (
	"testing"

	"github.com/stretchr/testify/require"
)

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
