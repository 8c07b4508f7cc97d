package pages

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

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
