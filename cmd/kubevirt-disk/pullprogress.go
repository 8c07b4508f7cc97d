package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/status"
)

// growFile makes a file that long, without content, if it is shorter. A block device has its size.
func growFile(name string, bytes int64) error {
	info, err := os.Stat(name)
	if err != nil || !info.Mode().IsRegular() || info.Size() >= bytes {
		return err
	}
	return os.Truncate(name, bytes)
}

// tellProgress answers GET /progress at an address ("": nowhere) until stop is called. The answer
// has no secret, and anybody may ask.
func tellProgress(ctx context.Context, address string, p *registry.Progress) (stop func(),
	err error) {
	if address == "" {
		return func() {}, nil
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("--%s: %w", flagProgress, err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /progress", func(w http.ResponseWriter, _ *http.Request) {
		done, total := p.Data()
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(status.Progress{Done: done, Total: total})
	})
	server := &http.Server{Handler: http.NewCrossOriginProtection().Handler(mux),
		ReadTimeout: progressTimeout, WriteTimeout: progressTimeout, MaxHeaderBytes: 4 << 10}
	server.SetKeepAlivesEnabled(false)
	go func() { _ = server.Serve(l) }()
	return func() { _ = server.Close() }, nil
}

// progressTimeout is how long a request for the progress may take.
const progressTimeout = 5 * time.Second
