package main

import (
	"context"
	"errors"
	"os/signal"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/internal/daemon"
)

func (a *app) serveCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "serve [IMAGE...]",
		Short: "Serve every image of a directory, or those that are named, as an iSCSI LUN, " +
			"until SIGTERM",
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
	cmd.RunE = running(a.serve)
	return cmd
}

// serve runs a daemon until a signal ends it.
func (a *app) serve(cmd *cobra.Command, args []string) error {
	files := newRereader()
	load := func() (*config, error) { return loadConfig(cmd.Flags(), files.read, args...) }
	cfg, err := load()
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
	// The reader of the log may be gone, as tee is after the Ctrl-C that also ends this: that is no
	// reason to die without draining.
	signal.Ignore(syscall.SIGPIPE)
	lines := newLogQueue(a.stderr)
	level := zap.NewAtomicLevelAt(cfg.log.level)
	log := newLogger(cfg.log.resolve(a.stderr), level, lines)
	lines.tell = func(lost uint64) {
		log.Warn("lines of the log were lost, as nobody read it", zap.Uint64("lines", lost))
	}
	// A log that cannot be written must not change how the command ends.
	defer func() { _ = log.Sync() }()

	opt := cfg.options(log)
	// Callers of the original wrapper start several in one pod, which has one network, and give
	// each a port for its portal only.
	opt.PagesOptional = (a.asWrapper || len(args) > 0) && !cfg.metricsChosen
	d, err := daemon.New(opt)
	if err == nil {
		s := &served{
			daemon: d, cfg: cfg, log: log,
			changes: changes{
				hangups: hangups,
				config:  load,
				credentials: func() (chap.Config, error) {
					c, _, err := credentials(files.read)
					return c, err
				},
				setLevel: level.SetLevel,
			},
		}
		if len(args) > 0 {
			s.tell = func(guide string) { printTo(a.stdout, guide, false) }
		}
		err = s.run(ctx)
	}
	err = errors.Join(err, removeWork())
	if err != nil && cfg.log.resolve(a.stderr).format == logJSON {
		log.Error("serving has failed", zap.Error(err))
		return &toldError{err}
	}
	return err
}

// served is a daemon with what is around it.
type served struct {
	daemon  *daemon.Daemon
	cfg     *config
	log     *zap.Logger
	changes changes
	tell    func(guide string) // tells a person how to log in; nil: nobody wants to know
}

// startGCPercent lets the heap grow to 16 MiB before it is collected while the disks are opened, as
// what large images take while they are validated is not worth collecting before they can be used.
// Percent, as GOGC.
const startGCPercent = 400

// startGCTime is for how long after that: the first initiators log in meanwhile.
const startGCTime = time.Second

// run serves until ctx ends.
func (s *served) run(ctx context.Context) error {
	percent := debug.SetGCPercent(startGCPercent)
	collect := sync.OnceFunc(func() { debug.SetGCPercent(percent) })
	defer collect()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go func() { // not waited for: what it reads may hang
		select {
		case <-ctx.Done():
			return
		case <-s.daemon.Ready():
		}
		time.AfterFunc(startGCTime, collect)
		if s.tell != nil {
			s.tell(s.guide())
		}
		s.follow(ctx)
	}()
	return s.daemon.Run(ctx)
}
