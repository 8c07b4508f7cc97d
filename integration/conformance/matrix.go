package conformance

import (
	"fmt"
	"slices"
	"strings"
)

// Configuration is a way to offer a LUN. No single one can pass every test: some want a medium that
// can be removed, others one that cannot be written.
type Configuration struct {
	Name string
	// Only has the tests or suites to run; nil: all.
	Only []string
	// Except has tests that this LUN cannot pass by what it is, each with its reason.
	Except map[string]string
}

// Selected picks the tests of this configuration, in the suite's order. Names of tests that the
// suite does not have are an error, so that the lists do not outlive what they are for.
func (c *Configuration) Selected(all []string) ([]string, error) {
	known := func(name string) bool {
		return slices.ContainsFunc(all, func(test string) bool { return covers(name, test) })
	}
	for _, name := range c.Only {
		if !known(name) {
			return nil, fmt.Errorf("%s: the suite has no %s", c.Name, name)
		}
	}
	for name := range c.Except {
		if !known(name) {
			return nil, fmt.Errorf("%s: the suite has no %s", c.Name, name)
		}
	}
	var selected []string
	for _, test := range all {
		if _, excepted := c.Except[test]; excepted {
			continue
		}
		if c.Only == nil || slices.ContainsFunc(c.Only,
			func(name string) bool { return covers(name, test) }) {
			selected = append(selected, test)
		}
	}
	return selected, nil
}

// covers says whether name is the test or its suite.
func covers(name, test string) bool { return name == test || strings.HasPrefix(test, name+".") }

// Merge makes one result of each test of the runs, in the order of all, which also has tests that
// no run had. A test that failed or hung in one configuration has failed, whatever it did in the
// others; else it has passed if it passed in one of them.
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
