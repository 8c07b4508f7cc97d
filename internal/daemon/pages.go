package daemon

import (
	"context"
	"errors"
	"net/http"
	"syscall"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/metrics"
	"kubevirt.io/disk/pages"
)

// servePages starts the pages first, so that people can watch a long start.
func (d *Daemon) servePages(ctx context.Context) (closePages func(), err error) {
	at := d.opt.Pages
	if at == nil {
		return func() {}, nil
	}
	l, err := listen(ctx, "metrics address", *at, []options.Address{*at},
		d.opt.SettingsOf(&d.opt.Pages))
	if errors.Is(err, syscall.EADDRINUSE) && d.opt.PagesOptional {
		d.log.Warn("no metrics and status pages: their port is taken; "+
			d.opt.Setting(&d.opt.Pages).String()+" chooses another", zap.Stringer("address", at))
		return func() {}, nil
	}
	if err != nil {
		return func() {}, err
	}
	log := d.log.Named("http")
	page, err := pages.NewPage(pages.PageSource{Status: d.Status, Work: d.work, Map: d.disks.Map})
	if err != nil {
		return func() {}, errors.Join(err, l.Close())
	}
	srv := pages.NewServer(d.pages(page, log), log)
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
	return func() {
		// A browser with the page learns that the daemon ends, unless that takes long.
		page.Stop()
		ctx, cancel := context.WithTimeout(context.Background(), farewell)
		defer cancel()
		_ = srv.Shutdown(ctx)
		_ = srv.Close()
		page.Wait()
	}, nil
}

// farewell is the longest time that the pages take to end.
const farewell = 500 * time.Millisecond

// PagesAddress returns the address of the pages as bound, or "" if there are none, or none yet.
func (d *Daemon) PagesAddress() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.pagesAt
}

func (d *Daemon) pages(page *pages.Page, log *zap.Logger) http.Handler {
	mux := http.NewServeMux()
	page.Register(mux)
	pages.Register(mux, pages.Daemon{Status: d.Status, Ready: d.isReady, Trouble: d.disks.Trouble,
		Health: d.disks.Failure})
	mux.Handle("GET /metrics", d.metrics.Handler(log))
	return pages.OnlyHosts(mux, d.opt.PagesHosts, d.opt.Setting(&d.opt.PagesHosts).String())
}

func (d *Daemon) countUploads() *metrics.Uploads {
	d.mu.Lock()
	v := d.volumes
	d.mu.Unlock()
	return v.Uploads()
}

// work returns, for the page, the amount of work of each LUN.
func (d *Daemon) work() []pages.Work {
	done := d.metrics.Work()
	commands := func(c metrics.Done) pages.Commands {
		return pages.Commands{Count: c.Commands, Bytes: c.Bytes, Time: c.Time}
	}
	var all []pages.Work
	for _, s := range d.disks.Served() {
		w := pages.Work{LUN: s.LUN, Image: s.Name, Read: commands(done[s.LUN].Read),
			Write: commands(done[s.LUN].Write)}
		if s.Progress != nil {
			w.CopiedBytes, _ = s.Progress.Data()
		}
		all = append(all, w)
	}
	return all
}
