package metrics

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

const initiatorA = "iqn.1993-08.org.debian:01:aaaa"

// twoDisks is a page with two LUNs.
func twoDisks() status.Status {
	return status.Status{LUNs: []status.LUN{
		{LUN: 1, Image: "fedora.qcow2", SizeBytes: 1 << 30, SignedBy: "sha256:ab",
			Copy:  &status.Copy{CopiedBytes: 1 << 20, DataBytes: 1 << 25, WaitsForSpace: true},
			Space: &status.Space{Used: 3 << 20}, Condition: status.Condition{
				State: status.DiskNoSpace, Kind: status.TroubleNoSpace},
			Troubles: []status.Trouble{{Kind: status.TroubleNoSpace},
				{Kind: status.TroubleStorage, Count: 7}, {Kind: status.TroubleOther},
				{Kind: status.TroubleOther, Message: "the image was written to"}}},
		{LUN: 2, Image: "data.raw", SizeBytes: 4096, Failure: "flush failed",
			Condition: status.Condition{State: status.DiskFailed}},
	}}
}

// of returns Metrics of a page, which may change.
func of(page *status.Status) *Metrics {
	return New(status.Build{Version: "v1.2.3", Commit: "abc", GoVersion: "go1.26",
		Platform: "linux/amd64"}, Daemon{Status: func() status.Status { return *page },
		Known: func(lun uint16) bool {
			return slices.ContainsFunc(page.LUNs, func(l status.LUN) bool { return l.LUN == lun })
		}, Fetched: func() *Fetched { return nil }, Uploads: func() *Uploads { return nil }})
}

func newTestMetrics() *Metrics {
	page := twoDisks()
	return of(&page)
}

// value returns the value of one metric by its full name, or false if it does not exist.
func value(t *testing.T, m *Metrics, name string, labels map[string]string) (float64, bool) {
	t.Helper()
	for _, f := range testtool.Must(m.registry.Gather())(t) {
		if f.GetName() != name {
			continue
		}
	next:
		for _, metric := range f.GetMetric() {
			if len(metric.GetLabel()) != len(labels) {
				continue
			}
			for _, l := range metric.GetLabel() {
				if labels[l.GetName()] != l.GetValue() {
					continue next
				}
			}
			switch {
			case metric.GetCounter() != nil:
				return metric.GetCounter().GetValue(), true
			case metric.GetGauge() != nil:
				return metric.GetGauge().GetValue(), true
			case metric.GetHistogram() != nil:
				return float64(metric.GetHistogram().GetSampleCount()), true
			}
		}
	}
	return 0, false
}

func requireValue(t *testing.T, m *Metrics, want float64, name string, labels map[string]string) {
	t.Helper()
	got, ok := value(t, m, name, labels)
	require.True(t, ok, "no metric %s%v", name, labels)
	require.Equal(t, want, got, "%s%v", name, labels)
}

func command(initiator string, lun uint16, op serving.Operation, bytes int64, d time.Duration,
	status uint8) serving.RequestEvent {
	return serving.RequestEvent{Client: initiator, Number: lun, Op: op, Bytes: bytes, Duration: d,
		Status: status}
}

func series3(lun, initiator, op string) map[string]string {
	return map[string]string{"lun": lun, "initiator": initiator, "operation": op}
}

// ended returns the labels of the commands that ended with a status.
func ended(series map[string]string, status string) map[string]string {
	series = maps.Clone(series)
	series["status"] = status
	return series
}

// TestCommandsAreCountedByStatus ends commands with every possible status. Each is counted once,
// under its own label or as "other". A successful command is no error.
func TestCommandsAreCountedByStatus(t *testing.T) {
	m := newTestMetrics()
	read := series3("1", initiatorA, "read")
	for code := range 256 {
		took := time.Duration(code) * time.Millisecond
		m.RequestDone(command(initiatorA, 1, serving.OpRead, 512, took, uint8(code)))
	}
	for range 3 {
		m.RequestDone(command(initiatorA, 1, serving.OpRead, 0, time.Millisecond, 0x18))
	}
	want := map[string]float64{"good": 1, "check_condition": 1, "condition_met": 1, "busy": 1,
		"reservation_conflict": 4, "task_set_full": 1, "aborted": 1, "other": 256 - 7}
	series := testutil.CollectAndCount(&collector{m: m}, "kubevirt_disk_operations_total")
	require.Equal(t, len(want), series)
	for status, n := range want {
		requireValue(t, m, n, "kubevirt_disk_operations_total", ended(read, status))
	}
	requireValue(t, m, 256+3-2, "kubevirt_disk_operation_errors_total", read)
	requireValue(t, m, 256+3, "kubevirt_disk_operation_duration_seconds", read)
	requireValue(t, m, 256*512, "kubevirt_disk_transferred_bytes_total", read)
}

func TestCommandsAreCountedByLUNInitiatorAndOperation(t *testing.T) {
	m := newTestMetrics()
	m.RequestDone(command(initiatorA, 1, serving.OpRead, 4096, 30*time.Microsecond, 0))
	m.RequestDone(command(initiatorA, 1, serving.OpRead, 8192, 3*time.Millisecond, 0))
	m.RequestDone(command(initiatorA, 1, serving.OpWrite, 512, time.Minute, 2))
	m.RequestDone(command("iqn.b", 2, serving.OpFlush, 0, 0, 0))

	read := series3("1", initiatorA, "read")
	requireValue(t, m, 2, "kubevirt_disk_operations_total", ended(read, "good"))
	requireValue(t, m, 12288, "kubevirt_disk_transferred_bytes_total", read)
	requireValue(t, m, 0, "kubevirt_disk_operation_errors_total", read)
	requireValue(t, m, 2, "kubevirt_disk_operation_duration_seconds", read)
	write := series3("1", initiatorA, "write")
	requireValue(t, m, 1, "kubevirt_disk_operation_errors_total", write)
	requireValue(t, m, 512, "kubevirt_disk_transferred_bytes_total", write)
	requireValue(t, m, 1, "kubevirt_disk_operations_total",
		ended(series3("2", "iqn.b", "flush"), "good"))
	_, exists := value(t, m, "kubevirt_disk_operations_total",
		ended(series3("2", "iqn.b", "read"), "good"))
	require.False(t, exists, "an operation without commands has no series")
}

func TestHistogramBucketsAreCumulativeAndEndWithEverything(t *testing.T) {
	m := newTestMetrics()
	for _, d := range []time.Duration{-time.Second, 10 * time.Microsecond, 11 * time.Microsecond,
		30 * time.Second, time.Hour} {
		m.RequestDone(command(initiatorA, 1, serving.OpRead, 1, d, 0))
	}
	for _, f := range testtool.Must(m.registry.Gather())(t) {
		if f.GetName() != "kubevirt_disk_operation_duration_seconds" {
			continue
		}
		h := f.GetMetric()[0].GetHistogram()
		require.EqualValues(t, 5, h.GetSampleCount())
		require.InDelta(t, 3630.000021, h.GetSampleSum(), 1e-9)
		require.Len(t, h.GetBucket(), len(bounds))
		require.EqualValues(t, 2, h.GetBucket()[0].GetCumulativeCount(),
			"a bound belongs to its bucket; a clock that stepped back counts as 0")
		require.EqualValues(t, 3, h.GetBucket()[1].GetCumulativeCount())
		require.EqualValues(t, 4, h.GetBucket()[len(bounds)-1].GetCumulativeCount())
		return
	}
	t.Fatal("no histogram")
}

func TestCommandsToLUNsThatAreNotThereAreCountedTogether(t *testing.T) {
	m := newTestMetrics()
	for lun := uint16(3); lun < 5000; lun++ {
		m.RequestDone(command(initiatorA, lun, serving.OpOther, 36, time.Microsecond, 2))
	}
	requireValue(t, m, 4997, "kubevirt_disk_operations_total",
		ended(series3("other", initiatorA, "other"), "check_condition"))
	require.Equal(t, 1, testutil.CollectAndCount(&collector{m: m},
		"kubevirt_disk_operations_total"))
}

func TestInitiatorsAreBounded(t *testing.T) {
	m := newTestMetrics()
	for i := range 1000 {
		name := fmt.Sprintf("iqn.2020-01.com.example:%d", i)
		m.LoginAccepted(serving.LoginEvent{Client: name})
		m.RequestDone(command(name, 1, serving.OpRead, 1, time.Microsecond, 0))
	}
	require.Equal(t, maxInitiators+1,
		testutil.CollectAndCount(&collector{m: m}, "kubevirt_disk_operations_total"))
	requireValue(t, m, 1000-maxInitiators, "kubevirt_disk_operations_total",
		ended(series3("1", "other", "read"), "good"))
	requireValue(t, m, 1000-maxInitiators, "kubevirt_disk_sessions",
		map[string]string{"initiator": "other", "type": "normal"})
	for i := range 1000 {
		m.SessionEnded(serving.SessionEvent{Client: fmt.Sprintf("iqn.2020-01.com.example:%d", i),
			Reason: "logout"})
	}
	requireValue(t, m, 0, "kubevirt_disk_sessions",
		map[string]string{"initiator": "iqn.2020-01.com.example:3", "type": "normal"})
	requireValue(t, m, 1000, "kubevirt_disk_sessions_ended_total",
		map[string]string{"reason": "logout"})
}

// TestOverflowIsShownIfThereIsOne checks that everything beyond the bound is on the page, and that
// the page has no empty row before.
func TestOverflowIsShownIfThereIsOne(t *testing.T) {
	for name, do := range map[string]func(m *Metrics){
		"a session": func(m *Metrics) {
			m.LoginAccepted(serving.LoginEvent{Client: initiatorA})
		},
		"a discovery": func(m *Metrics) {
			m.LoginAccepted(serving.LoginEvent{Client: initiatorA, Discovery: true})
		},
		"a command": func(m *Metrics) {
			m.RequestDone(command(initiatorA, 1, serving.OpRead, 1, time.Microsecond, 0))
		},
	} {
		m := newTestMetrics()
		for i := range maxInitiators {
			m.LoginAccepted(serving.LoginEvent{Client: fmt.Sprintf("iqn.2020-01.com.example:%d",
				i)})
		}
		require.Equal(t, 2*maxInitiators,
			testutil.CollectAndCount(&collector{m: m}, "kubevirt_disk_sessions"))
		do(m)
		require.Equal(t, 2*maxInitiators+2,
			testutil.CollectAndCount(&collector{m: m}, "kubevirt_disk_sessions"), name)
	}
}

func TestNamesThatAreNoLabelsDoNotBreakThePage(t *testing.T) {
	m := newTestMetrics()
	// The first two become the same label when they are made valid. "other" is the overflow's name.
	for _, name := range []string{"iqn.\xff", "iqn.\xfe", "other", "", "iqn.\"quoted\"\n"} {
		m.LoginAccepted(serving.LoginEvent{Client: name})
		m.RequestDone(command(name, 1, serving.OpRead, 1, time.Microsecond, 0))
	}
	m.initiators.get("a second time, after the overflow").normal.Add(1)
	require.Equal(t, 4, testutil.CollectAndCount(&collector{m: m},
		"kubevirt_disk_operations_total"))
	requireValue(t, m, 1, "kubevirt_disk_operations_total",
		ended(series3("1", "iqn.\uFFFD", "read"), "good"))
	requireValue(t, m, 2, "kubevirt_disk_operations_total",
		ended(series3("1", "other", "read"), "good"))
}

func TestLoginsSessionsAndBugs(t *testing.T) {
	m := newTestMetrics()
	m.LoginAccepted(serving.LoginEvent{Client: initiatorA})
	m.LoginAccepted(serving.LoginEvent{Client: initiatorA})
	m.LoginAccepted(serving.LoginEvent{Client: initiatorA, Discovery: true})
	requireValue(t, m, 1, "kubevirt_disk_sessions",
		map[string]string{"initiator": initiatorA, "type": "discovery"})
	m.SessionEnded(serving.SessionEvent{Client: initiatorA, Discovery: true, Reason: "logout"})
	m.LoginRefused(serving.LoginEvent{Client: "iqn.evil", Reason: "bad_password"})
	m.MessageRejected("protocol error")
	m.PanicCaught()
	requireValue(t, m, 2, "kubevirt_disk_sessions",
		map[string]string{"initiator": initiatorA, "type": "normal"})
	requireValue(t, m, 0, "kubevirt_disk_sessions",
		map[string]string{"initiator": initiatorA, "type": "discovery"})
	requireValue(t, m, 2, "kubevirt_disk_logins_accepted_total",
		map[string]string{"type": "normal"})
	requireValue(t, m, 1, "kubevirt_disk_logins_accepted_total",
		map[string]string{"type": "discovery"})
	requireValue(t, m, 1, "kubevirt_disk_logins_refused_total",
		map[string]string{"reason": "bad_password"})
	requireValue(t, m, 1, "kubevirt_disk_pdus_rejected_total",
		map[string]string{"reason": "protocol error"})
	requireValue(t, m, 1, "kubevirt_disk_panics_caught_total", nil)
}

func TestDisksCopiesAndReadiness(t *testing.T) {
	page := twoDisks()
	m := of(&page)
	first, second := map[string]string{"lun": "1", "image": "fedora.qcow2"},
		map[string]string{"lun": "2", "image": "data.raw"}
	requireValue(t, m, 1<<30, "kubevirt_disk_lun_size_bytes", first)
	requireValue(t, m, 1<<20, "kubevirt_disk_image_copied_bytes", first)
	requireValue(t, m, 1<<25, "kubevirt_disk_image_data_bytes", first)
	requireValue(t, m, 0, "kubevirt_disk_disk_complete", first)
	requireValue(t, m, 1, "kubevirt_disk_waits_for_space", first)
	requireValue(t, m, 0, "kubevirt_disk_waits_for_space", second)
	requireValue(t, m, 1, "kubevirt_disk_lun_state",
		map[string]string{"lun": "1", "state": "no_space"})
	requireValue(t, m, 1, "kubevirt_disk_lun_state",
		map[string]string{"lun": "2", "state": "failed"})
	requireValue(t, m, 1, "kubevirt_disk_lun_trouble",
		map[string]string{"lun": "1", "kind": "no_space"})
	requireValue(t, m, 7, "kubevirt_disk_lun_trouble",
		map[string]string{"lun": "1", "kind": "storage"})
	requireValue(t, m, 3<<20, "kubevirt_disk_lun_used_bytes", first)
	requireValue(t, m, 0, "kubevirt_disk_lun_free_bytes", first)
	requireValue(t, m, 0, "kubevirt_disk_lun_failed", first)
	requireValue(t, m, 1, "kubevirt_disk_lun_failed", second)
	_, exists := value(t, m, "kubevirt_disk_image_copied_bytes", second)
	require.False(t, exists, "a disk that is served in place is not copied")
	_, exists = value(t, m, "kubevirt_disk_lun_free_bytes", second)
	require.False(t, exists, "it cannot tell")
	requireValue(t, m, 0, "kubevirt_disk_ready", nil)
	page.Ready = true
	requireValue(t, m, 1, "kubevirt_disk_ready", nil)
	requireValue(t, m, 1, "kubevirt_disk_build_info", map[string]string{
		"version": "v1.2.3", "commit": "abc", "goversion": "go1.26", "platform": "linux/amd64"})
}

// full returns Metrics in which every metric exists.
func full() *Metrics {
	page := twoDisks()
	page.UsageTypes = []status.UsageType{{Name: "fast", Space: &status.Space{Used: 7, Free: 8}},
		{Name: "gone"}}
	page.LUNs[0].Digest, page.LUNs[0].PlatformDigest = "sha256:a", "sha256:b"
	page.Volumes = &status.Volumes{States: map[string]int{"ready": 2, "failed": 1}, Bytes: 7}
	m := of(&page)
	m.daemon.Fetched = func() *Fetched {
		return &Fetched{Bytes: 5, Chunks: 4, Wrong: 3, Damaged: 2, Unsaved: 1}
	}
	m.daemon.Uploads = func() *Uploads {
		return &Uploads{Active: 1, Bytes: 9, Completed: 3, Failed: 2}
	}
	for _, op := range operations {
		m.RequestDone(command(initiatorA, 1, op, 512, time.Millisecond, 0))
	}
	m.LoginAccepted(serving.LoginEvent{Client: initiatorA})
	m.LoginRefused(serving.LoginEvent{Reason: "bad_password"})
	m.SessionEnded(serving.SessionEvent{Client: initiatorA, Reason: "logout"})
	m.MessageRejected("protocol error")
	m.PanicCaught()
	return m
}

// TestWhatIsNotCounted has the series of volumes, uploads, fetched images and usage types.
func TestWhatIsNotCounted(t *testing.T) {
	m := full()
	for _, one := range []struct {
		name         string
		label, value string
		want         float64
	}{
		{"volumes", "state", "ready", 2},
		{"volumes", "state", "failed", 1},
		{"volumes_bytes", "", "", 7},
		{"uploads", "", "", 1},
		{"upload_bytes_total", "", "", 9},
		{"uploads_ended_total", "result", "completed", 3},
		{"uploads_ended_total", "result", "failed", 2},
		{"registry_fetched_bytes_total", "", "", 5},
		{"registry_fetched_chunks_total", "", "", 4},
		{"registry_wrong_chunks_total", "", "", 3},
		{"cache_damaged_chunks_total", "", "", 2},
		{"cache_unsaved_chunks_total", "", "", 1},
		{"usage_type_used_bytes", "usage_type", "fast", 7},
		{"usage_type_free_bytes", "usage_type", "fast", 8},
	} {
		labels := map[string]string{}
		if one.label != "" {
			labels[one.label] = one.value
		}
		requireValue(t, m, one.want, "kubevirt_disk_"+one.name, labels)
	}
}

func TestNamesFollowTheConventions(t *testing.T) {
	require.Empty(t, testtool.Must(testutil.GatherAndLint(full().registry))(t))
}

// TestEveryDescriptionIsEmitted checks that Describe and Collect know the same metrics.
func TestEveryDescriptionIsEmitted(t *testing.T) {
	c := &collector{m: full()}
	described := make(chan *prometheus.Desc, 64)
	c.Describe(described)
	close(described)
	emitted := map[string]bool{}
	metrics := make(chan prometheus.Metric, 256)
	c.Collect(metrics)
	close(metrics)
	for m := range metrics {
		emitted[m.Desc().String()] = true
	}
	n := 0
	for d := range described {
		n++
		require.True(t, emitted[d.String()], "described and never emitted: %s", d)
	}
	require.Len(t, emitted, n)
}

func TestCountingWhilePagesAreMade(t *testing.T) {
	m := newTestMetrics()
	const workers, each = 8, 500
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			name := fmt.Sprintf("iqn.%d", w%3)
			m.LoginAccepted(serving.LoginEvent{Client: name})
			for i := range each {
				m.RequestDone(command(name, uint16(i%4), operations[i%len(operations)], 1,
					time.Duration(i)*time.Microsecond, 0))
				m.MessageRejected(fmt.Sprint(i % 100))
			}
		})
	}
	for range 20 {
		require.NoError(t, testtool.Err(m.registry.Gather()))
	}
	wg.Wait()
	sum := uint64(0)
	for _, g := range m.initiators.byLabel() {
		for _, unit := range g.units {
			for i := range unit {
				sum += unit[i].count
			}
		}
	}
	require.EqualValues(t, workers*each, sum)
}

func TestCommandDoneAllocatesNothing(t *testing.T) {
	m := newTestMetrics()
	e := command(strings.Clone(initiatorA), 1, serving.OpWrite, 4096, 70*time.Microsecond, 0)
	m.RequestDone(e)
	require.Zero(t, testing.AllocsPerRun(1000, func() { m.RequestDone(e) }))
}

func BenchmarkCommandDone(b *testing.B) {
	m := newTestMetrics()
	for i := range maxInitiators {
		m.RequestDone(command(fmt.Sprintf("iqn.1993-08.org.debian:01:%d", i), 1, serving.OpRead, 1,
			0, 0))
	}
	e := command("iqn.1993-08.org.debian:01:7", 1, serving.OpRead, 4096, 70*time.Microsecond, 0)
	b.ReportAllocs()
	for b.Loop() {
		m.RequestDone(e)
	}
}
