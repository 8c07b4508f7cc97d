package daemon

import (
	"context"
	"errors"
	"net/http"
	"syscall"

	"go.uber.org/zap"

	"kubevirt.io/disk/pages"
)

// servePages starts the pages first, so that people can watch a long start.
func (d *Daemon) servePages(ctx context.Context) (closePages func(), err error) {
	at := d.opt.Pages
	if at == nil {
		return func() {}, nil
	}
	l, err := listen(ctx, *at, []Address{*at})
	if errors.Is(err, syscall.EADDRINUSE) && d.opt.PagesOptional {
		d.log.Warn("no metrics and status pages: their port is taken; "+
			d.names.of(SettingPages).String()+" chooses another", zap.Stringer("address", at))
		return func() {}, nil
	}
	if err != nil {
		return func() {}, d.names.explainListen(err, "metrics address", *at, SettingPages)
	}
	log := d.log.Named("http")
	srv := pages.NewServer(d.pages(log), log)
	address := l.Addr().String()
	d.mu.Lock()
	d.pagesAt = address
	d.mu.Unlock()
	d.log.Info("metrics", zap.String("address", address))
	go func() {
		// Serve returns when the server is closed. If it fails earlier, the daemon keeps serving
		// disks.
		_ = srv.Serve(l)
	}()
	return func() { _ = srv.Close() }, nil
}

// PagesAddress returns the address of the pages as bound, or "" if there are none, or none yet.
func (d *Daemon) PagesAddress() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.pagesAt
}

// pages returns a handler for all pages of the daemon.
func (d *Daemon) pages(log *zap.Logger) http.Handler {
	mux := http.NewServeMux()
	pages.Register(mux, pages.Source{Status: d.Status, Ready: d.isReady, Health: d.healthy})
	mux.Handle("GET /metrics", d.metrics.Handler(log))
	return mux
}
