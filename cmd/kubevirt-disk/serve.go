package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/control"
	"kubevirt.io/disk/internal/daemon"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/osfile"
)

func (a *app) serveCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "serve [IMAGE...] [-- COMMAND [ARGUMENT...]]",
		Short: "Serve every image of a directory, or the named ones, as an iSCSI LUN, " +
			"until SIGTERM",
		Long: `Serves every image of a directory as an iSCSI LUN until SIGTERM, SIGINT or the end of
its terminal. Then it drains and exits with status 0. A second SIGTERM or SIGINT ends it at once.

SIGHUP reads the credential files and the configuration again. A changed credential file takes
effect within seconds, also without SIGHUP: new logins need the new credentials, and sessions go on.
The settings log-level, access-mode (from write-exclusive) and read-only take effect at once. The
others need a restart, and the log names them. A wrong configuration changes nothing.

The portals are bound before images are expanded, so a taken port is known at once. Connections are
answered, and logins happen, when the LUNs are ready. Wait for the ready file or /readyz.

Every setting has a flag, an environment variable (--copy-mode is COPY_MODE) and a key in the YAML
file of --config (copy-mode: clone). A flag wins over the environment, and that over the file.

CHAP credentials come from the environment or from files: CHAP_USERNAME and CHAP_PASSWORD, for
mutual CHAP also CHAP_MUTUAL_USERNAME and CHAP_MUTUAL_PASSWORD, each also with the suffix _FILE.
They are never flags.

A person at a terminal can name images. They are LUN 1, 2 and so on, instead of those of a
directory, and standard output says how to log in. There is no ready file then. Without --work-dir
the disks are in a temporary directory, which is removed at the end, and the copy mode is
copy-on-write, unless the settings say otherwise. The same holds for --image by a user who has no
work directory and cannot make the usual one.

With -- COMMAND, the command is run when the disks can be used. When it ends, the daemon stops, with
the exit status of the command: 127 if there is no such command, 126 if it cannot be run, and 128
and the number of the signal that ended it. Signals are passed on to it. In its arguments, {uri} (or
{nbd}) is the NBD URI of the first disk and {iscsi} its iSCSI URL; {uri2} and so on are those of the
next ones. The environment has the same as $uri, $nbd and $iscsi. Settings that you leave out are
chosen so that other daemons are not in the way: a socket for NBD, a free port on loopback for
iSCSI, a temporary work directory, no pages and no ready file. The iSCSI URL has no password:
clients read it from LIBISCSI_CHAP_PASSWORD.

With --fork, the command returns with status 0 when the disks can be used, and the daemon goes on in
the background. If it cannot start, it says why and returns its status. The daemon's log goes on if
standard error is a file.`,
		Args:              beforeDash(imageArgs(cobra.ArbitraryArgs)),
		ValidArgsFunction: completeImages,
	}
	rows := newConfig().settings()
	settings.AddFlags(cmd.Flags(), rows)
	var background background
	background.flags(cmd)
	sections := &sectionHelp{rows: rows, first: firstSettings}
	help := cmd.Flags().VarPF(sections, "help", "h", "help for serve; --help=all: with all flags")
	help.NoOptDefVal = "true"
	cmd.SetUsageFunc(sections.usage)
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		err = flagError(cmd, err)
		ctx, stop := a.interruptible(cmd.Context(), nil, nil)
		defer stop()
		log := console.NewLogger(console.LogConfig{}, zapcore.InfoLevel, a.stderr)
		return a.tellLauncher(ctx, daemon.NewLauncher(kubevirtHook(), log), log, err)
	})
	cmd.RunE = running(func(cmd *cobra.Command, args []string) error {
		if background.fork && background.begin() {
			return a.fork()
		}
		return a.serve(cmd, args, &background)
	})
	return cmd
}

// serve runs a daemon until a signal or the end of its command ends it.
func (a *app) serve(cmd *cobra.Command, args []string, background *background) error {
	files := settings.NewRereader()
	load := func() (*config, error) { return loadConfig(cmd.Flags(), files.Read, args...) }
	hangups := make(chan struct{}, 1)
	run := &command{ended: make(chan struct{})}
	var pass func(os.Signal) bool
	if cmd.ArgsLenAtDash() >= 0 {
		pass = run.pass
	}
	if kubevirtHook() != nil {
		// A person and the kubelet may both ask for the end, while the guest still uses its disk.
		a.sameRequest = math.MaxInt64
	}
	ctx, stop := a.interruptible(cmd.Context(), hangups, pass)
	defer stop()
	cfg, err := load()
	if err != nil {
		log := console.NewLogger(cfg.log, cfg.log.Level, a.stderr)
		return a.tellLauncher(ctx, daemon.NewLauncher(cfg.Hook, log), log, err)
	}
	// The reader of the log may have ended: a Ctrl-C ends its tee, too. The daemon must still
	// drain. This channel has no reader, but if the signal were ignored, a command would inherit
	// that.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	run.words = cfg.command
	person := (len(cfg.images) > 0 || cfg.temporary) && cfg.Hook == nil && len(run.words) == 0
	level := zap.NewAtomicLevelAt(cfg.log.Level)
	ready := func() {}
	if len(run.words) > 0 {
		if err := run.find(); err != nil {
			return err
		}
	}
	if !cfg.log.Chosen && (len(run.words) > 0 || background.silent()) {
		level.SetLevel(zapcore.ErrorLevel) // other programs wait for what is printed here
		ready = func() { level.SetLevel(zapcore.WarnLevel) }
	}
	if person && !cfg.log.Chosen && cfg.log.Resolve(a.stderr).Format == console.Text {
		// The guide has the content of the first lines.
		level.SetLevel(zapcore.WarnLevel)
		ready = func() { level.SetLevel(cfg.log.Level) }
	}
	log := console.NewQueuedLogger(cfg.log, level, a.stderr)
	if len(cfg.idle) > 0 {
		log.Warn("some settings have no effect beside the others",
			zap.Strings("settings", cfg.idle))
	}
	// A failure to write the log does not change the exit status.
	defer func() { _ = log.Sync() }()

	launcher := daemon.NewLauncher(cfg.Hook, log)
	if launcher != nil {
		defer launcher.Close()
	}
	asked, err := askForClaim(ctx, cfg, launcher, log)
	if err == nil && asked {
		cfg, err = load()
	}
	switch {
	case err == nil:
	case ctx.Err() != nil || launcher.Ended():
		return nil // nothing was begun
	default:
		return a.tellLauncher(ctx, launcher, log, err)
	}
	if err := background.pid.Clear(); err != nil { // now, and not when the disks are ready
		return err
	}
	removeWork, err := cfg.makeTemporary()
	if err != nil {
		return err
	}
	opt := cfg.options(log)
	own, ownErr := control.NewOwnDir()
	if ownErr == nil && opt.ControlSocket != "" {
		opt.OwnSocket = own.Socket()
	} else if ownErr != nil {
		log.Debug("ps and other commands do not find this daemon by themselves", zap.Error(ownErr))
	}
	// Callers of the original wrapper start several daemons in one pod, which share one network.
	// They choose a port for each portal, but not for the pages.
	opt.PagesOptional = (a.asWrapper || person) && !cfg.metricsChosen
	if len(run.words) > 0 && len(opt.NBD) == 0 {
		if own == nil {
			return errors.Join(fmt.Errorf("%w: a command needs a socket for NBD, which %s also "+
				"names", ownErr, nameOf(keyNBD)), removeWork())
		}
		opt.NBD = []options.NBDPortal{{Socket: own.NBD()}}
	}
	d, err := daemon.New(opt)
	if err == nil {
		d.Attend(launcher)
		s := &served{
			daemon: d, cfg: cfg, log: log,
			changes: changes{
				hangups: hangups,
				config:  load,
				credentials: func() (chap.Config, error) {
					c, _, err := credentials(files.Read)
					return c, err
				},
				setLevel: level.SetLevel,
			},
		}
		s.usable = func() error {
			if person {
				console.Print(a.stdout, s.guide(background.fork), false)
			}
			ready()
			return background.usable()
		}
		if len(run.words) > 0 {
			s.attend = func() {
				now := d.Status()
				run.run(a, &now, cfg.CHAP.Initiator.Username)
			}
		}
		err = s.run(ctx)
		if len(run.words) > 0 {
			run.stop()
			err = cmp.Or(err, run.err)
		}
		err = errors.Join(err, background.end())
		if isClosed(d.Ready()) {
			launcher = nil // the launcher has its disks
		}
	}
	err = a.tellLauncher(ctx, launcher, log, err)
	err = errors.Join(err, own.Remove(), removeWork())
	if err != nil && !errors.As(err, new(*commandError)) &&
		cfg.log.Resolve(a.stderr).Format == console.JSON {
		log.Error("serving has failed", console.ErrorField(err))
		return &toldError{err}
	}
	return err
}

// served is a daemon and its environment.
type served struct {
	daemon  *daemon.Daemon
	cfg     *config
	log     *zap.Logger
	changes changes
	usable  func() error // is called when the disks can be used
	attend  func()       // runs the command and ends with it; nil: there is none
}

// run serves until ctx ends.
func (s *served) run(ctx context.Context) error {
	// From this size of the heap on, garbage is collected at once. The rest is for other memory.
	before := debug.SetMemoryLimit(-1)
	debug.SetMemoryLimit(min(containerMemory()/4*3, before))
	defer debug.SetMemoryLimit(before)
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() { // nothing waits for it, because it may hang in a read
		select {
		case <-ctx.Done():
			return
		case <-s.daemon.Ready():
		}
		// A daemon at rest would keep the garbage of its start for ever.
		time.AfterFunc(time.Second, debug.FreeOSMemory)
		if err := s.usable(); err != nil {
			stop(err)
			return
		}
		if s.attend != nil {
			go func() {
				s.attend()
				stop(nil)
			}()
		}
		s.follow(ctx)
	}()
	err := s.daemon.Run(ctx)
	if cause := context.Cause(ctx); err == nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}

// containerMemory is the memory limit of the container in bytes, from the kernel's control groups;
// math.MaxInt64: there is none.
func containerMemory() int64 {
	for _, path := range []string{"/sys/fs/cgroup/memory.max",
		"/sys/fs/cgroup/memory/memory.limit_in_bytes"} {
		text, err := osfile.ReadText(path)
		if err != nil {
			continue
		}
		return parseMemoryMax(string(text))
	}
	return math.MaxInt64
}

func parseMemoryMax(text string) int64 {
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil || n <= 0 {
		return math.MaxInt64 // "max"
	}
	return n
}
