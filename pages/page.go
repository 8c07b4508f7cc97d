package pages

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"html/template"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/status"
)

//go:embed assets
var assets embed.FS

// assetTypes are the types of the files that a browser loads with the page.
var assetTypes = map[string]string{
	"page.css": "text/css; charset=utf-8",
	"page.js":  "text/javascript; charset=utf-8",
	"page.svg": "image/svg+xml",
}

// policy lets a browser load files only from here, and use no script or style inside the page.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; " +
	"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// PageSource supplies the data of the page for people. All functions are required, and must not
// block for long.
type PageSource struct {
	Status func() status.Status
	Work   func() []Work // of all LUNs; called each second
	// Map is a picture of a LUN's disk; nil: not known now.
	Map func(lun uint16) *disk.Map
}

// Page is the page for people. It shows the daemon's work live. Its methods are safe for concurrent
// use.
type Page struct {
	src     PageSource
	html    *template.Template
	timeout time.Duration // for a client that does not read

	stop    chan struct{} // closed by Stop
	stopped sync.Once
	work    sync.WaitGroup

	mu      sync.Mutex
	rates   rates
	tick    chan struct{}        // guarded by mu; closed when there is new data
	status  *status.Status       // guarded by mu; of this tick; nil: not read yet
	maps    map[uint16]*disk.Map // guarded by mu; of this tick
	clients int                  // guarded by mu
}

// tickEvery is the time between two measurements of rates, with updates for the clients, unless
// these take long.
const tickEvery = time.Second

// NewPage makes a page, which measures from now on until Stop.
func NewPage(src PageSource) (*Page, error) {
	html, err := template.ParseFS(assets, "assets/page.html")
	if err != nil {
		return nil, err
	}
	p := &Page{src: src, html: html, timeout: clientTimeout, stop: make(chan struct{}),
		tick: make(chan struct{})}
	p.work.Go(p.run)
	return p, nil
}

// Stop ends the measuring, and tells the clients that the daemon stops. It does not wait.
func (p *Page) Stop() { p.stopped.Do(func() { close(p.stop) }) }

// Wait waits after Stop until no goroutine of the page runs any more. Clients that do not read
// delay this until their connections are closed.
func (p *Page) Wait() { p.work.Wait() }

// Register makes mux serve the page, its files and its events.
func (p *Page) Register(mux *http.ServeMux) {
	mux.HandleFunc("GET /{$}", p.serve)
	mux.HandleFunc("GET /events", p.events)
	for name, kind := range assetTypes {
		content, err := assets.ReadFile("assets/" + name)
		if err != nil {
			continue // a test loads all of them
		}
		sum := sha256.Sum256(content)
		tag := `"` + hex.EncodeToString(sum[:8]) + `"`
		mux.HandleFunc("GET /"+name, func(w http.ResponseWriter, r *http.Request) {
			protect(w.Header())
			w.Header().Set("Content-Type", kind)
			w.Header().Set("Cache-Control", "no-cache") // ask whether it has changed
			w.Header().Set("ETag", tag)
			http.ServeContent(w, r, name, time.Time{}, bytes.NewReader(content))
		})
	}
}

// protect sets the headers of every answer to a browser.
func protect(h http.Header) {
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
}

// serve answers with the page as it is now.
func (p *Page) serve(w http.ResponseWriter, r *http.Request) {
	page, err := p.render(r)
	if err != nil {
		http.Error(w, "the page cannot be made: "+err.Error(), http.StatusInternalServerError)
		return
	}
	_, _, shape := live(page)
	page = strings.Replace(page, `data-shape=""`, `data-shape="`+shape+`"`, 1)
	protect(w.Header())
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Content-Length", strconv.Itoa(len(page)))
	_, _ = io.WriteString(w, page) // if this fails, the client has gone
}

// render makes the page for a client, without its shape.
func (p *Page) render(r *http.Request) (string, error) {
	var b strings.Builder
	err := p.html.Execute(&b, p.view(r))
	return b.String(), err
}

// run measures until the page is stopped.
func (p *Page) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-p.stop:
			return
		case <-timer.C:
		}
		begin := time.Now()
		p.measure(begin, p.src.Work())
		// This takes long with very many LUNs. Limit it to a tenth of a processor.
		timer.Reset(max(tickEvery, 10*time.Since(begin)))
	}
}

// measure takes new counters, and wakes the clients.
func (p *Page) measure(now time.Time, work []Work) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rates.add(now, work)
	p.status, p.maps = nil, nil
	close(p.tick)
	p.tick = make(chan struct{})
}

// next is closed when there is new data.
func (p *Page) next() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.tick
}

// view makes the view for a client. All clients of a tick share one status and one set of maps.
func (p *Page) view(r *http.Request) *view {
	local := ""
	if a, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		local = a.String()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.status == nil {
		status := p.src.Status()
		p.status, p.maps = &status, map[uint16]*disk.Map{}
	}
	s := &snapshot{now: time.Now(), status: *p.status, rates: &p.rates, maps: p.mapLocked}
	s.asked, s.local = r.Host, local
	return s.view(selectionOf(r.URL.Query()))
}

// mapLocked reads the map of a disk once in a tick.
func (p *Page) mapLocked(lun uint16) *disk.Map {
	m, ok := p.maps[lun]
	if !ok {
		m = p.src.Map(lun)
		p.maps[lun] = m
	}
	return m
}

// enter admits a client. Wait then waits until leave.
func (p *Page) enter() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.clients >= maxClients {
		return false
	}
	select {
	case <-p.stop:
		return false
	default:
	}
	p.clients++
	p.work.Add(1)
	return true
}

func (p *Page) leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clients--
	p.work.Done()
}
