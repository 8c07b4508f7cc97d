package main

import (
	"math"
	"os"
	"strconv"
	"strings"
)

// containerMemory is how many bytes of memory the container may use, as the kernel's control groups
// say; math.MaxInt64: there is no limit.
func containerMemory() int64 {
	for _, path := range []string{"/sys/fs/cgroup/memory.max",
		"/sys/fs/cgroup/memory/memory.limit_in_bytes"} {
		text, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		return parseMemoryMax(string(text))
	}
	return math.MaxInt64
}

func parseMemoryMax(text string) int64 {
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil || n <= 0 {
		return math.MaxInt64 // "max"
	}
	return n
}

// heapLimit is the size of the heap, in bytes, from which on garbage is collected at once: a part
// of what the container may use, if that is little. The rest is for what is not in the heap.
func heapLimit(container int64) int64 { return min(memoryLimit, container/4*3) }
