package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/cli/xml"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/status"
)

// imageExtensions are the extensions of image files, without the dot.
var imageExtensions = []string{"qcow2", "raw", "img", "iso"}

// choices are the values that a shell completes for flags that have a few fixed values and are not
// settings.
var choices = map[string][]string{
	keyFormat:        texts(image.FormatRaw, image.FormatQcow2),
	flagTargetFormat: targetFormats,
	flagCompress:     compressions,

	"bus":    texts(libvirt.BusVirtio, libvirt.BusSCSI, libvirt.BusSATA, libvirt.BusUSB),
	"device": texts(libvirt.KindDisk, libvirt.KindLUN),
	"cache": texts(libvirt.CacheDefault, libvirt.CacheNone, libvirt.CacheWriteback,
		libvirt.CacheWritethrough, libvirt.CacheDirectsync, libvirt.CacheUnsafe),
	"io":            texts(libvirt.IOThreads, libvirt.IONative, libvirt.IOUring),
	"discard":       texts(libvirt.DiscardUnmap, libvirt.DiscardIgnore),
	"detect-zeroes": texts(libvirt.ZeroesOff, libvirt.ZeroesOn, libvirt.ZeroesUnmap),
	"error-policy": texts(libvirt.ErrorStop, libvirt.ErrorReport, libvirt.ErrorIgnore,
		libvirt.ErrorNoSpace),
	"rerror-policy": texts(libvirt.ErrorStop, libvirt.ErrorReport, libvirt.ErrorIgnore),
}

// fileFlags take the name of a file, and are no settings.
var fileFlags = []string{keyKernel, keyInitrd, xml.FlagFile, xml.FlagOverlay,
	"token-file", "ca", "cert", "key", flagPIDFile}

func texts[T ~string](values ...T) []string {
	all := make([]string, len(values))
	for i, v := range values {
		all[i] = string(v)
	}
	return all
}

// completeValues registers the values of the flags and arguments of all commands for the shell.
func completeValues(root *cobra.Command) {
	for _, cmd := range root.Commands() {
		completeValues(cmd)
		if slices.Contains([]string{"completion", "help"}, cmd.Name()) {
			continue
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			// It fails if it is called twice for a flag.
			_ = cmd.RegisterFlagCompletionFunc(f.Name, completionOf(f.Name))
		})
		if cmd.ValidArgsFunction == nil {
			cmd.ValidArgsFunction = cobra.NoFileCompletions
		}
	}
}

// describePlainly removes the backquotes from the descriptions of flags: the help needs them, but a
// shell would show them.
func describePlainly(cmd *cobra.Command) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) { _, f.Usage = pflag.UnquoteUsage(f) })
	for _, c := range cmd.Commands() {
		describePlainly(c)
	}
}

func completionOf(flag string) cobra.CompletionFunc {
	row, _ := settings.Find(knownSettings(), flag)
	switch values := slices.Concat(row.Choices, choices[flag]); {
	case values != nil:
		return cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
	case row.Kind == settings.KindDir:
		return cobra.FixedCompletions(nil, cobra.ShellCompDirectiveFilterDirs)
	case row.Kind == settings.KindFile || slices.Contains(fileFlags, flag):
		return cobra.FixedCompletions(nil, cobra.ShellCompDirectiveDefault)
	case flag == settings.FlagConfig:
		return cobra.FixedCompletions([]string{"yaml", "yml"},
			cobra.ShellCompDirectiveFilterFileExt)
	}
	return cobra.NoFileCompletions
}

// completeFrom completes a flag or an argument with the words that the function of returns for the
// state of the daemon. That is the daemon that the command would ask, or all if one of several has
// to be named. Without a daemon, nothing is completed.
func (q *asker) completeFrom(of func(status.Status) []string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, _ string) (words []string,
		_ cobra.ShellCompDirective) {
		ctx, cancel := context.WithTimeout(context.Background(), answerTime)
		defer cancel()
		if socket, err := q.socket(nil); err == nil {
			now, _, _ := daemonAt(socket).Status(ctx)
			return of(now), cobra.ShellCompDirectiveNoFileComp
		}
		for _, d := range daemons(ctx) {
			words = append(words, of(d.Status)...)
		}
		return cobra.AppendActiveHelp(words, "several daemons are running: choose one with --"+
			keyControlSocket), cobra.ShellCompDirectiveNoFileComp
	}
}

// disksOf are the names of the disks, with a description.
func disksOf(now status.Status) (words []string) {
	for _, l := range now.LUNs {
		words = append(words, fmt.Sprintf("%s\tLUN %d, %s", console.OneLine(l.Image), l.LUN,
			console.ShortSize(l.SizeBytes)))
	}
	return words
}

func lunsOf(now status.Status) (words []string) {
	for _, l := range now.LUNs {
		words = append(words, fmt.Sprintf("%d\t%s", l.LUN, console.OneLine(l.Image)))
	}
	return words
}

func initiatorsOf(now status.Status) (words []string) {
	for _, s := range now.Sessions {
		words = append(words, fmt.Sprintf("%s\tfrom %s", console.OneLine(s.Initiator), s.Remote))
	}
	return words
}

func sessionsOf(now status.Status) (words []string) {
	for _, s := range now.Sessions {
		if s.TSIH != 0 {
			words = append(words, fmt.Sprintf("%d\t%s", s.TSIH, console.OneLine(s.Initiator)))
		}
	}
	return words
}

// completeDisk completes the disk as the first argument. If named is set, the second one is one of
// its snapshots.
func (q *asker) completeDisk(named bool) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, typed string) (words []string,
		_ cobra.ShellCompDirective) {
		switch {
		case len(args) == 0:
			return q.completeFrom(disksOf)(cmd, args, typed)
		case len(args) == 1 && named:
			all, _ := q.snapshots(args[0])
			for _, s := range all {
				words = append(words, fmt.Sprintf("%s\t%s", s.Name,
					s.Created.UTC().Format(time.DateTime)))
			}
		}
		return words, cobra.ShellCompDirectiveNoFileComp
	}
}

// completeImages is for commands whose arguments are images.
func completeImages(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return imageExtensions, cobra.ShellCompDirectiveFilterFileExt
}

// completeConvert completes the image, and the file that convert makes from it.
func completeConvert(_ *cobra.Command, args []string, _ string) ([]string,
	cobra.ShellCompDirective) {
	switch len(args) {
	case 0:
		return imageExtensions, cobra.ShellCompDirectiveFilterFileExt
	case 1:
		return []string{"raw", "img", "qcow2"}, cobra.ShellCompDirectiveFilterFileExt
	}
	return nil, cobra.ShellCompDirectiveNoFileComp
}
