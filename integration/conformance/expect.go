package conformance

import (
	"bufio"
	"fmt"
	"io"
	"strings"
)

// Expectation is a test that is known not to pass.
type Expectation struct {
	Outcome Outcome // Failed, Skipped or Hung
	Reason  string
}

// ReadExpectations reads lines of the form "failed Suite.Test: reason". Instead of failed, the
// first word may be skipped, or hung: the suite itself hangs. With @ and a word behind it, the line
// is about the generation of that name, and ignored for others. A line may name several tests that
// share the reason. Empty lines and lines that start with # are ignored. Every line needs a reason.
func ReadExpectations(r io.Reader, generation string) (map[string]Expectation, error) {
	expected := make(map[string]Expectation)
	lines := bufio.NewScanner(r)
	for number := 1; lines.Scan(); number++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		head, reason, _ := strings.Cut(line, ":")
		outcome, names, _ := strings.Cut(head, " ")
		outcome, only, limited := strings.Cut(outcome, "@")
		e := Expectation{Reason: strings.TrimSpace(reason)}
		switch outcome {
		case Failed.String():
			e.Outcome = Failed
		case Skipped.String():
			e.Outcome = Skipped
		case Hung.String():
			e.Outcome = Hung
		default:
			return nil, fmt.Errorf("line %d: %q is neither failed, skipped nor hung", number,
				outcome)
		}
		if e.Reason == "" {
			return nil, fmt.Errorf("line %d: %s has no reason", number, names)
		}
		if strings.TrimSpace(names) == "" {
			return nil, fmt.Errorf("line %d names no test", number)
		}
		for name := range strings.FieldsSeq(names) {
			if strings.Count(name, ".") != 1 {
				return nil, fmt.Errorf("line %d: %q is not a test name of the form Suite.Test",
					number, name)
			}
			if limited && only != generation {
				continue
			}
			if _, twice := expected[name]; twice {
				return nil, fmt.Errorf("line %d: %s is listed twice", number, name)
			}
			expected[name] = e
		}
	}
	return expected, lines.Err()
}

// Compare returns one sentence for each difference that must not be: a test that is worse than
// listed, or a listed one that has become better, so that the list can only get shorter.
func Compare(results []Result, expected map[string]Expectation) []string {
	var problems []string
	seen := make(map[string]bool, len(results))
	for _, r := range results {
		seen[r.Name] = true
		e, listed := expected[r.Name]
		switch {
		case !listed && r.Outcome != Passed:
			problems = append(problems,
				fmt.Sprintf("%s %s and is not listed: %s", r.Name, r.Outcome, r.Detail))
		case !listed:
		case r.Outcome == Hung && e.Outcome != Hung,
			r.Outcome == Failed && e.Outcome == Skipped:
			problems = append(problems,
				fmt.Sprintf("%s %s but is expected as %s: %s", r.Name, r.Outcome, e.Outcome,
					r.Detail))
		case r.Outcome != e.Outcome:
			problems = append(problems,
				fmt.Sprintf("%s %s now: remove its line, %q", r.Name, r.Outcome,
					e.Outcome.String()+" "+r.Name+": "+e.Reason))
		}
	}
	for name := range expected {
		if !seen[name] {
			problems = append(problems, fmt.Sprintf("%s is listed, but the suite has no such "+
				"test: remove its line", name))
		}
	}
	return problems
}

// Totals counts the outcomes.
type Totals struct{ Passed, Failed, Skipped, Hung int }

// Count counts the outcomes of a run.
func Count(results []Result) Totals {
	var t Totals
	for _, r := range results {
		switch r.Outcome {
		case Passed:
			t.Passed++
		case Failed:
			t.Failed++
		case Skipped:
			t.Skipped++
		case Hung:
			t.Hung++
		}
	}
	return t
}

func (t Totals) String() string {
	return fmt.Sprintf("%d passed, %d failed, %d skipped, %d hung", t.Passed, t.Failed, t.Skipped,
		t.Hung)
}
