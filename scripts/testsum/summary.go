package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// event is one line of `go test -json` (see `go doc test2json`).
type event struct {
	Action     string
	Package    string
	ImportPath string // of build-output and build-fail
	Test       string
	Output     string
	Elapsed    float64
}

// name identifies a test of a package. Test is empty for the package itself.
type name struct{ Package, Test string }

func (n name) String() string {
	if n.Test == "" {
		return n.Package
	}
	return n.Package + " " + n.Test
}

// summary collects the results of all streams. Tests and subtests count alike. A package that fails
// without a failed test (a build failure, a panic, a data race at exit, a timeout) counts as one
// failure.
//
// mu keeps apart what several streams, and the lines of progress, do.
type summary struct {
	mu                      sync.Mutex
	w                       io.Writer
	skips                   []string
	passed, failed, skipped int
	begun                   begun
	failures                map[name]bool // top-level tests
	broken                  []string      // what failed without a failed test
	logs                    []string      // of programs that failed, to be shown at the end
}

func newSummary(w io.Writer) *summary {
	return &summary{w: w, failures: map[name]bool{}, begun: begun{}}
}

// stream is what one run of `go test` said. Another one may test the same package.
type stream struct {
	*summary
	output   map[name]*bytes.Buffer
	failedIn map[string]int // failed tests by package
}

// read consumes a stream. In the end it reports tests that never ended although their package said
// nothing. It prints lines that are not events unchanged, because the go command
// reports some errors that way.
func (sum *summary) read(r io.Reader) error {
	s := &stream{sum, map[name]*bytes.Buffer{}, map[string]int{}}
	lines := bufio.NewReaderSize(r, 1<<20)
	for {
		line, err := lines.ReadBytes('\n')
		if len(bytes.TrimSpace(line)) > 0 {
			var e event
			if json.Unmarshal(line, &e) == nil && e.Action != "" {
				s.add(e)
			} else {
				s.mu.Lock()
				fmt.Fprintf(s.w, "%s\n", bytes.TrimRight(line, "\n"))
				s.mu.Unlock()
			}
		}
		if err == io.EOF {
			s.mu.Lock()
			defer s.mu.Unlock()
			for n := range s.output {
				s.open(n.Package)
			}
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the test events: %w", err)
		}
	}
}

// Actions of events that scripts/test.sh adds.
const (
	// The go command failed, maybe before its own events say why.
	commandFailed = "command-failed"
	// A program beside the tests failed: Package is its command line. If Output is set, it is the
	// file of what it printed, and its end is shown at the end.
	programFailed = "program-failed"
)

// resultPrefix marks a line with a test's result, which is shown even if the test passes.
const resultPrefix = "conformance: "

func (s *stream) add(e event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := name{e.Package, e.Test}
	s.begun.add(e.Action, n, time.Now())
	switch e.Action {
	case "output":
		out := s.output[n]
		if out == nil {
			out = new(bytes.Buffer)
			s.output[n] = out
		}
		out.WriteString(e.Output)
		if strings.HasPrefix(e.Output, resultPrefix) {
			fmt.Fprint(s.w, e.Output)
		}
	case "build-output":
		fmt.Fprint(s.w, e.Output)
	case "pass":
		if e.Test == "" {
			fmt.Fprintf(s.w, "ok    %s %.1fs\n", e.Package, e.Elapsed)
		} else {
			s.passed++
		}
		s.drop(n)
	case "skip":
		if e.Test != "" {
			s.skipped++
			s.skips = append(s.skips, fmt.Sprintf("%s: %s", n, s.reason(n)))
		}
		s.drop(n)
	case "fail":
		s.fail(n, e.Elapsed)
	case commandFailed:
		if s.failed == 0 {
			s.failed = 1
			s.broken = append(s.broken, "go test, without a failed test")
			fmt.Fprintln(s.w, "--- FAILED go test, without a failed test")
		}
	case programFailed:
		s.broken = append(s.broken, e.Package)
		if e.Output != "" {
			s.logs = append(s.logs, e.Output)
		}
		fmt.Fprintf(s.w, "FAIL  %s\n", e.Package)
	}
}

func (s *stream) fail(n name, elapsed float64) {
	switch {
	case n.Test != "":
		s.failed++
		s.failedIn[n.Package]++
		top, _, _ := strings.Cut(n.Test, "/")
		s.failures[name{n.Package, top}] = true
		fmt.Fprintf(s.w, "--- FAILED %s (%.1fs)\n", n, elapsed)
	case s.failedIn[n.Package] == 0:
		s.failed++
		s.broken = append(s.broken, n.Package+", outside of a test")
		fmt.Fprintf(s.w, "--- FAILED %s (%.1fs), outside of a test\n", n, elapsed)
	default:
		fmt.Fprintf(s.w, "FAIL  %s %.1fs, %d failed\n", n, elapsed, s.failedIn[n.Package])
	}
	if out := s.output[n]; out != nil {
		s.w.Write(out.Bytes())
	}
	s.drop(n)
	if n.Test == "" {
		s.open(n.Package)
	}
}

// open reports the tests of a package that never ended, because their process died or was killed.
// The output of one of them has the stacks of all goroutines. A test that waits for its turn has
// said nothing.
func (s *stream) open(pkg string) {
	var open []name
	for n, out := range s.output {
		if n.Package == pkg && n.Test != "" && !bytes.HasSuffix(out.Bytes(), paused(n.Test)) {
			open = append(open, n)
		}
	}
	slices.SortFunc(open, func(a, b name) int { return strings.Compare(a.Test, b.Test) })
	for _, n := range open {
		fmt.Fprintf(s.w, "--- did not end: %s\n%s", n, s.output[n])
		if !strings.Contains(n.Test, "/") {
			s.broken = append(s.broken, n.String()+", did not end")
		}
		s.drop(n)
	}
}

func paused(test string) []byte { return []byte("=== PAUSE " + test + "\n") }

// reason returns the output of a skipped test, without the framing lines of the testing package.
func (s *stream) reason(n name) string {
	out := s.output[n]
	if out == nil {
		return "no reason given"
	}
	var said []string
	for line := range strings.Lines(out.String()) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "=== ") && !strings.HasPrefix(line, "--- ") {
			said = append(said, line)
		}
	}
	if len(said) == 0 {
		return "no reason given"
	}
	return said[len(said)-1]
}

// drop forgets a test that has ended.
func (s *stream) drop(n name) { delete(s.output, n) }

// finish prints the reasons of skips, the last lines of programs that failed, the names of what
// failed, and the totals.
func (s *summary) finish() {
	for _, line := range s.skips {
		fmt.Fprintf(s.w, "skipped %s\n", line)
	}
	for _, path := range s.logs {
		data, err := os.ReadFile(path)
		if err != nil {
			data = []byte(err.Error())
		}
		lines := strings.Split(strings.TrimSpace(string(data)), "\n")
		fmt.Fprintln(s.w, strings.Join(lines[max(0, len(lines)-lastLines):], "\n"))
	}
	for _, line := range s.failedNames() {
		fmt.Fprintf(s.w, "failed %s\n", line)
	}
	fmt.Fprintf(s.w, "%d passed, %d failed, %d skipped\n", s.passed, s.failed, s.skipped)
}

// lastLines is how much is shown of what a failed program printed.
const lastLines = 20

// failedNames are the top-level tests that failed, and what failed outside of tests.
func (s *summary) failedNames() []string {
	names := slices.Clone(s.broken)
	for n := range s.failures {
		names = append(names, n.String())
	}
	slices.Sort(names)
	return names
}
