package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
)

const (
	// againBelow is the path of the tests that may run again. They run machines, container engines
	// and a Kubernetes node: programs of others, which share two processors with all other tests. A
	// failure in any other package is ours, and stays a failure.
	againBelow = "kubevirt.io/disk/integration"
	// againMost is how many failed tests may run again. More failures are not bad luck.
	againMost = 2
	// againRounds is how often each must then pass. So a test that fails every other time is found.
	againRounds = 3
)

// unlucky returns the failed tests if running them again is worthwhile: a few tests of real parts,
// no data race, no panic, and everything else ran to its end.
func (s *summary) unlucky() []name {
	if s.final || len(s.failures) > againMost || len(s.running) > 0 { // a process died
		return nil
	}
	var tests []name
	for n := range s.failures {
		if n.Package != againBelow && !strings.HasPrefix(n.Package, againBelow+"/") {
			return nil
		}
		tests = append(tests, n)
	}
	slices.SortFunc(tests, func(a, b name) int { return strings.Compare(a.String(), b.String()) })
	return tests
}

// again runs the failed tests again, with nothing beside them. A test that passes each time no
// longer counts as failed, but is named as unstable: it is still a defect. run writes the events of
// one test to w.
func (s *summary) again(run func(n name, w io.Writer) error) {
	for _, n := range s.unlucky() {
		failed := s.failures[n]
		fmt.Fprintf(s.w, "%s runs again, %d times, with nothing beside it\n", n, againRounds)
		for round := range againRounds {
			one := newSummary(s.w)
			var events bytes.Buffer
			err := run(n, &events)
			if readErr := one.read(&events); err == nil {
				err = readErr
			}
			if err != nil || one.failed > 0 || one.passed == 0 {
				fmt.Fprintf(s.w, "failed again, in round %d: %s: %v\n", round+1, n, err)
				return
			}
		}
		s.failed -= failed
		s.passed += failed
		delete(s.failures, n)
		s.unstable = append(s.unstable, n.String())
	}
}

// goTest runs a test as scripts/test.sh did: args are the go command and its flags.
func goTest(args []string) func(name, io.Writer) error {
	return func(n name, w io.Writer) error {
		args := append(slices.Clone(args), "-run", "^"+n.Test+"$", n.Package)
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Stdout, cmd.Stderr = w, os.Stderr
		return cmd.Run()
	}
}
