package console

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"kubevirt.io/disk/internal/testtool"
)

const timeout = time.Minute

// gate is a log reader that reads nothing until it is opened. Then it counts lines.
type gate struct {
	open  chan struct{}
	lines atomic.Int64
	last  atomic.Value // the last line, a string
}

func (g *gate) Write(p []byte) (int, error) {
	<-g.open
	g.lines.Add(int64(bytes.Count(p, []byte("\n"))))
	g.last.Store(string(p))
	return len(p), nil
}

func TestALogThatNobodyReadsHoldsUpNothing(t *testing.T) {
	g := &gate{open: make(chan struct{})}
	q := newQueue(g)
	told := make(chan uint64, 1)
	q.tell = func(lost uint64) { told <- lost }
	const lines = queueLines + 100
	write := func(n int) {
		for range n {
			require.Equal(t, 5, testtool.Must(q.Write([]byte("line\n")))(t))
		}
	}
	write(queueLines + 2) // one is being written, as many as fit wait, and one is lost
	require.True(t, q.stuck.Load())
	q.timeout = time.Hour // only the first lost line has to wait
	write(lines - queueLines - 2)
	require.NoError(t, q.Sync())
	close(g.open)
	lost := int64(<-told)
	require.GreaterOrEqual(t, lost, int64(99), "one is being written, and as many as fit wait")
	testtool.Within(t, timeout, func() bool { return g.lines.Load()+lost == lines },
		"all lines but %d are there: %d", lost, func() any { return g.lines.Load() })
}

// TestLostLinesAreTold: each log with a queue says how many lines were lost, when it is read again.
func TestLostLinesAreTold(t *testing.T) {
	g := &gate{open: make(chan struct{})}
	log := NewQueuedLogger(LogConfig{}, zapcore.InfoLevel, g)
	for range queueLines + 2 { // one is being written, as many as fit wait, and one is lost
		log.Info("line")
	}
	close(g.open)
	testtool.Eventually(t, func() bool {
		last, _ := g.last.Load().(string)
		return strings.Contains(last, `"lines":1}`)
	})
}

func TestAFastLogIsComplete(t *testing.T) {
	g := &gate{open: make(chan struct{})}
	close(g.open)
	q := newQueue(g)
	q.timeout = time.Hour // on a busy machine the reader may pause for seconds
	const lines = 20 * queueLines
	for range lines {
		require.NoError(t, testtool.Err(q.Write([]byte("line\n"))))
	}
	require.NoError(t, q.Sync())
	testtool.Within(t, timeout, func() bool { return g.lines.Load() == lines },
		"%d lines are there: %d", lines, func() any { return g.lines.Load() })
}

// TestTheLogKeepsItsLines writes lines from one buffer, as a logger does, while nobody reads them
// yet.
func TestTheLogKeepsItsLines(t *testing.T) {
	var got bytes.Buffer
	g := &gate{open: make(chan struct{})}
	q := newQueue(io.MultiWriter(&got, g))
	var want bytes.Buffer
	buf := make([]byte, 0, 16)
	for i := range 100 {
		buf = fmt.Appendf(buf[:0], "line %d\n", i)
		want.Write(buf)
		require.NoError(t, testtool.Err(q.Write(buf)))
	}
	close(g.open)
	testtool.Within(t, timeout, func() bool { return g.lines.Load() == 100 },
		"all lines are there: %d", func() any { return g.lines.Load() })
	require.Equal(t, want.String(), got.String())
}

func TestOnOneLine(t *testing.T) {
	for text, want := range map[string]string{
		"":                  "",
		"it hangs":          "it hangs",
		"first\nsecond\n":   "first; second",
		"2 files:\n  a\n b": "2 files: a; b",
		"2 errors:\n  one:\n\n    its reason\n  two": "2 errors: one: its reason; two",
	} {
		require.Equal(t, want, OnOneLine(text))
	}
}

func TestLogFormats(t *testing.T) {
	var b bytes.Buffer
	require.Equal(t, JSON, LogConfig{}.Resolve(&b).Format, "a pipe gets JSON")
	NewLogger(LogConfig{}, zapcore.WarnLevel, &b).Info("quiet")
	require.Empty(t, b.String())
	NewLogger(LogConfig{}, zapcore.WarnLevel, &b).Warn("loud", zap.Error(errors.New("two\nlines")))
	require.Contains(t, b.String(), `"msg":"loud"`)
	require.Contains(t, b.String(), `"error":"two\nlines"`)
	b.Reset()
	log := NewLogger(LogConfig{Format: Text}, zapcore.InfoLevel, &b).With(zap.Int("lun", 1))
	log.Info("hello", zap.Strings("portals", []string{"a", "b"}), zap.Int("size_bytes", 512))
	log.Warn("loud", zap.Error(errors.New("two\nlines\x1b")))
	require.Regexp(t, `^..:..:..  hello \(lun 1, portals \[a b\], size bytes 512\)\n`+
		`..:..:..  WARN  loud \(lun 1, error two; lines\\x1b\)\n$`, b.String())
}
