// Command testsum reads the event stream of `go test -json` on its standard input. It prints a line
// per package, a line a minute that says how far the tests are, the output of failures, the reasons
// of skips, and the totals as the last line. Before that come the names of the tests that failed,
// and of those that failed first and passed later. It exits with 1 if anything failed, so that a
// pipeline does not lose the failure.
//
//	testsum [-beside DIR] [GO test FLAG...]
//
// DIR/NAME.log is the output of a program NAME that runs beside the tests. The other arguments are
// the go command and the flags for running a failed test of real parts again, once nothing runs
// beside it.
package main

import (
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
	err := sum.read(os.Stdin)
	end()
	if err != nil {
		fmt.Fprintf(os.Stderr, "testsum: %v\n", err)
	}
	if err == nil && flag.NArg() > 0 {
		sum.again(goTest(flag.Args()))
	}
	sum.finish()
	if err != nil || sum.failed > 0 {
		os.Exit(1)
	}
}
