package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/cli/xml"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/serving"
)

// The documented exit statuses.
const (
	exitDone   = 0
	exitFailed = 1
	exitUsage  = 2
)

// app is the environment of the commands: streams, arguments and signals.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	exit           func(status int) // ends the process at once, without clean-up
	// The binary was called by a name of the original wrapper. Its callers start several daemons in
	// one pod, so the port of the pages may be taken.
	asWrapper bool
	// a second signal to stop within this time counts as the same request
	sameRequest time.Duration
}

// failure is a runtime error: exit status 1. Every other error that reaches run is about usage or
// configuration.
type failure struct{ err error }

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// errSilent is a failure that the output already explains.
var errSilent = errors.New("failed")

// toldError is an error that is already in the log.
type toldError struct{ error }

func (e *toldError) Unwrap() error { return e.error }

// run executes a command line and returns the exit status. args[0] is the name by which the binary
// was called.
func (a *app) run(args []string) int {
	name := "kubevirt-disk"
	if len(args) > 0 {
		name, args = filepath.Base(args[0]), args[1:]
	}
	switch name {
	case nameCat:
		return a.cat(args)
	case nameEntryPoint:
		return a.entryPoint(args)
	}
	return a.execute(args)
}

func (a *app) execute(args []string) int {
	root := a.root()
	if len(args) > 0 && strings.HasPrefix(args[0], cobra.ShellCompRequestCmd) {
		describePlainly(root)
	}
	root.SetArgs(args)
	return a.report(root.Execute())
}

// report prints err for a person and returns the exit status.
func (a *app) report(err error) int {
	var command *commandError
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &command) && command.text == "": // it has printed the error itself
		return command.status
	case errors.Is(err, errSilent):
		return exitFailed
	case !errors.As(err, new(*toldError)):
		// The reader of a terminal may have stopped it and will go on. Wait for that.
		console.Print(a.stderr, fmt.Sprintf("kubevirt-disk: %s\n", console.Harmless(err.Error())),
			console.IsTerminal(a.stderr))
	}
	switch {
	case command != nil:
		return command.status
	case errors.As(err, new(*failure)):
		return exitFailed
	}
	return exitUsage
}

// reporter shows the progress of a command.
func (a *app) reporter(name string) *console.Reporter {
	return console.NewReporter(a.stderr, console.IsTerminal(a.stderr), name)
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "kubevirt-disk",
		Short: "Serve disk images as CHAP-protected iSCSI LUNs",
		Long: `Serves every disk image of a directory as an iSCSI LUN, protected by CHAP.

CHAP credentials come from the environment: CHAP_USERNAME and CHAP_PASSWORD, for mutual CHAP also
CHAP_MUTUAL_USERNAME and CHAP_MUTUAL_PASSWORD. With the suffix _FILE, such as CHAP_PASSWORD_FILE,
they come from files. They are never flags.

Exit status: 0 done, 1 failed while running, 2 wrong usage or configuration.`,
		Args:          usageArgs(cobra.NoArgs),
		SilenceErrors: true,
		SilenceUsage:  true,

		PersistentPreRunE: refuseEmpty,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cmd.SetOut(a.stderr)
			_ = cmd.Help()
			return errors.New("no command given: to serve images, use kubevirt-disk serve")
		},
	}
	root.SetIn(a.stdin)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	root.SetFlagErrorFunc(flagError)
	root.AddCommand(a.serveCommand(), a.inspectCommand(), a.convertCommand(), a.adaptCommand(),
		a.xmlCommand(), a.hookCommand(), a.healthcheckCommand(), a.provideCommand(),
		a.pullCommand(), a.pushCommand(), a.signCommand(), a.verifyCommand(), a.keyCommand(),
		a.commitCommand(), a.uploadCommand(), a.handoverCommand(), a.psCommand(),
		a.sessionsCommand(), a.kickCommand(), a.snapshotCommand(), a.versionCommand())
	root.Version = buildInfo().Version
	root.SetVersionTemplate(versionText(buildInfo()))
	completeValues(root)
	wideHelp(root)
	requireShell(root)
	requireTopic(root)
	return root
}

// requireShell makes a missing or unknown shell wrong usage. Cobra alone would print the help to
// the file of the completion, with status 0.
func requireShell(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() == "completion" {
			c.Args = cobra.ArbitraryArgs
			c.RunE = func(*cobra.Command, []string) error {
				return errors.New("which shell? usage is \"kubevirt-disk completion bash\", zsh, " +
					"fish or powershell")
			}
		}
	}
}

// requireTopic makes help about an unknown command wrong usage. Cobra alone would print all of the
// help.
func requireTopic(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	for _, c := range root.Commands() {
		if c.Name() == "help" {
			c.RunE = func(_ *cobra.Command, args []string) error {
				topic, rest, err := root.Find(args)
				if err != nil || len(rest) > 0 {
					return fmt.Errorf("there is no command %q%s: see kubevirt-disk --help",
						strings.Join(args, " "), didYouMean(args[0], "", root))
				}
				topic.InitDefaultHelpFlag() // so that the help shows it
				return topic.Help()
			}
		}
	}
}

// flagError explains a wrong flag. It does not repeat the value after an unknown flag, because that
// may be a password.
func flagError(cmd *cobra.Command, err error) error {
	// The flag belongs to the command that was misspelt.
	if words := cmd.Flags().Args(); cmd.HasAvailableSubCommands() && len(words) > 0 {
		return usageArgs(cobra.NoArgs)(cmd, words)
	}
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok {
		name := "--" + unknown.GetSpecifiedName()
		if unknown.GetSpecifiedShortnames() != "" {
			name = "-" + unknown.GetSpecifiedName()
		}
		err = fmt.Errorf("unknown flag %s", name)
		if looksLikeCredential(name) || name == "-p" || name == "-u" {
			return fmt.Errorf("%w: %s", err, credentialsHint)
		}
		if strings.HasPrefix(name, "--") {
			err = fmt.Errorf("%w%s", err, didYouMean(name[2:], "--", flagNames(cmd)))
		}
	}
	if invalid, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		err = fmt.Errorf("--%s: %s", invalid.GetFlag().Name,
			invalidValue(invalid.GetFlag(), invalid.GetValue()))
	}
	return fmt.Errorf("%w: see %s --help", err, cmd.CommandPath())
}

// invalidValue says which values a flag takes. The errors of the Go library would not help a user.
func invalidValue(flag *pflag.Flag, value string) string {
	switch kind := flag.Value.Type(); {
	case kind == "duration":
		return fmt.Sprintf("%q is not a duration: write it as 90s or 5m", value)
	case flag.Name == xml.FlagLUN:
		return fmt.Sprintf("%q is not a LUN: use 1 to %d", value, serving.MaxNumber)
	case strings.HasPrefix(kind, "uint"):
		return fmt.Sprintf("%q is not a number: use one from 1", value)
	case kind == "bool":
		return fmt.Sprintf("%q is neither true nor false", value)
	}
	return fmt.Sprintf("%q is not understood", value)
}

// usageArgs adds the usage to an error about arguments. It does not repeat the value of an argument
// like NAME=value, because that may be a password.
func usageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			for _, arg := range args {
				if name, _, ok := strings.Cut(arg, "="); ok && looksLikeCredential(name) {
					return fmt.Errorf("%s= is not an argument: %s", name, credentialsHint)
				}
			}
			if cmd.HasAvailableSubCommands() { // an unknown command
				return fmt.Errorf("%w%s: see %s --help", err, didYouMean(args[0], "", cmd),
					cmd.CommandPath())
			}
			return fmt.Errorf("%s: usage is %q", strings.TrimSpace(err.Error()), cmd.UseLine())
		}
		if slices.Contains(args, "") { // from an unset variable, for example
			return fmt.Errorf("an argument is empty: usage is %q", cmd.UseLine())
		}
		return nil
	}
}

// beforeDash checks the arguments before --. Those after it belong to another command, for which an
// empty one or PASSWORD=... may have a meaning.
func beforeDash(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if n := cmd.ArgsLenAtDash(); n >= 0 {
			args = args[:n]
		}
		return check(cmd, args)
	}
}

// mayBeEmpty are the flags that may have an empty value, and those whose commands report a missing
// value themselves.
var mayBeEmpty = []string{settings.FlagConfig, flagPIDFile, "serial", "wwn", "initiator-name",
	"base"}

// refuseEmpty refuses a flag with an empty value, as from a variable that is not set. Otherwise
// push would store the image without a signature.
func refuseEmpty(cmd *cobra.Command, _ []string) (err error) {
	cmd.Flags().Visit(func(f *pflag.Flag) {
		_, setting := f.Annotations[settings.IsSetting]
		if f.Value.Type() == "string" && f.Value.String() == "" && !setting &&
			!slices.Contains(mayBeEmpty, f.Name) {
			err = fmt.Errorf("--%s is empty: give it a value or leave it out", f.Name)
		}
	})
	return err
}

// noArgs takes no argument. Cobra's NoArgs would call an argument an unknown command.
func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("%q is too much: the command takes no argument", args[0])
	}
	return nil
}

// running makes a RunE whose errors mean exit status 1, except those about configuration.
func running(run func(*cobra.Command, []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		err := run(cmd, args)
		if err == nil || errors.As(err, new(*problems.Error)) ||
			errors.As(err, new(*commandError)) {
			return err
		}
		return &failure{err: err}
	}
}

// interruptible returns a context that ends with the first SIGTERM or SIGINT. A second one ends the
// process at once with status 1, in case something hangs. A closed terminal counts as one first
// signal, unless the process was started to outlive its terminal (nohup). Any other SIGHUP goes to
// hangups, unless one already waits there; if hangups is nil, it counts as a closed terminal.
// Signals that pass accepts do not count; pass may be nil. The caller calls stop.
func (a *app) interruptible(parent context.Context, hangups chan<- struct{},
	pass func(os.Signal) bool) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancel(parent)
	signals := make(chan os.Signal, 2)
	hungUp := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	outlives := signal.Ignored(syscall.SIGHUP)
	hadTerminal, terminals := controllingTerminal() == nil, standardTerminals()
	if hangups != nil && pass == nil || !outlives { // else a command ignores it, too
		signal.Notify(hungUp, syscall.SIGHUP)
	}
	stopped := make(chan struct{})
	go func() {
		var first time.Time
		for n := 0; ; {
			select {
			case <-stopped:
				return
			case s := <-hungUp:
				if pass != nil && pass(s) {
					continue
				}
				// When a terminal closes, its processes lose it before they get the signal.
				closed := anyHungUp(terminals) || hadTerminal &&
					errors.Is(controllingTerminal(), syscall.ENXIO)
				if hangups != nil && (outlives || !closed) {
					select {
					case hangups <- struct{}{}:
					default:
					}
					continue
				}
				n = max(n, 1)
			case s := <-signals:
				if pass != nil && pass(s) {
					continue
				}
				// One request may arrive twice: timeout(1) signals the process and then its group.
				if n > 0 && time.Since(first) < a.sameRequest {
					continue
				}
				n++
			}
			if n == 1 {
				first = time.Now()
			}
			if n > 1 {
				a.exit(exitFailed)
			}
			cancel()
		}
	}()
	return ctx, sync.OnceFunc(func() {
		signal.Stop(signals)
		signal.Stop(hungUp)
		close(stopped)
		cancel()
	})
}

// standardTerminals returns those standard streams that are terminals.
func standardTerminals() (fds []int) {
	for fd := range 3 {
		if _, err := unix.IoctlGetTermios(fd, unix.TCGETS); err == nil {
			fds = append(fds, fd)
		}
	}
	return fds
}

// anyHungUp reports whether one of the terminals was closed. The kernel marks it before it sends
// the signal.
func anyHungUp(terminals []int) bool {
	return slices.ContainsFunc(terminals, func(fd int) bool {
		_, err := unix.IoctlGetTermios(fd, unix.TCGETS)
		return errors.Is(err, unix.EIO)
	})
}

// controllingTerminal checks whether the process has a controlling terminal. ENXIO: it has none.
func controllingTerminal() error {
	f, err := os.OpenFile("/dev/tty", os.O_RDONLY|syscall.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	return f.Close()
}

// standardStream is the argument for standard input or output.
const standardStream = "-"

// checkSource refuses to read an image from standard input. A file named - is ./-.
func checkSource(path string) error {
	if path == standardStream {
		return errors.New("an image cannot be read from standard input, as its parts are read in " +
			"any order: " +
			`write it into a file first, and name that ("./-" is a file of that name)`)
	}
	return nil
}

// checkStdout refuses to write a disk to a terminal.
func (a *app) checkStdout() error {
	if console.IsTerminal(a.stdout) {
		return errors.New("standard output is a terminal, which a disk would garble: " +
			`redirect it (">disk.raw", "| ssh ...")`)
	}
	return nil
}

func isDirectory(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// imageArgs is usageArgs for commands that take file names. It refuses a credential instead of
// repeating it as a file name.
func imageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return usageArgs(func(cmd *cobra.Command, args []string) error {
		for _, arg := range args {
			name, _, ok := strings.Cut(arg, "=")
			if _, err := os.Lstat(arg); ok && looksLikeCredential(name) && errors.Is(err,
				fs.ErrNotExist) {
				return errors.New("a credential is not an argument") // usageArgs explains it
			}
		}
		return check(cmd, args)
	})
}
