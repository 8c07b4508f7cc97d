package console

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

type steps struct{ done, total, data, dataTotal int64 }

func (s *steps) Done() int64          { return s.done }
func (s *steps) Total() int64         { return s.total }
func (s *steps) Data() (int64, int64) { return s.data, s.dataTotal }

// atSecond sets the clock of a Reporter.
func atSecond(r *Reporter, seconds int) {
	r.began = time.Unix(0, 0)
	r.now = func() time.Time { return time.Unix(int64(seconds), 0) }
}

func TestProgressAsLines(t *testing.T) {
	var b bytes.Buffer
	r := NewReporter(&b, false, "a.qcow2")
	atSecond(r, 2)
	p := &steps{}
	r.show(p)
	require.Empty(t, b.String(), "it has not begun")
	*p = steps{total: 1 << 30, dataTotal: 512 << 20}
	for p.done = 0; p.done < p.total; p.done += p.total / 100 {
		p.data = p.done / 2
		r.show(p)
	}
	lines := strings.Split(strings.TrimSpace(b.String()), "\n")
	require.Len(t, lines, 10, "a line for every tenth:\n%s", b.String())
	require.Equal(t, "a.qcow2: 0 % -", lines[0])
	require.Contains(t, lines[5], "MiB/s")
	require.Contains(t, lines[5], "2s left")
	p.done, p.data = p.total, p.dataTotal
	b.Reset()
	r.finish(p, nil)
	require.Equal(t, "a.qcow2: 1 GiB, of them 512 MiB data, in 2s, 256 MiB/s\n", b.String())
	b.Reset()
	r.finish(p, errors.New("failed"))
	require.Empty(t, b.String(), "the error says it")
}

func TestProgressAsABar(t *testing.T) {
	var b bytes.Buffer
	r := NewReporter(&b, true, "a.qcow2")
	atSecond(r, 4)
	r.show(&steps{done: 50 << 20, total: 100 << 20, data: 40 << 20, dataTotal: 80 << 20})
	require.Equal(t, "\ra.qcow2 [===============               ]  50 % 10 MiB/s, 4s left\x1b[K",
		b.String())
	b.Reset()
	r.finish(&steps{done: 100 << 20, total: 100 << 20, data: 80 << 20, dataTotal: 80 << 20}, nil)
	require.Equal(t, "\r\x1b[Ka.qcow2: 100 MiB, of them 80 MiB data, in 4s, 20 MiB/s\n", b.String())
}

func TestProgressThatStandsStill(t *testing.T) {
	var b bytes.Buffer
	r := NewReporter(&b, true, "a.qcow2")
	p := &steps{done: 49, total: 100, data: 49 << 20, dataTotal: 100 << 20}
	for second, want := range []string{1: "49 MiB/s, 1s left", 5: "10 MiB/s, 5s left",
		6: "nothing for 5s", 7: "nothing for 6s"} {
		b.Reset()
		if atSecond(r, second); second > 0 {
			r.show(p)
			require.Contains(t, b.String(), want)
		}
	}
	p.data = 50 << 20
	r.show(p)
	require.Contains(t, b.String(), "7 MiB/s, 7s left", "it goes on")
}

func TestReporterReturnsWhatTheWorkReturns(t *testing.T) {
	var b bytes.Buffer
	r := NewReporter(&b, false, "a")
	r.interval = time.Millisecond
	p := &steps{done: 1, total: 2}
	failed := errors.New("failed")
	require.ErrorIs(t, r.While(p, func() error { return failed }), failed)
	require.NoError(t, r.While(p, func() error { return nil }))
}

func TestPercentNeverClaimsTooMuch(t *testing.T) {
	require.Equal(t, 0, percent(0, 0))
	require.Equal(t, 0, percent(-1, 10))
	require.Equal(t, 99, percent(1<<40-1, 1<<40))
	require.Equal(t, 100, percent(1<<40, 1<<40))
	require.Equal(t, 100, percent(11, 10))
	require.Equal(t, 50, percent(1<<62, 1<<63-1), "no overflow")
	require.Equal(t, "["+strings.Repeat(" ", barWidth)+"]", bar(0))
	require.Equal(t, "["+strings.Repeat("=", barWidth)+"]", bar(100))
}

func TestSizes(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 1 << 20: "1 MiB",
		10 << 30: "10 GiB", 1<<63 - 1: "8 EiB",
		1024*1024 - 1: "1 MiB", 1000 << 10: "1000 KiB", 100 << 20: "100 MiB", 11264: "11 KiB",
		11*1024 + 512: "11.5 KiB",
		1300:          "1.27 KiB", 9 * 1100: "9.67 KiB", 10<<10 + 60: "10.1 KiB",
		100<<10 + 600: "101 KiB",
		123456:        "121 KiB", 100<<10 + 60: "100 KiB", 1023<<10 + 511: "1023 KiB",
		1023<<10 + 512: "1 MiB",
		10239:          "10 KiB",
	} {
		require.Equal(t, want, ShortSize(n))
	}
	require.Equal(t, "512 bytes", Size(512))
	require.Equal(t, "1 KiB (1024 bytes)", Size(1024))
	require.Equal(t, "10 GiB (10737418240 bytes)", Size(10<<30))
}
