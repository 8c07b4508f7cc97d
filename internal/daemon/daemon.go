package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/internal/readyfile"
	"kubevirt.io/disk/metrics"
	"kubevirt.io/disk/pages"
	"kubevirt.io/disk/target"
)

var (
	errNotReady = errors.New("the daemon does not serve yet")
	errNoCHAP   = errors.New("there is no CHAP, so there are no credentials to replace")
)

// Daemon is one run of serve. Any number of goroutines may call its methods.
type Daemon struct {
	opt       Options
	log       *zap.Logger
	names     names
	started   time.Time
	auth      *chap.Authenticator // nil: initiators need not authenticate
	metrics   *metrics.Metrics
	measuring sync.Mutex // held while the metrics get the list of LUNs
	workers   *instance.Workers
	readyFile readyfile.File
	record    *recorder     // nil: nothing is recorded
	ready     chan struct{} // closed when every LUN can be used

	stopping context.Context // ends when the disks are about to be closed
	setStop  context.CancelFunc

	usageTypes []usageType
	streams    streams // set at the start, before the target is
	disks      table
	volumes    *volumes     // set with mu held before the images are found; nil: none can be made
	found      []foundImage // at the start; set before the target is
	refused    refusedLogins
	homes      []func() error // remember where the disks of the start lie, once they are made
	numbers    numbers        // set before the target is
	initial    []*servedDisk  // the disks of found; set before the target

	mu      sync.Mutex
	state   pages.State     // guarded by mu
	readyAt *time.Time      // guarded by mu
	portals []string        // guarded by mu; as bound
	pagesAt string          // guarded by mu; the address of the pages; "": there are none
	target  *target.Server  // guarded by mu; nil before it serves
	control *control.Server // guarded by mu; nil before the target serves
	// handover is guarded by mu and never modified; nil: no annotation asked for one.
	handover *pages.HandoverStatus
}

// New makes a daemon. It does nothing before Run. New fails if the options contradict each other.
func New(opt Options) (*Daemon, error) {
	if err := opt.resolve(); err != nil {
		return nil, fmt.Errorf("daemon: %w", err)
	}
	d := &Daemon{
		opt:       opt,
		log:       opt.Log,
		names:     opt.Names,
		started:   time.Now(),
		metrics:   metrics.New(metrics.BuildInfo(opt.Build)),
		workers:   instance.NewWorkers(),
		readyFile: readyfile.File{Path: opt.ReadyFile},
		ready:     make(chan struct{}),
		state:     pages.StateStarting,
	}
	d.stopping, d.setStop = context.WithCancel(context.Background())
	d.usageTypes = d.newUsageTypes()
	d.measureUsageTypes()
	d.metrics.SetRefresh(func() { d.askStorage(time.After(gaugeWait)) })
	d.readyFile.Name = d.names.of(SettingReadyFile).String()
	d.metrics.SetReady(func() bool { return d.isReady() == nil })
	if opt.CHAP.Enabled() {
		var err error
		if d.auth, err = chap.NewAuthenticator(opt.CHAP); err != nil {
			return nil, err
		}
	}
	if err := d.newStreams(); err != nil {
		return nil, err
	}
	var err error
	d.record, err = newRecorder(opt.RecordBoot, d.names.of(SettingRecordBoot), d.log)
	if err != nil {
		return nil, err
	}
	return d, nil
}

// Ready is closed when every LUN can be used, and the ready file is there.
func (d *Daemon) Ready() <-chan struct{} { return d.ready }

// Run serves until ctx ends. The end of ctx is never an error. Run is called once. A
// *problems.Error is about a setting.
func (d *Daemon) Run(ctx context.Context) error {
	d.log.Info("starting", zap.String("version", d.opt.Build.Version),
		zap.String("commit", d.opt.Build.Commit))
	// Try both, so that the error of a second daemon in one network names all ports that are taken.
	closePages, pagesErr := d.servePages(ctx)
	defer closePages()
	listeners, err := listenAll(ctx, d.opt.Portals, d.names)
	defer closeAll(listeners)
	if err := errors.Join(pagesErr, err); err != nil {
		return err
	}
	// Not earlier: if somebody starts a second daemon beside a running one, for example with exec
	// in its container, it must fail at its ports, and not make the first one unready.
	if err := d.readyFile.Clear(); err != nil {
		return err
	}
	d.setPortals(listeners)
	for _, l := range listeners {
		d.log.Info("portal", zap.String("address", l.Addr().String()))
	}

	if err := d.openVolumes(ctx); err != nil {
		return errors.Join(err, d.closeVolumes(ctx))
	}
	defer func() { _ = d.closeVolumes(ctx) }() // if stop has not done it
	err = d.openDisks(ctx)
	switch {
	case ctx.Err() != nil:
		d.log.Info("stopped before the LUNs were ready")
		return d.closeDisks(context.Background())
	case err != nil:
		return errors.Join(d.explainDescriptors(err), d.closeDisks(context.Background()))
	}
	srv, err := d.newTarget()
	if err != nil {
		return errors.Join(d.explainDescriptors(err), d.closeDisks(context.Background()))
	}
	// Sweep while serving: a file system may need long to free a large file.
	sweeping, stopSweeping := context.WithCancel(ctx)
	var swept sync.WaitGroup
	swept.Go(func() { d.sweep(sweeping) })
	defer swept.Wait()
	defer stopSweeping()
	return d.serveTarget(ctx, srv, listeners)
}

func (d *Daemon) newTarget() (*target.Server, error) {
	opt := target.Options{
		TargetName:  d.opt.TargetName,
		HidePortals: d.opt.BehindNAT,
		Auth:        d.auth,
		Observer:    eventSink{d.metrics, &d.refused},
		Limits:      d.opt.Limits,
		Log:         d.log,
		Empty:       d.opt.Volumes != nil,
	}
	for _, s := range d.initial {
		opt.LUNs = append(opt.LUNs, d.lun(s))
	}
	srv, err := target.New(opt)
	if err == nil {
		d.disks.serves(d.initial...)
		d.measure()
	}
	return srv, err
}

// serveTarget serves until ctx ends or a listener fails, and then drains.
func (d *Daemon) serveTarget(
	ctx context.Context, srv *target.Server, listeners []net.Listener,
) error {
	control := d.serveControl(srv)
	defer control.Close()
	d.mu.Lock()
	d.target, d.control = srv, control
	d.mu.Unlock()
	if err := d.serveVolumes(ctx); err != nil {
		if ctx.Err() != nil {
			err = nil
		}
		return errors.Join(err, d.stop(srv))
	}
	served := make(chan error, len(listeners))
	for _, l := range listeners {
		go func() { served <- srv.Serve(l) }()
	}
	d.set(pages.StateReady)
	d.announce()
	d.answerVolumes()
	err := d.readyFile.Write()
	if err == nil {
		close(d.ready)
		select {
		case <-ctx.Done():
			d.log.Info("stopping: initiators are asked to log out")
		case err = <-served:
			err = fmt.Errorf("a portal stopped accepting connections: %w", err)
		}
	}
	return errors.Join(err, d.stop(srv))
}

// serveControl answers at the control socket, and continues the handovers that were open at the
// last stop.
func (d *Daemon) serveControl(srv *target.Server) *control.Server {
	c := control.New(srv, d.log.Named("control"))
	if d.opt.ControlSocket == "" {
		return c
	}
	if err := c.Listen(d.opt.ControlSocket); err != nil {
		// The disks can be served without it.
		d.log.Warn("there is no control socket, so handover, sessions and kick find no daemon",
			zap.String("socket", d.opt.ControlSocket), zap.Error(err),
			zap.String("try", "another "+d.names.of(SettingControlSocket).Flag+
				", or \"\" to do without"))
	}
	return c
}

// serving returns the target, unless it is not there yet.
func (d *Daemon) serving() (*target.Server, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.target == nil {
		return nil, errNotReady
	}
	return d.target, nil
}

const (
	// stopTimeout limits a stop in all; drainTimeout is the part of it for commands in flight.
	stopTimeout  = 10 * time.Second
	drainTimeout = 8 * time.Second
)

// stop drains the sessions and flushes the data that initiators were told is durable. An error
// means that data may be lost.
func (d *Daemon) stop(srv *target.Server) error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	d.set(pages.StateStopping)
	d.setStop()
	removeErr := d.readyFile.Remove()
	if err := d.closeVolumes(ctx); err != nil {
		d.log.Warn("the volumes were not closed cleanly", zap.Error(err))
	}

	drain, cancelDrain := context.WithTimeout(ctx, drainTimeout)
	defer cancelDrain()
	drainErr := srv.Shutdown(drain)
	d.record.save()
	if drainErr != nil {
		// No acknowledged data is lost: the commands that were cut off were never answered.
		d.log.Warn("some commands did not end in time and were cut off", zap.Error(drainErr))
	}
	err := d.flushDisks(ctx)
	if drainErr == nil && ctx.Err() == nil {
		// If commands did not end, calls to a disk are still in progress. The end of the process
		// closes the disk.
		err = errors.Join(err, d.closeDisks(ctx))
	}
	if err = errors.Join(removeErr, err); err == nil {
		d.log.Info("stopped")
	}
	return err
}
