package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/pages"
	"kubevirt.io/disk/target"
)

// state is what the pages tell about a daemon.
type state struct {
	mu      sync.Mutex
	now     pages.State    // guarded by mu
	readyAt *time.Time     // guarded by mu
	portals []string       // guarded by mu; as bound
	disks   []*servedDisk  // guarded by mu
	target  *target.Server // guarded by mu; nil before it serves
}

func (s *state) set(now pages.State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now = now
	if now == pages.StateReady {
		t := time.Now()
		s.readyAt = &t
	}
}

func (s *state) setPortals(listeners []net.Listener) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.portals = nil
	for _, l := range listeners {
		s.portals = append(s.portals, l.Addr().String())
	}
}

func (s *state) setDisks(disks []*servedDisk) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.disks = disks
}

func (s *state) opened(d *servedDisk, instance *instance.Instance) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d.instance, d.capacity, d.space = instance, instance.Size(), newSpaceGauge(instance.Disk)
}

func (s *state) setTarget(srv *target.Server) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.target = srv
}

func (s *state) servedDisks() []*servedDisk {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.disks)
}

func (s *state) space(d *servedDisk) *spaceGauge {
	s.mu.Lock()
	defer s.mu.Unlock()
	return d.space
}

// settings are those of a disk that are in force.
func (s *state) settings(d *servedDisk) diskSettings {
	s.mu.Lock()
	defer s.mu.Unlock()
	return d.diskSettings
}

func (s *state) changeAccess(d *servedDisk, mode target.AccessMode, readOnly bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d.accessMode, d.readOnly = mode, readOnly
}

// failure says why a disk has failed for good, or nil.
func (s *state) failure(d *servedDisk) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failureLocked(d)
}

// failureLocked asks by a write of nothing, which changes nothing and waits for nothing: after a failed flush
// every write returns ErrFailed.
func (s *state) failureLocked(d *servedDisk) error {
	if d.instance == nil {
		return nil
	}
	if _, err := d.instance.WriteAt(nil, 0); errors.Is(err, disk.ErrFailed) {
		return err
	}
	return nil
}

// takeInstances returns the disks that are open, with instances that are then the caller's to close.
func (s *state) takeInstances() []servedDisk {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []servedDisk
	for _, d := range s.disks {
		if d.instance != nil {
			all = append(all, *d)
			d.instance, d.space = nil, nil
		}
	}
	return all
}

// ready is nil once every LUN can be used, and otherwise says what is missing.
func (s *state) ready() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now == pages.StateReady {
		return nil
	}
	return errors.New(string(s.now))
}

// healthy is nil unless a disk has failed.
func (s *state) healthy() error {
	var all []error
	for _, d := range s.servedDisks() {
		if err := s.failure(d); err != nil {
			all = append(all, fmt.Errorf("LUN %d (%q): %w", d.lun, d.name, err))
		}
	}
	return errors.Join(all...)
}

func (s *state) status(d *daemon) pages.Status {
	s.mu.Lock()
	srv := s.target
	page := pages.Status{
		State:          s.now,
		Ready:          s.now == pages.StateReady,
		TargetName:     d.cfg.targetName,
		Portals:        append([]string{}, s.portals...),
		Authentication: "none",
		LUNs:           []pages.LUNStatus{},
		Sessions:       []target.SessionInfo{},
		StartedAt:      d.started,
		ReadyAt:        s.readyAt,
		Build:          buildInfo(),
	}
	if s.readyAt != nil {
		page.ReadyAfterSeconds = s.readyAt.Sub(d.started).Seconds()
	}
	gauges := make([]*spaceGauge, len(s.disks))
	for i, one := range s.disks {
		page.LUNs = append(page.LUNs, d.lunStatusLocked(one))
		gauges[i] = one.space
	}
	s.mu.Unlock()
	for i, gauge := range gauges {
		if u := gauge.now(); u != nil {
			page.LUNs[i].Space = &pages.Space{Used: u.Used, Free: u.Available}
		}
	}
	switch {
	case d.cfg.chap.Mutual():
		page.Authentication = "mutual-chap"
	case d.cfg.chap.Enabled():
		page.Authentication = "chap"
	}
	if srv != nil {
		page.Sessions = append(page.Sessions, srv.Sessions()...)
		for i, one := range page.LUNs {
			have := srv.Holders(one.LUN)
			page.LUNs[i].Owner, page.LUNs[i].OpenTo, page.LUNs[i].Fenced = have.Owner, have.Guest, have.Fenced
		}
	}
	return page
}

// lunStatusLocked is called with state.mu held.
func (d *daemon) lunStatusLocked(s *servedDisk) pages.LUNStatus {
	lun := pages.LUNStatus{
		LUN:        s.lun,
		Image:      s.name,
		Format:     string(s.format),
		SizeBytes:  s.capacity,
		CopyMode:   string(s.copyMode),
		AccessMode: string(s.accessMode),
		ReadOnly:   s.readOnly,
		Removable:  s.removable,
		Ready:      s.instance != nil && d.state.now == pages.StateReady,
	}
	if s.instance != nil {
		lun.ReadOnly = s.readOnly || s.instance.ReadOnly
		lun.Serial = s.instance.Identity.Serial
		lun.Persistent = s.instance.Persistent
		lun.NAA = hex.EncodeToString(s.instance.Identity.NAA[:])
	}
	if s.progress != nil {
		copied, data := s.progress.Data()
		lun.Copy = &pages.CopyStatus{
			CopiedBytes: copied, DataBytes: data, TotalBytes: s.progress.Total(),
			Complete: s.progress.Finished(), WaitsForSpace: s.progress.Waiting(),
		}
	}
	if err := d.state.failureLocked(s); err != nil {
		lun.Failure = err.Error()
	}
	return lun
}

// servePages starts the pages before anything else, so that a start that takes long can be watched.
func (d *daemon) servePages(ctx context.Context) (closePages func(), err error) {
	p := d.cfg.metricsListen
	if p == nil {
		return func() {}, nil
	}
	l, err := listen(ctx, p.network([]portal{*p}), *p)
	if errors.Is(err, syscall.EADDRINUSE) && d.pagesOptional {
		d.log.Warn("no metrics and status pages: their port is taken; METRICS_LISTEN chooses another", zap.Stringer("address", p))
		return func() {}, nil
	}
	if err != nil {
		return func() {}, explainListen(err, "metrics address", *p, keyMetricsListen)
	}
	log := d.log.Named("http")
	srv := pages.NewServer(d.pages(log), log)
	d.pagesAt = l.Addr().String()
	d.log.Info("metrics", zap.String("address", l.Addr().String()))
	go func() {
		// It returns when the server is closed; that nobody scrapes any more is no reason to stop serving disks.
		_ = srv.Serve(l)
	}()
	return func() { _ = srv.Close() }, nil
}

// pages are all pages of the daemon.
func (d *daemon) pages(log *zap.Logger) http.Handler {
	mux := http.NewServeMux()
	pages.Register(mux, pages.Source{
		Status: func() pages.Status { return d.state.status(d) },
		Ready:  d.state.ready,
		Health: d.state.healthy,
	})
	mux.Handle("GET /metrics", d.metrics.Handler(log))
	return mux
}
