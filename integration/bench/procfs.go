package main

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of CPU times in /proc: USER_HZ, which is 100 on every architecture that Go runs
// on.
const tick = 10 * time.Millisecond

// cpuTime returns the user and system time that a process has used so far, with its children that
// have ended.
func cpuTime(pid int) (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	return parseStat(string(text))
}

// parseStat adds fields 14 to 17 (utime, stime, cutime, cstime) of proc_pid_stat(5). The name
// before them may contain spaces and parentheses.
func parseStat(text string) (time.Duration, error) {
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 15 {
		return 0, fmt.Errorf("no stat of a process: %q", text)
	}
	return sumTicks(fields[11:15])
}

func sumTicks(fields []string) (sum time.Duration, err error) {
	for _, field := range fields {
		ticks, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, err
		}
		sum += time.Duration(ticks) * tick
	}
	return sum, nil
}

// machineTime returns how long the processors of this machine have worked so far, for whatever
// process and for the kernel itself (proc_stat(5)).
func machineTime() (time.Duration, error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(text), "\n")
	fields := strings.Fields(line)
	if len(fields) < 8 || fields[0] != "cpu" {
		return 0, fmt.Errorf("no statistics of processors: %q", line)
	}
	// user, nice, system; not idle, iowait; irq, softirq
	return sumTicks(slices.Concat(fields[1:4], fields[6:8]))
}

// childless waits until the children of a process have ended, at most timeout.
func childless(pid int, timeout time.Duration) error {
	for begin := time.Now(); ; time.Sleep(time.Millisecond) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
		if err != nil {
			return err
		}
		switch {
		case len(text) == 0:
			return nil
		case time.Since(begin) > timeout:
			return fmt.Errorf("process %d still has the children %s", pid, text)
		}
	}
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
