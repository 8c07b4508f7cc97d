package main

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// module is left out of the names of packages where lines are short.
const module = "kubevirt.io/disk/"

// begun knows what runs now, and since when: test binaries, and their top-level tests. A test that
// waits for its turn (t.Parallel) does not run.
type begun map[name]time.Time

func (b begun) add(action string, n name, now time.Time) {
	if strings.Contains(n.Test, "/") {
		return
	}
	switch action {
	case "start", "run", "cont":
		b[n] = now
	case "pause", "pass", "fail", "skip":
		delete(b, n)
	}
}

// String names the packages that run, each with the tests that have run longest.
func (b begun) String(now time.Time) string {
	tests := map[string][]name{}
	for n := range b {
		if n.Test != "" {
			tests[n.Package] = append(tests[n.Package], n)
		} else if tests[n.Package] == nil {
			tests[n.Package] = []name{}
		}
	}
	const most = 3 // more make the line long
	var packages []string
	for pkg, open := range tests {
		slices.SortFunc(open, func(x, y name) int {
			return cmp.Or(b[x].Compare(b[y]), strings.Compare(x.Test, y.Test))
		})
		var said []string
		for _, n := range open[:min(most, len(open))] {
			since := ""
			if d := now.Sub(b[n]); d >= time.Minute {
				since = fmt.Sprintf(" %dm", int(d.Minutes()))
			}
			said = append(said, n.Test+since)
		}
		if len(open) > most {
			said = append(said, fmt.Sprintf("%d more", len(open)-most))
		}
		pkg = strings.TrimPrefix(pkg, module)
		if len(said) > 0 {
			pkg += " (" + strings.Join(said, ", ") + ")"
		}
		packages = append(packages, pkg)
	}
	slices.Sort(packages)
	return strings.Join(packages, ", ")
}

// report prints a line of progress every interval: how far the tests are, and what runs. The
// returned function ends it.
func (s *summary) report(interval time.Duration, logs string) (end func()) {
	start, stop, done := time.Now(), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case now := <-tick.C:
				s.progress(start, now, logs)
			}
		}
	}()
	return func() {
		close(stop)
		<-done
	}
}

func (s *summary) progress(start, now time.Time, logs string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	running := s.begun.String(now)
	if running == "" {
		running = "no test (go compiles them, or they have ended)"
	}
	fmt.Fprintf(s.w, "%dm: %d passed, %d failed; running: %s", int(now.Sub(start).Minutes()),
		s.passed, s.failed, running)
	for _, line := range beside(logs) {
		fmt.Fprintf(s.w, "; beside: %s", line)
	}
	fmt.Fprintln(s.w)
}

// beside names the programs that run beside the tests, each with the last line that it printed.
// scripts/test.sh keeps their output in DIR/NAME.log while they run.
func beside(dir string) []string {
	if dir == "" {
		return nil
	}
	logs, _ := filepath.Glob(filepath.Join(dir, "*.log")) // the pattern is good
	var programs []string
	for _, path := range logs {
		line := strings.TrimSuffix(filepath.Base(path), ".log")
		data, err := os.ReadFile(path)
		if err != nil { // the program has just ended
			continue
		}
		if last := lastLine(data); last != "" {
			line += " (" + last + ")"
		}
		programs = append(programs, line)
	}
	return programs
}

func lastLine(data []byte) string {
	data = bytes.TrimSpace(data)
	return string(data[bytes.LastIndexByte(data, '\n')+1:])
}
