package metrics

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"
)

// maxScrapes limits the scrapes that are answered at the same time.
const maxScrapes = 4

// Handler serves the page /metrics.
func (m *Metrics) Handler(log *zap.Logger) http.Handler { return m.handler(log, 10*time.Second) }

func (m *Metrics) handler(log *zap.Logger, limit time.Duration) http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		// If a metric cannot be made, log and count that, and show the others.
		ErrorHandling:       promhttp.ContinueOnError,
		ErrorLog:            zap.NewStdLog(log),
		Registry:            m.registry,
		MaxRequestsInFlight: maxScrapes,
		Timeout:             limit,
		EnableOpenMetrics:   true,
	})
}
