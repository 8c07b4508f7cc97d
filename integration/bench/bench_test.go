package main

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
)

func TestMedian(t *testing.T) {
	require.Zero(t, median(nil))
	require.Equal(t, 3.0, median([]float64{9, 3, 1}))
	require.Equal(t, 2.0, median([]float64{3, 1}))
	values := []float64{2, 1}
	median(values)
	require.Equal(t, []float64{2, 1}, values, "it keeps the order of the rounds")
}

func TestTable(t *testing.T) {
	out := table{head: []string{"load", "a"}}
	out.add("4 KiB", "1.0 µs")
	var b bytes.Buffer
	out.print(&b)
	require.Equal(t, "| load  | a      |\n| ----- | ------ |\n| 4 KiB | 1.0 µs |\n\n", b.String())
	require.Equal(t, "2.00×", ratio(4, 2))
	require.Equal(t, "–", ratio(0, 2))
	require.Equal(t, "–", ratio(2, 0))
	require.Equal(t, "1.5 MiB", mib(1.5*(1<<20)))
	// One round in which everything takes ten times as long changes nothing.
	ours, theirs := []usage{{wall: 1}, {wall: 20}, {wall: 2}},
		[]usage{{wall: 2}, {wall: 40}, {wall: 2}}
	require.Equal(t, "0.50×", pairedRatio(ours, theirs, func(u usage) float64 { return u.wall }))
}

func TestParseClients(t *testing.T) {
	const perf = "\r00:00:01 - lba 1, iops current 47307 (184 MB/s), iops average 47307 (184 " +
		"MB/s), in_flight 32, busy 0" +
		"\niops average 52029 (203 MB/s)                \n\nfinished.\n"
	require.Equal(t, 52029.0, testtool.Must(parseIscsiPerf(perf))(t))
	require.ErrorIs(t, testtool.Err(parseIscsiPerf("iops average 0 (0 MB/s)")), errHung)
	require.ErrorContains(t, testtool.Err(parseIscsiPerf("login failed")), "login failed")

	elapsed, err := parseQemuBench("Sending 2000 write requests\nRun completed in 0.046 seconds.\n")
	require.NoError(t, err)
	require.Equal(t, 46*time.Millisecond, elapsed)
	elapsed = testtool.Must(parseQemuBench("Run completed in 0.000 seconds.\n"))(t)
	require.Equal(t, time.Millisecond, elapsed)
	require.ErrorContains(t, testtool.Err(parseQemuBench("qemu-img: failed")), "failed")
	require.Equal(t, 500.0, client{operations: 1000, elapsed: 2 * time.Second}.rate())
}

func TestProcfs(t *testing.T) {
	used := testtool.Must(parseStat("7 (a ) b) S 1 2 3 4 5 6 7 8 9 10 150 25 30 1 20 0\n"))(t)
	require.Equal(t, 2060*time.Millisecond, used)
	require.Error(t, testtool.Err(parseStat("7 (a) S 1")))
	anonymous := testtool.Must(parseRssAnon("VmRSS:\t 2000 kB\nRssAnon:\t    1234 kB\n"))(t)
	require.EqualValues(t, 1234<<10, anonymous)
	require.Error(t, testtool.Err(parseRssAnon("VmRSS: 1 kB\n")))

	require.NoError(t, testtool.Err(cpuTime(os.Getpid())))
	stop := watchMemory(os.Getpid())
	require.Positive(t, stop())
}

// TestExpandMeasures checks that one measurement fills every column of the tables.
func TestExpandMeasures(t *testing.T) {
	for try := 1; ; try++ {
		u := testtool.Must(expand(t.Context(),
			[]string{"dd", "if=/dev/zero", "of=/dev/null", "bs=32M", "count=20"},
			t.TempDir()+"/raw"))(t)
		require.Positive(t, u.wall)
		require.Greater(t, u.memory, 32.0*(1<<20))
		if u.anonymous > 0 {
			break
		}
		require.Less(t, try, 10, "on a busy machine dd may end before anybody looks at it, but "+
			"not always")
	}
	_, err := expand(t.Context(), []string{"sh", "-c", "echo why; exit 1"}, t.TempDir()+"/raw")
	require.ErrorContains(t, err, "why")
}

// TestFloor checks that the floor does the work that is measured: every byte of a write is in the
// file, and reads come from there.
func TestFloor(t *testing.T) {
	testtool.Need(t, "gcc")
	const size = 4 << 20
	raw := filepath.Join(t.TempDir(), "lun.raw")
	require.NoError(t, os.WriteFile(raw, make([]byte, size), 0o600))
	floor := testtool.Must(peers.StartFloor(t.TempDir(), raw))(t)
	t.Cleanup(func() { require.NoError(t, floor.Stop()) })
	for _, load := range []generatorLoad{
		{bytes: 4 << 10, depth: 1, sessions: 1, luns: 1},
		{bytes: 4 << 10, depth: 32, sessions: 4, luns: 1},
		{bytes: 256 << 10, depth: 16, sessions: 2, luns: 1},
		{bytes: 256 << 10, depth: 16, sessions: 1, luns: 1, write: true, step: 256 << 10},
	} {
		load.size = size
		done, err := generate(t.Context(), load, floor.URL, 100*time.Millisecond)
		require.NoError(t, err, load.String())
		require.Positive(t, done.operations, load.String())
	}
	content := testtool.Must(os.ReadFile(raw))(t)
	want := make([]byte, 256<<10)
	for i := range want {
		want[i] = byte(i * 7)
	}
	require.True(t, bytes.Equal(want, content[:256<<10]), "the generator's writes are in the file")
	// A read beyond the end fails: the connection ends, and the load says so.
	beyond := generatorLoad{bytes: 4096, depth: 1, sessions: 1, luns: 1, size: size << 20}
	require.Error(t, testtool.Err(generate(t.Context(), beyond, floor.URL, 50*time.Millisecond)))
}

// TestLink: data arrives unchanged, and not too early.
func TestLink(t *testing.T) {
	content := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(content)
	}))
	defer server.Close()
	k := testtool.Must(newLink(strings.TrimPrefix(server.URL, "http://")))(t)
	defer func() { require.NoError(t, k.close()) }()
	begin := time.Now()
	got := testtool.Must(io.ReadAll(testtool.Must(http.Get("http://" + k.address))(t).Body))(t)
	require.True(t, bytes.Equal(content, got))
	least := 4*linkDelay + time.Duration(float64(len(content))/linkRate*float64(time.Second))
	require.GreaterOrEqual(t, time.Since(begin), least)
	require.Greater(t, k.fetched.Load(), int64(len(content)))
}
