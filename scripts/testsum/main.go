// Command testsum reads event streams of `go test -json`. It prints a line per package, a line a
// minute that says how far the tests are, the output of failures, the reasons of skips, the names
// of what failed, and the totals as the last line. It exits with 1 if anything failed.
//
//	testsum [-beside DIR] [STREAM...]
//
// It reads all streams at the same time, and standard input if there is none. DIR/NAME.log is the
// output of a program NAME that runs beside the tests.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"time"
)

func main() {
	logs := flag.String("beside", "", "`directory` of the logs of what runs beside the tests")
	flag.Parse()
	sum := newSummary(os.Stdout)
	end := sum.report(time.Minute, *logs)
	err := readAll(sum, flag.Args())
	end()
	if err != nil {
		fmt.Fprintf(os.Stderr, "testsum: %v\n", err)
	}
	sum.finish()
	if err != nil || sum.failed > 0 || len(sum.broken) > 0 {
		os.Exit(1)
	}
}

// readAll reads files, or standard input, to their ends, all at the same time. A pipe must not wait
// for another one.
func readAll(sum *summary, paths []string) error {
	if len(paths) == 0 {
		return sum.read(os.Stdin)
	}
	ended := make(chan error)
	for _, path := range paths {
		go func() {
			f, err := os.Open(path)
			if err == nil {
				err = sum.read(f)
				err = errors.Join(err, f.Close())
			}
			ended <- err
		}()
	}
	var errs []error
	for range paths {
		errs = append(errs, <-ended)
	}
	return errors.Join(errs...)
}
