// Command kubevirt-disk serves every disk image of a directory as an iSCSI LUN, protected by CHAP.
//
// Exit status: 0 done, 1 failed while running, 2 wrong usage or configuration.
package main

import (
	"os"
	"time"
)

// Set by the linker: -X main.version=v1.2.3 -X main.commit=0123abcd.
var (
	version = ""
	commit  = ""
)

func main() {
	a := &app{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, exit: os.Exit,
		sameRequest: 100 * time.Millisecond}
	os.Exit(a.run(os.Args))
}
