package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestProgress: a line says what runs, what does not just wait for its turn, and what runs beside.
func TestProgress(t *testing.T) {
	const stream = `{"Action":"start","Package":"kubevirt.io/disk/target"}
{"Action":"run","Package":"kubevirt.io/disk/target","Test":"TestA"}
{"Action":"run","Package":"kubevirt.io/disk/target","Test":"TestA/sub"}
{"Action":"pass","Package":"kubevirt.io/disk/target","Test":"TestA/sub"}
{"Action":"run","Package":"kubevirt.io/disk/target","Test":"TestWaits"}
{"Action":"pause","Package":"kubevirt.io/disk/target","Test":"TestWaits"}
{"Action":"run","Package":"kubevirt.io/disk/target","Test":"TestDone"}
{"Action":"pass","Package":"kubevirt.io/disk/target","Test":"TestDone"}
{"Action":"start","Package":"kubevirt.io/disk/chap"}
{"Action":"start","Package":"kubevirt.io/disk/disk"}
{"Action":"pass","Package":"kubevirt.io/disk/disk"}
`
	var out bytes.Buffer
	s := newSummary(&out)
	line := func(after time.Duration, logs string) string {
		t.Helper()
		out.Reset()
		now := time.Now()
		s.progress(now, now.Add(after), logs)
		return out.String()
	}
	require.Equal(t, "0m: 0 passed, 0 failed; running: no test (go compiles them, or they have"+
		" ended)\n", line(0, ""))

	require.NoError(t, s.read(strings.NewReader(stream)))
	logs := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(logs, "build.sh.log"),
		[]byte("build: etcd\nbuild: kubectl\n"), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(logs, "ended.sh"), []byte("fine\n"), 0o644))
	require.Equal(t, "3m: 2 passed, 0 failed; running: chap, target (TestA 3m); beside: build.sh"+
		" (build: kubectl)\n", line(3*time.Minute+time.Second, logs))

	more := `{"Action":"cont","Package":"p","Test":"TestB"}
{"Action":"cont","Package":"p","Test":"TestC"}
{"Action":"cont","Package":"p","Test":"TestD"}
{"Action":"cont","Package":"p","Test":"TestE"}
{"Action":"fail","Package":"p","Test":"TestF"}
`
	require.NoError(t, s.read(strings.NewReader(more)))
	require.Equal(t, "0m: 2 passed, 1 failed; running: chap, p (TestB, TestC, TestD, 1 more),"+
		" target (TestA)\n", line(0, ""))
}

// TestReport: lines of progress come while events do, and no more when the end was asked for.
func TestReport(t *testing.T) {
	var out bytes.Buffer
	s := newSummary(&out)
	one := &stream{s, map[name]*bytes.Buffer{}, map[string]int{}}
	end := s.report(time.Millisecond, "")
	testtool.Eventually(t, func() bool {
		one.add(event{Action: "pass", Package: "p", Test: "TestA"})
		s.mu.Lock()
		defer s.mu.Unlock()
		return strings.Count(out.String(), "running: ") > 2
	}, "there are three lines")
	end()
	said := out.Len()
	time.Sleep(10 * time.Millisecond)
	require.Equal(t, said, out.Len())
}
