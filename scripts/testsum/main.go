// Command testsum reads the event stream of `go test -json` on its standard input. It prints a line
// per package, the output of what failed, and the reasons of what was skipped; its last line is the
// totals. It exits with 1 where anything failed, so that a pipeline into it loses no failure.
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
	sum.finish()
	if err != nil || sum.failed > 0 {
		os.Exit(1)
	}
}
