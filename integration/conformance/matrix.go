package conformance

import (
	"fmt"
	"slices"
	"strings"
)

// Configuration is one way to offer a LUN. No single way passes every test: some tests want a
// write-protected medium.
type Configuration struct {
	Name string
	// Only names the tests or suites to run; nil: all.
	Only []string
}

// Selected picks the tests of this configuration, in the suite's order. It fails if a list names a
// test that the suite does not have, so that the lists stay up to date.
func (c *Configuration) Selected(all []string) ([]string, error) {
	known := func(name string) bool {
		return slices.ContainsFunc(all, func(test string) bool { return covers(name, test) })
	}
	for _, name := range c.Only {
		if !known(name) {
			return nil, fmt.Errorf("%s: the suite has no %s", c.Name, name)
		}
	}
	var selected []string
	for _, test := range all {
		if c.Only == nil || slices.ContainsFunc(c.Only,
			func(name string) bool { return covers(name, test) }) {
			selected = append(selected, test)
		}
	}
	return selected, nil
}

// covers reports whether name is the test or its suite.
func covers(name, test string) bool { return name == test || strings.HasPrefix(test, name+".") }

// Merge makes one result for each test, in the order of all, which includes tests that no run had.
// A test has failed if it failed or hung in any configuration; otherwise it has passed if it passed
// in any.
func Merge(all []string, runs map[string][]Result) []Result {
	merged := make([]Result, len(all))
	at := make(map[string]int, len(all))
	for i, test := range all {
		merged[i] = Result{Name: test, Outcome: Skipped, Detail: "not run in any configuration"}
		at[test] = i
	}
	configurations := make([]string, 0, len(runs))
	for name := range runs {
		configurations = append(configurations, name)
	}
	slices.Sort(configurations)
	for _, configuration := range configurations {
		for _, r := range runs[configuration] {
			m := &merged[at[r.Name]]
			switch {
			case m.Outcome == Failed, m.Outcome == Hung,
				m.Outcome == Passed && r.Outcome == Skipped:
			case r.Outcome == Passed:
				m.Outcome, m.Detail = Passed, ""
			default:
				m.Outcome, m.Detail = r.Outcome, configuration+": "+r.Detail
			}
		}
	}
	return merged
}
