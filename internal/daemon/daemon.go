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
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/plan"
	"kubevirt.io/disk/internal/daemon/served"
	"kubevirt.io/disk/internal/daemon/sources"
	"kubevirt.io/disk/internal/daemon/volumes"
	"kubevirt.io/disk/internal/readyfile"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/metrics"
	"kubevirt.io/disk/nbd"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target"
	"kubevirt.io/disk/vhostuser"
)

var (
	errNotReady = errors.New("the daemon does not serve yet")
	errNoCHAP   = errors.New("there is no CHAP, so there are no credentials to replace")
)

// Daemon is one run of serve. Any number of goroutines may call its methods.
type Daemon struct {
	opt       options.Options
	log       *zap.Logger
	started   time.Time
	auth      *chap.Authenticator // nil: initiators need not authenticate
	metrics   *metrics.Metrics
	readyFile readyfile.File
	launcher  *Launcher     // nil: this is no hook of KubeVirt
	ready     chan struct{} // closed when every LUN can be used

	sources *sources.Sources
	disks   *served.Disks
	inUse   *serving.Disks
	nbd     *nbd.Server       // set before the target is
	vhost   *vhostuser.Server // nil: vhost-user is off
	refused refusedLogins

	gate       hookGate
	hookPortal libvirt.Portal // address beside the socket, or zero; set before the hook answers
	atAddress  sync.Once      // logs that a machine has connected to hookPortal

	mu      sync.Mutex
	state   status.State     // guarded by mu
	readyAt *time.Time       // guarded by mu
	portals []string         // guarded by mu; as bound
	atNBD   []string         // guarded by mu; the portals of NBD, as bound
	pagesAt string           // guarded by mu; the address of the pages; "": there are none
	target  *target.Server   // guarded by mu; nil before it serves
	control *control.Server  // guarded by mu; nil before the target serves
	volumes *volumes.Volumes // guarded by mu; set before the disks are; nil: none can be made
	// handover is guarded by mu and never modified; nil: no annotation asked for one.
	handover *status.HandoverOutcome
}

// New makes a daemon. It does nothing before Run. New fails if the options contradict each other.
func New(opt options.Options) (*Daemon, error) {
	if err := opt.Resolve(); err != nil {
		return nil, fmt.Errorf("daemon: %w", err)
	}
	d := &Daemon{
		opt:       opt,
		log:       opt.Log,
		started:   time.Now(),
		readyFile: readyfile.File{Path: opt.ReadyFile},
		ready:     make(chan struct{}),
		state:     status.StateStarting,
	}
	d.metrics = metrics.New(opt.Build, metrics.Daemon{Status: d.Status,
		Known:   func(lun uint16) bool { return d.inUse.At(lun) != nil },
		Fetched: func() *metrics.Fetched { return d.sources.Fetched() },
		Uploads: d.countUploads})
	memory, _ := d.opt.MemoryFor()
	d.inUse = serving.New(serving.Config{Memory: memory,
		Observer: eventSink{d.metrics, &d.refused, d.sayIfAtAddress}, Log: opt.Log})
	d.readyFile.Name = d.opt.Setting(&d.opt.ReadyFile).String()
	d.Attend(NewLauncher(opt.Hook, opt.Log))
	var err error
	if opt.CHAP.Enabled() {
		if d.auth, err = chap.NewAuthenticator(opt.CHAP); err != nil {
			return nil, err
		}
	}
	if d.sources, err = sources.New(&d.opt); err != nil {
		return nil, err
	}
	if d.disks, err = served.New(&d.opt, d.inUse); err != nil {
		return nil, err
	}
	return d, nil
}

// Attend makes the daemon answer this launcher, which may have asked already, instead of a new one.
// Call it before Run.
func (d *Daemon) Attend(l *Launcher) {
	if d.launcher = l; l != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.machines = d.machines
	}
}

// Ready is closed when every LUN can be used, and the ready file is there.
func (d *Daemon) Ready() <-chan struct{} { return d.ready }

// Run serves until ctx ends. The end of ctx is never an error. Run is called once. A
// *problems.Error is about a setting.
func (d *Daemon) Run(ctx context.Context) error {
	d.log.Info("starting", zap.String("version", d.opt.Build.Version),
		zap.String("commit", d.opt.Build.Commit))
	ctx, stopAttending := d.launcher.attend(ctx)
	defer stopAttending()
	// Try both, so that the error of a second daemon in one network names all taken ports.
	closePages, pagesErr := d.servePages(ctx)
	defer closePages()
	listeners, err := listenAll(ctx, d.opt.Portals, d.opt.SettingsOf(&d.opt.Portals))
	defer closeAll(listeners)
	nbdListeners, nbdErr := d.listenNBD(ctx)
	defer closeAll(nbdListeners)
	if err := errors.Join(pagesErr, err, nbdErr); err != nil {
		return err
	}
	// Not earlier: a second daemon that is started while another one runs, for example by exec in
	// its container, must fail at its ports, and not make the first one unready.
	if err := d.readyFile.Clear(); err != nil {
		return err
	}
	d.setPortals(listeners, nbdListeners)
	control := control.New(d.Status, d.log.Named("control"))
	defer control.Close()
	d.listenOwn(control)
	for _, l := range listeners {
		d.log.Info("portal", zap.String("address", l.Addr().String()))
	}

	if err := plan.Check(&d.opt); err != nil {
		return err
	}
	if err := d.openVolumes(ctx); err != nil {
		return err
	}
	defer func() { _ = d.volumes.Close(ctx) }() // if stop has not done so
	p, err := d.openDisks(ctx)
	switch {
	case ctx.Err() != nil:
		d.log.Info("stopped before the LUNs were ready")
		return d.closeDisks(context.Background())
	case err != nil:
		return errors.Join(d.disks.ExplainDescriptors(err), d.closeDisks(context.Background()))
	}
	srv, err := d.newTarget()
	if err != nil {
		return errors.Join(err, d.closeDisks(context.Background()))
	}
	// Sweep while serving: a file system may take long to free a large file.
	sweeping, stopSweeping := context.WithCancel(ctx)
	var swept sync.WaitGroup
	swept.Go(func() { p.Sweep(sweeping) })
	defer swept.Wait()
	defer stopSweeping()
	return d.serveTarget(ctx, p, srv, control, listeners, nbdListeners)
}

// openVolumes finds the volumes, whose numbers no other disk may get.
func (d *Daemon) openVolumes(ctx context.Context) error {
	opt := d.opt.Volumes
	if opt == nil {
		return nil
	}
	// A new persistent directory would not survive. It must not be made together with the directory
	// of the volumes in it.
	if err := plan.CheckPersistent(&d.opt); err != nil {
		return err
	}
	l, err := listen(ctx, "address of the volumes", opt.Listen, []options.Address{opt.Listen},
		d.opt.SettingsOf(&opt.Listen))
	if err != nil {
		return err
	}
	v, err := volumes.New(&d.opt, l, d.disks, d.sources, d.boundPortals)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.volumes = v
	return nil
}

// openDisks finds the images to serve from the start, and makes a disk of each.
func (d *Daemon) openDisks(ctx context.Context) (*plan.Plan, error) {
	volumes := d.volumes.Holds()
	found, err := d.sources.Find(ctx, volumes.Single)
	if err != nil {
		return nil, err
	}
	p, err := plan.Make(ctx, &d.opt, found, volumes)
	if err != nil {
		plan.CloseImages(found)
		return nil, err
	}
	d.set(status.StateOpening)
	return p, d.disks.Start(ctx, p)
}

// closeDisks closes the disks and their images.
func (d *Daemon) closeDisks(ctx context.Context) error {
	return d.disks.Close(ctx, d.sources.Close)
}

func (d *Daemon) newTarget() (*target.Server, error) {
	opt := target.Options{
		TargetName:  d.opt.TargetName,
		HidePortals: d.opt.BehindNAT,
		Auth:        d.auth,
		Limits:      d.opt.Limits,
		Log:         d.log,
		Disks:       d.inUse,
	}
	srv, err := target.New(opt)
	if err == nil {
		d.nbd, err = nbd.New(nbd.Options{Disks: d.inUse, Log: d.log.Named("nbd"),
			Crowd: serving.Crowd{Sessions: d.opt.Limits.MaxConnections,
				PerPeer: d.opt.Limits.MaxPerAddress}})
	}
	if err == nil && d.opt.VhostUserDir != "" {
		d.vhost, err = vhostuser.New(vhostuser.Options{Disks: d.inUse, Dir: d.opt.VhostUserDir,
			ClientDir: d.vhostClientDir(), Log: d.log.Named("vhost-user")})
	}
	if err == nil {
		err = d.closeGate()
	}
	if err != nil {
		return nil, err
	}
	return srv, nil
}

// serveTarget serves until ctx ends or a listener fails, and then drains.
func (d *Daemon) serveTarget(ctx context.Context, p *plan.Plan, srv *target.Server,
	control *control.Server, listeners []net.Listener, nbdListeners []nbdListener) error {
	control.Begin(d.inUse, d.sessionsWith(srv), d.disks)
	if err := d.disks.ServeAll(control); err != nil {
		return errors.Join(err, d.closeDisks(context.Background()))
	}
	d.listenControl(control)
	d.mu.Lock()
	d.target, d.control = srv, control
	d.mu.Unlock()
	if err := d.volumes.Serve(ctx, p.Disks); err != nil {
		if ctx.Err() != nil {
			err = nil
		}
		return errors.Join(err, d.stop(srv))
	}
	served := make(chan error, len(listeners))
	for _, l := range listeners {
		go func() { served <- srv.Serve(l) }()
	}
	nbdServed := d.serveNBD(nbdListeners)
	d.set(status.StateReady)
	d.announce()
	d.volumes.Answer()
	var hookServed <-chan error
	endHook := func() {}
	err := d.readyFile.Write()
	if err == nil {
		hookServed, endHook, err = d.launcher.serve(d.define)
	}
	if err == nil {
		close(d.ready)
		select {
		case <-ctx.Done():
			d.log.Info("stopping: initiators are asked to log out")
		case err = <-served:
			err = fmt.Errorf("a portal stopped accepting connections: %w", err)
		case err = <-nbdServed:
		case err = <-hookServed:
		}
	}
	endHook()
	return errors.Join(err, d.stop(srv))
}

// listenOwn answers at the socket where this user's commands find the daemon, also while it starts.
func (d *Daemon) listenOwn(c *control.Server) {
	if d.opt.OwnSocket == "" {
		return
	}
	if err := c.Listen(d.opt.OwnSocket); err != nil {
		d.log.Warn("ps and other commands do not find this daemon by themselves", zap.Error(err))
	}
}

// listenControl answers at the control socket.
func (d *Daemon) listenControl(c *control.Server) {
	if d.opt.ControlSocket == "" {
		return
	}
	if err := c.Listen(d.opt.ControlSocket); err != nil {
		// The disks can be served without a control socket.
		d.log.Warn("there is no control socket, so handover, sessions, kick, snapshot and commit "+
			"find no daemon", zap.String("socket", d.opt.ControlSocket), zap.Error(err),
			zap.String("try",
				"another "+d.opt.Setting(&d.opt.ControlSocket).Flag+", or \"\" to do without"))
	}
}

// running returns an error until the target serves.
func (d *Daemon) running() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.target == nil {
		return errNotReady
	}
	return nil
}

const (
	// stopTimeout limits a stop in all; drainTimeout is the part of it for commands in flight.
	stopTimeout  = 10 * time.Second
	drainTimeout = 8 * time.Second
)

// stop drains the sessions and flushes the data that was acknowledged as durable. An error means
// that data may be lost.
func (d *Daemon) stop(srv *target.Server) error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	d.set(status.StateStopping)
	d.disks.Stop()
	removeErr := d.readyFile.Remove()
	if err := d.volumes.Close(ctx); err != nil {
		d.log.Warn("the volumes were not closed cleanly", zap.Error(err))
	}

	drain, cancelDrain := context.WithTimeout(ctx, drainTimeout)
	defer cancelDrain()
	drainErr := d.sessionsWith(srv).shutdown(drain)
	if drainErr != nil {
		// No acknowledged data is lost: the commands that were cut off were never answered.
		d.log.Warn("some commands did not end in time and were cut off", zap.Error(drainErr))
	}
	err := d.disks.Flush(ctx)
	if drainErr == nil && ctx.Err() == nil {
		// If commands did not end, calls to a disk are still under way. The end of the process
		// closes the disk.
		err = errors.Join(err, d.closeDisks(ctx))
	}
	if err = errors.Join(removeErr, err); err == nil {
		d.log.Info("stopped")
	}
	return err
}

// WantHandover carries out the step of a handover that an annotation asks for, unless it was done.
// The page /status shows the result. It is called again and again as long as the annotation exists.
func (d *Daemon) WantHandover(ctx context.Context, asked string) (done bool) {
	now := &status.HandoverOutcome{Asked: asked}
	var err error
	if now.Done, err = d.wantHandover(ctx, asked); err != nil {
		now.Error = err.Error()
	}
	d.mu.Lock()
	before := d.handover
	d.handover = now
	d.mu.Unlock()
	if err != nil && (before == nil || *before != *now) {
		d.log.Warn("a handover that an annotation of the pod asks for is not done yet",
			zap.String("asked", asked), zap.Error(err))
	}
	return err == nil
}

func (d *Daemon) wantHandover(ctx context.Context, asked string) (string, error) {
	req, err := control.ParseHandover(asked)
	if err != nil {
		return "", err
	}
	d.mu.Lock()
	c := d.control
	d.mu.Unlock()
	if c == nil {
		return "", errNotReady
	}
	return c.Want(ctx, req)
}

// Reload applies new settings of disks, see served.Disks.Reload.
func (d *Daemon) Reload(next options.Settings) (done, later []string, err error) {
	if err := d.running(); err != nil {
		return nil, nil, err
	}
	return d.disks.Reload(next)
}

// ReplaceCredentials sets the credentials for new logins. Sessions go on. It cannot turn CHAP on or
// off.
func (d *Daemon) ReplaceCredentials(c chap.Config) error {
	if d.auth == nil {
		return errNoCHAP
	}
	return d.auth.Replace(c)
}
