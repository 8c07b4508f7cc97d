package metrics

import (
	"fmt"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

func manyLUNs(n int) (*Metrics, *status.Status) {
	page := &status.Status{LUNs: make([]status.LUN, n)}
	for i := range page.LUNs {
		page.LUNs[i] = status.LUN{LUN: uint16(i + 1), Image: fmt.Sprintf("%d.raw", i+1),
			SizeBytes: 1 << 30}
	}
	m := of(page)
	m.initiators.known = func(lun uint16) bool { return int(lun) <= len(page.LUNs) }
	return m, page
}

// use sends commands of initiators to LUNs: each initiator to each LUN.
func use(m *Metrics, initiators, luns int) {
	for i := range initiators {
		for lun := range luns {
			for _, op := range []serving.Operation{serving.OpRead, serving.OpWrite} {
				m.RequestDone(serving.RequestEvent{Client: fmt.Sprintf("iqn.2026-01.x:%d", i),
					Number: uint16(lun + 1), Op: op, Bytes: 512, Duration: time.Millisecond})
			}
		}
	}
}

// TestAScrapeIsBounded: as many LUNs as a daemon has descriptors for, each used under as many names
// as have labels, take a limited number of series. All commands are counted, and each LUN's work is
// known.
func TestAScrapeIsBounded(t *testing.T) {
	const luns, names = 1018, 64
	m, _ := manyLUNs(luns)
	use(m, names, luns)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	w := httptest.NewRecorder()
	request := httptest.NewRequest("GET", "/metrics", nil)
	m.handler(zap.NewNop(), 10*time.Minute).ServeHTTP(w, request)
	runtime.ReadMemStats(&after)
	require.Equal(t, 200, w.Code)
	allocated := (after.TotalAlloc - before.TotalAlloc) >> 20
	t.Logf("%d MiB were allocated, for a page of %d MiB; the heap has %d MiB", allocated,
		w.Body.Len()>>20, after.HeapInuse>>20)
	// It was 503. The race detector makes pools forget, and adds half.
	require.Less(t, allocated, uint64(192), "MiB allocated by a scrape")
	series := strings.Count(w.Body.String(), "\nkubevirt_disk_transferred_bytes_total{")
	require.Less(t, series, 2*(maxPairs+maxShared+names)+1)
	total := 0.0
	for line := range strings.Lines(w.Body.String()) {
		if strings.HasPrefix(line, "kubevirt_disk_transferred_bytes_total{") {
			var bytes float64
			_, err := fmt.Sscan(line[strings.LastIndexByte(line, ' '):], &bytes)
			require.NoError(t, err)
			total += bytes
		}
	}
	require.EqualValues(t, luns*names*2*512, total)
	work := m.Work()
	require.Len(t, work, luns)
	for lun, w := range work {
		require.EqualValues(t, names, w.Read.Commands, lun)
	}
}

// TestSeriesOfRemovedLUNsMakeRoom: LUNs come and go. Those that are gone use up no series.
func TestSeriesOfRemovedLUNsMakeRoom(t *testing.T) {
	m, page := manyLUNs(maxPairs)
	use(m, 1, maxPairs)
	require.EqualValues(t, maxPairs, m.initiators.pairs.Load())
	use(m, 2, 1)
	labels := map[string]string{"lun": "1", "initiator": other, "operation": "read"}
	_, there := value(t, m, "kubevirt_disk_transferred_bytes_total", labels)
	require.True(t, there)
	page.LUNs = page.LUNs[:1]
	m.initiators.tidy()
	require.EqualValues(t, 1, m.initiators.pairs.Load())
	use(m, 2, 1)
	labels["initiator"] = "iqn.2026-01.x:1"
	got, there := value(t, m, "kubevirt_disk_transferred_bytes_total", labels)
	require.True(t, there)
	require.EqualValues(t, 512, got)
	labels["lun"] = "2"
	_, there = value(t, m, "kubevirt_disk_transferred_bytes_total", labels)
	require.False(t, there)
}
