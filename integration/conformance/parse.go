// Package conformance runs libiscsi's conformance suite, iscsi-test-cu (Debian package
// libiscsi-bin), against a target. It runs one process per test, so that a hang or a lost
// connection costs only that test. It compares the outcome with a list of expected failures, which
// may only get shorter.
package conformance

import (
	"fmt"
	"strings"
)

// Outcome is how one test ended.
type Outcome int

// The outcomes. The suite counts a skipped test as passed; we do not.
const (
	Passed Outcome = iota
	Failed
	Skipped
	Hung // it did not end in time, or died without a verdict
)

func (o Outcome) String() string {
	switch o {
	case Passed:
		return "passed"
	case Failed:
		return "failed"
	case Skipped:
		return "skipped"
	case Hung:
		return "hung"
	}
	return fmt.Sprintf("outcome %d", int(o))
}

// Result is the outcome of one test.
type Result struct {
	Name    string // "Suite.Test"
	Outcome Outcome
	Detail  string // the suite's first message about a failure or a skip
}

// parse reads the verbose output of a run. A test is Skipped if a message says so, whatever the
// verdict. A test without a verdict, because its process died or was killed, is Hung.
func parse(output string) []Result {
	var results []Result
	var suite string
	var current *Result
	verdict := false
	end := func() {
		if current != nil && !verdict {
			current.Outcome = Hung
		}
		current = nil
	}
	for line := range strings.Lines(output) {
		line = strings.TrimRight(line, "\r\n")
		if name, ok := strings.CutPrefix(line, "Suite: "); ok {
			end()
			suite = strings.TrimSpace(name)
			continue
		}
		if strings.HasPrefix(line, "Run Summary:") {
			end()
			continue
		}
		if rest, ok := strings.CutPrefix(line, "  Test: "); ok {
			end()
			name, message, _ := strings.Cut(rest, " ...")
			results = append(results, Result{Name: suite + "." + name})
			current, verdict = &results[len(results)-1], false
			line = message
		}
		if current == nil {
			continue
		}
		// The verdict is at the start of a line; it is on the test's own line if the test printed
		// nothing. Messages from the clean-up may follow it.
		switch text := strings.TrimSpace(line); {
		case verdict && current.Outcome != Failed:
		case strings.HasPrefix(line, "passed"):
			verdict = true
		case strings.HasPrefix(line, "FAILED"):
			current.Outcome, verdict = Failed, true
		case strings.HasPrefix(text, "[SKIPPED]"):
			if current.Outcome == Passed {
				current.Outcome = Skipped
			}
			current.note(text)
		case strings.HasPrefix(text, "[FAILED]"), verdict && current.Outcome == Failed:
			current.note(text)
		}
	}
	end()
	return results
}

// note keeps the first message.
func (r *Result) note(text string) {
	if r.Detail == "" {
		r.Detail = strings.TrimSpace(strings.TrimPrefix(strings.TrimPrefix(text, "[SKIPPED]"),
			"[FAILED]"))
	}
}
