// Command testsum reads the event stream of `go test -json` on its standard input. It prints a line
// per package, the output of failures, the reasons of skips, and the totals as the last line. It
// exits with 1 if anything failed, so that a pipeline does not lose the failure.
//
// Its arguments are the go command and the flags for running a failed test of real parts again,
// once nothing runs beside it.
package main

import (
	"fmt"
	"os"
)

func main() {
	sum := newSummary(os.Stdout)
	err := sum.read(os.Stdin)
	if err != nil {
		fmt.Fprintf(os.Stderr, "testsum: %v\n", err)
	}
	if err == nil && len(os.Args) > 1 {
		sum.again(goTest(os.Args[1:]))
	}
	sum.finish()
	if err != nil || sum.failed > 0 {
		os.Exit(1)
	}
}
