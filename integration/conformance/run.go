package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"
)

// Tool is the suite's program.
const Tool = "iscsi-test-cu"

// Options say what to run.
type Options struct {
	URLs    []string      // one, or two paths to the same LUN for the multipath tests
	Tests   []string      // "Suite.Test"; nil: all of the suite
	Timeout time.Duration // of each test; default 2 min
	// Hangs are tests that are known not to end. They get seconds.
	Hangs map[string]Expectation
	Env   []string // environment of the suite; nil: this process's
	// Before runs before each test, for example to restart a target that has died. It returns the
	// URLs to use.
	Before func() ([]string, error)
}

// hangTimeout is the time of a test that is known not to end.
const hangTimeout = 10 * time.Second

// List returns the tests of the installed suite, in its order.
func List(ctx context.Context) ([]string, error) {
	out, err := exec.CommandContext(ctx, Tool, "-l").CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return nil, fmt.Errorf("list the conformance tests: %w", err)
	}
	var tests []string
	for line := range strings.Lines(string(out)) {
		name, ok := strings.CutPrefix(strings.TrimSpace(line), "ALL.")
		if ok && strings.Count(name, ".") == 1 {
			tests = append(tests, name)
		}
	}
	if len(tests) == 0 {
		return nil, fmt.Errorf("%s -l named no test: %s", Tool, out)
	}
	return tests, nil
}

// Run runs the tests one after the other. It overwrites the LUN.
func Run(ctx context.Context, opt Options) ([]Result, error) {
	if opt.Timeout == 0 {
		opt.Timeout = 2 * time.Minute
	}
	if opt.Tests == nil {
		tests, err := List(ctx)
		if err != nil {
			return nil, err
		}
		opt.Tests = tests
	}
	results := make([]Result, 0, len(opt.Tests))
	for _, test := range opt.Tests {
		if opt.Before != nil {
			urls, err := opt.Before()
			if err != nil {
				return results, err
			}
			opt.URLs = urls
		}
		result, err := runOne(ctx, test, opt)
		if err != nil {
			return results, err
		}
		results = append(results, result)
	}
	return results, nil
}

func runOne(ctx context.Context, test string, opt Options) (Result, error) {
	if opt.Hangs[test].Outcome == Hung {
		opt.Timeout = hangTimeout
	}
	limited, cancel := context.WithTimeout(ctx, opt.Timeout)
	defer cancel()
	args := append([]string{"--dataloss", "--allow-sanitize", "--verbose", "--test=ALL." + test},
		opt.URLs...)
	cmd := exec.CommandContext(limited, Tool, args...)
	cmd.Env = opt.Env
	cmd.WaitDelay = 15 * time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	if ctx.Err() != nil {
		return Result{}, ctx.Err()
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) && limited.Err() == nil {
		return Result{}, fmt.Errorf("run %s: %w", Tool, err)
	}
	for _, result := range parse(out.String()) {
		if result.Name == test {
			if result.Outcome == Hung && result.Detail == "" {
				result.Detail = reason(limited, opt.Timeout, err)
			}
			return result, nil
		}
	}
	// The test did not even begin: the suite could not log in, or hung in the login.
	detail := strings.Join(strings.Fields(out.String()), " ")
	if detail == "" {
		detail = reason(limited, opt.Timeout, err)
	}
	return Result{Name: test, Outcome: Hung, Detail: detail}, nil
}

func reason(limited context.Context, timeout time.Duration, err error) string {
	if limited.Err() != nil {
		return fmt.Sprintf("did not end within %v", timeout)
	}
	return fmt.Sprintf("no verdict: %v", err)
}
