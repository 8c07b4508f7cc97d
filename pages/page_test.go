package pages

import (
	"fmt"
	"html"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/status"
)

// fake is a daemon that a page shows.
type fake struct {
	mu     sync.Mutex
	status status.Status // guarded by mu
	work   []Work        // guarded by mu
	maps   int           // guarded by mu; how often one was asked for
	hurry  int           // seconds more of work for each question; guarded by mu
}

func newFake() *fake {
	f := &fake{status: status.Status{State: status.StateReady, Ready: true, TargetName: "iqn.x",
		Portals: []string{"0.0.0.0:3260"}, Authentication: "chap", StartedAt: time.Now(),
		Sessions: []status.Session{{Initiator: "iqn.node1", Alias: "n1", TSIH: 7,
			Remote: "10.0.0.9:4000", User: "the-chap-user", LUNs: []uint16{1, 2}}},
		Volumes: &status.Volumes{Uploads: []status.Upload{
			{Volume: "vm.2", ReceivedBytes: 3 << 30, TotalBytes: 4 << 30, StartedBytes: 2 << 30,
				StartedAt: time.Now().Add(-time.Hour)},
			{Volume: "unknown-length", ReceivedBytes: 5 << 20}}}}}
	f.status.RefusedLogins = []status.RefusedLogin{{From: "10.0.0.7", Initiator: "iqn.stranger",
		User: "who", Reason: "authentication_failed", Count: 2,
		Last: time.Now().Add(-90 * time.Minute)}}
	f.luns(3)
	f.status.LUNs[1].Condition = status.Condition{State: status.DiskNoSpace, Kind: "no_space",
		Reason: "disk is full: no space left", Requests: 12, WhatToDo: "free space",
		Since: time.Now().Add(-90 * time.Minute)}
	return f
}

func (f *fake) luns(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.status.LUNs, f.work = nil, nil
	for i := range n {
		lun := status.LUN{LUN: uint16(i + 1), Image: fmt.Sprintf("disk-%d.qcow2", i+1),
			Format: "qcow2", SizeBytes: 16 << 40, CopyMode: "clone", Serial: fmt.Sprint("s", i),
			AccessMode: "write-exclusive", Ready: true, Owner: "iqn.node1",
			Fenced: []string{"iqn.old"}, OpenTo: "iqn.node2",
			Space: &status.Space{Used: 1, Free: 2},
			Copy:  &status.Copy{CopiedBytes: 1 << 30, DataBytes: 4 << 30}}
		lun.State = status.DiskReady
		f.status.LUNs = append(f.status.LUNs, lun)
		f.work = append(f.work, work(lun.LUN, 1))
	}
}

// source supplies the page's data. Each call finds that one more second of work was done, or more
// if the test is in a hurry.
func (f *fake) source() PageSource {
	seconds := 0
	r := rand.New(rand.NewPCG(1, 1))
	return PageSource{
		Status: func() status.Status {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.status
		},
		Work: func() (all []Work) {
			f.mu.Lock()
			defer f.mu.Unlock()
			seconds += 1 + f.hurry
			for _, w := range f.work {
				w = work(w.LUN, seconds*int(w.LUN))
				all = append(all, w)
			}
			return all
		},
		Map: func(uint16) *disk.Map {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.maps++
			return worstMap(r)
		},
	}
}

// serve serves a page with an HTTP server as the daemon's.
func (f *fake) serve(t *testing.T) (*Page, *httptest.Server) {
	t.Helper()
	page := testtool.Must(NewPage(f.source()))(t)
	mux := http.NewServeMux()
	page.Register(mux)
	ts := httptest.NewUnstartedServer(nil)
	ts.Config = newTestServer(mux)
	ts.Start()
	t.Cleanup(func() {
		page.Stop()
		ts.CloseClientConnections()
		ts.Close()
		page.Wait()
	})
	return page, ts
}

func TestPage(t *testing.T) {
	_, ts := newFake().serve(t)
	status, body, header := get(t, ts.URL+"/")
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, "text/html; charset=utf-8", header.Get("Content-Type"))
	require.Equal(t, "no-store", header.Get("Cache-Control"))
	for _, text := range []string{"disk-1.qcow2", "16 TiB", "iqn.node1", "open to iqn.node2",
		"fenced: iqn.old", "clone", "1 GiB of 4 GiB", "127.0.0.1:3260", "10.0.0.9:4000",
		"copying", "3 GiB of 4 GiB", "unknown-length", "not for good: no volume"} {
		require.Contains(t, body, text)
	}
	require.NotContains(t, body, "the-chap-user", "a name that is half a credential")
	require.Contains(t, body, `<th scope="row"><a id="lun1" href="?lun=1" aria-current="true">1</a>`)

	for _, path := range []string{"/index.html", "/assets/page.css", "/page.html", "/events/x"} {
		status, _, _ := get(t, ts.URL+path)
		require.Equal(t, http.StatusNotFound, status, path)
	}
	for _, method := range []string{"POST", "PUT", "DELETE", "PATCH"} {
		for _, path := range []string{"/", "/events", "/page.js"} {
			req := testtool.Must(http.NewRequest(method, ts.URL+path, nil))(t)
			res := testtool.Must(http.DefaultClient.Do(req))(t)
			require.NoError(t, res.Body.Close())
			require.Equal(t, http.StatusMethodNotAllowed, res.StatusCode, "%s %s", method, path)
		}
	}
}

// TestHeadIsGetWithoutABody checks HEAD also of the events, which have no end.
func TestHeadIsGetWithoutABody(t *testing.T) {
	_, ts := newFake().serve(t)
	for path, kind := range map[string]string{"/": "text/html; charset=utf-8",
		"/events": "text/event-stream", "/page.css": "text/css; charset=utf-8",
		"/page.js": "text/javascript; charset=utf-8", "/page.svg": "image/svg+xml"} {
		res := testtool.Must(http.Head(ts.URL + path))(t)
		body := testtool.Must(io.ReadAll(res.Body))(t)
		require.NoError(t, res.Body.Close())
		require.Empty(t, body)
		require.Equal(t, http.StatusOK, res.StatusCode)
		require.Equal(t, kind, res.Header.Get("Content-Type"))
		require.Equal(t, policy, res.Header.Get("Content-Security-Policy"))
		require.Equal(t, "nosniff", res.Header.Get("X-Content-Type-Options"))
		if path != "/events" {
			require.Positive(t, res.ContentLength, path)
		}
	}
	_, _, header := get(t, ts.URL+"/page.css")
	req := testtool.Must(http.NewRequest("GET", ts.URL+"/page.css", nil))(t)
	req.Header.Set("If-None-Match", header.Get("ETag"))
	res := testtool.Must(http.DefaultClient.Do(req))(t)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusNotModified, res.StatusCode)
}

// TestAssetsAreSmall limits the size of the files for browsers, and of those in the binary.
func TestAssetsAreSmall(t *testing.T) {
	sum, names := int64(0), map[string]bool{}
	require.NoError(t, fs.WalkDir(assets, "assets",
		func(_ string, entry fs.DirEntry, err error) error {
			require.NoError(t, err)
			if info, err := entry.Info(); err == nil && !entry.IsDir() {
				sum += info.Size()
				names[entry.Name()] = true
			}
			return nil
		}))
	require.Less(t, sum, int64(60<<10))
	for name := range assetTypes {
		require.True(t, names[name], name)
	}
}

// TestNothingInline checks that the policy does not break the page: no script, style or handler
// stands in it.
func TestNothingInline(t *testing.T) {
	_, ts := newFake().serve(t)
	_, body, _ := get(t, ts.URL+"/")
	require.NotRegexp(t, `(?i)<style|\sstyle=|\son[a-z]+=|javascript:|<script(?:[^>]*)>[^<]`, body)
	require.Len(t, regexp.MustCompile(`<script`).FindAllString(body, -1), 1)
	require.NotRegexp(t, `(?:src|href)="(?:https?:)?//`, body, "nothing comes from elsewhere")
}

// TestNamesAreNotMarkup checks that a name that somebody else chose is text on the page.
func TestNamesAreNotMarkup(t *testing.T) {
	f := newFake()
	const evil = `"><script>alert(1)</script>'&`
	f.status.LUNs[0].Image, f.status.LUNs[0].Owner = evil, evil
	f.status.LUNs[0].Failure, f.status.LUNs[0].Fenced = evil, []string{evil}
	f.status.Sessions[0].Initiator, f.status.Sessions[0].Alias = evil, evil
	f.status.TargetName = evil
	_, ts := f.serve(t)
	_, body, _ := get(t, ts.URL+"/")
	require.NotContains(t, body, "<script>alert")
	require.Contains(t, html.UnescapeString(body), evil)
}

// TestLiveMatchesThePage checks that each thing that changes has its place on the page, where it
// stands when the page is loaded.
func TestLiveMatchesThePage(t *testing.T) {
	page, ts := newFake().serve(t)
	page.Stop()
	page.Wait() // nothing is measured any more, so both show the same
	_, body, _ := get(t, ts.URL+"/?lun=2")
	again := testtool.Must(page.render(httptest.NewRequest("GET", ts.URL+"/?lun=2", nil)))(t)
	texts, paths, shape := live(again)
	require.Contains(t, body, `data-shape="`+shape+`"`)
	for _, id := range []string{"state", "uptime", "rops1", "rtime2", "owner1", "sum2", "image",
		"copy1left"} {
		require.Contains(t, texts, id)
	}
	for id, text := range texts {
		found := regexp.MustCompile(` id="` + regexp.QuoteMeta(id) + `"[^>]*>([^<]*)<`).
			FindStringSubmatch(body)
		require.NotNil(t, found, "%s is not on the page", id)
		if id != "uptime" && !strings.HasSuffix(id, "since") {
			require.Equal(t, text, html.UnescapeString(found[1]), id)
		}
	}
	for id, d := range paths {
		require.Contains(t, body, `id="`+id+`" d="`+d+`"`)
	}
	ids := map[string]bool{}
	for _, found := range regexp.MustCompile(` id="([^"]*)"`).FindAllStringSubmatch(body, -1) {
		require.False(t, ids[found[1]], "%s is there twice", found[1])
		ids[found[1]] = true
	}
}

// TestManyLUNs checks that a page of a full target is as small as that of 50 LUNs, and that all
// LUNs can be reached.
func TestManyLUNs(t *testing.T) {
	f := newFake()
	f.luns(16383)
	_, ts := f.serve(t)
	seen, next := 0, "?from=1"
	rows := regexp.MustCompile(`id="lun(\d+)"`)
	after := regexp.MustCompile(`href="(\?from=\d+)">next`)
	for pages := 0; next != "" && pages < 3; pages++ {
		_, body, _ := get(t, ts.URL+"/"+next)
		require.Less(t, len(body), 1<<20)
		n := rows.FindAllStringSubmatch(body, -1)
		require.Len(t, n, rowsPerPage)
		require.Equal(t, fmt.Sprint(seen+1), n[0][1])
		seen += len(n)
		next = after.FindStringSubmatch(body)[1]
	}
	_, body, _ := get(t, ts.URL+"/?lun=16383")
	require.Contains(t, body, `id="lun16383" href="?lun=16383" aria-current="true"`)
	require.NotContains(t, body, ">next LUNs")
	_, body, _ = get(t, ts.URL+"/?lun=16384&from=zero")
	require.Contains(t, body, "There is no LUN 16384.")
}

// TestUploads checks that the remaining time depends on the data since the connection began: a
// resumed upload had its first part for nothing.
func TestUploads(t *testing.T) {
	f := newFake()
	begun := f.status.Volumes.Uploads[0].StartedAt
	f.status.Volumes.Uploads = append(f.status.Volumes.Uploads, status.Upload{Volume: "slow",
		ReceivedBytes: 1, TotalBytes: 4 << 40, StartedAt: begun})
	s := &snapshot{now: begun.Add(time.Hour), status: f.status}
	var v view
	s.uploads(&v)
	require.Equal(t, []job{
		{ID: "upvm.2", What: "vm.2", Done: "3 GiB of 4 GiB", Percent: "75 %",
			Left: "1 h 0 min left"},
		{ID: "upunknown-length", What: "unknown-length", Done: "5 MiB", Percent: none,
			Left: none},
		{ID: "upslow", What: "slow", Done: "1 B of 4 TiB", Percent: "1 %",
			Left: "11574 days left"},
	}, v.Uploads)

	f.status.Volumes.Uploads = make([]status.Upload, 1000)
	s, v = &snapshot{status: f.status}, view{}
	s.uploads(&v)
	require.Len(t, v.Uploads, uploadsPerPage)
	require.Equal(t, "950", v.MoreUploads)
}

func TestEmptyPage(t *testing.T) {
	f := newFake()
	f.luns(0)
	f.status = status.Status{State: status.StateStarting}
	_, ts := f.serve(t)
	_, body, _ := get(t, ts.URL+"/?lun=1")
	require.Contains(t, body, "There are no LUNs yet.")
	require.Contains(t, body, "Nobody is logged in.")
}

// TestStates checks what is shown of a disk's state, in words.
func TestStates(t *testing.T) {
	lun := status.LUN{CopyMode: "clone", Copy: &status.Copy{}}
	for _, want := range []struct {
		is    status.DiskState
		shown string
	}{{status.DiskStarting, "starting"}, {status.DiskFailing, "failing"},
		{status.DiskNoSpace, "no space"}, {status.DiskWaiting, "waiting"},
		{status.DiskFailed, "failed"}, {status.DiskFenced, "fenced"},
		{status.DiskMoved, "moved"}, {status.DiskReady, "copying"}} {
		lun.State = want.is
		state, _ := stateOf(&lun, time.Now())
		require.Equal(t, want.shown, state)
	}
	lun.Copy.Complete = true
	state, _ := stateOf(&lun, time.Now())
	require.Equal(t, "ready", state)
	now := time.Now()
	lun.Condition = status.Condition{State: status.DiskNoSpace, Requests: 3,
		Reason: "disk is full: no room", Since: now.Add(-5 * time.Second)}
	state, note := stateOf(&lun, now)
	require.Equal(t, "no space", state)
	require.Equal(t, "disk is full: no room (3 times, since 5 s)", note)
}

// TestKept: the page says where the data of a disk is, and whether it stays.
func TestKept(t *testing.T) {
	one := &status.LUN{CopyMode: "copy-on-write"}
	s := snapshot{maps: func(uint16) *disk.Map { return nil }}
	require.Contains(t, s.detail(one).Kept, "not for good")
	s.status.WorkDir = "/work"
	require.Equal(t, "in /work", s.detail(one).Kept)
	s.status.UsageTypes = []status.UsageType{{Name: "slow", Directory: "/rust"},
		{Name: "fast", Directory: "/ssd"}}
	require.Equal(t, "in /ssd",
		s.detail(&status.LUN{CopyMode: "clone", UsageType: "fast"}).Kept)
	require.Equal(t, "in the image file", s.detail(&status.LUN{CopyMode: "none"}).Kept)
}

// TestTroubleComesFirst: the title and the headline say what is wrong, and the LUNs in trouble come
// before all others, each in a line of its own among many. Refused logins come before the list.
func TestTroubleComesFirst(t *testing.T) {
	f := newFake()
	f.luns(60)
	f.status.LUNs[36].Condition = status.Condition{State: status.DiskNoSpace,
		Reason: "disk is full", WhatToDo: "free space", Since: time.Now()}
	f.status.LUNs[50].Condition = status.Condition{State: status.DiskFenced, Since: time.Now()}
	f.status.Volumes.Failed = []status.FailedVolume{{Name: "vol", Failure: "its claim is away"}}
	_, ts := f.serve(t)
	_, body, _ := get(t, ts.URL+"/")
	require.Contains(t, body, `<title id="title">2 of 60 disks: no space (LUN 37)</title>`)
	require.Contains(t, body, `id="state" data-s="no space"`)
	at := -1
	for _, next := range []string{`id="headline"`, `href="?lun=37"`, "free space",
		`href="?lun=51"`, "its claim is away", "Refused logins", `id="lun1"`, `id="lun60"`} {
		require.Contains(t, body[at+1:], next)
		at += 1 + strings.Index(body[at+1:], next)
	}
	require.NotContains(t, body, "mapline", "one line for each LUN")

	f = newFake()
	f.luns(0)
	f.status.State = status.StateStarting
	f.status.Starting = &status.Condition{State: status.DiskStarting, Kind: "registry",
		Reason: "it waits for the registry of r/i: refused", WhatToDo: "see whether it runs",
		Since: time.Now()}
	_, ts = f.serve(t)
	_, body, _ = get(t, ts.URL+"/")
	require.Contains(t, body, `<title id="title">starting: waits for a registry</title>`)
	require.Contains(t, body, "it waits for the registry of r/i: refused. What to do: see whether")
	require.NotContains(t, body, "There are no LUNs yet.")
}

func TestTexts(t *testing.T) {
	for n, want := range map[float64]string{0: "0", 0.4: "0", 12: "12", 999: "999", 1000: "1,000",
		123456.7: "123,457", 1e9: "1,000,000,000"} {
		require.Equal(t, want, countText(n))
	}
	for d, want := range map[time.Duration]string{0: none, 300: "1 µs",
		85 * time.Microsecond:   "85 µs",
		1234 * time.Microsecond: "1.23 ms", 25 * time.Millisecond: "25 ms", 3 * time.Second: "3 s",
		1500 * time.Millisecond: "1.50 s"} {
		require.Equal(t, want, latencyText(d))
	}
	for d, want := range map[time.Duration]string{-time.Second: "0 s", 59 * time.Second: "59 s",
		61 * time.Second: "1 min", 90 * time.Minute: "1 h 30 min", 72 * time.Hour: "3 days"} {
		require.Equal(t, want, durationText(d))
	}
	require.Equal(t, "0 %", percentText(0, 10))
	require.Equal(t, "1 %", percentText(1, 1000), "a little is not nothing")
	require.Equal(t, "99 %", percentText(9999, 10000), "nearly all is not all")
	require.Equal(t, "100 %", percentText(10, 10))
	require.Equal(t, "0 %", percentText(0, 0))
	require.Equal(t, "75 %", percentText(3<<60, 4<<60))
	require.Equal(t, "iqn.a\ufffdb\ufffd", plain("iqn.a\u202eb\x00"))
	require.Equal(t, "a, b", plains([]string{"a", "b"}))
	require.Equal(t, "a, b, c, d, e, 2 more", plains([]string{"a", "b", "c", "d", "e", "f", "g"}))
}
