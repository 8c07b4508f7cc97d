// Command hello is the entry point of the image that `make run-container` boots as a virtual
// machine: it says where it runs, counts its starts in a file, and ends with status 7.
package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// countFile is on the disk. It is still there at the next start if the disk is persistent.
const countFile = "/starts"

// status shows that the exit status of the entry point comes out of the machine.
const status = 7

func main() {
	kernel, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		fmt.Fprintln(os.Stderr, "hello:", err)
		os.Exit(1)
	}
	starts := 1
	if text, err := os.ReadFile(countFile); err == nil {
		if n, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil {
			starts = n + 1
		}
	}
	if err := os.WriteFile(countFile, []byte(strconv.Itoa(starts)+"\n"), 0o644); err != nil {
		fmt.Fprintln(os.Stderr, "hello:", err)
		os.Exit(1)
	}
	fmt.Printf("Hello from a container image in a virtual machine: Linux %s, user %d, start %d\n",
		strings.TrimSpace(string(kernel)), os.Getuid(), starts)
	os.Exit(status)
}
