package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/signal"
	"runtime/debug"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/metrics"
	"kubevirt.io/disk/pages"
	"kubevirt.io/disk/target"
)

func (a *app) serveCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve [IMAGE...]",
		Short: "Serve every image of a directory, or those that are named, as an iSCSI LUN, until SIGTERM",
		Long: `Serves every image of a directory as an iSCSI LUN, until SIGTERM, SIGINT or the end of its terminal, which drain and exit with
status 0. A second SIGTERM or SIGINT ends the process at once.

SIGHUP reads the credential files and the configuration again. New logins need new credentials,
also without SIGHUP, a few seconds after a file has changed; sessions go on. Of the settings
log-level, access-mode (from write-exclusive) and read-only count at once, the others after a
restart: the log names them. What cannot be used changes nothing.

The portals are bound before images are expanded, so that a port that is taken is known at once. Connections made
before the LUNs are ready are answered when they are: no login happens earlier. Wait for the ready file or /readyz.

Every setting has a flag, an environment variable (--copy-mode is COPY_MODE) and a key in the YAML file of --config
(copy-mode: clone). A flag wins over the environment, that over the file.

CHAP credentials come from the environment or from files: CHAP_USERNAME and CHAP_PASSWORD, for mutual CHAP also
CHAP_MUTUAL_USERNAME and CHAP_MUTUAL_PASSWORD, each also with the suffix _FILE. They are never flags.

For a person at a terminal: where images are named, these are LUN 1, 2 and so on, in place of a directory's, and what is printed on
standard output says how to log in. There is no ready file then, and without --work-dir what is written is in a temporary directory
that is removed at the end, in copy mode copy-on-write, unless these settings say otherwise.`,
		Args:              imageArgs(cobra.ArbitraryArgs),
		ValidArgsFunction: completeImages,
	}
	addFlags(cmd.Flags())
	cmd.RunE = running(func(cmd *cobra.Command, args []string) error {
		files := newRereader()
		cfg, err := loadConfig(cmd.Flags(), files.read, args...)
		if err != nil {
			return err
		}
		hangups := make(chan struct{}, 1)
		ctx, stop := a.interruptible(cmd.Context(), hangups)
		defer stop()
		removeWork, err := cfg.makeTemporary()
		if err != nil {
			return err
		}
		// The reader of the log may be gone, as tee is after the Ctrl-C that also ends this: that is no reason to die without draining.
		signal.Ignore(syscall.SIGPIPE)
		lines := newLogQueue(a.stderr)
		level := zap.NewAtomicLevelAt(cfg.log.level)
		log := newLogger(cfg.log.resolve(a.stderr), level, lines)
		lines.tell = func(lost uint64) {
			log.Warn("lines of the log were lost, as nobody read it", zap.Uint64("lines", lost))
		}
		// A log that cannot be written must not change how the command ends.
		defer func() { _ = log.Sync() }()
		d := newDaemon(cfg, log)
		d.pagesOptional = (a.asWrapper || len(args) > 0) && !cfg.metricsChosen
		if len(args) > 0 {
			d.tell = func(guide string) { printTo(a.stdout, guide, false) }
		}
		d.changes = changes{
			hangups:     hangups,
			config:      func() (*config, error) { return loadConfig(cmd.Flags(), files.read, args...) },
			credentials: func() (chap.Config, error) { c, _, err := credentials(files.read); return c, err },
			setLevel:    level.SetLevel,
		}
		err = errors.Join(d.run(ctx), removeWork())
		if err != nil && cfg.log.resolve(a.stderr).format == logJSON {
			log.Error("serving has failed", zap.Error(err))
			return &toldError{err}
		}
		return err
	})
	return cmd
}

// daemon is one run of serve.
type daemon struct {
	cfg     *config
	log     *zap.Logger
	metrics *metrics.Metrics
	started time.Time
	state   state
	ready   readyFile
	changes changes
	auth    *chap.Authenticator // nil: initiators need not authenticate
	// pagesOptional says that a taken default port of the pages is no reason not to serve disks. Callers of the original
	// wrapper start several in one pod, which has one network, and give each a port for its portal only.
	pagesOptional bool
	pagesAt       string             // the address of the pages; "": there are none
	tell          func(guide string) // tells a person how to log in; nil: nobody wants to know
}

// startGCPercent lets the heap grow to 16 MiB before it is collected while the disks are opened. Percent, as GOGC.
const startGCPercent = 400

// startGCTime is for how long after that: the first initiators log in meanwhile.
const startGCTime = time.Second

func newDaemon(cfg *config, log *zap.Logger) *daemon {
	d := &daemon{cfg: cfg, log: log, metrics: metrics.New(metrics.BuildInfo(buildInfo())),
		started: time.Now(), ready: readyFile{path: cfg.readyFile}}
	d.metrics.SetReady(func() bool { return d.state.ready() == nil })
	return d
}

// run serves until ctx ends, which is no error, at whatever point that happens.
func (d *daemon) run(ctx context.Context) error {
	d.state.set(pages.StateStarting)
	b := buildInfo()
	d.log.Info("starting", zap.String("version", b.Version), zap.String("commit", b.Commit))
	// Both are tried, so that who starts a second daemon in one network learns at once of all that is taken.
	closePages, pagesErr := d.servePages(ctx)
	defer closePages()
	listeners, err := listenAll(ctx, d.cfg.portals)
	defer closeAll(listeners)
	if err := errors.Join(pagesErr, err); err != nil {
		return err
	}
	// Not before: who starts a daemon where one is running, as by an exec into its container, finds its ports taken, and must not make it unready.
	if err := d.ready.clear(); err != nil {
		return err
	}
	d.state.setPortals(listeners)
	for _, l := range listeners {
		d.log.Info("portal", zap.String("address", l.Addr().String()))
	}

	// What large images take while they are validated is not worth collecting before they can be used.
	percent := debug.SetGCPercent(startGCPercent)
	collect := func() { debug.SetGCPercent(percent) }
	err = d.openDisks(ctx)
	soon := time.AfterFunc(startGCTime, collect)
	defer func() {
		if soon.Stop() {
			collect()
		}
	}()
	defer d.closeImages()
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
	// Beside serving: giving back a large file takes a file system its time.
	sweeping, stopSweeping := context.WithCancel(ctx)
	var swept sync.WaitGroup
	swept.Go(func() { d.sweep(sweeping) })
	defer swept.Wait()
	defer stopSweeping()
	return d.serveTarget(ctx, srv, listeners)
}

func (d *daemon) newTarget() (*target.Server, error) {
	opt := target.Options{
		TargetName: d.cfg.targetName,
		Observer:   d.metrics,
		Limits:     d.cfg.limits,
		Log:        d.log,
	}
	if d.cfg.chap.Enabled() {
		var err error
		if d.auth, err = chap.NewAuthenticator(d.cfg.chap); err != nil {
			return nil, err
		}
		opt.Auth = d.auth
	}
	for _, s := range d.state.servedDisks() {
		lun := target.LUN{
			Number:    s.lun,
			Name:      s.name,
			Disk:      s.instance.Disk,
			Identity:  s.instance.Identity,
			ReadOnly:  s.instance.ReadOnly,
			Removable: s.removable,
			Access:    s.accessMode,
			Volatile:  !s.instance.Persistent,
			Grown:     s.instance.Grown,
			Store:     s.instance.Store(),
		}
		opt.LUNs = append(opt.LUNs, lun)
	}
	return target.New(opt)
}

// serveTarget serves until ctx ends or a listener fails, and then drains.
func (d *daemon) serveTarget(ctx context.Context, srv *target.Server, listeners []net.Listener) error {
	d.state.setTarget(srv)
	defer d.serveControl(srv)()
	served := make(chan error, len(listeners))
	for _, l := range listeners {
		go func() { served <- srv.Serve(l) }()
	}
	d.state.set(pages.StateReady)
	d.announce()
	err := d.ready.write()
	if err == nil {
		following, stopFollowing := context.WithCancel(ctx)
		defer stopFollowing()
		go d.follow(following, srv) // not waited for: what it reads may hang
		select {
		case <-ctx.Done():
			d.log.Info("stopping: initiators are asked to log out")
		case err = <-served:
			err = fmt.Errorf("a portal stopped accepting connections: %w", err)
		}
	}
	return errors.Join(err, d.stop(srv))
}

// serveControl answers at the control socket, and has handovers go on that were open at the last
// stop.
func (d *daemon) serveControl(srv *target.Server) (closeControl func()) {
	c := control.New(srv, d.log.Named("control"))
	if d.cfg.controlSocket == "" {
		return c.Close
	}
	if err := c.Listen(d.cfg.controlSocket); err != nil {
		// The disks can be served all the same.
		d.log.Warn("there is no control socket, so handover, sessions and kick find no daemon",
			zap.String("socket", d.cfg.controlSocket), zap.Error(err),
			zap.String("try", "another --"+keyControlSocket+", or \"\" to do without"))
	}
	return c.Close
}

const (
	// stopTimeout is how long a stop may take in all; drainTimeout is the part of it for commands in flight.
	stopTimeout  = 10 * time.Second
	drainTimeout = 8 * time.Second
)

// stop drains the sessions and makes what initiators were told is durable so. An error means that data may
// be lost.
func (d *daemon) stop(srv *target.Server) error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	d.state.set(pages.StateStopping)
	removeErr := d.ready.remove()

	drain, cancelDrain := context.WithTimeout(ctx, drainTimeout)
	defer cancelDrain()
	drainErr := srv.Shutdown(drain)
	if drainErr != nil {
		// Nothing that was acknowledged is lost: the commands that were cut off were never answered.
		d.log.Warn("some commands did not end in time and were cut off", zap.Error(drainErr))
	}
	err := d.flushDisks(ctx)
	if drainErr == nil && ctx.Err() == nil {
		// Otherwise calls to a disk are still in progress, and the end of the process closes it.
		err = errors.Join(err, d.closeDisks(ctx))
	}
	if err = errors.Join(removeErr, err); err == nil {
		d.log.Info("stopped")
	}
	return err
}

// announce tells the log what is served and how to log in.
func (d *daemon) announce() {
	s := d.state.status(d)
	for _, l := range s.LUNs {
		d.log.Info("serving a LUN", zap.Uint16("lun", l.LUN), zap.String("image", l.Image), zap.String("format", l.Format),
			zap.Int64("size_bytes", l.SizeBytes), zap.String("copy_mode", l.CopyMode), zap.String("access_mode", l.AccessMode),
			zap.String("serial", l.Serial), zap.String("naa", l.NAA))
	}
	command, user := "iscsi-ls", ""
	if d.cfg.chap.Enabled() {
		command, user = "LIBISCSI_CHAP_PASSWORD=... iscsi-ls", "USERNAME@"
	}
	d.log.Info("ready", zap.String("target", s.TargetName), zap.Strings("portals", s.Portals), zap.String("authentication", s.Authentication),
		zap.Duration("after", time.Since(d.started)),
		zap.String("try", fmt.Sprintf("%s -s iscsi://%s%s", command, user, reachable(s.Portals[0]))))
	if d.tell != nil {
		d.tell(d.guide())
	}
	switch {
	case d.cfg.chap.Enabled():
	case slices.ContainsFunc(d.cfg.portals, func(p portal) bool { return !p.loopback() }):
		d.log.Warn("there is no CHAP: whoever reaches a portal can use the disks", zap.Strings("portals", s.Portals))
	default:
		d.log.Warn("there is no CHAP, so only this machine, or this container or pod, can use the disks: CHAP_USERNAME and CHAP_PASSWORD let others log in",
			zap.Strings("portals", s.Portals))
	}
}

// reachable replaces an address that stands for all by one that a client on this machine can use.
func reachable(portal string) string {
	host, port, err := net.SplitHostPort(portal)
	if err != nil {
		return portal
	}
	switch host {
	case "0.0.0.0", "":
		host = "127.0.0.1"
	case "::":
		host = "::1"
	}
	return net.JoinHostPort(host, port)
}
