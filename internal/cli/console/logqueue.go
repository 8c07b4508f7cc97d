package console

import (
	"bytes"
	"io"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

const (
	// queueLines is how many lines wait for the reader of the log: about 300 KiB.
	queueLines = 1024
	// queueTimeout limits how long a full queue delays a writer, and how long the end of the
	// process waits for the last lines.
	queueTimeout = time.Second
)

// queue keeps the daemon's logins, handovers and drain going when the reader of the log does not
// read, as a terminal stopped by Ctrl-S or a log driver that hangs. While it reads, no line is
// lost, and a faster writer waits. Any number of goroutines may use it.
type queue struct {
	w       io.Writer
	entries chan queued
	timeout time.Duration     // queueTimeout
	stuck   atomic.Bool       // nothing was written since a line was lost
	lost    atomic.Uint64     // lines
	tell    func(lost uint64) // logs that lines were lost; set before the first line
}

// queued is a line, or a mark if done is set: done is closed when all lines before it are written.
type queued struct {
	line []byte
	done chan struct{}
}

// NewQueuedLogger makes a logger whose lines wait in a queue for the reader of w, and which logs
// how many lines were lost.
func NewQueuedLogger(c LogConfig, level zapcore.LevelEnabler, w io.Writer) *zap.Logger {
	lines := newQueue(w)
	log := NewLogger(c.Resolve(w), level, lines)
	lines.tell = func(lost uint64) {
		log.Warn("log lines were lost because nobody read the log", zap.Uint64("lines", lost))
	}
	return log
}

// newQueue starts a queue. It writes until the end of the process.
func newQueue(w io.Writer) *queue {
	q := &queue{w: w, entries: make(chan queued, queueLines), timeout: queueTimeout}
	go q.run()
	return q
}

func (q *queue) run() {
	for e := range q.entries {
		if e.done != nil {
			close(e.done)
			continue
		}
		_, _ = q.w.Write(e.line) // if this fails, there is nowhere to report it
		q.stuck.Store(false)
		if n := q.lost.Swap(0); n > 0 {
			go q.tell(n) // it may wait for this goroutine
		}
	}
}

// Write queues a line. If nothing was read for a while, it drops the line. It never fails.
func (q *queue) Write(p []byte) (int, error) {
	if !q.put(queued{line: bytes.Clone(p)}) {
		q.lost.Add(1)
	}
	return len(p), nil
}

func (q *queue) put(e queued) bool {
	select {
	case q.entries <- e:
		return true
	default:
	}
	if q.stuck.Load() {
		return false
	}
	select {
	case q.entries <- e:
		return true
	case <-time.After(q.timeout):
		q.stuck.Store(true)
		return false
	}
}

// Sync waits for the lines so far to be written, but not for long.
func (q *queue) Sync() error {
	mark := queued{done: make(chan struct{})}
	if !q.put(mark) {
		return nil
	}
	select {
	case <-mark.done:
	case <-time.After(q.timeout):
	}
	return nil
}
