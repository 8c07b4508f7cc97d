package pages

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

func newTestServer(h http.Handler) *http.Server { return NewServer(h, zap.NewNop()) }

// watcher is a client of the events.
type watcher struct {
	t    *testing.T
	res  *http.Response
	read *bufio.Reader
}

func watch(t *testing.T, url string) *watcher {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	req := testtool.Must(http.NewRequestWithContext(ctx, "GET", url+"/events?lun=1", nil))(t)
	res := testtool.Must(http.DefaultClient.Do(req))(t)
	t.Cleanup(func() { res.Body.Close() })
	return &watcher{t: t, res: res, read: bufio.NewReader(res.Body)}
}

// line returns the next line with a prefix, without the prefix.
func (w *watcher) line(prefix string) string {
	w.t.Helper()
	for {
		line := testtool.Must(w.read.ReadString('\n'))(w.t)
		if rest, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), prefix); ok {
			return rest
		}
	}
}

func (w *watcher) news() (n news) {
	w.t.Helper()
	require.NoError(w.t, json.Unmarshal([]byte(w.line("data: ")), &n))
	return n
}

// TestEvents checks that a client first gets everything, then the changes, and learns when the page
// has other parts.
func TestEvents(t *testing.T) {
	f := newFake()
	page, ts := f.serve(t)
	w := watch(t, ts.URL)
	require.Equal(t, http.StatusOK, w.res.StatusCode)
	require.Equal(t, "text/event-stream", w.res.Header.Get("Content-Type"))
	require.Equal(t, "no-store", w.res.Header.Get("Cache-Control"))
	require.Equal(t, "2000", w.line("retry: "))
	first := w.news()
	require.Equal(t, "no space", first.Text["state"])
	require.Equal(t, "copying", first.Text["state1"])
	require.NotEmpty(t, first.Path["gi"])
	second := w.news()
	require.Equal(t, first.Shape, second.Shape)
	require.NotContains(t, second.Text, "state", "it is still the same")
	// If the client came late, it knows the rate already. So let it change.
	f.mu.Lock()
	f.hurry = 7
	f.mu.Unlock()
	for n := second; n.Text["rops1"] == ""; {
		n = w.news()
	}

	f.luns(4)
	for n := second; n.Shape == first.Shape; {
		n = w.news()
	}
	f.mu.Lock()
	f.status.State = status.StateStopping
	f.mu.Unlock()
	for n := second; n.Text["state"] != "stopping"; {
		n = w.news()
	}
	page.Stop()
	require.Equal(t, "end", w.line("event: "))
	require.NoError(t, testtool.Err(io.Copy(io.Discard, w.read)), "the answer has an end")
	page.Wait()
	w = watch(t, ts.URL)
	require.Equal(t, http.StatusServiceUnavailable, w.res.StatusCode, "the daemon is going")
}

// TestClientsShareALook checks that all clients share one look at the disks in a tick.
func TestClientsShareALook(t *testing.T) {
	f := newFake()
	page, ts := f.serve(t)
	page.Stop()
	page.Wait()
	f.mu.Lock()
	f.maps = 0
	f.mu.Unlock()
	page.measure(time.Now(), nil)
	for range 10 {
		get(t, ts.URL+"/?lun=1")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	require.Equal(t, 3, f.maps, "one for each LUN")
}

// TestClientsAreBounded checks that too many clients are told so, and that a place is free again
// when one goes.
func TestClientsAreBounded(t *testing.T) {
	_, ts := newFake().serve(t)
	var all []*watcher
	for range maxClients {
		w := watch(t, ts.URL)
		require.Equal(t, http.StatusOK, w.res.StatusCode)
		all = append(all, w)
	}
	w := watch(t, ts.URL)
	require.Equal(t, http.StatusServiceUnavailable, w.res.StatusCode)
	require.NotEmpty(t, w.res.Header.Get("Retry-After"))
	status, _, _ := get(t, ts.URL+"/")
	require.Equal(t, http.StatusOK, status, "the page itself is for everybody")
	require.NoError(t, all[0].res.Body.Close())
	testtool.Eventually(t, func() bool {
		w := watch(t, ts.URL)
		defer w.res.Body.Close()
		return w.res.StatusCode == http.StatusOK
	})
	all[1].news() // the others go on
}

// TestSlowClientIsDropped checks that a client that reads nothing loses its connection, and does
// not hold up others meanwhile.
func TestSlowClientIsDropped(t *testing.T) {
	page, ts := newFake().serve(t)
	page.timeout = time.Second / 2
	conn := testtool.Must(net.Dial("tcp", ts.Listener.Addr().String()))(t)
	defer conn.Close()
	require.NoError(t, conn.(*net.TCPConn).SetReadBuffer(4096))
	_, err := io.WriteString(conn, "GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
	require.NoError(t, err)
	clients := func() int {
		page.mu.Lock()
		defer page.mu.Unlock()
		return page.clients
	}
	testtool.Eventually(t, func() bool { return clients() == 1 })
	w := watch(t, ts.URL)
	for range 3 {
		w.news()
	}
	// Many ticks, so that the buffers in between are soon full.
	done := make(chan struct{})
	go func() {
		defer close(done)
		for now := range time.Tick(time.Millisecond) {
			if clients() < 2 {
				return
			}
			page.measure(now, nil)
		}
	}()
	go func() { _, _ = io.Copy(io.Discard, w.read) }()
	testtool.Await(t, done, "it is still there")
}

// TestNothingIsLeft checks that nothing of a page runs after its end, and that two pages share
// nothing.
func TestNothingIsLeft(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	one := testtool.Must(NewPage(newFake().source()))(t)
	two := testtool.Must(NewPage(newFake().source()))(t)
	one.Stop()
	one.Stop()
	one.Wait()
	next := two.next()
	testtool.Await(t, next, "the other one has stopped, too")
	mux := http.NewServeMux()
	two.Register(mux)
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	srv := newTestServer(mux)
	go func() { _ = srv.Serve(l) }()
	client := &http.Client{Transport: &http.Transport{}}
	res := testtool.Must(client.Get("http://" + l.Addr().String() + "/events"))(t)
	two.Stop()
	require.NoError(t, testtool.Err(io.Copy(io.Discard, res.Body)))
	require.NoError(t, res.Body.Close())
	client.CloseIdleConnections()
	require.NoError(t, srv.Close())
	two.Wait()
}

func TestDrawMap(t *testing.T) {
	m := &disk.Map{CellBytes: 4, Size: 28, Cells: []disk.Cell{
		{Image: 4}, {Image: 3, Copied: 1}, {Copied: 4, Read: true}, {Hole: 4, Read: true},
		{Image: 3, Written: 1}, {Image: 1, Copied: 3}, {Image: 4, Read: true},
	}}
	require.Equal(t, mapPaths{Image: "M0 0.5h2M6 0.5h1", Copied: "M2 0.5h1M5 0.5h1",
		Written: "M4 0.5h1", Read: "M2 0.5h2M6 0.5h1"}, drawMap(m, 7))
	require.Equal(t, mapPaths{Image: "M0 0.5h2M2 1.5h1", Copied: "M2 0.5h1M1 1.5h1",
		Written: "M0 1.5h1", Read: "M2 0.5h2M2 1.5h1"}, drawMap(m, 4))
}

// worstMap is a map in which no two cells side by side are alike.
func worstMap(r *rand.Rand) *disk.Map {
	m := disk.NewMap(16<<40 - 4096)
	last := -1
	for i := range m.Cells {
		c := &m.Cells[i]
		kind := r.IntN(3)
		if kind == last {
			kind = (kind + 1) % 3
		}
		last = kind
		*[]*int64{&c.Image, &c.Copied, &c.Written}[kind] = m.CellBytes
		c.Read = i%2 == 0
	}
	return m
}

// TestMapIsSmall checks that the largest map of a disk takes at most 64 KiB in a browser, as it is
// in the page and in an event.
func TestMapIsSmall(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		m := drawMap(worstMap(r), gridColumns)
		paths := map[string]string{"gi": m.Image, "gc": m.Copied, "gw": m.Written, "gr": m.Read}
		require.LessOrEqual(t, len(testtool.Must(json.Marshal(news{Path: paths}))(t)), 64<<10)
	}
}

func TestDrawArea(t *testing.T) {
	require.Empty(t, drawArea([]float64{0, 0, 0}, 0, false))
	require.Equal(t, "M0 32v0l1 -31l1 30V32z", drawArea([]float64{0, 10, .001}, 10, false))
	require.Equal(t, "M0 32v31l1 -31l1 16V32z", drawArea([]float64{10, 0, 5}, 10, true))
}

// work is the work of a LUN after this many seconds at 100 reads of 4 KiB and 10 writes of 1 MiB a
// second.
func work(lun uint16, seconds int) Work {
	n := uint64(seconds)
	return Work{LUN: lun, Image: "a", CopiedBytes: int64(n) << 20,
		Read: Commands{Count: 100 * n, Bytes: 100 * n << 12,
			Time: time.Duration(n) * 5 * time.Millisecond},
		Write: Commands{Count: 10 * n, Bytes: 10 * n << 20,
			Time: time.Duration(n) * 20 * time.Millisecond}}
}

func TestRates(t *testing.T) {
	var r rates
	now := time.Now()
	r.add(now, []Work{work(1, 5), {LUN: 2}})
	require.Zero(t, r.luns[1].now, "one look is no speed")
	for i := range 5 {
		now = now.Add(time.Second)
		r.add(now, []Work{work(1, 6+i), {LUN: 2}})
	}
	h := r.luns[1]
	require.Equal(t, speed{readOps: 100, writeOps: 10, readBytes: 100 << 12, writeBytes: 10 << 20,
		readTime: 50 * time.Microsecond, writeTime: 2 * time.Millisecond}, h.now)
	require.InEpsilon(t, 100, h.left(100<<20).Seconds(), .001)
	up, down, top := h.chart(r.next, func(p point) float32 { return p.readOps },
		func(p point) float32 { return p.writeOps })
	require.NotEmpty(t, up)
	require.NotEmpty(t, down)
	require.InEpsilon(t, 100, top, .001)
	require.Nil(t, r.luns[2].points, "nothing is kept of a LUN that nobody uses")
	require.Zero(t, r.luns[2].left(1))

	// The latency stays for a while, and the chart for two minutes.
	idle := work(1, 10)
	for range latencyFor {
		now = now.Add(time.Second)
		r.add(now, []Work{idle})
		require.NotZero(t, r.luns[1].now.readTime)
		require.Zero(t, r.luns[1].now.readOps)
	}
	require.NotContains(t, r.luns, uint16(2), "the LUN is gone")
	for range chartPoints {
		require.NotNil(t, r.luns[1].points)
		now = now.Add(time.Second)
		if r.add(now, []Work{idle}); r.luns[1].points == nil {
			break
		}
	}
	require.Nil(t, r.luns[1].points)
	require.Zero(t, r.luns[1].now.readTime)

	r.add(now.Add(time.Second/2), []Work{idle, work(3, 1)})
	require.InEpsilon(t, 200, r.luns[3].now.readOps, .001, "all of it is new")
	idle.Image = "b"
	r.add(now.Add(time.Second), []Work{idle})
	require.Zero(t, r.luns[1].now.readOps, "another disk at the same LUN")
	r.add(now.Add(2*time.Second), []Work{{LUN: 1, Image: "b"}})
	require.Zero(t, r.luns[1].now.readOps, "counters that began anew")
}

// TestRatesAreBounded measures the histories of as many LUNs as a target can have, all in use.
func TestRatesAreBounded(t *testing.T) {
	heap := func() int64 {
		runtime.GC()
		runtime.GC() // the second collection empties the pools
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	var r rates
	now := time.Now()
	for second := range 4 {
		all := make([]Work, 1<<14)
		for i := range all {
			all[i] = work(uint16(i), second)
		}
		now = now.Add(time.Second)
		r.add(now, all)
	}
	with := heap()
	require.Len(t, r.luns, 1<<14)
	r = rates{}
	// Memory of earlier tests was collected before both numbers were taken.
	used := with - heap()
	t.Logf("%d bytes", used)
	require.Greater(t, used, int64(1<<20))
	require.Less(t, used, int64(40<<20))
}
