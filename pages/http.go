package pages

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"kubevirt.io/disk/status"
)

// Daemon supplies what the pages show. All functions but Trouble are required. Many requests call
// them at once, and they must not block.
type Daemon struct {
	Status func() status.Status
	// Ready returns nil once every LUN has been usable, and then as long as one is; otherwise what
	// is missing.
	Ready func() error
	// Trouble has a line for each LUN that is in trouble.
	Trouble func() []string
	Health  func() error // nil while a restart would not help; otherwise the failure
}

// Register makes mux serve /healthz, /readyz and /status.
func Register(mux *http.ServeMux, s Daemon) {
	mux.HandleFunc("GET /healthz", probe(s.Health, nil))
	mux.HandleFunc("GET /readyz", probe(s.Ready, s.Trouble))
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		// If this fails, the client has gone.
		_ = e.Encode(s.Status())
	})
}

// probe answers 200, with warnings, or 503 and the reason. People read this on terminals, and parts
// of the text come from servers and images.
func probe(check func() error, wrong func() []string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		if err := check(); err != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			for line := range strings.SplitSeq(err.Error(), "\n") {
				fmt.Fprintln(w, plain(line))
			}
			return
		}
		fmt.Fprintln(w, "ok")
		if wrong != nil {
			for _, line := range wrong() {
				fmt.Fprintln(w, plain(line))
			}
		}
	}
}
