package main

import (
	"bytes"
	"io"
	"sync/atomic"
	"time"
)

const (
	// logQueueLines is how many lines wait for whoever reads the log: about 300 KiB.
	logQueueLines = 1024
	// logPatience is how long a full queue holds up who logs, and the end of the process waits for
	// the last lines.
	logPatience = time.Second
)

// logQueue keeps a reader of the log that does not read, as of a terminal that Ctrl-S has stopped
// or of a log driver that hangs, from holding up what is logged: logins, handovers, the drain. As
// long as it reads, no line is lost and who logs faster waits for it. Any number of goroutines.
type logQueue struct {
	w        io.Writer
	entries  chan logEntry
	patience time.Duration     // logPatience
	stuck    atomic.Bool       // nothing has been written since a line was lost
	lost     atomic.Uint64     // lines
	tell     func(lost uint64) // logs that lines were lost; set before the first line
}

// logEntry is a line, or with done a mark that closes it when all lines before are written.
type logEntry struct {
	line []byte
	done chan struct{}
}

func newLogQueue(w io.Writer) *logQueue {
	q := &logQueue{w: w, entries: make(chan logEntry, logQueueLines), patience: logPatience}
	go q.run() // it ends with the process
	return q
}

func (q *logQueue) run() {
	for e := range q.entries {
		if e.done != nil {
			close(e.done)
			continue
		}
		_, _ = q.w.Write(e.line) // a log that cannot be written changes nothing else
		q.stuck.Store(false)
		if n := q.lost.Swap(0); n > 0 {
			go q.tell(n) // which may wait for this goroutine
		}
	}
}

// Write takes a line, and loses it where nobody has read for a while. It never fails.
func (q *logQueue) Write(p []byte) (int, error) {
	if !q.put(logEntry{line: bytes.Clone(p)}) {
		q.lost.Add(1)
	}
	return len(p), nil
}

func (q *logQueue) put(e logEntry) bool {
	select {
	case q.entries <- e:
		return true
	default:
	}
	if q.stuck.Load() {
		return false
	}
	patience := time.NewTimer(q.patience)
	defer patience.Stop()
	select {
	case q.entries <- e:
		return true
	case <-patience.C:
		q.stuck.Store(true)
		return false
	}
}

// Sync waits until what was logged is written, if that does not take long.
func (q *logQueue) Sync() error {
	mark := logEntry{done: make(chan struct{})}
	if !q.put(mark) {
		return nil
	}
	patience := time.NewTimer(q.patience)
	defer patience.Stop()
	select {
	case <-mark.done:
	case <-patience.C:
	}
	return nil
}
