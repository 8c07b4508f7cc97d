package console

import (
	"bytes"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

const timeout = time.Minute

// gate is a log reader that reads nothing until it is opened. Then it counts lines.
type gate struct {
	open  chan struct{}
	lines atomic.Int64
}

func (g *gate) Write(p []byte) (int, error) {
	<-g.open
	g.lines.Add(int64(bytes.Count(p, []byte("\n"))))
	return len(p), nil
}

func TestALogThatNobodyReadsHoldsUpNothing(t *testing.T) {
	g := &gate{open: make(chan struct{})}
	q := NewQueue(g)
	told := make(chan uint64, 1)
	q.Tell = func(lost uint64) { told <- lost }
	const lines = queueLines + 100
	write := func(n int) {
		for range n {
			n, err := q.Write([]byte("line\n"))
			require.NoError(t, err)
			require.Equal(t, 5, n)
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

func TestAFastLogIsComplete(t *testing.T) {
	g := &gate{open: make(chan struct{})}
	close(g.open)
	q := NewQueue(g)
	q.timeout = time.Hour // on a busy machine the reader may pause for seconds
	const lines = 20 * queueLines
	for range lines {
		_, err := q.Write([]byte("line\n"))
		require.NoError(t, err)
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
	q := NewQueue(io.MultiWriter(&got, g))
	var want bytes.Buffer
	buf := make([]byte, 0, 16)
	for i := range 100 {
		buf = fmt.Appendf(buf[:0], "line %d\n", i)
		want.Write(buf)
		_, err := q.Write(buf)
		require.NoError(t, err)
	}
	close(g.open)
	testtool.Within(t, timeout, func() bool { return g.lines.Load() == 100 },
		"all lines are there: %d", func() any { return g.lines.Load() })
	require.Equal(t, want.String(), got.String())
}
