package metrics

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"
)

// maxScrapes bounds the pages of metrics that are made at the same time.
const maxScrapes = 4

// Handler serves the page /metrics.
func (m *Metrics) Handler(log *zap.Logger) http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		// A metric that cannot be made is logged and counted; the others are still shown.
		ErrorHandling:       promhttp.ContinueOnError,
		ErrorLog:            zap.NewStdLog(log),
		Registry:            m.registry,
		MaxRequestsInFlight: maxScrapes,
		Timeout:             10 * time.Second,
		EnableOpenMetrics:   true,
	})
}
