package pages

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"html"
	"net/http"
	"strconv"
	"strings"
	"time"
)

const (
	// maxClients is how many clients may watch the page live. Others see the state at its loading.
	maxClients = 16
	// clientTimeout is how long a client may take to read what was sent.
	clientTimeout = 10 * time.Second
	// keepAlive is the longest pause in which a client gets nothing, so that a dead client is
	// noticed.
	keepAlive = 15 * time.Second
	// retry is how long a browser waits before it connects again.
	retry = "retry: 2000\n\n"
)

// news are the changes on the page, by the IDs of elements.
type news struct {
	Shape string            `json:"shape"`
	Text  map[string]string `json:"text,omitempty"`
	Path  map[string]string `json:"path,omitempty"`
}

// events sends changes as server-sent events, until the client goes or the page is stopped. A
// client has no queue: a slow client gets the state when it is ready for it, and a client that
// reads nothing is dropped.
func (p *Page) events(w http.ResponseWriter, r *http.Request) {
	protect(w.Header())
	w.Header().Set("Cache-Control", "no-store")
	if r.Method == http.MethodHead {
		w.Header().Set("Content-Type", "text/event-stream")
		return
	}
	if !p.enter() {
		w.Header().Set("Retry-After", "10")
		http.Error(w, "too many watch this page live: load it again to see what is new",
			http.StatusServiceUnavailable)
		return
	}
	defer p.leave()
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // a proxy must not hold events back
	c := &client{out: http.NewResponseController(w), w: w, timeout: p.timeout}
	// The server's limit is for requests with an end.
	_ = c.out.SetReadDeadline(time.Time{})
	if c.send(retry) != nil {
		return
	}
	for {
		next := p.next() // before the view, so that nothing new is missed
		page, err := p.render(r)
		if err != nil || c.show(page) != nil {
			return
		}
		select {
		case <-next:
		case <-r.Context().Done():
			return
		case <-p.stop:
			_ = c.send("event: end\ndata: \n\n")
			return
		}
	}
}

// client is a browser that watches the page.
type client struct {
	w           http.ResponseWriter
	out         *http.ResponseController
	timeout     time.Duration
	texts, path map[string]string // as sent
	sent        time.Time
}

// show sends the differences from the client's state.
func (c *client) show(page string) error {
	texts, paths, shape := live(page)
	n := news{Shape: shape, Text: changed(c.texts, texts), Path: changed(c.path, paths)}
	c.texts, c.path = texts, paths
	if len(n.Text)+len(n.Path) == 0 && time.Since(c.sent) < keepAlive {
		return nil
	}
	data, err := json.Marshal(n)
	if err != nil {
		return err
	}
	return c.send("data: " + string(data) + "\n\n")
}

// live takes a page apart: the texts and the paths of pictures of all elements with an ID, which
// can change while the page is open, and a shape that changes with everything else.
func live(page string) (texts, paths map[string]string, shape string) {
	texts, paths = map[string]string{}, map[string]string{}
	h := fnv.New64a()
	for more := true; more; {
		var before, id, attributes string
		before, page, more = strings.Cut(page, ` id="`)
		id, page, _ = strings.Cut(page, `"`)
		attributes, page, _ = strings.Cut(page, ">")
		fmt.Fprintln(h, before, id)
		if _, path, ok := strings.Cut(attributes, ` d="`); ok {
			paths[html.UnescapeString(id)] = html.UnescapeString(strings.TrimRight(path, `"/`))
			continue
		}
		if end := strings.IndexByte(page, '<'); end >= 0 && strings.HasPrefix(page[end:], "</") {
			texts[html.UnescapeString(id)] = html.UnescapeString(page[:end])
			page = page[end:]
		}
	}
	delete(texts, "link") // the script writes its text
	return texts, paths, strconv.FormatUint(h.Sum64(), 36)
}

func (c *client) send(text string) error {
	c.sent = time.Now()
	if err := c.out.SetWriteDeadline(c.sent.Add(c.timeout)); err != nil {
		return err
	}
	if _, err := c.w.Write([]byte(text)); err != nil {
		return err
	}
	return c.out.Flush()
}

// changed returns the values that are new or different.
func changed(before, now map[string]string) map[string]string {
	news := map[string]string{}
	for id, text := range now {
		if old, ok := before[id]; !ok || old != text {
			news[id] = text
		}
	}
	return news
}
