package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of CPU times in /proc: USER_HZ, which is 100 on every architecture that Go runs
// on.
const tick = 10 * time.Millisecond

// cpuTime returns the user and system time that all threads of a process have used so far.
func cpuTime(pid int) (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	return parseStat(string(text))
}

// parseStat reads fields 14 and 15 (utime, stime) of proc_pid_stat(5). The name before them may
// contain spaces and parentheses.
func parseStat(text string) (time.Duration, error) {
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 13 {
		return 0, fmt.Errorf("no stat of a process: %q", text)
	}
	user, err := strconv.ParseInt(fields[11], 10, 64)
	if err != nil {
		return 0, err
	}
	system, err := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+system) * tick, err
}

// anonymousMemory returns the anonymous memory of a process (RssAnon) in bytes.
func anonymousMemory(pid int) (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	return parseRssAnon(string(text))
}

// peakMemory returns the largest resident memory that a process has had (VmHWM) in bytes.
func peakMemory(pid int) (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	return parseStatus(string(text), "VmHWM:")
}

func parseRssAnon(text string) (int64, error) { return parseStatus(text, "RssAnon:") }

// parseStatus reads a size of proc_pid_status(5).
func parseStatus(text, field string) (int64, error) {
	for line := range strings.Lines(text) {
		value, ok := strings.CutPrefix(line, field)
		if !ok {
			continue
		}
		value = strings.TrimSuffix(strings.TrimSpace(value), "kB")
		kib, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
		return kib << 10, err
	}
	return 0, fmt.Errorf("no %s in %q", field, text)
}

// watchMemory samples the anonymous memory of a process until stop is called. stop returns the
// maximum.
func watchMemory(pid int) (stop func() int64) {
	done, result := make(chan struct{}), make(chan int64)
	go func() {
		var most int64
		ticker := time.NewTicker(20 * time.Millisecond)
		defer ticker.Stop()
		for {
			if now, err := anonymousMemory(pid); err == nil {
				most = max(most, now)
			}
			select {
			case <-done:
				result <- most
				return
			case <-ticker.C:
			}
		}
	}()
	return func() int64 {
		close(done)
		return <-result
	}
}
